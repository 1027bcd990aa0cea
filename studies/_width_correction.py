"""Corrections of leading order in 1/width: of the evidence and the predictive mean of one hidden layer."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike


class WidthCorrection(NamedTuple):
    """Coefficients of 1/width, to be added to the limit, and their Monte Carlo standard errors.

    Attributes:
        log_evidence: coefficient of the log evidence, in nats: that of a network less that of its limit is this over
            the width, to leading order; the data prefer a finite width where it is positive.
        log_evidence_error: standard error of ``log_evidence``.
        mean: coefficient of the posterior mean of the function at new inputs, (n_new,) or (n_new, k); None without new
            inputs.
        mean_error: standard errors of ``mean``.
    """

    log_evidence: Array
    log_evidence_error: Array
    mean: Array | None = None
    mean_error: Array | None = None


def width_correction(
    units: ArrayLike,
    kernel_train: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    *,
    units_new: ArrayLike | None = None,
    kernel_cross: ArrayLike | None = None,
) -> WidthCorrection:
    r"""Estimate the leading corrections in 1/width to the evidence and the predictive mean of one hidden layer.

    Given its hidden weights, a network with Gaussian readout is a Gaussian process, whose kernel is the mean over its
    units of $\psi\psi^\top$. With one hidden layer the units are independent, so the kernel differs from its limit by a
    random matrix whose covariance is that of a single unit over the width, and the evidence, its mean over networks, to
    order 1/width by moments of single units (Mathematics, :eq:`width-correction`, :eq:`mean-correction`). With two
    hidden layers or more the units are dependent, and these formulas do not hold; Yaida 2020 has theirs.

    Draws of units give it, without a network, at the cost of n² each. In single precision, terms of the size of the
    squared signal-to-noise ratio cancel: take float64 where the noise is below a tenth of the signal.

    Args:
        units: m independent units at the training inputs, (n, m), drawn from the prior and scaled so that the mean of
            :math:`\psi\psi^\top` is the kernel, but for the variance of a readout's bias: the features of a network of
            m units, times √m. Thousands are needed, as the error tells.
        kernel_train: K (n, n), the limit's, exactly, a readout's bias included.
        targets: Y, (n,) or (n, k).
        noise_scale: standard deviation σ of the noise, a number or (n,), one for each row.
        units_new: the same units at new inputs, (n_new, m), for the predictive mean.
        kernel_cross: kernel of new with training inputs, (n_new, n); goes with ``units_new``.

    Returns:
        two coefficients of 1/width and their standard errors.
    """
    units, targets, kernel_train = map(jnp.asarray, (units, targets, kernel_train))
    noise_variance = jnp.broadcast_to(jnp.asarray(noise_scale, kernel_train.dtype) ** 2, kernel_train.shape[:1])
    chol = jnp.linalg.cholesky(kernel_train + jnp.diag(noise_variance))
    columns = targets.reshape(len(targets), -1)
    drawn = _whitened_units(*(solve_triangular(chol, part, lower=True) for part in (units, columns)))
    evidence = _of_evidence(drawn)
    if units_new is None or kernel_cross is None:
        return WidthCorrection(*evidence)
    left = jnp.asarray(units_new) - solve_triangular(chol, jnp.asarray(kernel_cross).T, lower=True).T @ drawn.units
    shape = (len(left), *targets.shape[1:])
    return WidthCorrection(*evidence, *(part.reshape(shape) for part in _of_mean(drawn, left)))


class _Drawn(NamedTuple):
    """Units in coordinates in which the covariance of the targets is the identity, and what recurs of them.

    Attributes:
        units: v, (n, m).
        scores: products of the units with the targets, (k, m).
        sizes: squared norms of the units, (m,).
        slopes: derivatives of the log evidence towards v vᵀ, less their mean, (m,).
        spread: mean of v vᵀ, (n, n).
        smoothed: product of that mean with the targets, (n, k).
    """

    units: Array
    scores: Array
    sizes: Array
    slopes: Array
    spread: Array
    smoothed: Array


def _whitened_units(units: Array, targets: Array) -> _Drawn:
    scores = targets.T @ units
    sizes = jnp.sum(units**2, axis=0)
    slopes = 0.5 * (jnp.sum(scores**2, axis=0) - targets.shape[1] * sizes)
    spread = units @ units.T / units.shape[1]
    return _Drawn(units, scores, sizes, slopes - jnp.mean(slopes), spread, spread @ targets)


def _of_evidence(drawn: _Drawn) -> tuple[Array, Array]:
    """Average half the second derivative of the evidence over itself, towards a unit less the mean unit.

    Of the log evidence, that is, and the square of its first derivative. The former is a quadratic form: its mean at
    units less its value at the mean unit. Units enter the mean unit, and so the error, by twice the bilinear form.
    """
    num_outputs = drawn.scores.shape[0]
    squares = jnp.sum(drawn.scores**2, axis=0)
    terms = 0.5 * drawn.slopes**2 - 0.5 * squares * drawn.sizes + 0.25 * num_outputs * drawn.sizes**2
    at_mean = -0.5 * jnp.sum(drawn.smoothed**2) + 0.25 * num_outputs * jnp.sum(drawn.spread**2)
    at_both = -0.5 * jnp.sum((drawn.smoothed.T @ drawn.units) * drawn.scores, axis=0)
    at_both += 0.25 * num_outputs * jnp.sum(drawn.units * (drawn.spread @ drawn.units), axis=0)
    return _mean(terms, -at_mean, terms - 2 * at_both)


def _of_mean(drawn: _Drawn, left: Array) -> tuple[Array, Array]:
    """Average half the predictive mean's second derivative, and its first times that of the log evidence.

    Args:
        drawn: units at the training inputs.
        left: what the limit does not predict of the units at new inputs, (n_new, m).
    """
    directions = left[:, None] * drawn.scores[None]  # first derivatives, (n_new, k, m)
    around = directions - jnp.mean(directions, axis=-1, keepdims=True)
    terms = drawn.slopes[None, None] * around - drawn.sizes[None, None] * directions
    left_spread = left @ drawn.units.T / drawn.units.shape[1]
    at_both = left[:, None] * (drawn.smoothed.T @ drawn.units)[None]
    at_both += (left_spread @ drawn.units)[:, None] * drawn.scores[None]
    return _mean(terms, left_spread @ drawn.smoothed, terms + at_both)


def _mean(terms: Array, constant: Array, influence: Array) -> tuple[Array, Array]:
    """Average over units, the last axis, plus a constant; and give the standard error, by what each unit changes."""
    return jnp.mean(terms, axis=-1) + constant, jnp.std(influence, axis=-1) / terms.shape[-1] ** 0.5
