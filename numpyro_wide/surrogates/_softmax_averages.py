r"""Mean values of a softmax over independent normal logits of one variance, each by a single integral.

With a Gumbel variable for each logit, class k has the largest sum of both with the probability $softmax(f)_k$. Averaged
over normal logits that is the chance that the largest of independent sums is the k-th: an integral over one number of
products of their distribution functions F. In units in which a sum has mean 0 and variance 1 these are a family with
one parameter, from the normal's to Gumbel's; log(-log F), which is straight for Gumbel's, is kept in a table.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, logsumexp

_VARIANCE = np.pi**2 / 6  # of a Gumbel variable
_LOWEST, _STRAIGHT, _HIGHEST, _SPACING = (
    -7.0,
    12.0,
    56.0,
    0.1,
)  # of the table; from the second on F's logarithm is straight
_NUM_SHAPES = 41  # inverse standard deviations of a sum in the table, from 0, the normal's, to Gumbel's
_FIRST, _STRIDE, _NUM_PLACES = 5, 3, 72  # of the integral, above the largest mean, in cells of the table
_FARTHEST = 40.0  # standard deviations below the largest mean, from which on a class has no chance
_BATCH = 2**14  # numbers at a time, that fit a processor's cache


class SoftmaxAverages(NamedTuple):
    """Mean values over normal logits, by row.

    Attributes:
        log_normaliser: mean logarithm of the sum of exponentials, (n,).
        probs: mean probabilities, (n, k).
        curvature: mean of diag p − p pᵀ, (n, k, k), with p for the probabilities.
    """

    log_normaliser: np.ndarray
    probs: np.ndarray
    curvature: np.ndarray


def softmax_averages(mean: np.ndarray, variance: np.ndarray) -> SoftmaxAverages:
    """Average a softmax and its logarithm over independent normal logits.

    Args:
        mean: means of the logits, (n, k).
        variance: their variances, (n,), which those of a row share.
    """
    size = max(1, _BATCH // (mean.shape[1] * _NUM_PLACES))
    parts = [_of_rows(mean[i : i + size], variance[i : i + size]) for i in range(0, len(mean), size)]
    return SoftmaxAverages(*map(np.concatenate, zip(*parts, strict=True)))


def _of_rows(mean: np.ndarray, variance: np.ndarray) -> SoftmaxAverages:
    scale = np.sqrt(variance + _VARIANCE)
    best = mean.max(axis=1)
    height, hazard = _at(np.minimum((best[:, None] - mean) / scale[:, None], _FARTHEST), 1 / scale)
    largest = np.exp(-np.sum(height, axis=1))  # distribution function of the largest sum
    step = _STRIDE * _SPACING
    probs = step * np.matmul(hazard, largest[..., None])[..., 0]
    # The chance that two sums tie at the top is minus the derivative of the one's chance to win by the other's mean.
    curvature = -step * np.matmul(hazard * (largest / scale[:, None])[:, None], hazard.swapaxes(1, 2))
    diagonal = np.arange(mean.shape[1])
    curvature[:, diagonal, diagonal] = 0.0
    curvature[:, diagonal, diagonal] = -np.sum(curvature, axis=2)
    # The mean of the largest sum, less Euler's constant: that of a variable of distribution function F is what
    # 1 − F encloses above a point, less what F does below.
    above = step * (np.sum(1 - largest, axis=1) - 0.5)
    return SoftmaxAverages(best + scale * (_LOWEST + _FIRST * _SPACING + above), probs, curvature)


def _at(below: np.ndarray, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return −log F and the derivative of log F along the integral, (n, k, places).

    Args:
        below: how far means are below the largest, in standard deviations, (n, k).
        shapes: inverse standard deviations of the sums, (n,).
    """
    values, slopes = (_by_row(table, shapes) for table in _tables())
    cells = below / _SPACING
    first = cells.astype(int)
    t = (cells - first)[..., None]  # the same in all cells, which the integral's steps are multiples of
    start = first + (np.arange(len(values)) * values.shape[1])[:, None] + _FIRST
    flat = start[..., None] + _STRIDE * np.arange(_NUM_PLACES)
    left, left_slope = values.take(flat), slopes.take(flat)
    flat += 1
    rise, right_slope = values.take(flat) - left, slopes.take(flat)
    # Hermite's cubics between two places, and their derivatives.
    height = np.exp(
        left + (3 - 2 * t) * t**2 * rise + _SPACING * t * (1 - t) * ((1 - t) * left_slope - t * right_slope)
    )
    slope = 6 / _SPACING * t * (1 - t) * rise + (1 - t) * (1 - 3 * t) * left_slope - t * (2 - 3 * t) * right_slope
    return height, -slope * height


def _by_row(table: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Interpolate a table between its shapes, by cubics through four, (n, places)."""
    cells = np.clip(shapes * (_NUM_SHAPES - 1) * np.sqrt(_VARIANCE), 0, _NUM_SHAPES - 1)
    first = np.clip(cells.astype(int) - 1, 0, _NUM_SHAPES - 4)
    t = (cells - first)[:, None]
    weights = (
        -(t - 1) * (t - 2) * (t - 3) / 6,
        t * (t - 2) * (t - 3) / 2,
        -t * (t - 1) * (t - 3) / 2,
        t * (t - 1) * (t - 2) / 6,
    )
    return sum(weight * table[first + i] for i, weight in enumerate(weights))


@lru_cache(1)
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return log(−log F) and its derivative, (shapes, places)."""
    from scipy.interpolate import CubicSpline  # which NumPyro has not loaded

    places = np.arange(round((_HIGHEST - _LOWEST) / _SPACING) + 1) * _SPACING + _LOWEST
    curved = places <= _STRAIGHT
    shapes = np.linspace(0, 1 / np.sqrt(_VARIANCE), _NUM_SHAPES)
    values = np.stack([_log_height(places[curved], shape) for shape in shapes])
    slopes = CubicSpline(places[curved], values, axis=1)(places[curved], 1)
    beyond = places[~curved] - places[curved][-1]
    straight = values[:, -1:] + slopes[:, -1:] * beyond
    return np.hstack([values, straight]), np.hstack([slopes, np.broadcast_to(slopes[:, -1:], straight.shape)])


def _log_height(places: np.ndarray, shape: float) -> np.ndarray:
    """Return log(−log F) of a sum, by a trapezoid rule over the Gumbel variable or over the normal one."""
    scale = np.sqrt(max(1 - _VARIANCE * shape**2, 0.0))  # of the normal part
    if shape < 0.2:  # the normal part, of 4.8 Gumbel units at least, smooths Gumbel's
        gumbel = np.arange(-4.0, 45.0, 0.25)
        log_weights = -gumbel - np.exp(-gumbel) + np.log(0.25)
        at = (places[:, None] - shape * (gumbel - np.euler_gamma)) / scale
        log_below, log_above = (logsumexp(log_weights + log_ndtr(side * at), axis=1) for side in (1, -1))
    else:
        normal = np.arange(-12.0, 12.0, 0.05)
        log_weights = -0.5 * normal**2 + np.log(0.05 / np.sqrt(2 * np.pi))
        heights = np.exp(-((places[:, None] - scale * normal) / shape + np.euler_gamma))
        log_below = logsumexp(log_weights - heights, axis=1)
        log_above = logsumexp(log_weights + np.log(-np.expm1(-heights)), axis=1)
    # Where F is almost 1 its logarithm is that of the other side's probability, without cancellation.
    small = -np.log1p(-np.exp(np.minimum(log_above, -0.1)))
    return np.log(np.where(log_above < -1, small, -log_below))
