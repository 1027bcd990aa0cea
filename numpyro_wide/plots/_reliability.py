"""Reliability of class probabilities: how often right, by how sure."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_levels
from numpyro_wide.diagnostics.internal import confidence_bins
from numpyro_wide.plots._axes import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_reliability(
    labels: ArrayLike,
    probs: ArrayLike,
    *,
    num_bins: int = 15,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    r"""Draw how often predictions of a confidence are right, over a histogram of the confidences.

    A row's confidence is its largest probability (Mathematics, :eq:`ece`). For every bin of confidences that is not
    empty a point stands at their mean and at the share of rows that are right, with its exact binomial interval
    $[B_{\alpha/2}(k, m - k + 1), B_{1 - \alpha/2}(k + 1, m - k)]$, where $k$ of the bin's $m$ rows are right and $B_q$
    is the quantile of a beta law (Clopper and Pearson 1934). Below the diagonal predictions are too sure. Bars are the
    bins' shares of all rows: their sum, each times its distance from the diagonal, is the
    :func:`~numpyro_wide.diagnostics.expected_calibration_error`.

    Args:
        labels: true classes, whole numbers from 0, (n,).
        probs: probabilities of the classes, (n, classes), or by draw, (draws, n, classes), whose mean is drawn.
        num_bins: number of bins of equal width.
        level: probability of the intervals, each by itself, in (0, 1).
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.errorbar``.

    Returns:
        The axes.

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, labels are not classes, there are no bins, or the
            level is out of range.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_reliability
        >>> probs = np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> ax = plot_reliability(np.array([0, 1, 1, 1]), probs, num_bins=10)
        >>> len(ax.patches)
        10
    """
    check_levels("level", level)
    bins = confidence_bins("plot_reliability(labels, probs)", labels, probs, num_bins)
    members, is_right, confidence = (np.asarray(values, np.float64) for values in bins)
    sizes = members.sum(axis=0)
    used = sizes > 0
    counts, hits = sizes[used], (is_right @ members)[used]
    heights, places = hits / counts, (confidence @ members)[used] / counts
    low, high = _binomial_interval(hits, counts, level)

    ax = axes_or_new(ax)
    edges = np.linspace(0, 1, len(sizes) + 1)
    ax.bar(edges[:-1], sizes / sizes.sum(), np.diff(edges), align="edge", color="0.85", edgecolor="white", zorder=0)
    ax.plot([0, 1], [0, 1], color="0.2", linewidth=1, linestyle="--", zorder=1)
    style: dict[str, Any] = {"fmt": "o", "color": "C0", "markersize": 4, "capsize": 2, "zorder": 2} | kwargs
    ax.errorbar(places, heights, np.stack([heights - low, high - heights]), **style)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence", ylabel="share of rows that are right")
    ax.set_title(f"{100 * level:g} % intervals; bars: share of all rows", fontsize="medium")
    return ax


def _binomial_interval(hits: np.ndarray, counts: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the exact intervals for the probability of a hit (Clopper and Pearson 1934)."""
    from scipy.stats import beta  # slow to import: not with the package

    tail = (1 - level) / 2
    # Where all or none are hits a law has no second parameter, and its quantile is the end of the scale.
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), counts - hits + 1), 0.0)
    high = np.where(hits < counts, beta.ppf(1 - tail, hits + 1, np.maximum(counts - hits, 1)), 1.0)
    return low, high
