"""The regressor's numbers, held to scikit-learn, SciPy and refits with a row left out."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel

from numpyro_wide import wide_limit
from numpyro_wide.estimators import WideBNNRegressor, _policy, _posteriors
from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import Report, posterior_line
from numpyro_wide.estimators._chains import Run
from numpyro_wide.estimators._plan import plan_regression
from numpyro_wide.estimators._posteriors import Mixture
from numpyro_wide.estimators._scoring import has_steps
from numpyro_wide.machine import double_precision

UNITS = 50.0, 7.0  # of the targets: mean and scale


def rows(num_rows, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, (num_rows, 2)) * np.array([1.0, 30.0]) + np.array([0.0, 100.0])
    return x, UNITS[0] + UNITS[1] * (np.sin(2 * x[:, 0]) + 0.2 * random.normal(size=num_rows))


X, Y = rows(40)
Y_Z = ((Y - Y.mean()) / Y.std())[None, :, None]
X_NEW, Y_NEW = rows(8, seed=1)


@pytest.fixture(scope="module")
def limit():
    return WideBNNRegressor(method="limit", random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def weighted():
    return WideBNNRegressor(method="weighted", random_state=0).fit(X, Y)


class _GivenKernel(Kernel):
    """A kernel that is computed elsewhere, of rows that are indices."""

    def __init__(self, gram=None):
        self.gram = gram

    def __call__(self, X, Y=None, eval_gradient=False):
        first, second = (np.asarray(part, int).ravel() for part in (X, X if Y is None else Y))
        return self.gram[np.ix_(first, second)]

    def diag(self, X):
        return np.diagonal(self(X)).copy()

    def is_stationary(self):
        return False


@pytest.mark.as_compiled
@pytest.mark.fault(
    "estimators/_policy.py",
    "activation=_ACTIVATIONS, depth=first, input_scale=True",
    "activation=fits[0].activation, depth=first, input_scale=True",
)
def test_scales_of_the_columns_are_tried_with_every_activation():
    # erf has the better evidence with one scale for all columns, ReLU with a scale for each.
    random = np.random.default_rng(0)
    x = random.normal(size=(80, 6))
    y = x[:, 1] + 0.5 * np.sin(3 * x[:, 0]) + 0.1 * random.normal(size=80)
    y -= y.mean()
    model = WideBNNRegressor(method="limit", hidden=(50,), random_state=0).fit(x, y)
    best = {
        by_column: wide_limit.fit(
            x, y / y.std(), activation=("erf", "relu"), input_scale=by_column, num_restarts=1
        ).activation
        for by_column in (False, True)
    }
    assert best == {False: "erf", True: "relu"}
    assert model.fit_.activation == "relu" and "input_scale" in model.fit_.scales


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_gp.py", "return prior - explained.T @ explained", "return prior")
def test_the_limit_is_the_gaussian_process_that_scikit_learn_computes(limit):
    fit = limit.fit_
    loc, scale = Y.mean(), Y.std()
    both = (np.concatenate([X, X_NEW]) - X.mean(axis=0)) / X.std(axis=0)
    with double_precision():
        gram = np.asarray(wide_limit.fcn_kernel(fit.depth, fit.activation, **fit.scales)(both)[0])
    process = GaussianProcessRegressor(_GivenKernel(gram), alpha=fit.noise_scale**2, optimizer=None)
    process.fit(np.arange(40)[:, None], (Y - loc) / scale)
    mean, covariance = process.predict(40 + np.arange(8)[:, None], return_cov=True)
    covariance = scale**2 * (covariance + fit.noise_scale**2 * np.eye(8))
    found, found_covariance = limit.predict(X_NEW, return_cov=True)
    np.testing.assert_allclose(found, loc + scale * mean, rtol=1e-7)
    np.testing.assert_allclose(found_covariance, covariance, rtol=1e-5, atol=1e-6 * scale**2)
    np.testing.assert_allclose(limit.predict(X_NEW, return_std=True)[1] ** 2, np.diagonal(covariance), rtol=1e-5)


@pytest.mark.fault("estimators/_scoring.py", "Mixture(y - (y - mean) / share,", "Mixture(mean,")
def test_leave_one_out_is_a_fit_without_the_row(limit):
    fit = limit.fit_
    found = loo.of_regression(limit._posterior.function(fit.inputs), fit.targets[:, None]).by_row
    others = limit._posterior.left_out(fit.nngp(fit.inputs))
    np.testing.assert_allclose(others.by_draw(fit.targets[:, None])[0], found, rtol=1e-6)
    with double_precision():
        covariance = np.array(wide_limit.fcn_kernel(fit.depth, fit.activation, **fit.scales)(fit.inputs)[0])
    covariance[np.diag_indices(40)] += fit.noise_scale**2
    for row in (0, 17, 39):
        others = np.delete(np.arange(40), row)
        weights = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, row])
        spread = covariance[row, row] - weights @ covariance[others, row]
        expected = norm.logpdf(fit.targets[row], weights @ fit.targets[others], spread**0.5)
        np.testing.assert_allclose(found[row], expected, rtol=1e-6)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_regressor.py", "result.log_density + float", "0 * float")
def test_the_summary_has_the_numbers_of_the_report(limit, weighted):
    fit, (loc, scale) = limit.fit_, (Y.mean(), Y.std())
    with double_precision():
        covariance = np.array(wide_limit.fcn_kernel(fit.depth, fit.activation, **fit.scales)(fit.inputs)[0])
    precision = np.linalg.inv(covariance + fit.noise_scale**2 * np.eye(40))
    z = (Y - loc) / scale
    mean, deviation = z - precision @ z / np.diagonal(precision), np.diagonal(precision) ** -0.5
    expected = norm.logpdf(Y, loc + scale * mean, scale * deviation).mean()
    assert limit.summary_["log_density"] == pytest.approx(expected, rel=1e-6)
    known = {
        "method": "limit",
        "structure": "dense",
        "noise_scale": fit.noise_scale,
        "rhat": None,
        "pareto_shape": None,
    }
    assert limit.summary_.items() >= known.items() and limit.summary_["seconds"] > 0
    assert f"Pareto shape {weighted.summary_['pareto_shape']:.2f}" in str(weighted.report_)
    assert abs(weighted.summary_["log_density"] - expected) < 0.3  # of the same data


def test_the_report_says_what_the_posterior_is():
    base = {"method": "stacked", "structure": "dense", "rhat": 1.004, "agrees": True, "pareto_shape": None}
    for change, line in (
        ({}, "draws of chains that agree (R-hat 1.004)"),
        ({"rhat": 1.3, "agrees": False}, "an ensemble of chains that do not agree (R-hat 1.300)"),
        ({"rhat": None}, "draws of a single chain (R-hat unknown)"),
        ({"method": "weighted", "rhat": None, "pareto_shape": 0.4}, "weighted draws (Pareto shape 0.40)"),
        ({"method": "limit"}, "exact given scales and noise, at their mode, of an infinitely wide dense network"),
    ):
        assert posterior_line(base | change) == f"posterior: {line}"


@pytest.mark.fault("estimators/_policy.py", "if log_marginal(found) < before:", "if False:")
@pytest.mark.fault("estimators/_policy.py", "    if np.ptp(x, axis=0).all():  #", "    if True:  #")
@pytest.mark.fault("estimators/_policy.py", "structure=structure, input_scale=by_column", "structure=structure")
def test_a_dense_block_is_tried_where_effects_alone_gain(monkeypatch):
    """And relevances of columns where they are ahead in a dense network: effects alone would have to learn them all."""
    plan = plan_regression(300, 2, 1)
    for gain, of_columns, constant, expected in (
        (5.0, -1.0, 1.0, [("additive", False), ("both", False)]),
        (-5.0, -1.0, 1.0, [("additive", False)]),
        (5.0, -1.0, 0.0, []),
        (5.0, 2.0, 1.0, [("additive", False), ("additive", True), ("both", True)]),
    ):
        seen = []

        def fake(
            x, y, *, structure="dense", depth=1, input_scale=False, gain=gain, of_columns=of_columns, seen=seen, **_
        ):
            seen.extend([(structure, input_scale)] * (structure != "dense"))
            log_marginal = gain * (structure != "dense") + of_columns * input_scale
            row = {"structure": structure, "log_marginal": log_marginal, "activation": "erf"}
            row |= {"input_scale": input_scale, "order": 2, "depth": depth, "log_evidence": 0.0}
            return wide_limit.WideLimitFit("erf", 1, 0.0, 0.1, {"w_std": 1.0}, {}, [row], x, y)

        monkeypatch.setattr(_policy, "fit", fake)
        x = X * np.array([1.0, constant])
        best = _policy.compare_architectures(x, Y, plan, Report("structures"))
        assert seen == expected and best.table[0]["structure"] == ("additive" if gain > 0 and expected else "dense")


@pytest.mark.fault("estimators/_policy.py", "and not run.posterior.agrees", "and False")
def test_chains_that_do_not_agree_are_no_posterior(monkeypatch):
    posterior = SimpleNamespace(function=lambda x: (Y_Z, 0.1 + 0 * Y_Z, 1 + 0 * Y_Z), rhat=1.2, agrees=False)
    monkeypatch.setattr(_policy, "run_chains", lambda *args, **_: Run(posterior, None, 1, args[4]))
    with pytest.warns(
        UserWarning, match=r"no posterior: the chains reached an R-hat of 1\.200, not 1\.01.*; give a larger"
    ):
        model = WideBNNRegressor(plan=plan_regression(40, 2, 1, method="posterior"), random_state=0).fit(X, Y)
    assert model.method_ == "limit" and model.summary_["rhat"] == 1.2 and "no posterior" in str(model.report_)


@pytest.mark.slow
def test_a_sum_of_effects_is_found():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (360, 6))
    function = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3] ** 2
    y = function + 0.01 * random.normal(size=360)
    plan = plan_regression(160, 6, 1, time_budget=60)
    model = WideBNNRegressor(plan=plan, random_state=0).fit(x[:160], y[:160])
    dense = WideBNNRegressor(random_state=0, method="limit", hidden=(50,)).fit(x[:160], y[:160])
    assert model.method_ == "limit" and model.summary_["structure"] in ("additive", "both")
    errors = [np.sqrt(np.mean((one.predict(x[160:]) - function[160:]) ** 2)) for one in (model, dense)]
    assert errors[0] < 0.5 * errors[1] and errors[0] < 0.05
    assert model.predict(x[160:170], return_cov=True)[1].shape == (10, 10)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))


@pytest.mark.fault("estimators/_scoring.py", "pareto_smoothed(-row)", "pareto_smoothed(0 * row)")
def test_draws_are_averaged_as_left_out_rows_ask_for():
    # A normal mean with a flat prior: draws of its posterior, and the predictive density without each row.
    random = np.random.default_rng(0)
    y = random.normal(size=30)
    draws = y.mean() + random.normal(size=20_000) / 30**0.5
    found = loo.averaged(norm.logpdf(y, draws[:, None]))
    others = (y.sum() - y) / 29
    np.testing.assert_allclose(found.by_row, norm.logpdf(y, others, (1 + 1 / 29) ** 0.5), atol=0.02)
    assert found.share_unsure == 0


@pytest.mark.as_compiled
@pytest.mark.fault(
    "estimators/_posteriors.py",
    "return _mixture.log_average(self.by_draw(y))",
    "return np.mean(self.by_draw(y), axis=0)",
)
@pytest.mark.slow
def test_predictions_are_the_mixture_over_draws(weighted):
    rows = (X_NEW - X.mean(axis=0)) / X.std(axis=0)
    mean, variance, noise_variance = weighted._posterior.function(rows)
    mean = Y.mean() + Y.std() * mean[..., 0]
    scale = Y.std() * np.sqrt((variance + noise_variance)[..., 0])
    density = np.mean(norm.pdf(Y_NEW, mean, scale), axis=0)
    np.testing.assert_allclose(weighted.log_density(X_NEW, Y_NEW), np.log(density), rtol=1e-9)
    quantiles = weighted.predict_quantiles(X_NEW, (0.1, 0.5, 0.9))
    levels = [np.mean(norm.cdf(column, mean, scale), axis=0) for column in quantiles.T]
    np.testing.assert_allclose(levels, np.broadcast_to([[0.1], [0.5], [0.9]], (3, 8)), atol=1e-9)
    np.testing.assert_array_equal(weighted.predict_interval(X_NEW, 0.8), quantiles[:, [0, 2]])
    samples = weighted.sample_y(X_NEW, 4000, random_state=0)
    found_mean, deviation = weighted.predict(X_NEW, return_std=True)
    np.testing.assert_allclose(samples.mean(axis=1), found_mean, atol=5 * deviation.max() / 4000**0.5)
    np.testing.assert_allclose(samples.std(axis=1), deviation, rtol=0.1)


@pytest.mark.as_compiled
@pytest.mark.fault(
    "estimators/_regressor.py",
    "mixture.log_density(targets[block])",
    "mixture.log_density(targets[: block.stop - block.start][: len(rows) - block.start])",
)
def test_blocks_of_rows_are_predicted_as_all_are(weighted, monkeypatch):
    def predictions():
        found = weighted.predict_interval(X_NEW, 0.8), weighted.log_density(X_NEW, Y_NEW), weighted.sample_y(X_NEW, 500)
        return *weighted.predict(X_NEW, return_std=True), *found

    *whole, samples = predictions()
    monkeypatch.setattr(_posteriors, "BLOCK", 3)
    *by_blocks, samples_by_blocks = predictions()
    for expected, found in zip(whole, by_blocks, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    # The rows of a sample share a draw, also across blocks.
    mean, variance, noise_variance = weighted._posterior.function((X_NEW - X.mean(axis=0)) / X.std(axis=0))
    mixture = Mixture(mean, variance + noise_variance)
    for blocks, found in (([slice(0, 8)], samples), ([slice(0, 3), slice(3, 6), slice(6, 8)], samples_by_blocks)):
        random = np.random.RandomState(0)
        draw = (random.random_sample(500) * len(mixture.mean)).astype(int)
        for block in blocks:
            mean, variance = mixture.mean[draw, block], mixture.variance[draw, block]
            expected = mean + np.sqrt(variance) * random.standard_normal(mean.shape)
            np.testing.assert_allclose(found[block].T, Y.mean() + Y.std() * expected[..., 0], rtol=1e-9)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_posteriors.py", "key = sha256(x.tobytes()).digest()", "key = bytes(len(x))")
def test_predictions_of_the_same_rows_are_computed_once(weighted, monkeypatch):
    posterior = weighted._posterior
    once = weighted.predict_interval(X_NEW), weighted.log_density(X_NEW, Y_NEW)
    assert not pickle.loads(pickle.dumps(weighted))._posterior._last
    with monkeypatch.context() as patch:
        patch.setattr(posterior, "_function", None)
        again = weighted.predict_interval(X_NEW), weighted.log_density(X_NEW, Y_NEW)
    np.testing.assert_array_equal(np.concatenate(again, axis=None), np.concatenate(once, axis=None))
    assert np.ptp(weighted.predict(X_NEW + 1) - weighted.predict(X_NEW)) > 0
    monkeypatch.setattr(_posteriors, "_MOST_KEPT", 1)
    weighted.predict(X_NEW + 2)
    assert len(posterior._last) == 1


@pytest.mark.fault("estimators/_plan.py", '(seconds - COMPILING["weighted draws"]) / draw', "500")
@pytest.mark.slow
def test_weighted_draws_are_as_many_as_the_budget_pays_for(weighted):
    few = WideBNNRegressor(method="weighted", time_budget=0.01, random_state=0).fit(X, Y)
    for found, expected in ((weighted, 500), (few, 50)):
        assert {len(values) for values in found.draws_.values()} == {expected}
        assert f"{expected} chosen of {10 * expected} draws" in str(found.report_)


@pytest.mark.fault("estimators/_posteriors.py", "[:, :, None] + of_means", "[:, :, None] + 0 * of_means")
def test_covariance_of_draws_has_the_variances_on_its_diagonal(weighted):
    mean, covariance = weighted.predict(X_NEW, return_cov=True)
    rows = (X_NEW - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_array_equal(mean, weighted.predict(X_NEW))
    np.testing.assert_allclose(np.diagonal(covariance), weighted.predict(X_NEW, return_std=True)[1] ** 2, rtol=1e-9)
    # Without the noise, too: the same posterior of the function by another way.
    by_mean, variance, _ = weighted._posterior.function(rows)
    expected = (variance.mean(axis=0) + by_mean.var(axis=0))[:, 0]
    np.testing.assert_allclose(np.diagonal(weighted._posterior.covariance(rows)[..., 0]), expected, rtol=1e-6)


def test_the_report_tells_what_was_decided(weighted):
    text = str(weighted.report_)
    for part in (
        "40 rows, 2 columns; method weighted",
        "log evidence",
        "Pareto shape",
        'predictions are those of "weighted"',
        "seconds",
    ):
        assert part in text
    assert "\nDecision\n" in weighted.report_._repr_html_()
    assert weighted.method_ == "weighted" and weighted.mcmc_ is None and weighted.n_iter_ == 1
    assert weighted.predictive_.draws["hidden.hidden_0.kernel"].shape[0] == 500
    with pytest.raises(ValueError, match='there are no chains to convert: "weighted" predicts'):
        weighted.to_arviz()


def test_precision_is_left_as_it_was(weighted):
    assert not jax.config.jax_enable_x64
    weighted.predict(X_NEW)
    assert not jax.config.jax_enable_x64 and jax.numpy.ones(()).dtype == np.float32


@pytest.mark.slow
def test_predictions_survive_pickling_and_a_process_of_their_own(weighted, tmp_path):
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((weighted, X_NEW)))
    code = f"import pickle; m, x = pickle.load(open({str(path)!r}, 'rb')); print(m.predict(x).tolist())"
    finished = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(eval(finished.stdout), weighted.predict(X_NEW), rtol=1e-6)


def test_several_targets_of_their_own_units(limit):
    both = np.column_stack([Y, -1e8 * Y])
    found = WideBNNRegressor(method="limit", random_state=0).fit(X, both)
    mean, deviation = found.predict(X_NEW, return_std=True)
    np.testing.assert_allclose(mean[:, 1], -1e8 * mean[:, 0], rtol=1e-6)
    np.testing.assert_allclose(deviation[:, 1], 1e8 * deviation[:, 0], rtol=1e-6)
    by_row = norm.logpdf(both[:8], *found.predict(X[:8], return_std=True)).sum(axis=1)
    np.testing.assert_allclose(found.log_density(X[:8], both[:8]), by_row, rtol=1e-6)
    assert found.predict(X_NEW, return_cov=True)[1].shape == (8, 8, 2)
    assert found.predict_interval(X_NEW).shape == (8, 2, 2) and found.sample_y(X_NEW, 3).shape == (8, 2, 3)


@pytest.mark.slow
def test_targets_in_steps_are_told_from_measurements():
    random = np.random.default_rng(0)
    y = random.normal(size=400)
    assert has_steps(np.round(y), 0.5) and has_steps(np.stack([y, np.round(y)], axis=1), 0.5)
    assert not has_steps(y, 1e-3) and not has_steps(np.round(y, 1), 0.5)  # no ties; rounded finely
    with pytest.warns(UserWarning, match="too few for a finite network: the limit predicts; give a larger"):
        marks = WideBNNRegressor(random_state=0, time_budget=1).fit(X, np.round(Y / 7))
    assert "the targets are discrete" in str(marks.report_)


def test_a_budget_that_pays_for_no_weighted_draws_is_kept():
    told = pytest.warns(UserWarning, match=r"0\.5 seconds are too few for a finite network: the limit predicts; give a")
    with told as found:
        model = WideBNNRegressor(random_state=0, time_budget=0.5).fit(X, Y)
    assert model.method_ == "limit" and found[0].filename == __file__


def test_a_far_target_is_told_once_in_its_own_units(recwarn):
    far = Y.copy()
    far[7] = 1e4
    model = WideBNNRegressor(method="limit", random_state=0).fit(X, far)
    (told,) = recwarn
    assert "1 of 40 targets, 1e+04 the farthest, decide the noise" in str(told.message)
    assert told.filename == __file__ and "1e+04 the farthest" in str(model.report_)


def test_a_model_without_a_finite_density_is_worse():
    fine, broken = np.array([-9.0, -8.0, -9.0]), np.array([-1.0, np.nan, -1.0])
    assert loo.is_better(fine, broken) and not loo.is_better(broken, fine)
    gains, level = np.tile([2.0, 3.0, 4.0], 4), np.zeros(12)
    assert loo.is_better(gains, level) and not loo.is_better(np.tile([2.0, -3.0, 4.0], 4), level)
    assert not loo.is_better(gains[:9], level[:9])  # of few rows the standard error is unknown


@pytest.mark.as_compiled
def test_the_limit_has_a_tenth_at_most(monkeypatch):
    for weight, expected in ((0.3, 0.9), (0.95, 0.95)):
        monkeypatch.setattr(loo, "stacking_weight", lambda *_, weight=weight: weight)
        model = WideBNNRegressor(random_state=0, time_budget=100).fit(X[:12], Y[:12])
        assert model.method_ == "stacked" and model._posterior.weight == expected


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_posteriors.py", "* self.limit.covariance(x) + between", "* self.limit.covariance(x)")
@pytest.mark.fault(
    "estimators/_posteriors.py",
    "num_kept = min(round(self.weight * number), number - 1)",
    "num_kept = round((1 - self.weight) * number)",
)
def test_a_stack_is_a_mixture_of_draws_and_limit():
    drawn, limit = (
        WideBNNRegressor(method=method, random_state=0, time_budget=20).fit(X, Y) for method in ("weighted", "limit")
    )
    new, rows = X_NEW, (X_NEW - X.mean(axis=0)) / X.std(axis=0)
    mean, deviation = drawn.predict(new, return_std=True)
    of_limit, spread = limit.predict(new, return_std=True)
    observed = mean + deviation * np.linspace(-1, 1, len(new))
    densities = drawn.log_density(new, observed), limit.log_density(new, observed)
    covariances = [model._posterior.covariance(rows)[..., 0] for model in (drawn, limit)]
    drawn._posterior.stack(limit._posterior, 0.75)
    pooled, total = drawn.predict(new, return_std=True)
    # A quarter of the draws, equally spaced, makes place for the limit.
    center = 0.75 * mean + 0.25 * of_limit
    np.testing.assert_allclose(pooled, center, atol=0.02 * deviation.max())
    variance = 0.75 * (deviation**2 + (mean - center) ** 2) + 0.25 * (spread**2 + (of_limit - center) ** 2)
    np.testing.assert_allclose(total**2, variance, rtol=0.05)
    expected = np.logaddexp(np.log(0.75) + densities[0], np.log(0.25) + densities[1])
    np.testing.assert_allclose(drawn.log_density(new, observed), expected, atol=0.05)
    difference = (mean - of_limit) / drawn._targets.scale
    between = 0.75 * 0.25 * np.multiply.outer(difference, difference)
    expected = 0.75 * covariances[0] + 0.25 * covariances[1] + between
    np.testing.assert_allclose(drawn._posterior.covariance(rows)[..., 0], expected, rtol=1e-8)
    again = pickle.loads(pickle.dumps(drawn))
    np.testing.assert_allclose(again.predict(new), pooled, rtol=1e-9)


@pytest.mark.slow
def test_a_single_chain_with_noise_by_row_is_pickled():
    options = {"method": "chains", "noise": "by_row", "hidden": (4,), "num_chains": 1, "time_budget": 400}
    model = WideBNNRegressor(random_state=0, **options).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_interval(X_NEW), model.predict_interval(X_NEW), rtol=1e-9)
    assert again.to_arviz().posterior.sizes["chain"] == 1 and "a single chain" in str(again.report_)


@pytest.mark.slow
def test_chains_by_default_on_noise_that_grows():
    random = np.random.default_rng(0)
    x = random.uniform(-1.7, 1.7, (150, 1))
    x_test = random.uniform(-1.7, 1.7, (1000, 1))

    def observed(x):
        return np.sin(2 * x[:, 0]) + 0.1 * 10 ** (x[:, 0] / 3.4) * random.normal(size=len(x))

    model = WideBNNRegressor(random_state=0, hidden=(20,), num_chains=2, time_budget=120).fit(x, observed(x))
    y_test = observed(x_test)
    ends = model.predict_interval(x_test, 0.9)
    assert model.method_ == "stacked" and "by row" in str(model.report_) and model.n_iter_ > 400
    assert 0.85 < np.mean((ends[:, 0] < y_test) & (y_test < ends[:, 1])) < 0.95
    one_noise = WideBNNRegressor(random_state=0, method="limit").fit(x, observed(x))
    assert "the limit has one noise for all rows" in str(one_noise.report_)
    assert np.mean(model.log_density(x_test, y_test) - one_noise.log_density(x_test, y_test)) > 0.15
    assert model.to_arviz().posterior.sizes["chain"] == 2
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict(x_test), model.predict(x_test), rtol=1e-9)
