"""Are predicted class probabilities right, and are they sure where they should be?"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, is_known, whole_number


def expected_calibration_error(probs: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> Array:
    r"""Expected calibration error: how far confidence is from accuracy (Huix 2022, E.3; Mathematics, :eq:`ece`).

    $\sum_b \frac{|S_b|}{n} |\mathrm{acc}(S_b) - \mathrm{conf}(S_b)|$ over bins of equal width of the largest
    probability, [b/B, (b+1)/B), the last of which holds 1 as well. Of a mixture of predictions, by draws of a
    posterior say, the probabilities are those averaged over the draws. The error is in [0, 1] and, with n inputs,
    that of perfectly calibrated predictions is of order $1/\sqrt n$ and not 0.

    Args:
        probs: probabilities of the classes, (..., n, classes).
        labels: the true classes, integers, (n,) or (..., n).
        num_bins: number B of bins.

    Returns:
        The error, of the leading shape (...).

    Raises:
        ValueError: if shapes do not fit, rows are no probabilities, labels are no classes, or there are no bins. Under
            jit, where numbers are not known, the error is NaN for a label that is no class.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import expected_calibration_error
        >>> probs = jnp.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> expected_calibration_error(probs, jnp.array([0, 1, 1, 1]), num_bins=10).round(3)
        Array(0.325, dtype=float32)
    """
    num_bins = whole_number("num_bins", num_bins)
    probs, labels = _checked(probs, labels)
    largest = jnp.max(probs, -1)
    # Divided by NumPy, whose quotients are correctly rounded: a confidence of k/B is then the left edge of its bin.
    edges = jnp.asarray(np.arange(1, num_bins) / num_bins, largest.dtype)
    members = jax.nn.one_hot(jnp.searchsorted(edges, largest, side="right"), num_bins, dtype=largest.dtype)
    gap = _is_right(probs, labels) - largest
    return jnp.sum(jnp.abs(jnp.einsum("...nb,...n->...b", members, gap)), -1) / largest.shape[-1]


def negative_log_likelihood(probs: ArrayLike, labels: ArrayLike) -> Array:
    r"""Mean negative log probability of the true classes, in nats: infinite if one of them was excluded.

    Args:
        probs: probabilities of the classes, (..., n, classes); those of a mixture are averaged over its draws first.
        labels: the true classes, integers, (n,) or (..., n).

    Returns:
        $-\frac1n \sum_i \log p_i(y_i)$, of the leading shape (...).

    Raises:
        ValueError: as :func:`expected_calibration_error` does.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import negative_log_likelihood
        >>> negative_log_likelihood(jnp.array([[0.5, 0.5], [0.1, 0.9]]), jnp.array([0, 1])).round(3)
        Array(0.399, dtype=float32)
    """
    probs, labels = _checked(probs, labels)
    of_label = jnp.take_along_axis(probs, labels[..., None], -1)[..., 0]
    return -jnp.mean(jnp.where(_is_class(labels, probs), jnp.log(of_label), jnp.nan), -1)


def accuracy(probs: ArrayLike, labels: ArrayLike) -> Array:
    """How often the most probable class is the true one; of equally probable classes the first counts.

    Args:
        probs: probabilities of the classes, (..., n, classes).
        labels: the true classes, integers, (n,) or (..., n).

    Returns:
        The fraction, of the leading shape (...).

    Raises:
        ValueError: as :func:`expected_calibration_error` does.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import accuracy
        >>> accuracy(jnp.array([[0.6, 0.4], [0.1, 0.9]]), jnp.array([1, 1]))
        Array(0.5, dtype=float32)
    """
    probs, labels = _checked(probs, labels)
    return jnp.mean(_is_right(probs, labels), -1)


def confidence(probs: ArrayLike) -> Array:
    """Probability of the most probable class.

    Args:
        probs: probabilities of the classes, (..., n, classes).

    Returns:
        The largest of each row, (..., n).

    Raises:
        ValueError: if there are no classes or rows are no probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import confidence
        >>> confidence(jnp.array([[0.6, 0.4], [0.1, 0.9]])).tolist()
        [0.6, 0.9]
    """
    return jnp.max(_checked_probs(probs), -1)


def predictive_entropy(probs: ArrayLike) -> Array:
    r"""Entropy of the predicted classes, in nats: large where a model knows that it does not know (Huix 2022, E.5).

    Args:
        probs: probabilities of the classes, (..., n, classes).

    Returns:
        $-\sum_c p_c \log p_c$, between 0 and log(classes), (..., n).

    Raises:
        ValueError: if there are no classes or rows are no probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import predictive_entropy
        >>> predictive_entropy(jnp.array([[0.5, 0.5], [0.0, 1.0]])).round(3).tolist()
        [0.693, 0.0]
    """
    return jnp.sum(jax.scipy.special.entr(_checked_probs(probs)), -1)


def _is_class(labels: Array, probs: Array) -> Array:
    return (labels >= 0) & (labels < probs.shape[-1])


def _is_right(probs: Array, labels: Array) -> Array:
    """1 where the most probable class is the label, 0 where it is not, and NaN where the label is no class."""
    is_right = (jnp.argmax(probs, -1) == labels).astype(probs.dtype)
    return jnp.where(_is_class(labels, probs), is_right, jnp.nan)


def _checked(probs: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    """Both as arrays, labels broadcast to the leading axes and n."""
    probs = _checked_probs(probs)
    labels = labels if isinstance(labels, Array) else jnp.asarray(np.asarray(labels))
    leading = probs.shape[:-1]
    if probs.ndim < 2 or not leading[-1]:
        raise ValueError(f"probs must have shape (..., n, classes) with n at least 1, got {probs.shape}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels must be integers, the indices of the true classes, got {labels.dtype}; "
            "use labels.argmax(-1) where they are one-hot."
        )
    if not labels.ndim or labels.shape != leading[len(leading) - labels.ndim :]:
        raise ValueError(f"labels must have shape (n,) or (..., n) as in probs, {leading}, got {labels.shape}.")
    num_classes = probs.shape[-1]
    if is_known(labels) and not bool(jnp.all(_is_class(labels, probs))):
        raise ValueError(
            f"labels must be between 0 and {num_classes - 1}, got {int(labels.min())} to {int(labels.max())}."
        )
    return probs, jnp.broadcast_to(labels, leading)


def _checked_probs(probs: ArrayLike) -> Array:
    (array,) = as_floats(probs)
    if not array.ndim or array.shape[-1] < 2:
        raise ValueError(
            f"probs must have an axis of at least two classes, (..., n, classes), got {array.shape}; "
            "stack 1 - p and p where only one probability is at hand."
        )
    # Rows from a softmax, and averages of such, sum to one up to rounding.
    if is_known(array) and not bool(jnp.all((array >= 0) & (jnp.abs(array.sum(-1, keepdims=True) - 1) < 1e-3))):
        raise ValueError(
            "probs must be probabilities, not negative and with sum 1 over the last axis; use jax.nn.softmax on "
            "logits, and np.stack([1 - p, p], axis=-1) for the probability p of the second of two classes."
        )
    return array
