"""What the figures show is what they are given, on the axes that they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import binomtest, norm

from numpyro_wide.amortized import AmortizedRunResult, AmortizedState, HeldOut
from numpyro_wide.diagnostics import expected_calibration_error
from numpyro_wide.plots import plot_ess_by_width, plot_prediction, plot_rank_ecdf, plot_reliability, plot_training


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def band(ax, index=0):
    """Lower and upper edge of a filled band, by x."""
    vertices = ax.collections[index].get_paths()[0].vertices
    return {x: (vertices[vertices[:, 0] == x, 1].min(), vertices[vertices[:, 0] == x, 1].max()) for x in vertices[:, 0]}


def test_ess_by_width(ax):
    ess = {"plain": {64: [1.0, 2.0, 6.0], 32: [1.0, 1.0, 4.0]}, "mapped": {32: {"mean": 5.0, "min": 4.0, "max": 8.0}}}
    assert plot_ess_by_width(ess, ax=ax) is ax
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[32, 2], [64, 3]])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[32, 5]])
    assert band(ax)[64.0] == (1, 6) and band(ax, 1)[32.0] == (4, 8)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["32", "64"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["plain", "mapped"]


@pytest.mark.parametrize("wrong", [np.nan, -1, 10, 0.5])
def test_ranks_that_are_none_are_refused(wrong):
    ranks = np.array([0, 3, wrong, 9])
    with pytest.raises(ValueError, match="must be whole numbers from 0 to num_draws = 9, but 1 of 4 are not, such as"):
        plot_rank_ecdf(ranks, 9)
    assert not plt.get_fignums()


def test_the_ranks_that_are_wrong_are_named():
    with pytest.raises(ValueError, match=r"ranks of 'w\[1\]' must be"):
        plot_rank_ecdf({"w": np.array([[0, 10], [1, 2]])}, 9)
    with pytest.raises(ValueError, match="num_draws must be a whole number of at least 1, but got 9.5"):
        plot_rank_ecdf(np.arange(4), 9.5)


def test_a_new_figure_is_made_without_axes():
    assert plot_rank_ecdf(np.arange(4), 9) is not plot_rank_ecdf(np.arange(4), 9)


def test_prediction_has_the_intervals_of_the_mixture(ax):
    x, variance = np.array([[2.0], [1.0]]), np.array([[0.04, 0.09]])
    found = {"mean": np.array([[3.0, -1.0]]), "variance": variance, "predictive_variance": variance + 0.16}
    data = np.array([1.5]), np.array([0.5])
    assert plot_prediction(x, found, data=data, level=0.8, ax=ax) is ax
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, -1], [2, 3]])  # sorted by the input
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[1.5, 0.5]])
    for index, extra in enumerate((0.16, 0.0)):
        by_input = {1.0: (-1, (0.09 + extra) ** 0.5), 2.0: (3, (0.04 + extra) ** 0.5)}
        for place, (mean, scale) in by_input.items():
            np.testing.assert_allclose(band(ax, index)[place], norm.ppf((0.1, 0.9), mean, scale), rtol=1e-4)


def test_prediction_mixes_draws(ax):
    found = {"mean": np.array([[-1.0], [1.0]]), "predictive_variance": np.full((2, 1), 1e-6)}
    plot_prediction([0.0], found, ax=ax)
    assert len(ax.collections) == 1 and ax.lines[0].get_ydata()[0] == 0
    np.testing.assert_allclose(band(ax)[0.0], (-1, 1), atol=0.01)


def test_prediction_of_several_outputs_or_inputs_is_refused():
    with pytest.raises(ValueError, match=r"one output over one input.*a mean of shape \(2, 3, 4\)"):
        plot_prediction(np.zeros(3), {"mean": np.zeros((2, 3, 4))})
    with pytest.raises(ValueError, match=r"got x of shape \(3, 2\) and a mean of shape \(2, 3\)"):
        plot_prediction(np.zeros((3, 2)), {"mean": np.zeros((2, 3))})
    assert not plt.get_fignums()


def test_training_that_went_on(ax):
    """The last 400 of 1000 steps, averaged by four; a skipped step counts for nothing."""
    losses = np.repeat(np.arange(100.0), 4)
    losses[1] = np.nan
    seen = HeldOut(np.array([800, 1000]), np.array([3.0, 4.0]), {}, np.array(3.0), np.array(800))
    state = AmortizedState(None, None, None, np.array(1000), np.array(1), seen)
    assert plot_training(AmortizedRunResult({}, state, losses), ax=ax) is ax
    loss, held_out, best = ax.lines
    np.testing.assert_allclose(loss.get_xydata(), np.stack([602 + 4 * np.arange(100), np.arange(100)], axis=1))
    np.testing.assert_allclose(held_out.get_xydata(), [[800, 3], [1000, 4]])
    assert set(best.get_xdata()) == {800}


def test_training_without_held_out_simulations(ax):
    state = AmortizedState(None, None, None, np.array(3), np.array(0))
    result = AmortizedRunResult({}, state, np.ones(3))
    assert len(plot_training(result, ax=ax).lines) == 1


# Reliability diagrams: points, intervals and bars by SciPy's binomial test and by the calibration error ---------------

LABELS = np.random.default_rng(0).integers(3, size=300)
# Sure of itself more often than right.
PROBS = np.random.default_rng(1).dirichlet(0.3 * np.ones(3), 300)


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
