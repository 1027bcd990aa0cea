"""What the figures show is what they are given, on the axes that they are given."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density
from scipy.stats import binom

from numpyro_wide import repriorise
from numpyro_wide.diagnostics import PosteriorSlice, posterior_slice, rhat_squared
from numpyro_wide.diagnostics._convergence import autocorrelation
from numpyro_wide.linear_gaussian import readout_map
from numpyro_wide.plots import (
    plot_autocorrelation,
    plot_ess_by_width,
    plot_posterior_slice,
    plot_probability_integral_transform,
    plot_rank_ecdf,
    plot_rank_histogram,
    plot_rhat_by_steps,
)
from tests.models import network, small_data

DRAWS = np.random.default_rng(0).normal(size=(3, 40, 2, 2)).cumsum(1)


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


def test_rhat_by_steps(ax):
    assert plot_rhat_by_steps({"chain": DRAWS}, thinning=10, num_points=4, ax=ax) is ax
    steps, mean = ax.lines[0].get_xydata().T
    assert steps[0] == 50 and steps[-1] == 400
    excess = rhat_squared(DRAWS) - 1
    np.testing.assert_allclose(mean[-1], excess.mean())
    np.testing.assert_allclose(band(ax)[400.0], (excess.mean(), excess.max()))


def test_autocorrelation(ax):
    assert plot_autocorrelation({"chain": DRAWS}, max_lag=7, thinning=2, ax=ax) is ax
    lags, mean = ax.lines[1].get_xydata().T
    expected = autocorrelation(DRAWS, max_lag=7).reshape(8, 4)
    np.testing.assert_allclose(lags, np.arange(0, 16, 2))
    np.testing.assert_allclose(mean, expected.mean(1))
    np.testing.assert_allclose(band(ax)[4.0], (expected[2].min(), expected[2].max()))


def test_a_new_figure_is_made_without_axes():
    assert plot_autocorrelation({"chain": DRAWS}) is not plot_autocorrelation({"chain": DRAWS})


def slerp(a, b, t):
    """Spherical linear interpolation of directions as Shoemake 1985 writes it, norms linearly."""
    one, two = np.linalg.norm(a), np.linalg.norm(b)
    angle = np.arccos(a @ b / one / two)
    direction = (np.sin((1 - t) * angle) * a / one + np.sin(t * angle) * b / two) / np.sin(angle)
    return ((1 - t) * one + t * two) * direction


def test_a_slice_is_spherical_interpolation():
    """The log density of a linear function of the weights gives the weights away."""
    points = np.random.default_rng(1).normal(size=(3, 12)).astype("f") * np.array([[1], [2], [0.5]], "f")
    weights = np.random.default_rng(2).normal(size=12).astype("f")

    def model():
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (12,)))
        numpyro.factor("linear", w @ weights)

    found = posterior_slice(model, [{"w": point} for point in points], resolution=7, margin=0.0)
    # The first edge lies along the first axis, where the second coordinate is 0.
    first, second = found.points[:2]
    assert (first == 0).all() and second[1] == pytest.approx(0, abs=1e-12)
    row = np.flatnonzero(np.isclose(found.angles[1], 0))
    assert row.size == 1
    for angle, value in zip(found.angles[0], found.log_density[row[0]], strict=True):
        expected = slerp(points[0].astype(float), points[1].astype(float), angle / second[0]) @ weights
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "repriorised"])
def test_a_slice_has_the_density_of_the_model_s_own_coordinates(form):
    """That of θ, or of φ: that of θ times |det ∂θ/∂φ|; a bounded site as NumPyro's samplers see it."""
    x, y = small_data(8)
    points, expected = [], []
    for i, key in enumerate(jax.random.split(jax.random.key(0), 3)):
        one, two = jax.random.split(key)
        point = {
            "hidden": jax.random.normal(one, (2, 20)),
            "w": jax.random.normal(two, (21, 1)),
            "sigma": 0.5 + 0.1 * i,
        }
        joint, sites = log_density(network, (x, y), {}, point)
        log_det = 0.0
        if form == "repriorised":
            log_det = readout_map(sites["features"]["value"], y, jnp.zeros((21, 1)), point["sigma"], prior_scale=1.2)[1]
        points.append(point)
        expected.append(joint + log_det + np.log(point["sigma"]))
    model = network
    if form == "repriorised":
        model = repriorise(network, readout="w", features="features", targets="y", noise_scale="sigma")
    found = posterior_slice(model, points, x, y, resolution=2, batch_size=2)
    np.testing.assert_allclose(found.at_points, expected, rtol=1e-3)


def test_three_modes_and_levels_are_drawn(ax):
    grid = np.linspace(-1, 1, 5)
    values = -np.add.outer(grid**2, 10 * grid**2)
    found = PosteriorSlice(
        (grid, grid), values, np.array([[0.0, 0.0], [1.0, 0.0], [0.3, 0.9]]), np.array([2.0, -1, -1])
    )
    assert plot_posterior_slice(found, depth=6.0, ax=ax) is ax
    np.testing.assert_allclose(ax.lines[0].get_xydata(), found.points)
    # Relative to the highest value, that of a point between the grid's.
    np.testing.assert_allclose(ax.collections[0].levels[[0, -1]], [-6, 0])
    np.testing.assert_allclose(ax.collections[0].zmax, -2)


def test_points_that_span_no_slice_are_refused():
    def model():
        numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))

    points = [{"w": jnp.array(point)} for point in ([1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0])]
    with pytest.raises(ValueError, match="lie on one great circle"):
        posterior_slice(model, points)
    with pytest.raises(ValueError, match="goes through three points, but got 2"):
        posterior_slice(model, points[:2])
    with pytest.raises(ValueError, match="must hold all latent sites, but 'w' is missing; it has 'v'"):
        posterior_slice(model, [{"v": jnp.ones(3)}] * 3)
    with pytest.raises(ValueError, match="at least two chains and ten draws, but 'one' has shape"):
        plot_rhat_by_steps({"one": DRAWS[:1]})


@pytest.mark.parametrize("plot", [plot_rank_histogram, plot_rank_ecdf])
@pytest.mark.parametrize("wrong", [np.nan, -1, 10, 0.5])
def test_ranks_that_are_none_are_refused(plot, wrong):
    ranks = np.array([0, 3, wrong, 9])
    with pytest.raises(ValueError, match="must be whole numbers from 0 to num_draws = 9, but 1 of 4 are not, such as"):
        plot(ranks, 9)
    assert not plt.get_fignums()


def test_the_ranks_that_are_wrong_are_named():
    with pytest.raises(ValueError, match=r"ranks of 'w\[1\]' must be"):
        plot_rank_ecdf({"w": np.array([[0, 10], [1, 2]])}, 9)
    with pytest.raises(ValueError, match="num_draws must be a whole number of at least 1, but got 9.5"):
        plot_rank_histogram(np.arange(4), 9.5)


def test_transforms_and_their_band(ax):
    values = np.random.default_rng(3).random(600) ** 2
    assert plot_probability_integral_transform(values, num_bins=4, ax=ax, color="C3") is ax
    counts = [np.sum((values >= left) & (values < left + 0.25)) for left in (0, 0.25, 0.5, 0.75)]
    np.testing.assert_allclose([patch.get_height() for patch in ax.patches], np.array(counts) * 4 / 600)
    low, high = band(ax)[0.25]
    # Wider than one bin's binomial interval of 95 %, narrower than that of 99 %: Bonferroni over four.
    for level, is_inside in ((0.95, True), (0.99, False)):
        ends = np.array(binom.interval(level, 600, 0.25)) * 4 / 600
        assert (low < ends[0] and high > ends[1]) == is_inside
    assert ax.get_title() == "band: 95 % simultaneous, calibrated predictions"
    assert len(plot_probability_integral_transform(np.array([0.0, 0.5, 1.0])).patches) == 5  # on a new figure


@pytest.mark.parametrize("power", [1, 2])
def test_transforms_of_calibrated_predictions_are_inside_the_band(power):
    drawn = plot_probability_integral_transform(np.random.default_rng(4).random(2000) ** power)
    edges = band(drawn)
    outside = []
    for patch in drawn.patches:
        low, high = edges[patch.get_x()]
        outside.append(not low <= patch.get_height() <= high)
    assert any(outside) == (power == 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 2)), r"transforms of one output, \(n,\), but got shape \(3, 2\)"),
        (np.zeros(0), r"got shape \(0,\)"),
        (np.array([0.2, 1.5]), r"must be in \[0, 1\], but 1 of 2 are not, such as 1.5"),
        (np.array([0.2, np.nan, -1.0]), r"2 of 3 are not, such as nan"),
    ],
)
def test_transforms_that_are_none(values, message):
    with pytest.raises(ValueError, match=message):
        plot_probability_integral_transform(values)
