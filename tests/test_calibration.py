"""Ranks and coverage of a posterior that is known, and of posteriors that are wrong in known ways."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from matplotlib import pyplot

from numpyro_wide import _checks, plots
from numpyro_wide.calibration import (
    Simulations,
    c2st,
    expected_coverage,
    from_guide,
    hpd_ranks,
    sbc_ranks,
    tarp,
    uniformity_band,
    uniformity_p_value,
)
from tests.marks import parametrize

S, L = 1000, 99
MEAN_WEIGHT, POSTERIOR_SCALE = 0.8, 0.8**0.5  # θ ~ N(1, 2²), y | θ ~ N(θ, 1)
TRUTH, WRONG = 0.01, 0.005  # p-values: what the exact posterior exceeds, and what wrong ones stay below


def simulations(*, inflation=1.0, shift=0.0, correlation=0.0, assumed=0.0, num_draws=L, seed=0):
    """Two latents with unit prior-to-noise ratios, their posterior noises correlated, and draws from a posterior.

    ``inflation`` multiplies the posterior's scale, ``shift`` moves its mean by so many scales, ``assumed`` is its
    correlation where ``correlation`` is the right one.
    """
    rng = np.random.default_rng(seed)

    def noise(rho, *shape):
        first, second = rng.normal(size=(2, *shape))
        return np.stack([first, rho * first + (1 - rho**2) ** 0.5 * second], axis=-1)

    y = 1 + 5**0.5 * rng.normal(size=(S, 2))
    mean = 1 + MEAN_WEIGHT * (y - 1)
    truth = mean + POSTERIOR_SCALE * noise(correlation, S)
    scale = inflation * POSTERIOR_SCALE
    draws = mean[:, None] + POSTERIOR_SCALE * shift + scale * noise(assumed, S, num_draws)

    def log_density(x, mean):
        z = (x - mean - POSTERIOR_SCALE * shift) / scale
        return -(np.sum(z**2, -1) - 2 * assumed * z[..., 0] * z[..., 1]) / (2 * (1 - assumed**2))

    densities = log_density(truth, mean), log_density(draws, mean[:, None])
    return Simulations({"theta": truth}, {"theta": draws}, {"y": y}, *densities)


CASES = {
    "exact": simulations(),
    "exact, correlated": simulations(correlation=0.9, assumed=0.9),
    "too wide": simulations(inflation=1.5),
    "too narrow": simulations(inflation=0.7),
    "shifted": simulations(shift=0.5),
}


def all_p_values(found):
    """p-values of every method, and for marginals the smaller of the two."""
    return {
        "ranks": min(uniformity_p_value(sbc_ranks(found)["theta"], L)),
        "central": min(expected_coverage(found)["theta"].p_value),
        "hpd": expected_coverage(found, region="hpd")["joint"].p_value,
        "tarp": tarp(jax.random.key(1), found).p_value,
    }


@parametrize("name", ["exact", "exact, correlated"], rest="slow")
def test_the_exact_posterior_passes(name):
    assert min(all_p_values(CASES[name]).values()) > TRUTH


@parametrize("name", ["too wide", "too narrow", "shifted"], rest="slow")
def test_wrong_posteriors_are_found_by_every_method(name):
    assert max(all_p_values(CASES[name]).values()) < WRONG


def test_ranks_have_the_shapes_that_are_read_from_them():
    edges = {name: np.mean(np.abs(sbc_ranks(found)["theta"] - L / 2) > 0.4 * L) for name, found in CASES.items()}
    assert edges["too wide"] < 0.14 < edges["exact"] < 0.26 < edges["too narrow"]
    assert np.mean(sbc_ranks(CASES["shifted"])["theta"]) < 0.4 * L
    inside = {name: expected_coverage(found)["theta"].empirical[:, 24] for name, found in CASES.items()}  # at 0.5
    assert np.all(inside["too wide"] > 0.6)
    assert np.all(inside["too narrow"] < 0.42)


@parametrize("name", ["exact", "too wide", "too narrow"], rest="slow")
def test_coverage_is_that_of_the_normal_distribution(name):
    inflation = {"exact": 1.0, "too wide": 1.5, "too narrow": 0.7}[name]
    coverage = expected_coverage(CASES[name])["theta"]
    np.testing.assert_allclose(coverage.nominal, np.arange(1, 50) * 0.02, rtol=1e-12)
    expected = 2 * scipy.stats.norm.cdf(inflation * scipy.stats.norm.ppf((1 + coverage.nominal) / 2)) - 1
    np.testing.assert_allclose(
        coverage.empirical, np.tile(expected, (2, 1)), atol=4 * 0.5 / S**0.5 + 0.005
    )  # for 99 draws
    joint = expected_coverage(CASES[name], region="hpd")["joint"]
    radius = scipy.stats.chi2(2).ppf(joint.nominal)  # of squared distances
    expected = scipy.stats.chi2(2).cdf(inflation**2 * radius)
    np.testing.assert_allclose(joint.empirical, expected, atol=4 * 0.5 / S**0.5 + 0.005)


def test_only_joint_methods_see_a_wrong_correlation():
    p_values = all_p_values(simulations(correlation=0.9, assumed=0.0))
    assert min(p_values["ranks"], p_values["central"]) > TRUTH
    assert max(p_values["hpd"], p_values["tarp"]) < WRONG


def test_references_from_the_data_see_a_posterior_that_is_the_prior():
    rng = np.random.default_rng(5)
    truth, draws = 1 + 2 * rng.normal(size=S), 1 + 2 * rng.normal(size=(S, L))
    prior = Simulations({"theta": truth}, {"theta": draws}, {"y": truth + rng.normal(size=S)})
    assert uniformity_p_value(sbc_ranks(prior)["theta"], L) > TRUTH
    assert tarp(jax.random.key(0), prior).p_value > TRUTH
    assert tarp(jax.random.key(0), prior, {"theta": prior.observed["y"]}).p_value < WRONG
    exact = CASES["exact"]
    assert tarp(jax.random.key(0), exact, {"theta": exact.observed["y"]}).p_value > TRUTH


def test_ties_are_broken_at_random():
    """A coin that the data say nothing about: every draw is 0 or 1, and ranks must still be uniform."""
    rng = np.random.default_rng(0)
    coin = Simulations({"z": rng.integers(0, 2, S)}, {"z": rng.integers(0, 2, (S, L))})
    assert uniformity_p_value(sbc_ranks(coin)["z"], L) > TRUTH
    assert np.any(sbc_ranks(coin, rng_key=jax.random.key(3))["z"] != sbc_ranks(coin)["z"])


def test_boolean_latents_have_distances():
    rng = np.random.default_rng(0)
    coin = Simulations({"z": rng.random((S, 2)) < 0.5}, {"z": rng.random((S, L, 2)) < 0.5})
    as_floats = Simulations({"z": coin.truth["z"].astype(float)}, {"z": coin.draws["z"].astype(float)})
    key = jax.random.key(0)
    np.testing.assert_array_equal(tarp(key, coin).empirical, tarp(key, as_floats).empirical)


def test_a_truth_of_density_0_has_the_highest_rank():
    """A posterior with a bounded support may miss the truth, which no region of highest density then holds."""
    densities = {"log_density_truth": np.array([-np.inf, 0.0, -1.0]), "log_density_draws": np.full((3, 9), -0.5)}
    assert hpd_ranks(Simulations(FEW, {"z": np.zeros((3, 9))}, **densities)).tolist() == [9, 0, 9]


def test_bands_hold_whole_curves_at_their_level():
    num_simulations, num_trials = 150, 2000
    grid = np.linspace(0.05, 0.95, 19)
    masses = np.diff(grid, prepend=0, append=1)
    low, high = uniformity_band(grid, num_simulations, level=0.9)
    counts = np.random.default_rng(7).multinomial(num_simulations, masses, size=num_trials)
    curves = np.cumsum(counts, axis=1)[:, :-1] / num_simulations
    inside = np.mean(np.all((curves >= low) & (curves <= high), axis=1))
    # counts are whole: the level is reached up to the jumps of the binomial distribution
    assert 0.9 - 4 * (0.09 / num_trials) ** 0.5 - 0.01 < inside < 0.95
    shifted = np.mean(np.all((curves >= low + 0.02) & (curves <= high - 0.02), axis=1))
    assert shifted < 0.85


def test_p_values_are_uniform():
    rng = np.random.default_rng(2)
    p_values = uniformity_p_value(rng.integers(0, L + 1, size=(200, 300)), L)
    for level in (0.05, 0.2, 0.5):
        np.testing.assert_allclose(np.mean(p_values <= level), level, atol=4 * (level * (1 - level) / 300) ** 0.5)


def test_many_draws_are_looked_at_on_a_grid():
    found = simulations(num_draws=999)
    ranks = sbc_ranks(found)["theta"]
    assert np.all(uniformity_p_value(ranks, 999) > TRUTH)
    coverage = expected_coverage(found)["theta"]
    assert len(coverage.nominal) <= 100
    for depth in (1, 400):
        nominal = 1 - 2 * depth / 1000
        index = np.argmin(np.abs(coverage.nominal - nominal))
        depth = round((1 - coverage.nominal[index]) * 500)
        expected = np.mean((ranks >= depth) & (ranks <= 999 - depth), axis=0)
        np.testing.assert_array_equal(coverage.empirical[:, index], expected)


def test_figures_show_the_numbers():
    found = CASES["too narrow"]
    ranks = sbc_ranks(found)
    _, (ecdf, regions, ball) = pyplot.subplots(1, 3)
    plots.plot_rank_ecdf(ranks, L, ax=ecdf)
    assert [line.get_label() for line in ecdf.get_lines()[:2]] == ["theta[0]", "theta[1]"]
    x, y = ecdf.get_lines()[1].get_data()
    np.testing.assert_allclose(y[30] + x[30], np.mean(ranks["theta"][:, 1] < 30))
    coverage = expected_coverage(found)
    plots.plot_coverage(coverage, ax=regions)
    np.testing.assert_allclose(regions.get_lines()[1].get_ydata()[1:-1], coverage["theta"].empirical[1])
    plots.plot_coverage(tarp(jax.random.key(0), found), ax=ball)
    assert ball.get_legend() is None
    pyplot.close("all")


FEW = {"z": np.zeros(3)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Simulations(FEW, {"w": np.zeros((3, 9))}), r"same names, but hold \['z'\] and \['w'\]"),
        (lambda: Simulations(FEW, {"z": np.zeros((4, 9))}), r"'z' has shapes \(3,\) and \(4, 9\)"),
        (lambda: Simulations(FEW, {"z": np.full((3, 9), np.nan)}), r"draws\['z'\] is empty or holds NaN"),
        (
            lambda: Simulations(FEW, {"z": np.zeros((3, 9))}, log_density_truth=np.zeros(3)),
            r"must have shapes \(3,\) and \(3, 9\), but got \(\(3,\), \(\)\)",
        ),
        (
            lambda: Simulations(FEW, {"z": np.zeros((3, 9))}, {}, np.zeros(3), np.full((3, 9), np.nan)),
            "log_density_draws is empty or holds NaN.*write -inf where the density is 0",
        ),
        (
            lambda: Simulations(FEW, {"z": np.zeros((3, 9))}, {}, np.full(3, np.nan), np.zeros((3, 9))),
            "log_density_truth is empty or holds NaN",
        ),
        (lambda: hpd_ranks(Simulations(FEW, {"z": np.zeros((3, 9))})), "need log_density_truth"),
        (
            lambda: expected_coverage(Simulations(FEW, {"z": np.zeros((3, 9))}), region="tail"),
            "region must be one of 'central', 'hpd', but got 'tail'",
        ),
        (
            lambda: tarp(jax.random.key(0), Simulations(FEW, {"z": np.zeros((3, 9))}), {"z": np.zeros(2)}),
            r"references must have the names and shapes .*\(3,\)}, but got .*\(2,\)",
        ),
        (
            lambda: tarp(jax.random.key(0), Simulations(FEW, {"z": np.ones((3, 9))}), {"z": np.full(3, np.nan)}),
            "distances need finite points, but the references hold NaN or infinite",
        ),
        (
            lambda: tarp(jax.random.key(0), Simulations({"z": np.array([0.0, np.inf])}, {"z": np.ones((2, 9))})),
            "distances need finite points, but the truths hold",
        ),
        (
            lambda: expected_coverage(Simulations(FEW, {"z": np.zeros((3, 1))})),
            "central intervals run between two draws, but there is one draw",
        ),
        (lambda: uniformity_p_value([], 9), r"an array \(num_simulations, ...\), but the shape is \(0,\)"),
        (lambda: uniformity_p_value([np.nan, 2.0], 5), "from 0 to num_draws = 5, but 1 of 2 are not, such as nan"),
        (lambda: uniformity_p_value([0.5, 2.0], 9), "from 0 to num_draws = 9, but 1 of 2 are not, such as 0.5"),
        (lambda: uniformity_p_value([0, 12], 9), "from 0 to num_draws = 9, but 1 of 2 are not, such as 12"),
        (lambda: uniformity_band([0.5], 10, level=95), "level must lie between 0 and 1.*but got 95"),
    ],
)
def test_refuses_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sbc_ranks(Simulations(FEW, {"z": np.zeros((3, 9))}), rng_key=3), "rng_key must be a PRNG key"),
        (lambda: tarp(Simulations(FEW, {"z": np.zeros((3, 9))}), None), r"PRNG key.*order is \(rng_key, simulations"),
        (
            lambda: tarp(jax.random.key(0), Simulations(FEW, {"z": np.zeros((3, 9))}), {"z": np.zeros(3) * 1j}),
            "Cannot cast array data from .*complex128",
        ),
        (lambda: uniformity_p_value([1j, 2], 9), "ranks must hold real numbers"),
    ],
)
def test_refuses_arguments_of_another_kind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.fault("calibration.py", "array = np.array(values)", "array = np.asarray(values)")
def test_simulations_hold_copies_of_real_numbers():
    truth, draws, density = np.arange(3.0), np.zeros((3, 9)), np.ones(3)
    held = Simulations({"z": truth}, {"z": draws}, {"y": truth}, density, draws)
    before = sbc_ranks(held)["z"]
    for array in (truth, draws, density):
        array -= 7
    assert held.truth["z"].tolist() == held.observed["y"].tolist() == [0, 1, 2]
    assert held.log_density_truth.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(sbc_ranks(held)["z"], before)
    for wrong in (np.zeros(3, complex), np.array(["a", "b", "c"]), np.array([None, 1.0, 2.0])):
        with pytest.raises(TypeError, match="z must hold real numbers, but it has the type"):
            Simulations({"z": wrong}, {"z": draws})


# Draws from guides, for data simulated from a model with plates and a nuisance ----------------------------------------

X = np.array([0.5, -1.0, 2.0], np.float32)


def model(x):
    slope = numpyro.sample("slope", dist.Normal(1.0, 2.0))
    nuisance = numpyro.sample("nuisance", dist.Normal(0.0, 0.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x + nuisance, 0.7))


def posterior_of_slope(x, y):
    """Mean and scale given y, the nuisance integrated out, in closed form."""
    noise = 0.49 * np.eye(len(x)) + 0.25
    weights = np.linalg.solve(noise, x)
    variance = 1 / (0.25 + weights @ x)
    return variance * (0.25 + y @ weights), variance**0.5


def guide(observed, x):
    inflation = numpyro.param("inflation", 1.0)
    mean, scale = posterior_of_slope(x, observed["y"])
    numpyro.sample("slope", dist.Normal(mean, inflation * scale))


@pytest.fixture(scope="module")
def exact():
    """Draws of the exact posterior."""
    params = {"inflation": jnp.array(1.0)}
    return from_guide(jax.random.key(0), model, guide, params, X, observed="y", num_simulations=400, batch_size=64)


def test_the_exact_guide_is_calibrated(exact):
    assert exact.truth.keys() == {"slope"}  # the nuisance is marginalised
    assert exact.draws["slope"].shape == (400, 99)
    mean, scale = posterior_of_slope(X, exact.observed["y"])
    np.testing.assert_allclose(np.mean((exact.truth["slope"] - mean) / scale), 0, atol=4 / 400**0.5)
    assert uniformity_p_value(sbc_ranks(exact)["slope"], 99) > 0.01
    assert expected_coverage(exact, region="hpd")["joint"].p_value > 0.01
    assert tarp(jax.random.key(1), exact, {"slope": mean}).p_value > 0.01
    expected = dist.Normal(mean[:, None], scale).log_prob(exact.draws["slope"])
    np.testing.assert_allclose(exact.log_density_draws, expected, rtol=1e-4, atol=1e-4)


def test_the_parameters_of_a_guide_count(exact):
    wide = from_guide(jax.random.key(0), model, guide, {"inflation": jnp.array(2.0)}, X, observed="y", batch_size=500)
    assert wide.num_simulations == 500
    mean, scale = posterior_of_slope(X, wide.observed["y"])
    expected = dist.Normal(mean, 2 * scale).log_prob(wide.truth["slope"])
    np.testing.assert_allclose(wide.log_density_truth, expected, rtol=1e-4, atol=1e-4)
    assert expected_coverage(wide, region="hpd")["joint"].p_value < 0.002
    assert uniformity_p_value(sbc_ranks(wide)["slope"], 99) < 0.002


def test_refuses_unknown_sites():
    sites = "the sample or deterministic site 'z', which the model does not have; .* are 'slope', 'nuisance', 'y'"
    with pytest.raises(ValueError, match=rf"observed names {sites}"):
        from_guide(jax.random.key(0), model, guide, {}, X, observed="z")
    other = lambda observed, x: numpyro.sample("w", dist.Normal())  # noqa: E731
    with pytest.raises(ValueError, match=r"latent site 'w', which the model does not have.*'slope', 'nuisance'"):
        from_guide(jax.random.key(0), model, other, {}, X, observed="y", num_simulations=2)


def test_a_guide_without_its_parameters_is_refused():
    with pytest.raises(ValueError, match=r"params must be a dictionary .*'inflation', but got none.*get_params"):
        from_guide(jax.random.key(0), model, guide, {}, X, observed="y", num_simulations=2)


def test_models_that_do_not_simulate_are_refused():
    """As the trainer refuses them: with a factor, a given value or a scale, draws are not from the joint law."""

    def with_factor(x):
        model(x)
        numpyro.factor("penalty", 1.0)

    def subsampled(x):
        slope = numpyro.sample("slope", dist.Normal(1.0, 2.0))
        with numpyro.plate("rows", 6, subsample_size=3):
            numpyro.sample("y", dist.Normal(slope, 0.7))

    def attempt(model):
        from_guide(jax.random.key(0), model, guide, {"inflation": 1.0}, X, observed="y")

    with pytest.raises(ValueError, match=r"must simulate every site, but 'penalty'"):
        attempt(with_factor)
    with pytest.raises(ValueError, match=r"plate 'rows' takes 3 of 6 rows"):
        attempt(subsampled)


def test_a_guide_may_see_a_function_of_the_latents():
    def implicit():
        numpyro.deterministic("y", 2 * numpyro.sample("slope", dist.Normal()))

    def near(observed):
        numpyro.sample("slope", dist.Normal(observed["y"] / 2, 0.1))

    found = from_guide(jax.random.key(0), implicit, near, {}, observed="y", num_simulations=50, num_draws=19)
    np.testing.assert_allclose(found.draws["slope"].mean(1), found.observed["y"] / 2, atol=5 * 0.1 / 19**0.5)
    np.testing.assert_allclose(found.truth["slope"], found.observed["y"] / 2, rtol=1e-6)


def test_the_key_comes_first():
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key.*order is from_guide\(rng_key, model, guide"):
        from_guide(model, guide, {}, X, observed="y")


@parametrize("name", ["num_simulations", "num_draws", "batch_size"], rest="slow")
def test_numbers_of_draws_are_whole(name):
    for value in (0, 2.5, True):
        with pytest.raises(ValueError, match=rf"{name} must be a whole number of at least 1, but got {value}"):
            from_guide(jax.random.key(0), model, guide, {}, X, observed="y", **{name: value})


# The classifier two-sample test against the accuracy of the best classifier, in closed form ---------------------------

KEY = jax.random.key(0)


def normals(number, loc, scale, seed):
    return loc + scale * np.random.default_rng(seed).normal(size=(number, 2))


@pytest.mark.as_compiled
@pytest.mark.fault(
    "calibration.py",
    "features = (np.concatenate([sample, exact_sample]) - loc) / scale",
    "features = np.concatenate([sample, exact_sample]) + 0 * (loc + scale)",
)
@parametrize(
    ("loc", "scale", "expected"),
    [
        (0.0, 1.0, 0.5),
        # Of distance 1.5 √2 in units of the scale.
        (1.5, 1.0, scipy.stats.norm.cdf(1.5 / 2**0.5)),
        # The likelihood ratio of circles depends on the radius alone: r² = 2 log(4)·4/3 is where both densities agree.
        (0.0, 2.0, 0.5 * (1 + (1 - 4 ** (-4 / 3)) - (1 - 4 ** (-1 / 3)))),
    ],
    rest="slow",
)
def test_accuracy_is_that_of_the_best_classifier(loc, scale, expected):
    units = np.array([1e3, 1e-3])  # of which nothing depends
    draws, reference = units * normals(1500, loc, scale, 1), units * normals(1500, 0.0, 1.0, 2)
    found = c2st(KEY, {"a": draws[:, 0], "b": draws[:, 1:]}, {"b": reference[:, 1:], "a": reference[:, 0]})
    assert found == pytest.approx(expected, abs=0.03)
    assert found == c2st(KEY, draws, reference)


@pytest.mark.parametrize(
    ("draws", "reference", "message"),
    [
        (np.zeros((20, 2)), np.zeros((30, 2)), r"shapes \(20, 2\) and \(30, 2\), draws in front; thin the longer"),
        (np.zeros((20, 2)), np.zeros((20, 3)), r"shapes \(20, 2\) and \(20, 3\)"),
        ({"a": np.zeros(20)}, {"b": np.zeros(20)}, "of the same sites"),
        (np.zeros(5), np.zeros(5), "draws must hold ten draws or more"),
        ({"a": np.zeros(20), "b": np.zeros(19)}, np.zeros(20), "ten draws or more, along the first axis"),
        (np.full(20, np.nan), np.zeros(20), "distances need finite points"),
    ],
)
def test_mistakes(draws, reference, message):
    with pytest.raises(ValueError, match=message):
        c2st(KEY, draws, reference)


@pytest.mark.slow
def test_a_bar_is_over_the_folds(bars, monkeypatch, capsys):
    monkeypatch.setattr(_checks, "_PATIENCE", 0)
    for shown in (True, False):
        c2st(KEY, normals(50, 0.0, 1.0, 1), normals(50, 0.0, 1.0, 2), progress_bar=shown)
        assert ("classifiers: 100%" in capsys.readouterr().err) == shown
