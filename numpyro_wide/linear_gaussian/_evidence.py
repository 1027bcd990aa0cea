"""Evidence of a linear Gaussian problem, its moments and rounding error."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import is_known
from numpyro_wide.linear_gaussian._linalg import (
    cholesky,
    diagonal,
    full_precision,
    inverse_lower,
    row_sums_of_squares,
    solve_gram,
    solve_lower,
)
from numpyro_wide.linear_gaussian._roots import CHOLESKY_ROOTS, DataCholeskyRoot, FeatureRoot


def above_rounding(variance: Array, least: Array) -> Array:
    """Return the noise variance, NaN below the least."""
    return jnp.where(variance < least, jnp.nan, variance)


def least_variance(squared_norm: Array, features: Array, is_by_rows: bool) -> Array:
    r"""Return the least noise variance of an evidence for $\|\Psi\|_F^2$.

    By rows that outnumber columns, eigenvalues of rounding weigh what no column explains.
    """
    num_rows, num_features = features.shape
    share = 1.0 if is_by_rows and num_rows > num_features else 0.1
    return share * jnp.finfo(squared_norm.dtype).eps * squared_norm


def evidence_rounding(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    """Estimate the rounding error of the log evidence in nats; infinite where that is NaN."""
    eps = jnp.finfo(features.dtype).eps
    num_rows, num_outputs = targets.shape
    rows = features.T if variant == "feature" else features
    squared_norms = jnp.sum(rows**2, axis=1)
    squared_norm = squared_norms.sum()
    factor = cholesky(rows @ rows.T, variance)
    inverse_factor = inverse_lower(factor)
    inverse = inverse_factor.T @ inverse_factor
    if variant == "feature":
        mean = inverse @ (features.T @ targets)
        alpha = (targets - features @ mean) / variance
        moved = jnp.sum(mean**2) / variance
    else:
        alpha = inverse @ targets
        moved = jnp.sum(alpha**2)

    # Both Gram matrices have this log det(K / σ²).
    log_det = 2 * jnp.log(diagonal(factor) / jnp.sqrt(variance)).sum()
    log_normaliser = num_outputs * (log_det + num_rows * jnp.log(2 * jnp.pi * variance))
    size = 0.5 * (jnp.abs(jnp.sum(targets * alpha)) + jnp.abs(log_normaliser))
    by_output = jnp.sqrt(jnp.sum(alpha**2, axis=0) * jnp.sum(targets**2, axis=0)).sum()
    log_det_term = num_outputs * jnp.sqrt(squared_norms @ (inverse**2 @ squared_norms))

    ratio = eps * squared_norm / variance
    mean_term = ratio**2 * moved * variance * 0.1 / len(rows)
    total = 2 * eps * (by_output + size + log_det_term) + ratio**4 * mean_term
    least = least_variance(squared_norm, features, variant != "feature")
    is_lost = (variance < least) | ~jnp.isfinite(total)
    return jnp.where(is_lost, jnp.inf, total)


T = TypeVar("T")
S = TypeVar("S")
# (features (n, d), targets (n, k), regulariser (), *columns (d or n, k)) -> arrays (..., k), and common results
Core: TypeAlias = Callable[..., tuple[T, S]]


class Standardised(NamedTuple):
    """Readout with a standard normal prior and equal noise in every row."""

    features: Array  # (n, d), or (k, n, d) by output
    targets: Array  # (n, k)
    regulariser: Array  # scalar, or (k,) by output
    log_scale: Array  # sum of the log divisors of all targets, scalar

    @classmethod
    @full_precision
    def of(
        cls,
        features: Array,
        targets: Array,
        regulariser: Array | np.ndarray,
        prior_loc: Array | np.ndarray,
        prior_scale: Array | np.ndarray,
    ) -> "Standardised":
        """Absorb the prior, and noise by row (:eq:`rows`), in features and targets."""
        is_vector = targets.ndim == 1
        targets = as_matrix(targets)
        num_outputs = targets.shape[1]
        variance = broadcastable_matrix(regulariser, is_vector)
        loc = broadcastable_matrix(prior_loc, is_vector)
        scale = broadcastable_matrix(prior_scale, is_vector)

        if not is_known(prior_loc) or np.any(np.asarray(prior_loc)):
            targets = targets - features @ jnp.broadcast_to(loc, (features.shape[1], num_outputs))
        features = features * scale.T if scale.shape[1] == 1 else features[None] * scale.T[:, None]

        if variance.shape[0] == 1:
            regulariser = variance[0, 0] if variance.shape[1] == 1 else variance[0]
            return cls(features, targets, regulariser, jnp.zeros((), targets.dtype))
        row_scale = jnp.sqrt(variance)
        if variance.shape[1] == 1:
            features = features / row_scale if features.ndim == 2 else features / row_scale[None]
        else:
            features = (features if features.ndim == 3 else features[None]) / row_scale.T[:, :, None]
        log_scale = jnp.log(row_scale).sum() * (num_outputs // variance.shape[1])
        return cls(features, targets / row_scale, jnp.ones((), targets.dtype), log_scale)

    @property
    def is_shared(self) -> bool:
        """Whether one factorisation serves all outputs."""
        return self.features.ndim == 2 and self.regulariser.ndim == 0

    @property
    def squared_norm(self) -> Array:
        r"""$\|\Psi\|_F^2$, scalar, or (k,) for features by output."""
        return jnp.sum(self.features**2, axis=(-2, -1))

    @property
    def rounding(self) -> Array:
        r"""Rounding of the Gram matrix, $\epsilon \|\Psi\|_F^2$."""
        return jnp.finfo(self.features.dtype).eps * self.squared_norm

    def resolved(self) -> "Standardised":
        """Return NaN for a noise variance below the Gram matrix's rounding: moments, unlike the evidence, are lost."""
        return self._replace(regulariser=above_rounding(self.regulariser, self.rounding))

    def representable(self) -> "Standardised":
        """Raise the regulariser to the Gram matrix's rounding."""
        return self._replace(regulariser=jnp.maximum(self.regulariser, self.rounding))

    def sum_over_outputs(self, core: Callable[..., Array], variant: str) -> Array:
        """Return a sum of ``core(features, targets, regulariser, variant)``."""
        _, by_output = self.for_each_output(lambda *arrays: ((), core(*arrays, variant)))
        return by_output.sum()

    @full_precision
    def for_each_output(self, core: Core[T, S], *columns: Array) -> tuple[T, S]:
        """Run ``core`` once or by output; the second result has a leading axis, 1 or k."""
        if self.is_shared:
            by_output, common = core(self.features, self.targets, self.regulariser, *columns)
            return by_output, jax.tree.map(lambda x: x[None], common)
        in_axes = (0 if self.features.ndim == 3 else None, 0, 0 if self.regulariser.ndim else None, *[0] * len(columns))
        split = [x.T[:, :, None] for x in (self.targets, *columns)]
        by_output, common = jax.vmap(core, in_axes)(self.features, split[0], self.regulariser, *split[1:])
        return jax.tree.map(lambda x: x[:, :, 0].T, by_output), common


def as_matrix(x: Array) -> Array:
    """Return a vector as a single column."""
    return x[:, None] if x.ndim == 1 else x


def broadcastable_matrix(value: Array | np.ndarray, is_vector: bool) -> Array:
    """Return numbers that broadcast against (m,) or (m, k) as (1 or m, 1 or k)."""
    value = jnp.asarray(value)
    return value.reshape(-1, 1) if is_vector else value.reshape((1,) * (2 - value.ndim) + value.shape)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def log_evidence_of(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    """Return the log evidence at a scalar σ²."""
    return _value(targets, variance, CHOLESKY_ROOTS[variant].of(features, variance))[0]


@log_evidence_of.defjvp
@full_precision
def _log_evidence_jvp(
    variant: str, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    features, targets, variance = primals
    num_rows, num_outputs = targets.shape
    root = CHOLESKY_ROOTS[variant].of(features, variance).inverted()
    value, mean, alpha = _value(targets, variance, root)
    solved = root.solve_features()
    trace_inverse = (num_rows - jnp.sum(features * solved)) / variance

    features_dot, targets_dot, variance_dot = tangents
    tangent = jnp.sum((alpha @ mean.T - num_outputs * solved) * features_dot)
    tangent -= jnp.sum(alpha * targets_dot)
    tangent += 0.5 * (jnp.sum(alpha**2) - num_outputs * trace_inverse) * variance_dot
    return value, tangent


def _value(targets: Array, variance: Array, root: FeatureRoot | DataCholeskyRoot) -> tuple[Array, Array, Array]:
    """Return the log evidence, the posterior mean μ, (d, k), and α = (Y − Ψμ)/σ² = K⁻¹Y, (n, k)."""
    num_rows, num_outputs = targets.shape
    # The root's trace costs less than the features' norm.
    least = least_variance(root.trace(), root.features, isinstance(root, DataCholeskyRoot))
    variance = above_rounding(variance, least)
    mean, residual = root.fit(targets)
    alpha = residual / variance
    # ‖Y − Ψμ‖²/σ² + ‖μ‖² = tr(Yᵀ K⁻¹ Y)
    quadratic = variance * jnp.sum(alpha**2) + jnp.sum(mean**2)
    log_normaliser = root.log_det() + num_rows * jnp.log(2 * jnp.pi * variance)
    return -0.5 * (quadratic + num_outputs * log_normaliser), mean, alpha


def posterior_moments(features: Array, targets: Array, variance: Array) -> tuple[Array, Array]:
    """Return posterior mean (d, k) and covariance (d, d) at a scalar noise variance."""
    num_rows, num_features = features.shape
    eye = jnp.eye(num_features, dtype=features.dtype)
    if num_features <= num_rows:
        factor = cholesky(features.T @ features, variance)
        root = solve_lower(factor, eye) * jnp.sqrt(variance)
        mean = solve_gram(factor, features.T @ targets)
        return mean, root.T @ root
    factor = cholesky(features @ features.T, variance)
    whitened = solve_lower(factor, features)
    return whitened.T @ solve_lower(factor, targets), eye - whitened.T @ whitened


def function_moments(
    test: Array, features: Array, targets: Array, variance: Array, scale: Array, phi: Array, residuals: Array
) -> tuple[tuple[Array, Array], Array]:
    """Return mean and a draw's deviation at test rows, (m, k) each, and the variance, (m,)."""
    weights, remainder = _conditioning_weights(features, variance, test * scale[:, :1].T)
    spread = row_sums_of_squares(remainder) + variance * row_sums_of_squares(weights)
    deviation = remainder @ phi - jnp.sqrt(variance) * weights @ residuals
    return (weights @ targets, deviation), spread


def joint_function_moments(
    test: Array, features: Array, targets: Array, variance: Array, scale: Array
) -> tuple[Array, Array]:
    """Return the mean at test rows, (m, k), and an output's covariance, (m, m)."""
    weights, remainder = _conditioning_weights(features, variance, test * scale[:, :1].T)
    return weights @ targets, remainder @ remainder.T + variance * weights @ weights.T


def left_out_moments(features: Array, targets: Array, variance: Array) -> tuple[Array, Array]:
    """Return mean, (n, k), and variance, (n,), of each row's targets given all others (Rasmussen 2006, eq. 5.12)."""
    if features.shape[1] <= features.shape[0]:
        whitened = features @ inverse_lower(cholesky(features.T @ features, variance)).T
        residual = targets - whitened @ (whitened.T @ targets)
        share = jnp.maximum(1 - row_sums_of_squares(whitened), jnp.finfo(features.dtype).eps)
    else:
        inverse = inverse_lower(cholesky(features @ features.T, variance))
        residual = variance * (inverse.T @ (inverse @ targets))
        share = variance * row_sums_of_squares(inverse.T)
    return targets - residual / share[:, None], variance / share


def _conditioning_weights(features: Array, variance: Array, test: Array) -> tuple[Array, Array]:
    r"""Return $c = K^{-1} \Psi \psi$, (m, n), and $\psi - \Psi^\top c$, (m, d)."""
    if features.shape[1] <= features.shape[0]:
        inverse = inverse_lower(cholesky(features.T @ features, variance))
        solved = (test @ inverse.T) @ inverse  # ψᵀ (σ²I + ΨᵀΨ)⁻¹
        return solved @ features.T, variance * solved
    inverse = inverse_lower(cholesky(features @ features.T, variance))
    weights = ((test @ features.T) @ inverse.T) @ inverse
    return weights, test - weights @ features
