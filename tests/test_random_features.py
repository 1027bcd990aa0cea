"""Regression on random features, against dense linear algebra in NumPy and the prior of the network."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.special import erf, logsumexp
from scipy.stats import multivariate_normal, norm

from numpyro_wide import wide_limit
from numpyro_wide.linear_gaussian import _row_blocks as blocked_problem
from numpyro_wide.nn import FCN
from numpyro_wide.wide_limit import fit_random_features
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X, X_NEW = RNG.normal(size=(300, 2)), RNG.normal(size=(20, 2))
Y, Y_NEW = (np.sin(2 * x[:, 0]) + 0.2 * RNG.normal(size=len(x)) for x in (X, X_NEW))
QUIET = {"progress_bar": False, "block_size": 64, "num_draws": 5, "width": 30}


@functools.cache
def scales(num_rows=50):
    return wide_limit.fit(X[:num_rows], Y[:num_rows], num_restarts=1, input_scale=True)


@functools.cache
def found(weighted=False):
    return fit_random_features(X, Y, fit=scales(), weighted=weighted, **QUIET)


def features(fitted, draw, x):
    """Features of a draw, in NumPy (MATH.md, equation of the kernels)."""
    fit, weights = fitted.fit, fitted.predictive.draws
    w, b = (np.asarray(weights[f"hidden.hidden_0.{name}"][draw]) for name in ("kernel", "bias"))
    inner = fit.scales["w_std"][0] / np.sqrt(2) * (x * fit.scales["input_scale"]) @ w + fit.scales["b_std"] * b
    return fit.scales["readout_w_std"] / np.sqrt(len(b)) * erf(inner)


def by_draw(fitted, x_new):
    """Means, variances of the function and log evidences, each from dense matrices."""
    rows = []
    for draw in range(5):
        train, test = features(fitted, draw, X), features(fitted, draw, x_new)
        covariance = train @ train.T + fitted.fit.noise_scale**2 * np.eye(len(X))
        gain = np.linalg.solve(covariance, train @ test.T).T
        variance = np.sum(test**2, axis=1) - np.sum(gain * (test @ train.T), axis=1)
        rows.append((gain @ Y, variance, multivariate_normal(np.zeros(len(X)), covariance).logpdf(Y)))
    return map(np.array, zip(*rows, strict=True))


@pytest.mark.as_compiled
@pytest.mark.fault("_random_features.py", "mean, variance, self.weights)", "mean, variance)")
@pytest.mark.fault("_random_features.py", "_mixture.log_average(by_row, self.weights)", "_mixture.log_average(by_row)")
@parametrize("weighted", [False, True], rest="slow")
def test_predictions_are_the_mixture_of_dense_posteriors(weighted):
    fitted = found(weighted)
    means, variances, log_evidences = by_draw(fitted, X_NEW)
    np.testing.assert_allclose(fitted.log_evidence, log_evidences, rtol=1e-8)
    weights = np.exp(log_evidences - logsumexp(log_evidences)) if weighted else np.full(5, 0.2)
    mean, variance = fitted.predict(X_NEW)
    np.testing.assert_allclose(mean, weights @ means, rtol=1e-6)
    np.testing.assert_allclose(variance, weights @ (variances + means**2) - (weights @ means) ** 2, rtol=1e-5)
    noisy = fitted.predict(X_NEW, with_noise=True)[1]
    np.testing.assert_allclose(noisy, variance + fitted.fit.noise_scale**2, rtol=1e-10)
    densities = norm(means, np.sqrt(variances + fitted.fit.noise_scale**2)).pdf(Y_NEW)
    np.testing.assert_allclose(fitted.log_density(X_NEW, Y_NEW), np.log(weights @ densities), rtol=1e-6)


@pytest.mark.slow
def test_hidden_weights_are_those_of_the_networks_prior():
    drawn = fit_random_features(X, Y, fit=scales(), **QUIET | {"num_draws": 20, "width": 200}).predictive.draws
    assert sorted(drawn) == ["hidden.hidden_0.bias", "hidden.hidden_0.kernel"]
    for values in drawn.values():
        values = np.asarray(values)
        assert abs(values.mean()) < 4 / np.sqrt(values.size) and abs(values.var() - 1) < 4 * np.sqrt(2 / values.size)
    kernel = np.mean([features(found(), draw, X_NEW) @ features(found(), draw, X_NEW).T for draw in range(5)], axis=0)
    limit = wide_limit.fcn_kernel(1, "erf", **scales().scales)(X_NEW)[0]
    assert np.abs(kernel - limit).max() < 0.5 * np.abs(limit).max()  # 150 features


@pytest.mark.slow
def test_many_test_rows_go_by_blocks(monkeypatch):
    whole = found().predict(X)
    monkeypatch.setattr("numpyro_wide._random_features._TEST_ROWS", 128)  # which does not divide 300
    for part, expected in zip(found().predict(X), whole, strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-9)
    assert found().log_density(X, Y).shape == (300,)


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_predictive.py", "<= _MOST_KEPT", "< 0")
def test_rows_are_summed_over_once(monkeypatch):
    calls = []
    sums = "numpyro_wide.linear_gaussian._row_blocks.sums_by_blocks"
    original = blocked_problem.sums_by_blocks
    monkeypatch.setattr(sums, lambda *args: calls.append(1) or original(*args))
    fitted = fit_random_features(X[:200], Y[:200], fit=scales(), **QUIET)
    traced = len(calls)
    assert traced > 0
    fitted.predict(X_NEW)
    fitted.log_density(X_NEW, Y_NEW)
    assert len(calls) == traced


@pytest.mark.slow
def test_outputs_share_scales_and_architectures_are_compared():
    y = np.stack([Y, -2 * Y], axis=1)
    fitted = fit_random_features(X, y, num_rows=40, activation=("erf", "relu"), input_scale=False, **QUIET)
    assert len(fitted.fit.table) == 2 and fitted.fit.inputs.shape == (40, 2)
    mean, variance = fitted.predict(X_NEW)
    assert mean.shape == variance.shape == (20, 2)
    np.testing.assert_allclose(mean[:, 1], -2 * mean[:, 0], rtol=1e-6)
    assert fitted.log_density(X_NEW, np.zeros((20, 2))).shape == (20,)


@pytest.mark.fault("_random_features.py", "np.log(squares) - digamma(half)", "np.log(squares) - 3 * digamma(half)")
@pytest.mark.fault("_random_features.py", "squares * np.exp(-mean) - 1", "squares * np.exp(-mean)")
@pytest.mark.fault("_random_features.py", "fit, targets, noise_scale), log", "fit, targets, fit.noise_scale), log")
@parametrize("outputs", [(), (2,)], rest="slow")
@pytest.mark.slow
def test_noise_by_row_is_that_of_the_rows(outputs):
    """Against the law that the rows were drawn from."""
    rng = np.random.default_rng(1)
    x, x_new = rng.uniform(-1.7, 1.7, size=(2000, 2)), rng.uniform(-1.5, 1.5, size=(1000, 2))

    def law(x):
        mean = np.sin(2 * x[:, 0])
        return mean.reshape(-1, *(1 for _ in outputs)) * np.ones(outputs), 0.3 * np.exp(0.8 * x[:, 1])

    def drawn(x):
        mean, noise = law(x)
        return mean + noise.reshape(-1, *(1 for _ in outputs)) * rng.normal(size=mean.shape)

    settings = {"activation": "erf", "num_rows": 300, "width": 64, "num_draws": 4, "progress_bar": False}
    fitted = fit_random_features(x, drawn(x), noise="by_row", **settings)
    (mean, noise), y_new = law(x_new), drawn(x_new)
    errors = np.log(fitted.noise_scale(x_new) / noise)
    assert errors.shape == (1000,) and abs(errors.mean()) < 0.06 and errors.std() < 0.12
    by_truth = norm(mean, noise.reshape(-1, *(1 for _ in outputs))).logpdf(y_new).reshape(1000, -1).sum(axis=1)
    loss = by_truth - fitted.log_density(x_new, y_new)
    assert loss.mean() < 0.03 * mean[0].size
    variance, with_noise = (fitted.predict(x_new, with_noise=noisy)[1] for noisy in (False, True))
    square = fitted.noise_scale(x_new).reshape(-1, *(1 for _ in outputs)) ** 2
    np.testing.assert_allclose(with_noise - variance, np.broadcast_to(square, variance.shape), rtol=1e-8)
    # Rows count by their noise: the function is known best where that is small.
    is_noisy = noise > np.median(noise)
    assert variance[is_noisy].mean() > 3 * variance[~is_noisy].mean()


@pytest.mark.fault("_random_features.py", "few_draws), targets) /", "few_draws), targets) + 0 *")
@pytest.mark.fault("_random_features.py", "return self.fit.noise_scale * np.exp(", "return np.exp(")
@pytest.mark.slow
def test_noise_by_row_is_in_the_units_of_the_targets():
    """In units a thousand times as large the same noise is a thousandth."""
    settings = QUIET | {"num_draws": 2, "noise": "by_row", "activation": "erf", "input_scale": False, "num_rows": 50}
    fit, noise = scales(), []
    for unit in (1.0, 1e-3):
        sizes = {"readout_w_std": unit * fit.scales["readout_w_std"]}
        changes = {"targets": unit * fit.targets, "noise_scale": unit * fit.noise_scale}
        in_units = replace(fit, scales=fit.scales | sizes, **changes)
        noise.append(fit_random_features(X, unit * Y, fit=in_units, **settings).noise_scale(X_NEW))
    np.testing.assert_allclose(noise[1], 1e-3 * noise[0], rtol=1e-3)
    assert abs(np.log(noise[0] / 0.2)).max() < 0.7


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fit_random_features(X[:, 0], Y), ValueError, r"x must be \(n, d_in\) .* got \(300,\)"),
        (lambda: fit_random_features(X, Y[1:]), ValueError, r"same rows, but got \(300, 2\) and \(299,\)"),
        (lambda: fit_random_features(X, Y, fit=3), TypeError, "fit must be the result of wide_limit.fit, but is"),
        (lambda: fit_random_features(X[:, :1], Y, fit=scales()), ValueError, r"fit must be of inputs .* \(2,\)"),
        (lambda: fit_random_features(X, Y, fit=scales(), width=0), ValueError, "width must be a whole number"),
        (lambda: fit_random_features(np.array([["a"]]), Y), TypeError, "x must hold real numbers"),
        (lambda: found().predict(X[:, 0]), ValueError, r"x_new must have rows of shape \(2,\)"),
        (lambda: found().predict(X[:0]), ValueError, "x_new is empty"),
        (lambda: found().log_density(X, Y[1:]), ValueError, r"y_new must have shape \(300,\)"),
        (lambda: jax.jit(lambda x: fit_random_features(x, Y))(X), TypeError, "fit_random_features chooses by numbers"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_networks_that_are_not_fully_connected_are_refused():
    fit = replace(scales(), network=FCN(1, 5))
    with pytest.raises(ValueError, match="fit must be of fully connected networks"):
        fit_random_features(X, Y, fit=fit)


def test_nan_in_the_millionth_row_is_found_and_said_where():
    x = np.ones((10**6, 1), "f")
    x[-1] = np.nan
    with pytest.raises(ValueError, match="x must not contain NaN, but 1 of its entries do, the first in row 999999"):
        fit_random_features(x, x[:, 0])
