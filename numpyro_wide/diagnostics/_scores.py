"""Scores of predictions: regression and classes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide import _mixture as mixtures
from numpyro_wide._checks import as_floats, check_finite, check_levels, check_no_nan, is_known, whole_number


def standard_error(by_entry: np.ndarray, degrees_lost: int = 1) -> float:
    """Compute the standard error of the mean over independent rows.

    Args:
        by_entry: numbers to be averaged, (n, ...); those of a row, which depend on each other, are averaged first.
        degrees_lost: what n is lessened by in the variance: 1, or 0 for the binomial variance of zeros and ones.

    Returns:
        The error, NaN where there are too few rows, or numbers that are not finite.
    """
    by_row = by_entry.reshape(len(by_entry), -1).mean(axis=1)
    if len(by_row) <= degrees_lost or not np.isfinite(by_row).all():
        return np.nan
    return float(by_row.std(ddof=degrees_lost) / np.sqrt(len(by_row)))


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


class ConfidenceBins(NamedTuple):
    """Rows by their confidence, the largest probability, in bins of equal width.

    Attributes:
        members: one where a row is in a bin and else zero, (..., n, bins).
        is_right: one where the most probable class is the true one and else zero, (..., n).
        confidence: the largest probability, (..., n).
    """

    members: Array
    is_right: Array
    confidence: Array

    @property
    def gap(self) -> Array:
        """Correctness less confidence, (..., n)."""
        return self.is_right - self.confidence


def expected_calibration_error(probs: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> Array:
    r"""Compute how far confidence is from accuracy (Huix 2022, E.3; Mathematics, :eq:`ece`).

    $\sum_b \frac{|S_b|}{n} |\mathrm{acc}(S_b) - \mathrm{conf}(S_b)|$ over bins of equal width of the largest
    probability, [b/B, (b+1)/B), the last of which holds 1 as well. Of a mixture of predictions, such as
    by draws of a posterior, the probabilities are those averaged over the draws. The error is in [0, 1] and, with n
    inputs, that of perfectly calibrated predictions is of order $1/\sqrt n$ and not 0.

    The two arrays are told apart by their types, probabilities being real and labels whole, so that either may come
    first: labels first, as in the other scores, or probabilities first, which is this function's older order.

    Args:
        probs: probabilities of the classes, (..., n, classes).
        labels: true classes, whole numbers from 0, (n,) or (..., n).
        num_bins: number B of bins.

    Returns:
        The error, of the leading shape (...).

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, labels are not classes, or there are no bins.
            Under jit, where numbers are not known, the error is NaN for a label that is not a class.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import expected_calibration_error
        >>> probs = jnp.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> expected_calibration_error(probs, jnp.array([0, 1, 1, 1]), num_bins=10).round(3)
        Array(0.325, dtype=float32)
    """
    num_bins = whole_number("num_bins", num_bins)
    if _is_whole(probs) and not _is_whole(labels):
        probs, labels = labels, probs
    labels, probs = _checked_classes("expected_calibration_error(probs, labels)", labels, probs)
    bins = _binned(labels, probs, num_bins)
    return jnp.sum(jnp.abs(jnp.einsum("...nb,...n->...b", bins.members, bins.gap)), -1) / bins.gap.shape[-1]


def negative_log_likelihood(labels: ArrayLike, probs: ArrayLike) -> Array:
    r"""Compute the mean negative log probability of the true classes, in nats.

    It is infinite if one of them was given the probability 0.

    Args:
        labels: true classes, whole numbers from 0, (n,) or (..., n).
        probs: probabilities of the classes, (..., n, classes); those of a mixture averaged over its draws.

    Returns:
        $-\frac1n \sum_i \log p_i(y_i)$, of the leading shape (...).

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, or labels are not classes. Under jit, where
            numbers are not known, the score is NaN for a label that is not a class.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import negative_log_likelihood
        >>> negative_log_likelihood(jnp.array([0, 1]), jnp.array([[0.5, 0.5], [0.1, 0.9]])).round(3)
        Array(0.399, dtype=float32)
    """
    labels, probs = _checked_classes("negative_log_likelihood(labels, probs)", labels, probs)
    return -jnp.mean(_log_prob_of_label(labels, probs), -1)


def accuracy(labels: ArrayLike, probs: ArrayLike) -> Array:
    """Compute how often the most probable class is the true one; of equally probable classes the first counts.

    Args:
        labels: true classes, whole numbers from 0, (n,) or (..., n).
        probs: probabilities of the classes, (..., n, classes); those of a mixture averaged over its draws.

    Returns:
        The fraction, of the leading shape (...).

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, or labels are not classes. Under jit, where
            numbers are not known, the score is NaN for a label that is not a class.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import accuracy
        >>> accuracy(jnp.array([1, 1]), jnp.array([[0.6, 0.4], [0.1, 0.9]]))
        Array(0.5, dtype=float32)
    """
    labels, probs = _checked_classes("accuracy(labels, probs)", labels, probs)
    return jnp.mean(_is_right(labels, probs), -1)


def predictive_entropy(probs: ArrayLike) -> Array:
    r"""Compute the entropy of the predicted classes, in nats (Huix 2022, E.5).

    It is large where a model knows that it does not know.

    Args:
        probs: probabilities of the classes, (..., n, classes).

    Returns:
        $-\sum_c p_c \log p_c$, between 0 and log(classes), (..., n).

    Raises:
        ValueError: if there are no classes or rows are not probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import predictive_entropy
        >>> predictive_entropy(jnp.array([[0.5, 0.5], [0.0, 1.0]])).round(3).tolist()
        [0.693, 0.0]
    """
    return jnp.sum(jax.scipy.special.entr(_checked_probs(probs)), -1)


def classification_scores(labels: ArrayLike, probs: ArrayLike, *, num_bins: int = 15) -> dict[str, float]:
    r"""Compute all scores of predicted class probabilities, with their standard errors.

    Args:
        labels: true classes, whole numbers from 0, (n,).
        probs: probabilities of the classes, (n, classes), or by draw, (draws, n, classes), whose mean is scored.
        num_bins: number of bins of the calibration error.

    Returns:
        ``"accuracy"``, ``"negative_log_likelihood"`` in nats, and ``"expected_calibration_error"``; and each with
        ``_se``, its standard error over rows, which are taken to be independent: binomial for the first, by the delta
        method for the last, with bins and signs of their gaps as they are, which is too small where predictions are
        calibrated. From a single row only the binomial one is defined; the others are NaN.

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, labels are not classes, or there are no bins.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import classification_scores
        >>> probs = np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> scores = classification_scores(np.array([0, 1, 1, 1]), probs)
        >>> scores["accuracy"], round(scores["accuracy_se"], 3)
        (0.75, 0.217)
    """
    num_bins = whole_number("num_bins", num_bins)
    labels, probs = _mixture("classification_scores(labels, probs)", labels, probs)
    bins = _binned(labels, probs, num_bins)
    members, gap = (np.asarray(values, np.float64) for values in (bins.members, bins.gap))
    signs = np.sign(gap @ members)
    by_row = {
        "accuracy": np.asarray(_is_right(labels, probs), np.float64),
        "negative_log_likelihood": -np.asarray(_log_prob_of_label(labels, probs), np.float64),
        "expected_calibration_error": gap * (members @ signs),
    }
    scores = {name: float(values.mean()) for name, values in by_row.items()}
    # Divided by n and not by n − 1, the variance of zeros and ones is the binomial p (1 − p).
    errors = {f"{name}_se": standard_error(values, int(name != "accuracy")) for name, values in by_row.items()}
    return scores | errors


def confidence_bins(order: str, labels: ArrayLike, probs: ArrayLike, num_bins: int) -> ConfidenceBins:
    """Sort rows into bins of confidence, as the calibration error has them.

    Args:
        order: how the caller is called, for messages.
        labels: true classes, whole numbers from 0, (n,).
        probs: probabilities of the classes, (n, classes), or by draw, (draws, n, classes), whose mean counts.
        num_bins: number of bins.

    Returns:
        The bins.

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, labels are not classes, or there are no bins.
    """
    num_bins = whole_number("num_bins", num_bins)
    return _binned(*_mixture(order, labels, probs), num_bins)


def _mixture(order: str, labels: ArrayLike, probs: ArrayLike) -> tuple[Array, Array]:
    """Return labels (n,) and probabilities (n, classes), averaged over draws if there are any."""
    if np.ndim(labels) != 1 or np.ndim(probs) not in (2, 3):
        raise ValueError(
            "labels must have shape (n,) and probs (n, classes) or (draws, n, classes), but got "
            f"{np.shape(labels)} and {np.shape(probs)}; the order is {order}."
        )
    labels, probs = _checked_classes(order, labels, probs)
    return (labels[0], probs.mean(axis=0)) if probs.ndim == 3 else (labels, probs)


def _is_whole(values: ArrayLike) -> bool:
    return bool(jnp.issubdtype(values.dtype if isinstance(values, Array) else np.asarray(values).dtype, jnp.integer))


def _is_class(labels: Array, probs: Array) -> Array:
    return (labels >= 0) & (labels < probs.shape[-1])


def _is_right(labels: Array, probs: Array) -> Array:
    """Return 1 where the most probable class is the label, 0 where it is not, and NaN where the label is no class."""
    is_right = (jnp.argmax(probs, -1) == labels).astype(probs.dtype)
    return jnp.where(_is_class(labels, probs), is_right, jnp.nan)


def _log_prob_of_label(labels: Array, probs: Array) -> Array:
    of_label = jnp.take_along_axis(probs, labels[..., None], -1)[..., 0]
    return jnp.where(_is_class(labels, probs), jnp.log(of_label), jnp.nan)


def _binned(labels: Array, probs: Array, num_bins: int) -> ConfidenceBins:
    largest = jnp.max(probs, -1)
    # Divided by NumPy, whose quotients are correctly rounded: a confidence of k/B is then the left edge of its bin.
    edges = jnp.asarray(np.arange(1, num_bins) / num_bins, largest.dtype)
    members = jax.nn.one_hot(jnp.searchsorted(edges, largest, side="right"), num_bins, dtype=largest.dtype)
    return ConfidenceBins(members, _is_right(labels, probs), largest)


def _checked_classes(order: str, labels: ArrayLike, probs: ArrayLike) -> tuple[Array, Array]:
    """Return both as arrays, the labels with the leading axes of the probabilities."""
    labels = labels if isinstance(labels, Array) else jnp.asarray(np.asarray(labels))
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels must be integers, the indices of the true classes, got {labels.dtype}; use labels.argmax(-1) "
            f"where they are one-hot. The order is {order}."
        )
    probs = _checked_probs(probs)
    leading = probs.shape[:-1]
    if probs.ndim < 2 or not leading[-1]:
        raise ValueError(f"probs must have shape (..., n, classes) with n at least 1, got {probs.shape}.")
    if not labels.ndim or labels.shape != leading[len(leading) - labels.ndim :]:
        raise ValueError(f"labels must have shape (n,) or (..., n) as in probs, {leading}, got {labels.shape}.")
    num_classes = probs.shape[-1]
    if is_known(labels) and not bool(jnp.all(_is_class(labels, probs))):
        raise ValueError(
            f"labels must be between 0 and {num_classes - 1}, got {int(labels.min())} to {int(labels.max())}."
        )
    return jnp.broadcast_to(labels, leading), probs


def _checked_probs(probs: ArrayLike) -> Array:
    (array,) = as_floats(probs, names=("probs",))
    if not array.ndim or array.shape[-1] < 2:
        raise ValueError(
            f"probs must have an axis of at least two classes, (..., n, classes), got {array.shape}; "
            "stack 1 - p and p where there is only one probability."
        )
    # Rows from a softmax, and averages of such, sum to one up to rounding.
    if is_known(array) and not bool(jnp.all((array >= 0) & (jnp.abs(array.sum(-1, keepdims=True) - 1) < 1e-3))):
        raise ValueError(
            "probs must be probabilities, not negative and with sum 1 over the last axis; use jax.nn.softmax on "
            "logits, and np.stack([1 - p, p], axis=-1) for the probability p of the second of two classes."
        )
    return array
