"""Scores of predicted class probabilities: how often right, how likely, how sure, and sure where they should be."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, is_known, whole_number
from numpyro_wide.diagnostics._standard_error import standard_error


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
    labels, probs = _checked("expected_calibration_error(probs, labels)", labels, probs)
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
    labels, probs = _checked("negative_log_likelihood(labels, probs)", labels, probs)
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
    labels, probs = _checked("accuracy(labels, probs)", labels, probs)
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
    labels, probs = _checked(order, labels, probs)
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


def _checked(order: str, labels: ArrayLike, probs: ArrayLike) -> tuple[Array, Array]:
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
