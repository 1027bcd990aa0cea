"""Equal-weight mixtures of Gaussians, one for each entry of y: density, distribution function, CRPS.

All take y (m,), and mean and standard deviation (draws, m), in float64.
"""

import numpy as np
from scipy.special import erf, logsumexp, ndtr

# Intermediate arrays hold at most about so many numbers: 2 MB, which fit into a processor's cache.
BLOCK = 2**18


def log_density(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute the logarithm of the mixture's density, (m,)."""
    z = (y - mean) / scale
    # By log-sum-exp: far from every draw the density underflows, its logarithm does not.
    by_draw = -0.5 * z**2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
    return logsumexp(by_draw, axis=0) - np.log(len(mean))


def distribution_function(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute the mixture's distribution function, (m,)."""
    # The mean of numbers that are 1 may be rounded to a little more.
    return np.minimum(ndtr((y - mean) / scale).mean(axis=0), 1.0)


def crps(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute E|X − y| − ½ E|X − X'| for X, X' from the mixture, (m,) (Gneiting & Raftery 2007; Grimit 2006)."""
    return absolute_error(y, mean, scale) - spread(mean, scale)


def absolute_error(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute E|X − y|, (m,)."""
    return _mean_modulus(y - mean, scale).mean(axis=0)


def spread(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute ½ E|X − X'|, (m,): by pairs of draws, or by the integral where that needs fewer evaluations."""
    num_points = _num_points(mean, scale)
    by_integral = num_points < len(mean) / 2
    found = np.empty(mean.shape[1])
    found[~by_integral] = spread_by_pairs(mean[:, ~by_integral], scale[:, ~by_integral])
    found[by_integral] = spread_by_integral(mean[:, by_integral], scale[:, by_integral])
    return found


def spread_by_pairs(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute ½ E|X − X'| in closed form, summed over all pairs of draws (Grimit 2006)."""
    num_draws = len(mean)
    variance = scale**2
    total = _mean_modulus(np.zeros_like(mean), np.sqrt(2) * scale).sum(axis=0)
    for i in range(num_draws - 1):
        pairs = _mean_modulus(mean[i + 1 :] - mean[i], np.sqrt(variance[i + 1 :] + variance[i]))
        total += 2 * pairs.sum(axis=0)
    return total / (2 * num_draws**2)


def spread_by_integral(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute ½ E|X − X'| = ∫ F (1 − F) by the trapezoidal rule, which costs draws times points and not draws².

    Its error falls exponentially in 1/step, as the integrand is analytic (Trefethen & Weideman 2014): the Fourier
    transform of F (1 − F) falls as exp(−s² ω² / 4), s the smallest of the draws' standard deviations, and is 1e-17 at
    the first frequency 2π/step that the rule cannot tell from 0.
    """
    mean = mean - mean[0]  # far from zero the points would be rounded
    low, high = _ends(mean, scale)
    num_points = _num_points(mean, scale)
    found = np.empty(mean.shape[1])
    for i in range(mean.shape[1]):
        points = np.linspace(low[i], high[i], num_points[i])
        total = 0.0
        for part in np.array_split(points, 1 + len(points) * len(mean) // BLOCK):
            below = ndtr((part[:, None] - mean[:, i]) / scale[:, i]).mean(axis=1)
            total += float(np.sum(below * (1 - below)))
        found[i] = total * (points[1] - points[0])
    return found


def _mean_modulus(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Compute E|Z| for Z ~ N(mean, scale²)."""
    z = mean / scale
    return scale * (np.sqrt(2 / np.pi) * np.exp(-0.5 * z**2) + z * erf(z / np.sqrt(2)))


def _ends(mean: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points eight deviations beyond every draw, where F is 1e-15 from 0 or 1."""
    return (mean - 8 * scale).min(axis=0), (mean + 8 * scale).max(axis=0)


def _num_points(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Count the points that make the step half of the smallest deviation, or a little less."""
    low, high = _ends(mean, scale)
    # Far more than anyone would take, since a whole number has an end and a ratio of deviations has none.
    return np.minimum(np.ceil(2 * (high - low) / scale.min(axis=0)) + 1, 2**53).astype(np.int64)
