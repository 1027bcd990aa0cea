"""Maps of the targets: densities, moments and quantiles in their own units, and which map is taken."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import lognorm, norm

from numpyro_wide.estimators import WideBNNRegressor, _targets
from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import Report
from numpyro_wide.estimators._plan import plan_regression
from numpyro_wide.estimators._posteriors import Mixture
from numpyro_wide.estimators._targets import TRANSFORMS, TargetScale, choose_scale
from tests.marks import parametrize

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(120, 2))
SIGNAL = np.sin(X[:, 0]) + 0.3 * X[:, 1]
NOISE = 0.2 * RANDOM.normal(size=120)
PLAN = plan_regression(120, 2, 1)
Y = {"none": 8 + SIGNAL + NOISE, "cube_root": 100 * (2 + SIGNAL + NOISE) ** 3, "log": np.exp(2 * (SIGNAL + NOISE))}


def fitted(transform):
    options = {"method": "limit", "random_state": 0, "target_transform": transform}
    return WideBNNRegressor(**options).fit(X[:100], Y[transform][:100])


@parametrize("transform", TRANSFORMS, rest="slow")
def test_predictions_are_those_of_the_distribution_in_the_units_of_the_targets(transform):
    model, x, y = fitted(transform), X[100:104], Y[transform][100:104]
    scale = TargetScale.of(transform, Y[transform][:100])
    z_mean, z_variance, z_noise = model._posterior.function((x - X[:100].mean(axis=0)) / X[:100].std(axis=0))
    m = scale.loc + scale.scale * z_mean[0, :, 0]
    sd = scale.scale * np.sqrt((z_variance + z_noise)[0, :, 0])
    if transform == "log":
        expected = lognorm(sd, scale=np.exp(m))
        density, mean, deviation = expected.logpdf(y), expected.mean(), expected.std()
        ends = np.stack([expected.ppf(0.1), expected.ppf(0.9)], axis=1)
    else:
        power = 3 if transform == "cube_root" else 1
        density = norm.logpdf(y ** (1 / power), m, sd) - np.log(power) + (1 / power - 1) * np.log(y)
        nodes, weights = np.polynomial.hermite_e.hermegauss(20)
        values, weights = (m[:, None] + sd[:, None] * nodes) ** power, weights / weights.sum()
        mean = values @ weights
        deviation = np.sqrt((values - mean[:, None]) ** 2 @ weights)
        ends = norm.ppf([[0.1, 0.9]], m[:, None], sd[:, None]) ** power
    np.testing.assert_allclose(model.log_density(x, y), density, rtol=1e-9)
    found_mean, found_deviation = model.predict(x, return_std=True)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-7)
    np.testing.assert_allclose(found_deviation, deviation, rtol=1e-6)
    np.testing.assert_allclose(model.predict_interval(x, 0.8), ends, rtol=1e-6)
    samples = model.sample_y(x, 4000)
    np.testing.assert_allclose(np.quantile(samples, 0.5, axis=1), model.predict_quantiles(x, (0.5,))[:, 0], rtol=0.1)


@pytest.mark.fault("estimators/_targets.py", "slope = slope - np.log(y)", "slope = slope + 0")
@parametrize("transform", TRANSFORMS, rest="slow")
def test_the_density_integrates_to_one(transform):
    scale = TargetScale.of(transform, Y[transform])
    mixture = Mixture(np.array([[[0.3]], [[-0.5]]]), np.array([[[0.04]], [[0.09]]]))

    def density(y):
        at = np.array([y])
        return float(np.exp(mixture.log_density(scale.forward(at)[:, None]) + scale.log_slope(at))[0])

    ends = (scale.inverse(np.array(z)) for z in (-3.0, 0.0, 3.0))
    low, middle, high = map(float, ends)
    assert quad(density, low, middle)[0] + quad(density, middle, high)[0] == pytest.approx(1, abs=1e-4)


@parametrize("transform", TRANSFORMS, rest="slow")
def test_correlations_are_those_of_samples(transform):
    scale = TargetScale.of(transform, Y[transform])
    mean, covariance = np.array([0.2, -0.4]), np.array([[0.09, 0.05], [0.05, 0.06]])
    z = RANDOM.multivariate_normal(mean, covariance, size=400_000)
    expected = np.corrcoef(scale.inverse(z), rowvar=False)
    found = scale.correlation(mean[:, None], covariance[..., None])[..., 0]
    np.testing.assert_allclose(found, expected, atol=0.01)
    model, x = fitted(transform), X[100:104]
    covariance = model.predict(x, return_cov=True)[1]
    np.testing.assert_allclose(np.diagonal(covariance) ** 0.5, model.predict(x, return_std=True)[1], rtol=1e-9)
    assert np.linalg.eigvalsh(covariance).min() > 0


@parametrize("transform", TRANSFORMS, rest="slow")
def test_the_map_of_the_targets_is_found(transform):
    report = Report("targets")
    scale = choose_scale(X, Y[transform], PLAN, np.random.RandomState(0), report)
    assert scale.transform == transform
    assert scale.forward(Y[transform]).std() == pytest.approx(1)
    assert ("they are taken" in str(report)) == (transform != "none")  # those are too close for a look


@pytest.mark.fault("estimators/_targets.py", "is_clear and scores", "is_clear or scores")
@parametrize(("error", "expected"), [(1.0, "log"), (1.2, "none")], rest="slow")
def test_a_better_density_does_not_pay_for_worse_means(error, expected, monkeypatch):
    def left_out(limit, y, scale):
        is_log = scale.transform == "log"
        return np.full(len(y), float(is_log)), error if is_log else 1.0

    monkeypatch.setattr(_targets, "_left_out", left_out)
    assert choose_scale(X, Y["log"], PLAN, np.random.RandomState(0), Report("targets")).transform == expected


@pytest.mark.fault("estimators/_targets.py", "max(fits, key", "min(fits, key")
def test_maps_of_a_sum_of_effects_are_chosen_by_its_limit(monkeypatch):
    """A cube root of a sum is none: dense limits took it for Rosenbrock's function, at 22 times the error."""
    seen = []

    def left_out(limit, y, scale):
        seen.append(limit.table[0]["structure"])
        return np.zeros(len(y)), 1.0

    monkeypatch.setattr(_targets, "_left_out", left_out)
    x = RANDOM.uniform(-1, 1, size=(60, 4))
    rows = {"random": np.random.RandomState(0), "report": Report("targets")}
    for y, num_columns, expected in (
        (np.sum(np.exp(2 * x), axis=1), 4, "additive"),
        (np.exp(2 * np.sin(x.sum(axis=1))), 4, "dense"),
        (np.sum(np.exp(2 * x), axis=1), 51, "dense"),  # of which the plan leaves structured limits out
    ):
        choose_scale(x, y, plan_regression(60, num_columns, 1), **rows)
        assert seen[-3:] == [expected] * 3


def test_targets_that_are_not_positive_stay_as_they_are():
    y = Y["log"] - Y["log"].min()
    assert choose_scale(X, y, PLAN, np.random.RandomState(0), Report("targets")).transform == "none"
    for transform in ("log", "cube_root"):
        with pytest.raises(
            ValueError, match=f'target_transform="{transform}" needs positive targets, but the least is 0'
        ):
            WideBNNRegressor(target_transform=transform).fit(X, y)


def test_targets_without_a_logarithm_have_no_density():
    found = fitted("log").log_density(X[:3], [Y["log"][0], 0.0, -1.0])
    assert np.isfinite(found[0]) and (found[1:] == -np.inf).all()
    with pytest.raises(ValueError, match="whose density at 0 is infinite"):
        fitted("cube_root").log_density(X[:1], [0.0])
    assert np.isfinite(fitted("cube_root").log_density(X[:1], [-0.1])).all()


@pytest.mark.slow
def test_several_targets_are_mapped_together():
    both = np.column_stack([Y["log"], 1e6 * Y["log"]])
    model = WideBNNRegressor(method="limit", random_state=0).fit(X, both)
    assert model.target_transform_ == "log"
    mean, deviation = model.predict(X[:5], return_std=True)
    np.testing.assert_allclose(mean[:, 1], 1e6 * mean[:, 0], rtol=1e-6)
    np.testing.assert_allclose(deviation[:, 1], 1e6 * deviation[:, 0], rtol=1e-6)
    assert model.sample_y(X[:5], 3).shape == (5, 2, 3) and model.log_density(X[:5], both[:5]).shape == (5,)


def test_a_noise_that_few_rows_do_not_tell_is_flagged():
    x = np.random.default_rng(0).normal(size=(40, 3))
    report = str(WideBNNRegressor(method="limit", random_state=0).fit(x, np.sin(x).sum(axis=1)).report_)  # no noise
    assert "is far below that error: the rows are too few to tell it" in report
    assert "far below" not in str(fitted("none").report_)


def test_the_report_says_what_leave_one_out_densities_are_worth():
    lines = [loo.LeaveOneOut(np.zeros(5), share).reliability for share in (0.02, 0.3)]
    assert lines[0] == "2.0% of the rows have a Pareto shape above 0.7"
    assert (
        lines[1] == "30.0% of the rows have a Pareto shape above 0.7, for draws know them: new rows score some tenths "
        "of a nat less"
    )


def test_the_choice_shows_no_bar_of_its_own(bars, capsys):
    choose_scale(X, Y["log"], PLAN, np.random.RandomState(0), Report("targets"))
    assert capsys.readouterr().err == ""
