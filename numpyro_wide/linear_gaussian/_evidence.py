r"""The log evidence $\log N(Y; 0, \Psi \Psi^\top + \sigma^2 I)$ with its closed-form gradient."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.linear_gaussian._problem import check_positive, resolve_variant, solve, standardise
from numpyro_wide.linear_gaussian._roots import add_diagonal, cholesky, inverse_lower, solve_lower


def log_evidence(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""Log density of the targets with the readout integrated out.

    $\log N(Y; \Psi\,\text{loc}, \Psi \operatorname{diag}(\text{scale}^2) \Psi^\top + \sigma^2 I)$, summed over the
    columns of $Y$ (Hron 2022, eq. 5, whose exponent lacks its minus sign; Mathematics, :eq:`evidence`). The derivative
    is in closed form (:eq:`gradient`), from the factor at hand; it costs one inverse of the smaller Gram matrix and
    works in forward and reverse mode.

    The quadratic form is evaluated as $\|Y - \Psi \mu\|^2 / \sigma^2 + \|\mu\|^2$ at the posterior mean $\mu$, its
    minimum, where errors of $\mu$ enter squared: differences between neighbouring states keep their digits in
    float32. Where $\sigma^2$ is below the rounding of the Gram matrix, $\epsilon \|\Psi\|_F^2$, the result may be
    NaN, and float64 is needed.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        variant: "feature" works with (d, d) matrices, "data" and "data-cholesky" with (n, n) ones, through
            eigenvectors and Cholesky factors; "auto" takes "feature" if d ≤ n, else "data-cholesky". "data" has first
            derivatives only.
        prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
        prior_scale: standard deviation of the readout's prior; broadcasts likewise.

    Returns:
        The log evidence, a scalar; NaN under ``jit`` where the noise is not positive.

    Raises:
        ValueError: if shapes do not fit, the noise is not positive, or the variant is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> linear_gaussian.log_evidence(jnp.zeros((2, 3)), jnp.zeros(2), noise_scale=1.0).round(4)  # -log(2π)
        Array(-1.8379, dtype=float32)
    """
    check_positive("noise_scale", noise_scale)
    check_positive("prior_scale", prior_scale)
    scale = jnp.asarray(noise_scale, jnp.result_type(features, targets, noise_scale, float))
    # Under jit a negative scale is not refused; squared it would pass for its mirror image.
    variance = jnp.where(scale > 0, scale, jnp.nan) ** 2
    problem = standardise(features, targets, variance, prior_loc, prior_scale)
    variant = resolve_variant(variant, *problem.features.shape[-2:])

    def core(features: Array, targets: Array, variance: Array) -> tuple[tuple[()], Array]:
        return (), _log_evidence(features, targets, variance, variant)

    _, by_output = solve(core, problem)
    return by_output.sum() - problem.log_scale


class _Terms(NamedTuple):
    r"""What value and gradient need: $\mu$ (d, k), $\alpha = (Y - \Psi\mu)/\sigma^2$ (n, k), the factor."""

    mean: Array
    alpha: Array
    log_det: Array
    factor: Array | tuple[Array, Array]


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _log_evidence(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    return _value(targets, variance, _terms(features, targets, variance, variant))


@_log_evidence.defjvp
def _log_evidence_jvp(
    variant: str, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    features, targets, variance = primals
    num_rows, num_outputs = targets.shape
    terms = _terms(features, targets, variance, variant)
    solved = _solve_features(features, terms.factor, variant)
    trace_inverse = (num_rows - jnp.sum(features * solved)) / variance

    features_dot, targets_dot, variance_dot = tangents
    tangent = jnp.sum((terms.alpha @ terms.mean.T - num_outputs * solved) * features_dot)
    tangent -= jnp.sum(terms.alpha * targets_dot)
    tangent += 0.5 * (jnp.sum(terms.alpha**2) - num_outputs * trace_inverse) * variance_dot
    return _value(targets, variance, terms), tangent


def _value(targets: Array, variance: Array, terms: _Terms) -> Array:
    num_rows, num_outputs = targets.shape
    # ‖Y − Ψμ‖²/σ² + ‖μ‖² = tr(Yᵀ K⁻¹ Y)
    quadratic = variance * jnp.sum(terms.alpha**2) + jnp.sum(terms.mean**2)
    log_normaliser = terms.log_det + num_rows * jnp.log(2 * jnp.pi * variance)
    return -0.5 * (quadratic + num_outputs * log_normaliser)


def _terms(features: Array, targets: Array, variance: Array, variant: str) -> _Terms:
    """Posterior mean, residual over σ², log det(K/σ²) and the factorisation."""
    factor: Array | tuple[Array, Array]
    if variant == "feature":
        factor = cholesky(features.T @ features, variance)
        mean = solve_lower(factor, solve_lower(factor, features.T @ targets), transpose=True)
        log_det = 2 * jnp.log(jnp.diagonal(factor) / jnp.sqrt(variance)).sum()
    elif variant == "data-cholesky":
        factor = cholesky(features @ features.T, variance)
        mean = features.T @ solve_lower(factor, solve_lower(factor, targets), transpose=True)
        log_det = 2 * jnp.log(jnp.diagonal(factor) / jnp.sqrt(variance)).sum()
    else:
        gram = add_diagonal(features @ features.T, variance)
        values, vectors = jnp.linalg.eigh(gram, symmetrize_input=False)
        factor = (jnp.maximum(values, variance), vectors)  # no eigenvalue of K is smaller, but for rounding
        values, _ = factor
        mean = features.T @ (vectors @ ((vectors.T @ targets) / values[:, None]))
        log_det = jnp.log(values / variance).sum()
    return _Terms(mean, (targets - features @ mean) / variance, log_det, factor)


def _solve_features(features: Array, factor: Array | tuple[Array, Array], variant: str) -> Array:
    r"""$K^{-1} \Psi = \Psi (\sigma^2 I + \Psi^\top \Psi)^{-1}$, by products, which beat triangular solves."""
    if isinstance(factor, tuple):
        values, vectors = factor
        return ((vectors / values[None, :]) @ vectors.T) @ features
    inverse_factor = inverse_lower(factor)
    inverse = inverse_factor.T @ inverse_factor
    return features @ inverse if variant == "feature" else inverse @ features
