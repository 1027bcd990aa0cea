"""Reliability diagrams: points, intervals and bars by SciPy's binomial test and by the calibration error."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import binomtest

from numpyro_wide.diagnostics import expected_calibration_error
from numpyro_wide.plots import plot_reliability

LABELS = np.random.default_rng(0).integers(3, size=300)
# Sure of itself more often than right.
PROBS = np.random.default_rng(1).dirichlet(0.3 * np.ones(3), 300)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def drawn(ax, index=0):
    """Places, heights and ends of the intervals of what was drawn."""
    points, _, (bars,) = ax.containers[index]
    return *points.get_xydata().T, np.array([segment[:, 1] for segment in bars.get_segments()])


def error_bars(ax):
    return next(index for index, found in enumerate(ax.containers) if hasattr(found, "has_yerr"))


@pytest.mark.fault("plots.py", "proportion_ci(level)", "proportion_ci(2 * level - 1)")
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_points_and_intervals_against_scipy(level):
    _, ax = plt.subplots()
    assert plot_reliability(LABELS, PROBS, num_bins=5, level=level, ax=ax) is ax
    places, heights, ends = drawn(ax, error_bars(ax))
    confidence, right = PROBS.max(1), PROBS.argmax(1) == LABELS
    of_bin = np.minimum(np.floor(confidence * 5), 4)
    for i, found in enumerate(np.unique(of_bin)):
        rows = of_bin == found
        np.testing.assert_allclose(places[i], confidence[rows].mean(), rtol=1e-5)
        np.testing.assert_allclose(heights[i], right[rows].mean(), rtol=1e-6)
        interval = binomtest(int(right[rows].sum()), int(rows.sum())).proportion_ci(level, method="exact")
        np.testing.assert_allclose(ends[i], interval, rtol=1e-5)
    assert len(places) == len(np.unique(of_bin)) == 4  # no confidence is below a third


@pytest.mark.parametrize("num_bins", [5, 15])
def test_bars_times_distances_are_the_calibration_error(num_bins):
    ax = plot_reliability(LABELS, PROBS, num_bins=num_bins)
    shares = np.array([patch.get_height() for patch in ax.patches])
    np.testing.assert_allclose(shares.sum(), 1, rtol=1e-6)
    places, heights, _ = drawn(ax, error_bars(ax))
    error = shares[shares > 0] @ np.abs(heights - places)
    np.testing.assert_allclose(error, expected_calibration_error(PROBS, LABELS, num_bins), rtol=1e-5)


def test_where_all_or_none_are_right_the_interval_ends_there():
    probs = np.array([[0.9, 0.1], [0.92, 0.08], [0.6, 0.4], [0.62, 0.38]])
    ax = plot_reliability(np.array([0, 0, 1, 1]), probs, num_bins=10)
    _, heights, ends = drawn(ax, error_bars(ax))
    np.testing.assert_array_equal(heights, [0, 1])
    # Of two rows: the quantile of both right is the square root.
    np.testing.assert_allclose(ends, [[0, 1 - 0.025**0.5], [0.025**0.5, 1]], rtol=1e-6)
    assert ax.get_title() == "95 % intervals; bars: share of all rows"


def test_draws_are_averaged_and_the_style_is_the_user_s():
    draws = np.stack([PROBS, PROBS[:, ::-1]])
    both = [drawn(ax, error_bars(ax)) for ax in (plot_reliability(LABELS, p) for p in (draws, draws.mean(0)))]
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    ax = plot_reliability(LABELS, PROBS, color="C3", label="network")
    assert ax.containers[error_bars(ax)][0].get_color() == "C3"
    assert ax.get_legend_handles_labels()[1] == ["network"]


def test_what_is_no_prediction_is_refused():
    with pytest.raises(ValueError, match="level must lie between 0 and 1, such as 0.9 for 90 %, but got 1.0"):
        plot_reliability(LABELS, PROBS, level=1.0)
    with pytest.raises(ValueError, match=r"the order is plot_reliability\(labels, probs\)"):
        plot_reliability(PROBS, LABELS)
    with pytest.raises(ValueError, match="num_bins must be a whole number of at least 1, but got 0"):
        plot_reliability(LABELS, PROBS, num_bins=0)
    assert not plt.get_fignums()
