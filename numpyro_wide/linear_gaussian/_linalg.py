"""Factors and solves of the Gram matrices, in the forms whose derivatives XLA computes fastest."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import optimization_barrier
from jax.lax.linalg import cholesky as lax_cholesky
from jax.lax.linalg import triangular_solve


@jax.custom_jvp
def gram_factor(rows: Array, regulariser: Array) -> Array:
    r"""Return the lower Cholesky factor $L$ of $R R^\top + \lambda I$ for rows $R$ (m, p)."""
    return cholesky(rows @ rows.T, regulariser)


@gram_factor.defjvp
def _gram_factor_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    rows, regulariser = primals
    rows_dot, regulariser_dot = tangents
    factor = gram_factor(rows, regulariser)
    return factor, factor @ relative_factor_tangent(inverse_lower(factor), rows_dot @ rows.T, regulariser_dot)


def relative_factor_tangent(inverse: Array, half_gram_dot: Array, regulariser_dot: Array) -> Array:
    r"""Return $L^{-1} \mathrm{d}L = \Phi(L^{-1} \mathrm{d}K L^{-\top})$ (Murray 2016, arXiv:1602.07527).

    $\Phi$ is the lower triangle with its diagonal halved, and $\mathrm{d}K = H + H^\top + \mathrm{d}\lambda I$ is given
    by $H = \mathrm{d}R\, R^\top$, so that the reverse mode multiplies by $R$ once, where autodiff would twice.
    """
    half = inverse @ add_diagonal(half_gram_dot, 0.5 * regulariser_dot) @ inverse.T
    halved = jnp.tril(jnp.ones_like(half)) - 0.5 * jnp.eye(half.shape[0], dtype=half.dtype)
    return halved * (half + half.T)


def cholesky(gram: Array, regulariser: Array) -> Array:
    """Return the lower Cholesky factor of the Gram matrix plus the regulariser on its diagonal."""
    # A Gram matrix computed by one product is symmetric already.
    return lax_cholesky(add_diagonal(gram, regulariser), symmetrize_input=False)


def inverse_lower(factor: Array) -> Array:
    """Return the inverse of a lower triangular matrix, with which products beat triangular solves of many columns.

    By halves, [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹BA⁻¹, C⁻¹]], so that nearly all the work is in matrix products:
    on two cores 2.5 times faster than one triangular solve at 512 rows, and 5 times at 1024.
    """
    size = factor.shape[0]
    if size <= 128:
        return solve_lower(factor, jnp.eye(size, dtype=factor.dtype))
    half = size // 2
    upper_left, lower_right = inverse_lower(factor[:half, :half]), inverse_lower(factor[half:, half:])
    lower_left = -lower_right @ (factor[half:, :half] @ upper_left)
    return jnp.block([[upper_left, jnp.zeros((half, size - half), factor.dtype)], [lower_left, lower_right]])


def add_diagonal(matrix: Array, value: Array) -> Array:
    """Return the matrix plus a multiple of the identity."""
    return matrix + value * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def diagonal(matrix: Array) -> Array:
    """Return the diagonal, by a masked sum: its derivative is a product, where that of a gather is a scatter."""
    return jnp.sum(jnp.where(jnp.eye(matrix.shape[0], dtype=bool), matrix, 0), axis=1)


def transpose(matrix: Array) -> Array:
    """Return a transposed copy: XLA multiplies a few columns by it three times faster than along the leading axis."""
    return optimization_barrier(matrix.T)


def solve_lower(factor: Array, columns: Array, transpose: bool = False) -> Array:
    """Solve with a lower triangular matrix or its transpose."""
    return triangular_solve(factor, columns, left_side=True, lower=True, transpose_a=transpose)


def solve_gram(factor: Array, columns: Array, inverse: Array | None = None) -> Array:
    """Solve with the matrix that a lower Cholesky factor is of; by products, if the factor's inverse is at hand."""
    if inverse is not None:
        return inverse.T @ (inverse @ columns)
    return solve_lower(factor, solve_lower(factor, columns), transpose=True)
