"""Scores of predicted numbers, whose predictions are equal-weight mixtures of Gaussians.

Computed by NumPy in float64, whatever JAX is set to: differences of numbers that are nearly equal enter all of them.
"""

from collections.abc import Callable

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_levels, check_no_nan
from numpyro_wide.diagnostics import _gaussian_mixtures as mixtures
from numpyro_wide.diagnostics._standard_error import standard_error

Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def rmse(y: ArrayLike, mean: ArrayLike, variance: ArrayLike | None = None) -> float:
    r"""Compute the root mean squared error of the mean over draws, in the units of y.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: the other scores' third argument, which this one does not use.

    Returns:
        $\sqrt{\frac1n \sum_i (y_i - \bar\mu_i)^2}$, over all entries of y.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, or there is NaN or infinity.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import rmse
        >>> round(rmse(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [3.0, 5.0]])), 6)
        1.0
    """
    variance = np.broadcast_to(1.0, np.shape(mean)) if variance is None else variance
    return float(np.sqrt(np.mean(_by_entry(_squared_error, *_checked(y, mean, variance)))))


def log_predictive_density(
    y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, pointwise: bool = False
) -> float | np.ndarray:
    r"""Compute the mean log density of y under the mixture of the draws' Gaussians, in nats: the higher the better.

    Every entry of y is scored by itself: of several outputs, these are the marginal densities.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.
        pointwise: whether to return the log density of every entry and not their mean.

    Returns:
        The mean over all entries of $\log \frac1S \sum_s N(y_i; \mu_{si}, \sigma_{si}^2)$; if ``pointwise``, an array
        of the shape of y. In other units, y times c, it is less by log c.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there is NaN or infinity, or a variance is not positive.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import log_predictive_density
        >>> y = np.array([0.0, 1.0])
        >>> round(log_predictive_density(y, np.zeros((3, 2)), np.ones((3, 2))), 4)
        -1.1689
    """
    return _mean_unless(pointwise, _by_entry(mixtures.log_density, *_checked(y, mean, variance)))


def crps(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, pointwise: bool = False) -> float | np.ndarray:
    r"""Compute the continuous ranked probability score of the mixture, in the units of y: the lower the better.

    $\int (F(x) - 1\{x \ge y\})^2 dx = E|X - y| - \frac12 E|X - X'|$ (Gneiting & Raftery 2007) for X and X' from the
    mixture, of which both terms have closed forms (Grimit 2006). For one draw without variance it would be $|y - \mu|$.

    The second term is a sum over pairs of draws. It is also an integral, which a step of half the smallest deviation
    gives to float64's precision; that is taken where it has fewer points than there are pairs for each draw. With 2000
    draws that share the noise, it is about thirty times as fast. Memory stays bounded: entries go by blocks.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.
        pointwise: whether to return the score of every entry and not their mean.

    Returns:
        The mean over all entries; if ``pointwise``, an array of the shape of y.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there is NaN or infinity, or a variance is not positive.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import crps
        >>> round(crps(np.zeros(1), np.zeros(1), np.ones(1)), 4)  # (√2 − 1)/√π for a standard normal at its mean
        0.2337
    """
    return _mean_unless(pointwise, _by_entry(mixtures.crps, *_checked(y, mean, variance)))


def probability_integral_transform(y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> np.ndarray:
    """Compute the mixture's distribution function at y: uniform on [0, 1] where predictions are calibrated.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.

    Returns:
        Numbers in [0, 1], of the shape of y; ``plots.plot_probability_integral_transform`` draws them.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there is NaN or infinity, or a variance is not positive.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import probability_integral_transform
        >>> mean, variance = np.array([[0.0, 0.0], [0.0, 4.0]]), np.ones((2, 2))
        >>> probability_integral_transform(np.array([0.0, 2.0]), mean, variance).round(3).tolist()
        [0.5, 0.5]
    """
    return _by_entry(mixtures.distribution_function, *_checked(y, mean, variance))


def interval_coverage(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, level: float = 0.9) -> float:
    """Compute the share of y inside the mixture's central interval, whose ends cut off (1 − level)/2 on either side.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.
        level: probability of the interval, which the share should be near to.

    Returns:
        The share, over all entries of y.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there is NaN or infinity, a variance is not positive, or the level is not
            between 0 and 1.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import interval_coverage
        >>> interval_coverage(np.array([-1.0, 0.0, 1.6, 2.0]), np.zeros(4), np.ones(4), level=0.9)
        0.75
    """
    check_levels("level", level)
    return float(np.mean(_is_inside(probability_integral_transform(y, mean, variance), level)))


def regression_scores(
    y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, scale: ArrayLike = 1.0
) -> dict[str, float]:
    """Compute all scores with their standard errors, in the units of y times ``scale``.

    Args:
        y: observations, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (draws, n) or (draws, n, k); without draws, of the shape of y, for one Gaussian.
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.
        scale: number that standardised targets were divided by, or (k,) of them, for scores in the units before.

    Returns:
        ``"rmse"``, ``"log_predictive_density"``, ``"crps"`` and ``"coverage_90"``, averaged over rows and outputs; and
        each with ``_se``, its standard error over rows, which are taken to be independent: by the delta method for the
        first, binomial for the last (of one output). From a single row only the binomial one is defined; the
        others are NaN.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there is NaN or infinity, or a variance or scale is not positive.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import regression_scores
        >>> y = np.random.default_rng(0).normal(size=1000)
        >>> scores = regression_scores(y, np.zeros(1000), np.ones(1000), scale=10.0)
        >>> print({name: round(score, 2) for name, score in scores.items() if "rmse" in name})
        {'rmse': 9.78, 'rmse_se': 0.23}
    """
    arrays = _checked(y, mean, variance)
    units = _checked_scale(scale, arrays[0].shape)
    squared_error = _by_entry(_squared_error, *arrays) * units**2
    root = np.sqrt(squared_error.mean())
    is_inside = _is_inside(_by_entry(mixtures.distribution_function, *arrays), 0.9)
    by_entry = {
        "log_predictive_density": _by_entry(mixtures.log_density, *arrays) - np.log(units),
        "crps": _by_entry(mixtures.crps, *arrays) * units,
        "coverage_90": is_inside,
    }
    scores = {"rmse": root} | {name: values.mean() for name, values in by_entry.items()}
    errors = {
        "rmse_se": standard_error(squared_error) / (2 * root) if root else 0.0,  # d√x = dx / (2√x)
        "log_predictive_density_se": standard_error(by_entry["log_predictive_density"]),
        "crps_se": standard_error(by_entry["crps"]),
        # Divided by n and not by n − 1, the variance of zeros and ones is the binomial p (1 − p).
        "coverage_90_se": standard_error(is_inside, degrees_lost=0),
    }
    return {name: float(value) for name, value in (scores | errors).items()}


def _squared_error(y: np.ndarray, mean: np.ndarray, _: np.ndarray) -> np.ndarray:
    return (y - mean.mean(axis=0)) ** 2


def _is_inside(transform: np.ndarray, level: float) -> np.ndarray:
    return (transform >= (1 - level) / 2) & (transform <= 1 - (1 - level) / 2)


def _mean_unless(pointwise: bool, values: np.ndarray) -> float | np.ndarray:
    return values if pointwise else float(values.mean())


def _by_entry(score: Score, y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Compute a score of each entry of y in float64, a block of entries at a time."""
    flat_y, flat_mean, flat_variance = y.reshape(-1), mean.reshape(len(mean), -1), variance.reshape(len(mean), -1)
    found = np.empty(flat_y.shape)
    size = max(1, mixtures.BLOCK // len(mean))
    # A y that is 1e160 deviations away has the log density −∞, which is right.
    with np.errstate(over="ignore"):
        for start in range(0, len(flat_y), size):
            block = slice(start, start + size)
            means, variances = (x[:, block].astype(np.float64) for x in (flat_mean, flat_variance))
            found[block] = score(flat_y[block].astype(np.float64), means, np.sqrt(variances))
    return found.reshape(y.shape)


def _checked(y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all three as arrays, the latter two with an axis of draws."""
    y, mean, variance = np.asarray(y), np.asarray(mean), np.asarray(variance)
    for name, values in (("y", y), ("mean", mean), ("variance", variance)):
        check_no_nan(name, values)
    if y.ndim not in (1, 2) or not y.size:
        raise ValueError(f"y must have shape (n,) or (n, k), with at least one entry, but has {y.shape}.")
    if mean.shape != y.shape and (mean.shape[1:] != y.shape or not len(mean)):
        raise ValueError(
            f"mean must have the shape of y, {y.shape}, or an axis of draws before it, {_shape_with_draws(y)}, but has "
            f"{mean.shape}; if its axis of draws is another, use np.moveaxis, and if y has outputs instead of "
            "rows, its transpose."
        )
    if variance.shape != mean.shape:
        raise ValueError(
            f"variance must have the shape of mean, {mean.shape}, but has {variance.shape}; use "
            "np.broadcast_to(variance, mean.shape) where draws or rows share it."
        )
    _check_range(y, mean, variance)
    return y, mean.reshape(-1, *y.shape), variance.reshape(-1, *y.shape)


def _check_range(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> None:
    for name, values in (("y", y), ("mean", mean), ("variance", variance)):
        check_finite(name, values)
    if not np.all(variance > 0):
        raise ValueError(
            f"variance must be positive everywhere, but is {variance.min()} somewhere; it is that of y, so add the "
            "noise's to that of a function's value."
        )


def _shape_with_draws(y: np.ndarray) -> str:
    return f"(draws, {', '.join(map(str, y.shape))})"


def _checked_scale(scale: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return what y was divided by as an array: a number, or one for each output."""
    units = np.asarray(scale)
    check_no_nan("scale", units)
    allowed = [(), shape[1:]]
    if units.shape not in allowed:
        raise ValueError(
            f"scale must be a number{f' or have shape {shape[1:]}' if shape[1:] else ''}, but has shape {units.shape}."
        )
    if not np.all((units > 0) & np.isfinite(units)):
        raise ValueError(f"scale must be positive and finite, but is {scale}; give what y was divided by.")
    return units.astype(np.float64)
