"""Mixtures of Gaussians over a leading axis of draws, in NumPy and float64: moments, density, quantiles, CRPS.

``mean`` and ``variance`` have shape (draws, ...), ``y`` the same without draws; every entry is a mixture of its own.
``weights`` are (draws,), with sum one; None for equal ones.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import erf, logsumexp, ndtr

Weights = np.ndarray | None
# Intermediate arrays hold at most about so many numbers: 2 MB, which fit into a processor's cache.
BLOCK = 2**18


def in_blocks(fn: Callable, y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Compute ``fn(y, mean, variance)``, entry by entry, in float64 and for a block of entries at a time."""
    flat_y, flat_mean, flat_variance = y.reshape(-1), mean.reshape(len(mean), -1), variance.reshape(len(mean), -1)
    out = np.empty(flat_y.shape)
    size = max(1, BLOCK // len(mean))
    for start in range(0, len(flat_y), size):
        block = slice(start, start + size)
        arguments = (values[..., block].astype(np.float64) for values in (flat_y, flat_mean, flat_variance))
        out[block] = fn(*arguments)
    return out.reshape(y.shape)


def moments(mean: np.ndarray, variance: np.ndarray, weights: Weights = None) -> tuple[np.ndarray, np.ndarray]:
    center = _average(mean, weights)
    return center, _average(variance + (mean - center) ** 2, weights)


def component_log_density(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the log density of each component, (draws, ...); summed over outputs, that of a row given the draw."""
    return -0.5 * ((y - mean) ** 2 / variance + np.log(2 * np.pi * variance))


def log_average(log_values: np.ndarray, weights: Weights = None) -> np.ndarray:
    """Return the logarithm of the average over draws of exp(log_values), (draws, ...)."""
    if weights is None:
        return logsumexp(log_values, axis=0) - np.log(len(log_values))
    return logsumexp(log_values, axis=0, b=weights.reshape(-1, *[1] * (log_values.ndim - 1)))


def log_density(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    # A y that is 1e160 deviations away has the log density −∞.
    with np.errstate(over="ignore"):
        return log_average(component_log_density(y, mean, variance))


def cdf(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    # The average of numbers that are 1 may be rounded to a little more.
    return np.minimum(ndtr((y - mean) / np.sqrt(variance)).mean(axis=0), 1.0)


def quantile(level: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the mixture's quantiles by bisection, 40 steps, to 1e-12 of the range; levels broadcast over entries."""
    far = 10 * np.sqrt(variance)
    low, high = (mean - far).min(axis=0), (mean + far).max(axis=0)
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_below = cdf(middle, mean, variance) < level
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)


def crps(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return E|X − y| − ½ E|X − X'| for X, X' from the mixtures of entries (m,) (Gneiting & Raftery 2007)."""
    scale = np.sqrt(variance)
    num_points = _num_points(mean, scale)
    by_integral = num_points < len(mean) / 2  # which then needs fewer evaluations
    spread = np.empty(mean.shape[1])
    for entries, half_mean_difference in ((~by_integral, spread_by_pairs), (by_integral, spread_by_integral)):
        spread[entries] = half_mean_difference(mean[:, entries], scale[:, entries])
    return _mean_modulus(y - mean, scale).mean(axis=0) - spread


def spread_by_pairs(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ½ E|X − X'|, (m,), in closed form, summed over all pairs of draws (Grimit 2006)."""
    variance = scale**2
    total = _mean_modulus(np.zeros_like(mean), np.sqrt(2) * scale).sum(axis=0)
    for i in range(len(mean) - 1):
        pairs = _mean_modulus(mean[i + 1 :] - mean[i], np.sqrt(variance[i + 1 :] + variance[i]))
        total += 2 * pairs.sum(axis=0)
    return total / (2 * len(mean) ** 2)


def spread_by_integral(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ½ E|X − X'| = ∫ F (1 − F), (m,), by a trapezoidal rule (Trefethen & Weideman 2014), without pairs."""
    # Its error is of the size of the integrand's Fourier transform at 2π/step, exp(−(π s/step)²) = 1e-17 for steps of
    # half the smallest standard deviation s.
    mean = mean - mean[0]  # far from zero the points would be rounded
    low, high = _ends(mean, scale)
    num_points = _num_points(mean, scale)
    spread = np.empty(mean.shape[1])
    for i in range(mean.shape[1]):
        points = np.linspace(low[i], high[i], num_points[i])
        total = 0.0
        for chunk in np.array_split(points, 1 + len(points) * len(mean) // BLOCK):
            below = ndtr((chunk - mean[:, i, None]) / scale[:, i, None]).mean(axis=0)
            total += float(np.sum(below * (1 - below)))
        spread[i] = total * (points[1] - points[0])
    return spread


def _average(values: np.ndarray, weights: Weights) -> np.ndarray:
    return values.mean(axis=0) if weights is None else np.tensordot(weights, values, 1)


def _mean_modulus(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return E|Z| for Z ~ N(mean, scale²)."""
    z = mean / scale
    return scale * (np.sqrt(2 / np.pi) * np.exp(-0.5 * z**2) + z * erf(z / np.sqrt(2)))


def _ends(mean: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # F is 1e-15 from 0 or 1 there.
    return (mean - 8 * scale).min(axis=0), (mean + 8 * scale).max(axis=0)


def _num_points(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the number of points with a step of half the smallest deviation, or a little less."""
    low, high = _ends(mean, scale)
    # Far more than anyone would take, since a whole number has an end and a ratio of deviations has none.
    return np.minimum(np.ceil(2 * (high - low) / scale.min(axis=0)) + 1, 2**53).astype(np.int64)
