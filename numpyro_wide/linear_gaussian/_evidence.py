r"""The log evidence $\log N(Y; 0, \Psi \Psi^\top + \sigma^2 I)$ with its closed-form gradient."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.linear_gaussian._roots import ROOTS, Root
from numpyro_wide.linear_gaussian._rounding import above_rounding
from numpyro_wide.linear_gaussian._standardised import Standardised


def evidence(standard: Standardised, variant: str) -> Array:
    """Return the log density of a readout's targets with the readout integrated out.

    Args:
        standard: the readout with a standard normal prior, at the regulariser σ².
        variant: root of the posterior covariance, "feature", "data" or "data-cholesky".

    Returns:
        The log evidence, a scalar.
    """

    def core(features: Array, targets: Array, variance: Array) -> tuple[tuple[()], Array]:
        return (), _log_evidence(features, targets, variance, variant)

    _, by_output = standard.for_each_output(core)
    return by_output.sum() - standard.log_scale


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _log_evidence(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    root, variance = _factorised(features, variance, variant)
    return _value(targets, variance, _terms(targets, variance, root))


@_log_evidence.defjvp
def _log_evidence_jvp(
    variant: str, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    features, targets, variance = primals
    num_rows, num_outputs = targets.shape
    root, variance = _factorised(features, variance, variant)
    root = root.inverted()
    terms = _terms(targets, variance, root)
    solved = root.solve_features()
    trace_inverse = (num_rows - jnp.sum(features * solved)) / variance

    features_dot, targets_dot, variance_dot = tangents
    tangent = jnp.sum((terms.alpha @ terms.mean.T - num_outputs * solved) * features_dot)
    tangent -= jnp.sum(terms.alpha * targets_dot)
    tangent += 0.5 * (jnp.sum(terms.alpha**2) - num_outputs * trace_inverse) * variance_dot
    return _value(targets, variance, terms), tangent


def _factorised(features: Array, variance: Array, variant: str) -> tuple[Root, Array]:
    """Return the root, and the noise variance, NaN where rounding hides it."""
    root = ROOTS[variant].of(features, variance)
    # The root's trace costs less than the features' norm.
    return root, above_rounding(variance, root.trace())


class _Terms(NamedTuple):
    r"""The terms of which value and gradient are made.

    Attributes:
        mean: posterior mean $\mu$, (d, k).
        alpha: $\alpha = (Y - \Psi\mu)/\sigma^2 = K^{-1} Y$, (n, k).
        log_det: $\log\det(K/\sigma^2)$ of one output, scalar.
    """

    mean: Array
    alpha: Array
    log_det: Array


def _terms(targets: Array, variance: Array, root: Root) -> _Terms:
    mean, residual = root.fit(targets)
    return _Terms(mean, residual / variance, root.log_det())


def _value(targets: Array, variance: Array, terms: _Terms) -> Array:
    num_rows, num_outputs = targets.shape
    # ‖Y − Ψμ‖²/σ² + ‖μ‖² = tr(Yᵀ K⁻¹ Y)
    quadratic = variance * jnp.sum(terms.alpha**2) + jnp.sum(terms.mean**2)
    log_normaliser = terms.log_det + num_rows * jnp.log(2 * jnp.pi * variance)
    return -0.5 * (quadratic + num_outputs * log_normaliser)
