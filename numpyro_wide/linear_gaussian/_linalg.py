"""Factors and solves of Gram matrices, in forms with fast derivatives."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import optimization_barrier
from jax.lax.linalg import cholesky as lax_cholesky
from jax.lax.linalg import triangular_solve

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Make a function's products full ones: accelerators round float32 to ten bits, too few for Gram matrices."""

    @wraps(fn)
    def with_full_products(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return with_full_products


@jax.custom_jvp
def gram_factor(rows: Array, regulariser: Array) -> Array:
    r"""Return the lower Cholesky factor of $R R^\top + \lambda I$ for rows $R$ (m, p)."""
    return cholesky(_lower_gram(rows), regulariser)


@gram_factor.defjvp
@full_precision
def _gram_factor_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    rows, regulariser = primals
    rows_dot, regulariser_dot = tangents
    factor = gram_factor(rows, regulariser)
    return factor, factor @ relative_factor_tangent(inverse_lower(factor), rows_dot @ rows.T, regulariser_dot)


def relative_factor_tangent(inverse: Array, half_gram_dot: Array, regulariser_dot: Array) -> Array:
    r"""Return $L^{-1} \mathrm{d}L = \Phi(L^{-1} \mathrm{d}K L^{-\top})$ (Murray 2016, arXiv:1602.07527)."""
    half = inverse @ add_diagonal(half_gram_dot, 0.5 * regulariser_dot) @ inverse.T
    halved = jnp.tril(jnp.ones_like(half)) - 0.5 * jnp.eye(half.shape[0], dtype=half.dtype)
    return halved * (half + half.T)


def cholesky(gram: Array, regulariser: Array) -> Array:
    """Return the lower Cholesky factor of the regularised Gram matrix."""
    # A Gram matrix computed by one product is symmetric already.
    return lax_cholesky(add_diagonal(gram, regulariser), symmetrize_input=False)


def inverse_lower(factor: Array, leaf: int | None = None) -> Array:
    """Invert a lower triangular matrix, by halves; products with it beat many triangular solves."""
    size = len(factor)
    leaf = leaf or _leaf_size(size, 32, 8)
    if size <= leaf:
        return solve_lower(factor, jnp.eye(size, dtype=factor.dtype))
    half = size // 2
    upper_left = inverse_lower(factor[:half, :half], leaf)
    lower_right = inverse_lower(factor[half:, half:], leaf)
    return _lower_block(upper_left, -lower_right @ (factor[half:, :half] @ upper_left), lower_right)


def square_of_lower(lower: Array, leaf: int | None = None) -> Array:
    r"""Return $M^\top M$ for a lower triangular $M$, by halves."""
    leaf = leaf or _leaf_size(len(lower), 128, 4)
    if len(lower) <= leaf:
        return lower.T @ lower
    half = len(lower) // 2
    below, lower_right = lower[half:, :half], lower[half:, half:]
    across = lower_right.T @ below
    upper_left = square_of_lower(lower[:half, :half], leaf) + below.T @ below
    return jnp.block([[upper_left, across.T], [across, square_of_lower(lower_right, leaf)]])


def _lower_gram(rows: Array, leaf: int | None = None) -> Array:
    r"""Return $R R^\top$ with zeros in blocks above the diagonal, by halves."""
    leaf = leaf or _leaf_size(len(rows), 128, 4)
    if len(rows) <= leaf:
        return rows @ rows.T
    upper, lower = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return _lower_block(_lower_gram(upper, leaf), lower @ upper.T, _lower_gram(lower, leaf))


def _lower_block(upper_left: Array, lower_left: Array, lower_right: Array) -> Array:
    zeros = jnp.zeros((len(upper_left), len(lower_right)), upper_left.dtype)
    return jnp.block([[upper_left, zeros], [lower_left, lower_right]])


def _leaf_size(size: int, least: int, most_leaves: int) -> int:
    """Return the size at which halving ends, for compile time."""
    return max(least, -(-size // most_leaves))


def add_diagonal(matrix: Array, value: Array) -> Array:
    """Add a multiple of the identity."""
    return matrix + value * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def diagonal(matrix: Array) -> Array:
    """Return the diagonal by a masked sum, which has a cheap derivative."""
    return jnp.sum(jnp.where(jnp.eye(matrix.shape[0], dtype=bool), matrix, 0), axis=1)


def transposed_times(matrix: Array, columns: Array) -> Array:
    r"""Return $M^\top V$, by a product along the rows of $M$."""
    # XLA would fuse a product with one vector, and go along columns.
    return optimization_barrier(columns.T @ matrix).T


def row_sums_of_squares(matrix: Array) -> Array:
    """Return row sums of squares as a product, which XLA vectorises."""
    return matrix**2 @ jnp.ones(matrix.shape[-1], matrix.dtype)


def solve_lower(factor: Array, columns: Array, transpose: bool = False) -> Array:
    """Solve with a lower triangular matrix or its transpose."""
    return triangular_solve(factor, columns, left_side=True, lower=True, transpose_a=transpose)


def solve_gram(factor: Array, columns: Array, inverse: Array | None = None) -> Array:
    """Solve with a lower Cholesky factor, or with its inverse where known."""
    if inverse is not None:
        return inverse.T @ (inverse @ columns)
    return solve_lower(factor, solve_lower(factor, columns), transpose=True)
