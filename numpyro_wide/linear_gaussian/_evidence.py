r"""The log evidence $\log N(Y; 0, \Psi \Psi^\top + \sigma^2 I)$ with its closed-form gradient."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.linear_gaussian._problem import ReadoutProblem, above_rounding, for_each_output, standardise
from numpyro_wide.linear_gaussian._roots import ROOTS, Root


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
    float32. Below the rounding of the Gram matrix, $\sigma^2 < \epsilon \|\Psi\|_F^2$, float64 is needed: digits are
    lost, and from a tenth of that on the result is NaN.

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
    problem = ReadoutProblem.of(
        features, targets, noise_scale, variant=variant, prior_loc=prior_loc, prior_scale=prior_scale
    )
    return evidence_of(problem)


def evidence_of(problem: ReadoutProblem) -> Array:
    """What stands behind :func:`log_evidence`."""

    def core(features: Array, targets: Array, variance: Array) -> tuple[tuple[()], Array]:
        return (), _log_evidence(features, targets, variance, problem.variant)

    standard = standardise(problem.exact())
    _, by_output = for_each_output(core, standard)
    return by_output.sum() - standard.log_scale


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _log_evidence(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    root, variance = _factorised(features, variance, variant)
    return _value(targets, variance, _terms(features, targets, variance, root))


@_log_evidence.defjvp
def _log_evidence_jvp(
    variant: str, primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    features, targets, variance = primals
    num_rows, num_outputs = targets.shape
    root, variance = _factorised(features, variance, variant)
    terms = _terms(features, targets, variance, root)
    solved = root.solve_features()
    trace_inverse = (num_rows - jnp.sum(features * solved)) / variance

    features_dot, targets_dot, variance_dot = tangents
    tangent = jnp.sum((terms.alpha @ terms.mean.T - num_outputs * solved) * features_dot)
    tangent -= jnp.sum(terms.alpha * targets_dot)
    tangent += 0.5 * (jnp.sum(terms.alpha**2) - num_outputs * trace_inverse) * variance_dot
    return _value(targets, variance, terms), tangent


def _factorised(features: Array, variance: Array, variant: str) -> tuple[Root, Array]:
    """The root, and the noise variance, NaN where rounding hides it: its trace costs less than the features' norm."""
    root = ROOTS[variant].of(features, variance)
    return root, above_rounding(variance, root.trace())


class _Terms(NamedTuple):
    r"""What value and gradient need: $\mu$ (d, k), $\alpha = (Y - \Psi\mu)/\sigma^2$ (n, k), $\log\det(K/\sigma^2)$."""

    mean: Array
    alpha: Array
    log_det: Array


def _terms(features: Array, targets: Array, variance: Array, root: Root) -> _Terms:
    mean = root.mean(targets)
    return _Terms(mean, (targets - features @ mean) / variance, root.log_det())


def _value(targets: Array, variance: Array, terms: _Terms) -> Array:
    num_rows, num_outputs = targets.shape
    # ‖Y − Ψμ‖²/σ² + ‖μ‖² = tr(Yᵀ K⁻¹ Y)
    quadratic = variance * jnp.sum(terms.alpha**2) + jnp.sum(terms.mean**2)
    log_normaliser = terms.log_det + num_rows * jnp.log(2 * jnp.pi * variance)
    return -0.5 * (quadratic + num_outputs * log_normaliser)
