"""Roots of the posterior covariance of a readout."""

from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from numpyro_wide.linear_gaussian._linalg import (
    add_diagonal,
    diagonal,
    full_precision,
    gram_factor,
    inverse_lower,
    relative_factor_tangent,
    row_sums_of_squares,
    solve_gram,
    solve_lower,
    square_of_lower,
    transposed_times,
)

Functions: TypeAlias = tuple[Array, Array, Array, Array]  # inverse, shrinkage, stretch and log-determinant


@jax.custom_jvp
def posterior_root_functions(gram: Array, regulariser: Array) -> Functions:
    """Return functions of $K$ (n, n) for the symmetric root; first derivatives only."""
    return _evaluate(*_roots(gram, regulariser))


@posterior_root_functions.defjvp
@full_precision
def _posterior_root_functions_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Functions, Functions]:
    vectors, a, s = _roots(*primals)
    gram_dot, regulariser_dot = tangents
    s_dot = regulariser_dot / (2 * s)
    b = a[:, None]
    a_row = a[None, :]
    rotated = vectors.T @ gram_dot @ vectors

    def tangent(divided_difference: Array, partial_s: Array | None = None) -> Array:
        inner = divided_difference * rotated
        if partial_s is not None:
            inner += jnp.diag(partial_s * s_dot)
        return vectors @ inner @ vectors.T

    inverse_dot = tangent(-1 / (a_row * b) ** 2)
    shared = (s + a_row) * (s + b) * (a_row + b)
    shrink_dot = tangent(-(s + a_row + b) / (a_row * b * shared), -1 / (a * (s + a) ** 2))
    stretch_dot = tangent(-1 / (s * shared), -(2 * s + a) / (s * (s + a)) ** 2)
    log_det_dot = (jnp.diagonal(rotated) / a**2).sum() - a.size * regulariser_dot / s**2
    return _evaluate(vectors, a, s), (inverse_dot, shrink_dot, stretch_dot, log_det_dot)


def _roots(gram: Array, regulariser: Array) -> tuple[Array, Array, Array]:
    values, vectors = jnp.linalg.eigh(gram, symmetrize_input=False)
    # Rounding can put eigenvalues below the regulariser, or zero.
    return vectors, jnp.sqrt(jnp.maximum(values, regulariser)), jnp.sqrt(regulariser)


def _evaluate(vectors: Array, a: Array, s: Array) -> Functions:
    def function(values: Array) -> Array:
        return (vectors * values[None, :]) @ vectors.T

    return function(a**-2), function(1 / (a * (s + a))), function(1 / (s * (s + a))), 2 * jnp.log(a / s).sum()


class _CholeskyRoot(NamedTuple):
    r"""One factorisation's results, for targets (n, k) and readouts (d, k); $K = \Psi \Psi^\top + \lambda I$."""

    features: Array
    regulariser: Array
    factor: Array
    inverse_factor: Any = None  # where it is known

    def log_det(self) -> Array:
        r"""Return $\log\det(K / \lambda) = -2 \log|\det A|$, of one output."""
        return 2 * jnp.log(diagonal(self.factor) / jnp.sqrt(self.regulariser)).sum()

    def trace(self) -> Array:
        """Return the trace of the factorised matrix."""
        return row_sums_of_squares(self.factor).sum()

    def inverted(self) -> Self:
        """Return the root with its factor's inverse."""
        return self._replace(inverse_factor=inverse_lower(self.factor))


class FeatureRoot(_CholeskyRoot):
    r"""Cholesky root of $\lambda I + \Psi^\top \Psi$ (Hron 2022, §3.2; :eq:`feature`): O(nd² + d³)."""

    @classmethod
    def of(cls, features: Array, regulariser: Array) -> "FeatureRoot":
        r"""Factorise for features (n, d) and a scalar $\lambda$."""
        return cls(features, regulariser, gram_factor(features.T, regulariser))

    def fit(self, targets: Array) -> tuple[Array, Array]:
        r"""Return the mean $\mu = \Psi^\top K^{-1} Y$, (d, k), and $Y - \Psi \mu$, (n, k), refined once."""
        mean = solve_gram(self.factor, transposed_times(self.features, targets), self.inverse_factor)
        residual = targets - self.features @ mean
        slope = transposed_times(self.features, residual) - self.regulariser * mean
        step = solve_gram(self.factor, slope, self.inverse_factor)
        return _refined(self, mean, residual, step)

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        r"""Return the readout $W = \mu + A \phi$, and $\log|\det A|$ of one output."""
        scaled = jnp.sqrt(self.regulariser) * phi
        return solve_lower(self.factor, self._whitened(targets) + scaled, transpose=True), -0.5 * self.log_det()

    def inverse(self, targets: Array, readout: Array) -> Array:
        r"""Return the repriorised readout $\phi = A^{-1} (W - \mu)$."""
        return (self.factor.T @ readout - self._whitened(targets)) / jnp.sqrt(self.regulariser)

    def solve_features(self) -> Array:
        r"""Return $K^{-1} \Psi$, by products, of an inverted root."""
        return self.features @ square_of_lower(self.inverse_factor)

    def _whitened(self, targets: Array) -> Array:
        return solve_lower(self.factor, self.features.T @ targets)


class DataCholeskyRoot(_CholeskyRoot):
    r"""Cholesky root of $\Psi \Psi^\top + \lambda I$ (Andrews 1968; :eq:`data-cholesky`): O(n²d + n³)."""

    @classmethod
    def of(cls, features: Array, regulariser: Array) -> "DataCholeskyRoot":
        return cls(features, regulariser, gram_factor(features, regulariser))

    def fit(self, targets: Array) -> tuple[Array, Array]:
        weights = solve_gram(self.factor, targets, self.inverse_factor)
        mean = transposed_times(self.features, weights)
        residual = targets - self.features @ mean
        step = solve_gram(self.factor, residual - self.regulariser * weights, self.inverse_factor)
        step = transposed_times(self.features, step)
        return _refined(self, mean, residual, step)

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        # The derivative is its own, without the factor's.
        return andrews_map(self.features, self.regulariser, stop_gradient(self.factor), targets, phi)

    def inverse(self, targets: Array, readout: Array) -> Array:
        scale = jnp.sqrt(self.regulariser)
        centred = readout - self.features.T @ solve_gram(self.factor, targets)
        correction = solve_lower(add_diagonal(self.factor, scale), self.features @ centred, transpose=True)
        return centred + self.features.T @ correction / scale

    def solve_features(self) -> Array:
        return square_of_lower(self.inverse_factor) @ self.features


class DataRoot(NamedTuple):
    """Symmetric root by eigenvectors of $K$ (Hron 2022; :eq:`data`)."""

    features: Array
    inverse_gram: Array
    shrink: Array
    stretch: Array
    log_det: Array

    @classmethod
    def of(cls, features: Array, regulariser: Array) -> "DataRoot":
        gram = add_diagonal(features @ features.T, regulariser)
        return cls(features, *posterior_root_functions(gram, regulariser))

    def forward(self, targets: Array, phi: Array) -> tuple[Array, Array]:
        weights = self.inverse_gram @ targets - self.shrink @ (self.features @ phi)
        return phi + self.features.T @ weights, -0.5 * self.log_det

    def inverse(self, targets: Array, readout: Array) -> Array:
        centred = readout - self.features.T @ (self.inverse_gram @ targets)
        return centred + self.features.T @ (self.stretch @ (self.features @ centred))


def _refined(root: _CholeskyRoot, mean: Array, residual: Array, step: Array) -> tuple[Array, Array]:
    """Return mean and residual after one step of refinement, of the best length."""
    moved = root.features @ step
    slope = _by_output(residual * moved) - root.regulariser * _by_output(mean * step)
    curvature = _by_output(moved**2) + root.regulariser * _by_output(step**2)
    # Derivatives are those of the step alone, zero but for rounding.
    length = stop_gradient(slope / jnp.where(curvature > 0, curvature, 1))
    return mean + length * step, residual - length * moved


def _by_output(matrix: Array) -> Array:
    return jnp.sum(matrix, axis=0, keepdims=True)


CHOLESKY_ROOTS: dict[str, type[FeatureRoot | DataCholeskyRoot]] = {
    "feature": FeatureRoot,
    "data-cholesky": DataCholeskyRoot,
}
ROOTS: dict[str, Any] = {"feature": FeatureRoot, "data": DataRoot, "data-cholesky": DataCholeskyRoot}


@jax.custom_jvp
def andrews_map(features: Array, regulariser: Array, factor: Array, targets: Array, phi: Array) -> tuple[Array, Array]:
    r"""Return the data-cholesky map and log-determinant; the derivative forms no $\mathrm{d}L$."""
    scale = jnp.sqrt(regulariser)
    inner = solve_lower(factor, targets) - solve_lower(add_diagonal(factor, scale), features @ phi)
    weights = solve_lower(factor, inner, transpose=True)
    return phi + transposed_times(features, weights), -jnp.log(diagonal(factor) / scale).sum()


@andrews_map.defjvp
@full_precision
def _andrews_map_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    features, regulariser, _, targets, phi = primals
    features_dot, regulariser_dot, _, targets_dot, phi_dot = tangents
    scale = jnp.sqrt(regulariser)
    scale_dot = regulariser_dot / (2 * scale)
    factor = gram_factor(features, regulariser)
    inverse, shifted = inverse_lower(factor), add_diagonal(factor, scale)
    mean_part, noise_part = inverse @ targets, solve_lower(shifted, features @ phi)
    inner = mean_part - noise_part
    weights = inverse.T @ inner

    # dL = L F: other products with F have k columns. Products with features run along rows in reverse mode.
    F = relative_factor_tangent(inverse, features_dot @ features.T, regulariser_dot)
    signal_dot = features_dot @ phi + (phi_dot.T @ features.T).T
    mean_dot = inverse @ targets_dot - F @ mean_part
    noise_dot = solve_lower(shifted, signal_dot - factor @ (F @ noise_part) - scale_dot * noise_part)
    weights_dot = inverse.T @ (mean_dot - noise_dot - F.T @ inner)
    readout_dot = phi_dot + features_dot.T @ weights + (weights_dot.T @ features).T
    log_abs_det_dot = features.shape[0] * scale_dot / scale - diagonal(F).sum()

    log_abs_det = -jnp.log(diagonal(factor) / scale).sum()
    return (phi + transposed_times(features, weights), log_abs_det), (readout_dot, log_abs_det_dot)
