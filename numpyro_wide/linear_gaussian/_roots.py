r"""Roots $A$ of the readout's posterior covariance $\Sigma = (I + \lambda^{-1} \Psi^\top \Psi)^{-1} = A A^\top$.

Any root gives a map $W = \mu + A \phi$ that turns a standard normal $\phi$ into the readout's conditional
posterior (Hron 2022, eq. 3; Mathematics, :eq:`map`). The three differ by a rotation of $\phi$:
densities agree, draws do not.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import optimization_barrier
from jax.lax.linalg import cholesky as lax_cholesky
from jax.lax.linalg import triangular_solve

from numpyro_wide.linear_gaussian._spectral import posterior_root_functions


class Root(Protocol):
    """One factorisation, and what can be done with it for targets (n, k) and readouts (d, k)."""

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        r"""The readout $W = \mu + A \phi$, and $\log|\det A|$, which is that of one output."""

    def inverse(self, targets: Array, readout: Array) -> Array:
        r"""The repriorised readout $\phi = A^{-1} (W - \mu)$."""


class FeatureRoot(NamedTuple):
    r"""Cholesky factor of $\lambda I + \Psi^\top \Psi = L L^\top$ (Hron 2022, §3.2; :eq:`feature`): O(nd² + d³)."""

    features: Array
    regulariser: Array
    factor: Array

    @classmethod
    def of(cls, features: Array, regulariser: Array) -> "FeatureRoot":
        """Factorises."""
        return cls(features, regulariser, gram_factor(features.T, regulariser))

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        scale = jnp.sqrt(self.regulariser)
        whitened = solve_lower(self.factor, self.features.T @ targets)
        readout = solve_lower(self.factor, whitened + scale * phi, transpose=True)
        return readout, -jnp.log(diagonal(self.factor) / scale).sum()

    def inverse(self, targets: Array, readout: Array) -> Array:
        whitened = solve_lower(self.factor, self.features.T @ targets)
        return (self.factor.T @ readout - whitened) / jnp.sqrt(self.regulariser)


class DataCholeskyRoot(NamedTuple):
    r"""Cholesky factor of $K = \Psi \Psi^\top + \lambda I = L L^\top$: O(n²d + n³).

    The root is that of Andrews (1968), $A = I - \Psi^\top L^{-\top} (L + \sqrt\lambda I)^{-1} \Psi$
    (:eq:`data-cholesky`), with inverse $I + \lambda^{-1/2} \Psi^\top (L^\top + \sqrt\lambda I)^{-1} \Psi$.
    """

    features: Array
    regulariser: Array

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        return andrews_map(self.features, self.regulariser, targets, phi)

    def inverse(self, targets: Array, readout: Array) -> Array:
        factor, scale = gram_factor(self.features, self.regulariser), jnp.sqrt(self.regulariser)
        mean_weights = solve_lower(factor, solve_lower(factor, targets), transpose=True)
        centred = readout - self.features.T @ mean_weights
        correction = solve_lower(add_diagonal(factor, scale), self.features @ centred, transpose=True)
        return centred + self.features.T @ correction / scale


class DataRoot(NamedTuple):
    r"""The symmetric root through the eigenvectors of $K = \Psi \Psi^\top + \lambda I$ (Hron 2022, App. B; :eq:`data`).

    $A = I - \Psi^\top f(K) \Psi$ with $f(x) = (\sqrt{x} (\sqrt\lambda + \sqrt{x}))^{-1}$, and
    $A^{-1} = I + \Psi^\top g(K) \Psi$ with $g(x) = (\sqrt\lambda (\sqrt\lambda + \sqrt{x}))^{-1}$.
    """

    features: Array
    inverse_gram: Array
    shrink: Array
    stretch: Array
    log_det: Array

    @classmethod
    def of(cls, features: Array, regulariser: Array) -> "DataRoot":
        """Factorises."""
        gram = add_diagonal(features @ features.T, regulariser)
        return cls(features, *posterior_root_functions(gram, regulariser))

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        weights = self.inverse_gram @ targets - self.shrink @ (self.features @ phi)
        return phi + self.features.T @ weights, -0.5 * self.log_det

    def inverse(self, targets: Array, readout: Array) -> Array:
        centred = readout - self.features.T @ (self.inverse_gram @ targets)
        return centred + self.features.T @ (self.stretch @ (self.features @ centred))


def posterior_root(variant: str, features: Array, regulariser: Array) -> Root:
    """The root of the named variant for features (n, d) and a scalar regulariser."""
    if variant == "feature":
        return FeatureRoot.of(features, regulariser)
    if variant == "data":
        return DataRoot.of(features, regulariser)
    return DataCholeskyRoot(features, regulariser)


@jax.custom_jvp
def andrews_map(features: Array, regulariser: Array, targets: Array, phi: Array) -> tuple[Array, Array]:
    r"""The data-cholesky map with a derivative that never forms $\mathrm{d}L$.

    Args:
        features: $\Psi$, (n, d).
        regulariser: $\lambda$, scalar.
        targets: $Y$, (n, k).
        phi: $\phi$, (d, k).

    Returns:
        $\phi + \Psi^\top L^{-\top} (L^{-1} Y - (L + \sqrt\lambda I)^{-1} \Psi\phi)$ and $-\log\det(L / \sqrt\lambda)$.
    """
    scale = jnp.sqrt(regulariser)
    factor = cholesky(features @ features.T, regulariser)
    inner = solve_lower(factor, targets) - solve_lower(add_diagonal(factor, scale), features @ phi)
    weights = solve_lower(factor, inner, transpose=True)
    return phi + transpose(features) @ weights, -jnp.log(diagonal(factor) / scale).sum()


@andrews_map.defjvp
def _andrews_map_jvp(
    primals: tuple[Array, Array, Array, Array], tangents: tuple[Array, Array, Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    features, regulariser, targets, phi = primals
    features_dot, regulariser_dot, targets_dot, phi_dot = tangents
    scale = jnp.sqrt(regulariser)
    scale_dot = regulariser_dot / (2 * scale)
    factor = cholesky(features @ features.T, regulariser)
    inverse, shifted = inverse_lower(factor), add_diagonal(factor, scale)
    mean_part, noise_part = inverse @ targets, solve_lower(shifted, features @ phi)
    inner = mean_part - noise_part
    weights, features_transposed = inverse.T @ inner, transpose(features)

    # dL = L F, so that L⁻¹ dL = F and tr(L⁻¹ dL) = tr F; all other products with F have k columns. The order of the
    # factors in the products with features is that whose transpose, the reverse mode, runs along rows.
    F = _relative_factor_tangent(inverse, features_dot @ features.T, regulariser_dot)
    signal_dot = features_dot @ phi + (phi_dot.T @ features_transposed).T
    mean_dot = inverse @ targets_dot - F @ mean_part
    noise_dot = solve_lower(shifted, signal_dot - factor @ (F @ noise_part) - scale_dot * noise_part)
    weights_dot = inverse.T @ (mean_dot - noise_dot - F.T @ inner)
    readout_dot = phi_dot + features_dot.T @ weights + (weights_dot.T @ features).T
    log_abs_det_dot = features.shape[0] * scale_dot / scale - diagonal(F).sum()

    log_abs_det = -jnp.log(diagonal(factor) / scale).sum()
    return (phi + features_transposed @ weights, log_abs_det), (readout_dot, log_abs_det_dot)


@jax.custom_jvp
def gram_factor(rows: Array, regulariser: Array) -> Array:
    r"""Lower Cholesky factor $L$ of $R R^\top + \lambda I$ for rows $R$ (m, p)."""
    return cholesky(rows @ rows.T, regulariser)


@gram_factor.defjvp
def _gram_factor_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    rows, regulariser = primals
    rows_dot, regulariser_dot = tangents
    factor = gram_factor(rows, regulariser)
    return factor, factor @ _relative_factor_tangent(inverse_lower(factor), rows_dot @ rows.T, regulariser_dot)


def _relative_factor_tangent(inverse: Array, half_gram_dot: Array, regulariser_dot: Array) -> Array:
    r"""$L^{-1} \mathrm{d}L = \Phi(L^{-1} \mathrm{d}K L^{-\top})$ (Murray 2016, arXiv:1602.07527).

    $\Phi$ is the lower triangle with its diagonal halved, and $\mathrm{d}K = H + H^\top + \mathrm{d}\lambda I$ is given
    by $H = \mathrm{d}R\, R^\top$, so that the reverse mode multiplies by $R$ once, where autodiff would twice.
    """
    half = inverse @ add_diagonal(half_gram_dot, 0.5 * regulariser_dot) @ inverse.T
    halved = jnp.tril(jnp.ones_like(half)) - 0.5 * jnp.eye(half.shape[0], dtype=half.dtype)
    return halved * (half + half.T)


def cholesky(gram: Array, regulariser: Array) -> Array:
    """Lower Cholesky factor of the Gram matrix plus the regulariser on its diagonal."""
    # A Gram matrix computed by one product is symmetric already.
    return lax_cholesky(add_diagonal(gram, regulariser), symmetrize_input=False)


def inverse_lower(factor: Array) -> Array:
    """Inverse of a lower triangular matrix, with which products beat triangular solves of many columns.

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
    """The matrix plus a multiple of the identity."""
    return matrix + value * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def diagonal(matrix: Array) -> Array:
    """The diagonal, by a masked sum: its derivative is a product, where that of a gather is a scatter."""
    return jnp.sum(jnp.where(jnp.eye(matrix.shape[0], dtype=bool), matrix, 0), axis=1)


def transpose(matrix: Array) -> Array:
    """A transposed copy: XLA multiplies a few columns by it three times faster than along the leading axis."""
    return optimization_barrier(matrix.T)


def solve_lower(factor: Array, columns: Array, transpose: bool = False) -> Array:
    """Solves with a lower triangular matrix or its transpose."""
    return triangular_solve(factor, columns, left_side=True, lower=True, transpose_a=transpose)
