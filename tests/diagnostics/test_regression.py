"""Scores of predicted numbers: against quadrature, SciPy, closed forms of one Gaussian, and simulated data."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from numpyro_wide import _mixture as _gaussian_mixtures
from numpyro_wide.diagnostics import (
    crps,
    interval_coverage,
    log_predictive_density,
    probability_integral_transform,
    regression_scores,
    rmse,
)
from tests.marks import parametrize

SCORES = [rmse, log_predictive_density, crps, interval_coverage, probability_integral_transform, regression_scores]


def predictions(shape, seed=0, spread=2.0):
    """Observations near 3, and means and variances with deviations that differ among draws and entries."""
    rng = np.random.default_rng(seed)
    mean, variance = 3 + spread * rng.normal(size=shape), np.exp(rng.normal(size=shape))
    return 3 + 2 * rng.normal(size=shape[1:]), mean, variance


def crps_by_quadrature(y, mean, variance):
    """∫ (F(x) − 1{x ≥ y})² dx."""
    scale = np.sqrt(variance)
    low, high = min(y, (mean - 9 * scale).min()), max(y, (mean + 9 * scale).max())

    def below(x):
        return stats.norm.cdf(x, mean, scale).mean()

    options = {"epsabs": 1e-12, "epsrel": 1e-12, "limit": 200}
    return (
        quad(lambda x: below(x) ** 2, low, y, **options)[0] + quad(lambda x: (1 - below(x)) ** 2, y, high, **options)[0]
    )


@pytest.mark.fault("_mixture.py", "return total / (2 * len(mean) ** 2)", "return total / len(mean) ** 2")
@pytest.mark.fault("_mixture.py", "2 * pairs.sum(axis=0)", "pairs.sum(axis=0)")
@parametrize("num_draws", [1, 2, 7], rest="slow")
def test_crps_against_quadrature(num_draws):
    y, mean, variance = predictions((num_draws, 6))
    y[0] = 20.0  # far outside
    expected = [crps_by_quadrature(y[i], mean[:, i], variance[:, i]) for i in range(6)]
    found = crps(y, mean, variance, pointwise=True)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert crps(y, mean, variance) == pytest.approx(np.mean(expected), rel=1e-9)


@pytest.mark.fault("_mixture.py", "np.ceil(2 * (high - low)", "np.ceil(2 / 7 * (high - low)")
@parametrize("spread", [0.0, 1.0, 60.0], rest="slow")
def test_pairs_and_integral_agree(spread):
    _, mean, variance = predictions((40, 3), seed=1, spread=spread)
    pairs = _gaussian_mixtures.spread_by_pairs(mean + 1e3, np.sqrt(variance))
    integral = _gaussian_mixtures.spread_by_integral(mean + 1e3, np.sqrt(variance))
    np.testing.assert_allclose(integral, pairs, rtol=1e-12)


def test_many_draws_take_either_way_by_entry(monkeypatch):
    """Entries whose draws are near to each other go by the integral, others by pairs, in blocks of a few."""
    y, mean, variance = predictions((300, 5), seed=2)
    variance = np.clip(variance, 0.5, 2.0)
    mean[:, 1] *= 100
    used = _gaussian_mixtures._num_points(mean, np.sqrt(variance)) < 150
    assert used.tolist() == [True, False, True, True, True]
    whole = crps(y, mean, variance, pointwise=True)
    np.testing.assert_allclose(whole[:2], [crps_by_quadrature(y[i], mean[:, i], variance[:, i]) for i in (0, 1)])
    monkeypatch.setattr(_gaussian_mixtures, "BLOCK", 700)
    np.testing.assert_allclose(crps(y, mean, variance, pointwise=True), whole, rtol=1e-13)


@pytest.mark.fault(
    "_mixture.py", "logsumexp(log_values, axis=0) - np.log(len(log_values))", "logsumexp(log_values, axis=0)"
)
def test_scores_of_one_gaussian():
    """The closed form of Gneiting & Raftery 2007, §4.2, SciPy's density and distribution function."""
    y, mean, variance = predictions((50,), seed=3)[0] + np.arange(50) / 10, np.full(50, 2.0), np.linspace(0.5, 4, 50)
    scale = np.sqrt(variance)
    z = (y - mean) / scale
    expected = scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    for with_draws in (lambda x: x, lambda x: x[None], lambda x: np.stack([x, x, x])):
        arguments = y, with_draws(mean), with_draws(variance)
        np.testing.assert_allclose(crps(*arguments, pointwise=True), expected, rtol=1e-12)
        np.testing.assert_allclose(
            log_predictive_density(*arguments, pointwise=True), stats.norm.logpdf(y, mean, scale), rtol=1e-12
        )
        np.testing.assert_allclose(probability_integral_transform(*arguments), stats.norm.cdf(z), rtol=1e-12)
        assert rmse(*arguments) == rmse(*arguments[:2]) == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)), rel=1e-12)
        low, high = stats.norm.interval(0.6, mean, scale)
        assert interval_coverage(*arguments, level=0.6) == np.mean((y >= low) & (y <= high))


@parametrize("shape", [(4, 9), (4, 9, 2)], rest="slow")
def test_mixtures_against_scipy(shape):
    y, mean, variance = predictions(shape, seed=4)
    density = stats.norm.pdf(y, mean, np.sqrt(variance)).mean(0)
    np.testing.assert_allclose(log_predictive_density(y, mean, variance, pointwise=True), np.log(density), rtol=1e-10)
    assert log_predictive_density(y, mean, variance) == pytest.approx(np.mean(np.log(density)), rel=1e-10)
    transform = probability_integral_transform(y, mean, variance)
    np.testing.assert_allclose(transform, stats.norm.cdf(y, mean, np.sqrt(variance)).mean(0), rtol=1e-12)
    assert rmse(y, mean) == pytest.approx(np.sqrt(np.mean((y - mean.mean(0)) ** 2)), rel=1e-12)
    assert crps(y, mean, variance, pointwise=True).shape == shape[1:]


def test_density_far_from_every_draw():
    """Where the density itself underflows: the nearest draw decides, less log 2 for its weight."""
    found = log_predictive_density(np.array([100.0]), np.array([[0.0], [10.0]]), np.ones((2, 1)))
    assert found == pytest.approx(-0.5 * 90**2 - 0.5 * np.log(2 * np.pi) - np.log(2), rel=1e-12)
    assert log_predictive_density(np.array([1e200]), np.array([0.0]), np.array([1.0])) == -np.inf


def test_calibrated_predictions():
    """Observations from the mixture itself: uniform transforms, nominal coverage, best scores among their like."""
    _, mean, variance = predictions((5, 4000), seed=5)
    rng = np.random.default_rng(6)
    which = rng.integers(5, size=4000), np.arange(4000)
    y = mean[which] + np.sqrt(variance[which]) * rng.normal(size=4000)
    transform = probability_integral_transform(y, mean, variance)
    assert stats.kstest(transform, "uniform").pvalue > 0.05
    assert stats.kstest(probability_integral_transform(y, mean, 3 * variance), "uniform").pvalue < 1e-4
    for level in (0.5, 0.9):
        error = np.sqrt(level * (1 - level) / 4000)
        assert abs(interval_coverage(y, mean, variance, level) - level) < 2.5 * error
        assert interval_coverage(y, mean, variance / 4, level) < level - 4 * error
    for other in (mean, variance * 2), (mean, variance / 2), (mean + 0.5, variance):
        assert log_predictive_density(y, *other) < log_predictive_density(y, mean, variance)
        assert crps(y, *other) > crps(y, mean, variance)


@pytest.mark.fault("diagnostics/_scores.py", " - np.log(units)", " + np.log(units)")
@parametrize(("shape", "scale"), [((3, 30), 7.0), ((3, 30, 2), 7.0), ((3, 30, 2), np.array([7.0, 0.2]))], rest="slow")
def test_scale_gives_the_scores_of_rescaled_numbers(shape, scale):
    y, mean, variance = predictions(shape, seed=7)
    found = regression_scores(y, mean, variance, scale=scale)
    rescaled = regression_scores(y * scale, mean * scale, variance * scale**2)
    assert found == pytest.approx(rescaled, rel=1e-12)
    assert list(found)[:4] == ["rmse", "log_predictive_density", "crps", "coverage_90"]
    assert found["rmse"] == pytest.approx(rmse(y * scale, mean * scale), rel=1e-12)
    assert found["crps"] == pytest.approx(crps(y * scale, mean * scale, variance * scale**2), rel=1e-12)
    assert found["coverage_90"] == interval_coverage(y, mean, variance)
    plain = log_predictive_density(y, mean, variance)
    assert found["log_predictive_density"] == pytest.approx(plain - np.mean(np.log(scale)), rel=1e-12)


@pytest.mark.fault(
    "diagnostics/_scores.py", "_standard_error(squared_error) / (2 * root)", "_standard_error(squared_error) / root"
)
def test_standard_errors_are_the_deviations_over_samples():
    """2000 samples of 200 rows: deviations of the scores against the mean of the errors that are reported."""
    rng = np.random.default_rng(8)
    y, mean, variance = rng.normal(size=(2000, 200)), np.full((1, 200), 0.3), np.full((1, 200), 1.5)
    found = [regression_scores(sample, mean, variance) for sample in y]
    for name in ("rmse", "log_predictive_density", "crps", "coverage_90"):
        deviation = np.std([scores[name] for scores in found])
        error = np.mean([scores[f"{name}_se"] for scores in found])
        np.testing.assert_allclose(error, deviation, rtol=0.06)  # four standard errors of a deviation, 1/√4000 each
    share = found[0]["coverage_90"]
    assert found[0]["coverage_90_se"] == pytest.approx(np.sqrt(share * (1 - share) / 200), rel=1e-12)


@pytest.mark.fault("diagnostics/_scores.py", "by_entry.reshape(len(by_entry), -1).mean(axis=1)", "by_entry.reshape(-1)")
def test_outputs_of_a_row_count_once():
    """A second output equal to the first brings no further information."""
    y, mean, variance = predictions((3, 40), seed=9)
    once = regression_scores(y, mean, variance)
    assert regression_scores(*(np.stack([x, x], -1) for x in (y, mean, variance))) == pytest.approx(once, rel=1e-12)


def test_one_row_and_no_error():
    found = regression_scores(np.zeros(1), np.zeros((2, 1)), np.ones((2, 1)))
    assert found["rmse"] == found["rmse_se"] == 0
    assert (found["coverage_90"], found["coverage_90_se"]) == (1, 0)
    assert np.isnan([found["crps_se"], found["log_predictive_density_se"]]).all()


def test_single_precision_is_computed_in_double():
    """An offset of 1e6, exact in float32: float32 would have lost the deviations of 1/8."""
    y, mean, variance = (np.round(8 * x) / 8 for x in predictions((6, 20), seed=10, spread=10.0))
    y, mean, variance = y + 2**20, mean + 2**20, variance + 0.125
    single = [jnp.asarray(x, jnp.float32) for x in (y, mean, variance)]
    assert regression_scores(*single) == regression_scores(y, mean, variance)


Y, MEAN, VARIANCE = np.zeros(4), np.zeros((3, 4)), np.ones((3, 4))
