"""Scores of predicted numbers, by mixtures of Gaussians, and classes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide import _mixture
from numpyro_wide._checks import as_floats, check_finite, check_level, is_known, whole_number


def rmse(y: ArrayLike, mean: ArrayLike, variance: ArrayLike | None = None) -> float:
    """Compute the root mean squared error of the mean over draws, in the units of y.

    Arguments as for :func:`log_predictive_density`; the variance is unused.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import rmse
        >>> rmse(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [3.0, 5.0]]))
        1.0
    """
    y, mean, _ = _checked(y, mean, np.ones(np.shape(mean)) if variance is None else variance)
    return float(np.sqrt(np.mean((y - mean.mean(axis=0, dtype=float)) ** 2)))


def log_predictive_density(
    y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, pointwise: bool = False
) -> float | np.ndarray:
    r"""Compute the mean log density of y, nats, under the mixture $\frac1S \sum_s N(y; \mu_s, \sigma_s^2)$ over draws.

    Args:
        y: observations, (n,) or (n, k); outputs are scored by their marginals.
        mean: predicted means, ``(draws, *y.shape)`` or y's shape.
        variance: predicted variances with the noise, of the shape of ``mean``.
        pointwise: whether to return the log density of every entry instead.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import log_predictive_density
        >>> round(log_predictive_density(np.array([0.0, 1.0]), np.zeros((3, 2)), np.ones((3, 2))), 4)
        -1.1689
    """
    log_densities = _mixture.in_blocks(_mixture.log_density, *_checked(y, mean, variance))
    return log_densities if pointwise else float(log_densities.mean())


def crps(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, pointwise: bool = False) -> float | np.ndarray:
    r"""Compute the continuous ranked probability score of the mixture over draws, in the units of y; lower is better.

    $E|X - y| - \frac12 E|X - X'|$ for X and X' from the mixture (Gneiting & Raftery 2007), exactly (Grimit 2006).
    Arguments as for :func:`log_predictive_density`.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import crps
        >>> round(crps(np.zeros(1), np.zeros(1), np.ones(1)), 4)  # (√2 − 1)/√π for a standard normal at its mean
        0.2337
    """
    scores = _mixture.in_blocks(_mixture.crps, *_checked(y, mean, variance))
    return scores if pointwise else float(scores.mean())


def probability_integral_transform(y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> np.ndarray:
    """Compute the mixture's distribution function at y, y's shape: uniform for calibrated predictions.

    Arguments as for :func:`log_predictive_density`.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import probability_integral_transform
        >>> probability_integral_transform(np.array([0.0, 1.645]), np.zeros(2), np.ones(2)).round(3).tolist()
        [0.5, 0.95]
    """
    return _mixture.in_blocks(_mixture.cdf, *_checked(y, mean, variance))


def interval_coverage(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, level: float = 0.9) -> float:
    """Compute the share of y inside the central interval of probability ``level``.

    Other arguments as for :func:`log_predictive_density`.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import interval_coverage
        >>> interval_coverage(np.array([-1.0, 0.0, 1.6, 2.0]), np.zeros(4), np.ones(4), level=0.9)
        0.75
    """
    check_level(level)
    return float(np.mean(_is_inside(probability_integral_transform(y, mean, variance), level)))


def regression_scores(
    y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, scale: ArrayLike = 1.0
) -> dict[str, float]:
    """Compute all scores with standard errors, in the units of y times ``scale``, a number or (k,).

    Other arguments as for :func:`log_predictive_density`.

    Returns:
        ``"rmse"``, ``"log_predictive_density"``, ``"crps"`` and ``"coverage_90"``, means over entries, each with
        ``_se``, the standard error over independent rows; NaN for a single row.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import regression_scores
        >>> scores = regression_scores(np.array([0.1, -0.1, 0.3]), np.zeros(3), np.ones(3), scale=10.0)
        >>> round(scores["rmse"], 2), round(scores["rmse_se"], 2)
        (1.91, 0.7)
    """
    arrays = y, mean, variance = _checked(y, mean, variance)
    units = np.asarray(scale, float)
    if units.shape not in ((), y.shape[1:]) or not np.all((units > 0) & np.isfinite(units)):
        raise ValueError(f"scale must be a positive, finite number, or one for each output, but is {scale}.")
    squared_error = ((y - mean.mean(axis=0, dtype=float)) * units) ** 2
    root = float(np.sqrt(squared_error.mean()))
    by_entry = {
        "log_predictive_density": log_predictive_density(*arrays, pointwise=True) - np.log(units),
        "crps": crps(*arrays, pointwise=True) * units,
        "coverage_90": _is_inside(probability_integral_transform(*arrays), 0.9),
    }
    rmse_error = _standard_error(squared_error) / (2 * root) if root else 0.0
    return {"rmse": root, **_with_errors(by_entry), "rmse_se": rmse_error}


def _with_errors(by_entry: dict[str, np.ndarray]) -> dict[str, float]:
    means = {name: float(values.mean()) for name, values in by_entry.items()}
    return means | {f"{name}_se": _standard_error(values) for name, values in by_entry.items()}


def _standard_error(by_entry: np.ndarray) -> float:
    """Return the standard error of the mean over rows (n, ...), binomial for booleans, or NaN."""
    by_row = by_entry.reshape(len(by_entry), -1).mean(axis=1)
    degrees_lost = 0 if by_entry.dtype == bool else 1
    if len(by_row) <= degrees_lost or not np.isfinite(by_row).all():
        return np.nan
    return float(by_row.std(ddof=degrees_lost) / np.sqrt(len(by_row)))


def _is_inside(transform: np.ndarray, level: float) -> np.ndarray:
    return (transform >= (1 - level) / 2) & (transform <= 1 - (1 - level) / 2)


def _checked(y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all three as arrays, the latter two with an axis of draws."""
    y, mean, variance = np.asarray(y), np.asarray(mean), np.asarray(variance)
    for name, values in (("y", y), ("mean", mean), ("variance", variance)):
        check_finite(name, values)
    if y.ndim not in (1, 2) or not y.size:
        raise ValueError(f"y must have shape (n,) or (n, k), with at least one entry, but has {y.shape}.")
    if mean.shape != y.shape and (mean.shape[1:] != y.shape or not len(mean)):
        raise ValueError(
            f"mean must have the shape of y, {y.shape}, or an axis of draws before it, but has {mean.shape}; move the "
            "axis of draws by np.moveaxis."
        )
    if variance.shape != mean.shape:
        raise ValueError(
            f"variance must have the shape of mean, {mean.shape}, but has {variance.shape}; use "
            "np.broadcast_to(variance, mean.shape)."
        )
    if not np.all(variance > 0):
        raise ValueError(f"variance must be positive everywhere, but is {variance.min()} somewhere; add the noise's.")
    return y, mean.reshape(-1, *y.shape), variance.reshape(-1, *y.shape)


def expected_calibration_error(probs: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> Array:
    r"""Compute the distance of confidence from accuracy (Huix 2022, E.3; Mathematics, :eq:`ece`).

    $\sum_b \frac{|S_b|}{n} |\mathrm{acc}(S_b) - \mathrm{conf}(S_b)|$ over equal bins of the largest probability.

    Args:
        probs: class probabilities, (..., n, classes), averaged over draws.
        labels: true classes, whole numbers from 0, (n,) or (..., n); may precede the probabilities.
        num_bins: number of bins.

    Returns:
        The error, (...); NaN under ``jit`` for a label out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import expected_calibration_error
        >>> expected_calibration_error(jnp.array([[0.8, 0.2], [0.3, 0.7]]), jnp.array([0, 1])).round(3)
        Array(0.25, dtype=float32)
    """
    if _is_whole(probs) and not _is_whole(labels):
        probs, labels = labels, probs
    labels, probs = _checked_classes("expected_calibration_error(probs, labels)", labels, probs)
    members, is_right, confidence = _binned(labels, probs, num_bins)
    gaps = jnp.einsum("...nb,...n->...b", members, is_right - confidence)
    return jnp.sum(jnp.abs(gaps), -1) / confidence.shape[-1]


def classification_scores(labels: ArrayLike, probs: ArrayLike, *, num_bins: int = 15) -> dict[str, float]:
    """Compute all scores of class probabilities with standard errors.

    Args:
        labels: true classes, whole numbers from 0, (n,).
        probs: class probabilities, (n, classes) or (draws, n, classes).
        num_bins: number of bins of the calibration error.

    Returns:
        ``"accuracy"``, ``"negative_log_likelihood"`` and ``"expected_calibration_error"``, each with ``_se``, the
        standard error over independent rows; NaN for a single row.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import classification_scores
        >>> classification_scores(np.array([0, 1]), np.array([[0.8, 0.2], [0.3, 0.7]]))["accuracy"]
        1.0
    """
    labels, probs = averaged("classification_scores(labels, probs)", labels, probs)
    members, is_right, confidence = binned(labels, probs, num_bins)
    gap = is_right - confidence
    by_row = {
        "accuracy": is_right == 1,
        "negative_log_likelihood": -np.asarray(jnp.log(probs[jnp.arange(len(labels)), labels]), np.float64),
        "expected_calibration_error": gap * (members @ np.sign(gap @ members)),
    }
    return _with_errors(by_row)


def averaged(order: str, labels: ArrayLike, probs: ArrayLike) -> tuple[Array, Array]:
    """Return labels (n,) and probabilities (n, classes), averaged over draws."""
    if np.ndim(labels) != 1 or np.ndim(probs) not in (2, 3):
        raise ValueError(
            "labels must have shape (n,) and probs (n, classes) or (draws, n, classes), but got "
            f"{np.shape(labels)} and {np.shape(probs)}; the order is {order}."
        )
    labels, probs = _checked_classes(order, labels, probs)
    return (labels[0], probs.mean(axis=0)) if probs.ndim == 3 else (labels, probs)


def _is_whole(values: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.asarray(values).dtype, jnp.integer)


def _is_class(labels: Array, probs: Array) -> Array:
    return (labels >= 0) & (labels < probs.shape[-1])


def _binned(labels: Array, probs: Array, num_bins: int) -> tuple[Array, Array, Array]:
    """Return memberships of bins (..., n, bins), correctness, NaN for a label out of range, and confidence (..., n)."""
    num_bins = whole_number("num_bins", num_bins)
    confidence = jnp.max(probs, -1)
    # NumPy rounds quotients correctly: a confidence of k/B is a left edge.
    edges = jnp.asarray(np.arange(1, num_bins) / num_bins, confidence.dtype)
    members = jax.nn.one_hot(jnp.searchsorted(edges, confidence, side="right"), num_bins, dtype=confidence.dtype)
    is_right = (jnp.argmax(probs, -1) == labels).astype(probs.dtype)
    return members, jnp.where(_is_class(labels, probs), is_right, jnp.nan), confidence


def binned(labels: Array, probs: Array, num_bins: int) -> tuple[np.ndarray, ...]:
    """Return the same of known numbers, in double precision."""
    return tuple(np.asarray(values, np.float64) for values in _binned(labels, probs, num_bins))


def _checked_classes(order: str, labels: ArrayLike, probs: ArrayLike) -> tuple[Array, Array]:
    """Return both as arrays (..., n) and (..., n, classes)."""
    labels = jnp.asarray(labels)
    if not _is_whole(labels):
        raise ValueError(
            f"labels must be integers, got {labels.dtype}; use labels.argmax(-1) for one-hot codes. "
            f"The order is {order}."
        )
    probs = _checked_probs(probs)
    leading = probs.shape[:-1]
    if probs.ndim < 2 or not leading[-1]:
        raise ValueError(f"probs must have shape (..., n, classes) with n at least 1, got {probs.shape}.")
    if not labels.ndim or labels.shape != leading[len(leading) - labels.ndim :]:
        raise ValueError(f"labels must have shape (n,) or (..., n) as in probs, {leading}, got {labels.shape}.")
    if is_known(labels) and not bool(jnp.all(_is_class(labels, probs))):
        raise ValueError(
            f"labels must be between 0 and {probs.shape[-1] - 1}, got {int(labels.min())} to {int(labels.max())}."
        )
    return jnp.broadcast_to(labels, leading), probs


def _checked_probs(probs: ArrayLike) -> Array:
    (array,) = as_floats(probs, names=("probs",))
    if not array.ndim or array.shape[-1] < 2:
        raise ValueError(
            f"probs must have an axis of at least two classes, (..., n, classes), got {array.shape}; stack 1 - p and p."
        )
    if is_known(array) and not bool(jnp.all((array >= 0) & (jnp.abs(array.sum(-1, keepdims=True) - 1) < 1e-3))):
        raise ValueError("probs must be probabilities, with sum 1 over the last axis; use jax.nn.softmax on logits.")
    return array
