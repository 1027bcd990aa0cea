"""Regression on codes of classes: leave-one-out by refitting, calibration by quadrature, known probabilities."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import approx_fprime, minimize
from scipy.special import log_softmax, softmax
from scipy.stats import norm

from numpyro_wide import nn, wide_limit
from numpyro_wide.diagnostics import classification_scores
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._label_regression import Calibration, LabelScore, codes_of
from numpyro_wide.wide_limit._scale_problem import ScaleProblem
from tests.compilations import compilations
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 2))
LABELS = np.digitize(X[:, 0] + 0.3 * RNG.normal(size=30), [-0.6, 0.5])
QUICK = {"activation": "erf", "depth": 1, "input_scale": False}


def covariance_of(num_rows=12):
    root = RNG.normal(size=(num_rows, num_rows))
    return root @ root.T / num_rows + 0.1 * np.eye(num_rows)


@pytest.mark.fault("wide_limit/_gp.py", "- self.weights / self.left_out_precision[:, None]", "- self.weights")
def test_leave_one_out_is_that_of_refitting_without_each_row():
    covariance, codes = covariance_of(), codes_of(LABELS[:12], 3)
    found = Conditioned(covariance, codes)
    for row in range(12):
        others = np.arange(12) != row
        gain = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, row])
        np.testing.assert_allclose(found.left_out[row], gain @ codes[others], rtol=1e-10, atol=1e-12)
        variance = covariance[row, row] - gain @ covariance[others, row]
        np.testing.assert_allclose(1 / found.left_out_precision[row], variance, rtol=1e-10)


@pytest.mark.fault("wide_limit/_gp.py", "+ weights_term.T) - precision_term", "+ weights_term.T)")
@parametrize("by_input", [False, True], rest="slow")
def test_the_gradient_is_that_of_differences(by_input):
    with double_precision():
        score = LabelScore(ScaleProblem.of("erf", 2, X, 1.0, by_input, True), LABELS, 3)
        at = 0.3 * RNG.normal(size=len(score.problem.spreads))
        differences = approx_fprime(at, lambda logarithms: score(logarithms)[0], 1e-5)
        np.testing.assert_allclose(score(at)[1], differences, rtol=1e-3, atol=2e-3)


@pytest.mark.fault(
    "wide_limit/_label_regression.py",
    "spread = min(prior.spread[0], 1 / np.sqrt(max(curvature, 1e-12)))",
    "spread = 1e-6",
)
def test_the_slope_is_averaged_over_its_posterior():
    """On two rows, where the posterior is wide, by quadrature."""
    values, labels = np.array([[0.5, -0.2, -0.3], [0.1, 0.3, -0.4]]), np.array([0, 1])
    found = Calibration.of(values, labels)

    def posterior(log_slope):
        logits = np.exp(log_slope) * values + found.shift
        return norm.pdf(log_slope, np.log(5), 0.5) * np.exp(log_softmax(logits, axis=1)[[0, 1], labels].sum())

    total = quad(posterior, -1, 5)[0]
    expected = [
        quad(lambda u, c=c: posterior(u) * softmax(np.exp(u) * values[0] + found.shift)[c], -1, 5)[0] / total
        for c in range(3)
    ]
    np.testing.assert_allclose(found(values)[0], expected, atol=2e-4)


@pytest.mark.fault(
    "wide_limit/_label_regression.py",
    "residual = np.exp(by_draw - by_row)[..., None] * residual",
    "residual = residual / len(values)",
)
def test_the_mode_is_that_of_another_optimiser():
    """With draws: each row's probability is an average over them."""
    values, labels = RNG.normal(size=(4, 20, 3)), RNG.integers(0, 3, 20)

    def loss(parameters):
        probs = softmax(np.exp(parameters[0]) * values + parameters[1:], axis=-1)
        by_row = np.mean(probs[:, np.arange(20), labels], axis=0)
        prior = norm.logpdf(parameters[0], np.log(5), 0.5) + norm.logpdf(parameters[1:]).sum()
        return -np.sum(np.log(by_row)) - prior

    expected = minimize(loss, np.append(np.log(5), np.zeros(3)), method="BFGS").x
    found = Calibration.of(values, labels)
    np.testing.assert_allclose(found.shift, expected[1:], atol=2e-3)
    np.testing.assert_allclose(np.log(found.slopes[len(found.slopes) // 2]), expected[0], atol=2e-3)


@pytest.mark.fault("wide_limit/_label_regression.py", "self.slope), self.shift)", "self.slope), 0 * self.shift)")
def test_a_calibration_is_the_prior_of_another():
    values, labels = RNG.normal(size=(20, 3)), RNG.integers(0, 3, 20)
    first = Calibration.of(RNG.normal(size=(40, 3)), RNG.integers(0, 3, 40))
    close, wide = (Calibration.of(values, labels, first.as_prior(spread)) for spread in (1e-3, 10.0))
    np.testing.assert_allclose(close(values), first(values), atol=0.05)
    np.testing.assert_allclose(close.shift, first.shift, atol=1e-3)
    np.testing.assert_allclose(close.slopes[8], first.slopes[8], rtol=1e-3)
    assert np.abs(wide.shift - first.shift).max() > 0.1


def test_predictions_are_the_calibrated_dense_regression():
    fit = wide_limit.fit(X, LABELS, likelihood="categorical", **QUICK)
    x_new = RNG.normal(size=(6, 2))
    with double_precision():
        gram = np.asarray(wide_limit.fcn_kernel(1, "erf", **fit.scales)(np.concatenate([X, x_new]))[0])
    noisy = gram[:30, :30] + fit.noise_scale**2 * np.eye(30)
    codes = np.eye(3)[LABELS] - 1 / 3
    mean = gram[30:, :30] @ np.linalg.solve(noisy, codes)
    expected = sum(
        w * softmax(s * mean + fit.calibration.shift, axis=1)
        for s, w in zip(fit.calibration.slopes, fit.calibration.weights, strict=True)
    )
    np.testing.assert_allclose(fit.predict(x_new), expected, rtol=1e-6, atol=1e-9)
    assert fit.noise_scale > 0 and fit.held_out.shape == (30,) and "held out se" in str(fit)
    # Function and noise have the size of the residuals, and the evidence is of the codes.
    process = Conditioned(noisy, codes)
    squares = (codes - process.left_out) ** 2 * process.left_out_precision[:, None]
    np.testing.assert_allclose(np.mean(squares), 1.0, rtol=1e-6)
    expected = sum(wide_limit.gp_log_evidence(gram[:30, :30], column, fit.noise_scale) for column in codes.T)
    np.testing.assert_allclose(fit.log_evidence, expected, rtol=1e-3)


def test_classes_in_another_order_have_the_same_probabilities():
    order = np.array([2, 0, 1])
    one = wide_limit.fit(X, LABELS, likelihood="categorical", **QUICK)
    other = wide_limit.fit(X, order[LABELS], likelihood="categorical", **QUICK)
    np.testing.assert_allclose(other.predict(X)[:, order], one.predict(X), atol=1e-3)
    np.testing.assert_allclose(one.predict(X).sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.slow
def test_probabilities_that_are_known_are_found():
    """Labels drawn from a softmax: the error of calibration is that of the sample, and the score near the best."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5000, 2))
    probs = softmax(np.column_stack([2 * np.sin(2 * x[:, 0]), 1.5 * x[:, 1], np.zeros(5000)]), axis=1)
    labels = (probs.cumsum(axis=1) < rng.random((5000, 1))).sum(axis=1)
    fit = wide_limit.fit(x[:1000], labels[:1000], likelihood="categorical", **QUICK)
    scores = classification_scores(labels[1000:], fit.predict(x[1000:]))
    best = classification_scores(labels[1000:], probs[1000:])
    assert scores["negative_log_likelihood"] < best["negative_log_likelihood"] + 0.03
    assert scores["expected_calibration_error"] < 0.03
    held_out = -fit.held_out.mean()
    assert abs(held_out - scores["negative_log_likelihood"]) < 3 * fit.held_out.std() / np.sqrt(1000)


@pytest.mark.fault("wide_limit/_label_regression.py", "logarithms = _with_best_noise(score, logarithms, gram)", "pass")
def test_more_rows_than_are_compared(monkeypatch):
    """Scales of some rows, noise and calibration of all."""
    monkeypatch.setattr("numpyro_wide.wide_limit._fit._MOST_COMPARED", 60)
    x = np.random.default_rng(3).normal(size=(200, 2))
    labels = (x[:, 0] + 0.5 * x[:, 1] ** 2 > 0.3).astype(int)
    fit = wide_limit.fit(x, labels, likelihood="bernoulli", **QUICK)
    assert fit.held_out.shape == (200,) and fit.predict(x[:3]).shape == (3, 2)
    with double_precision():
        gram = np.asarray(wide_limit.fcn_kernel(1, "erf", **fit.scales)(x)[0])
    codes = codes_of(labels, 2)

    def score(multiple):
        mean = Conditioned(gram, codes, (multiple * fit.noise_scale) ** 2).left_out
        return np.mean(np.log(Calibration.of(mean, labels)(mean)[np.arange(200), labels]))

    assert score(1.0) == pytest.approx(fit.held_out.mean(), abs=1e-4)
    assert score(1.0) > max(score(0.3), score(3.0))


@pytest.mark.slow
def test_few_rows_unbalanced_and_missing_classes():
    rare = np.zeros(30, int)
    rare[:2] = 1
    probs = wide_limit.fit(X, rare, likelihood="bernoulli", **QUICK).predict(X)
    assert np.isfinite(probs).all() and probs[:, 1].mean() < 0.3
    probs = wide_limit.fit(X, 0 * LABELS, likelihood="bernoulli", **QUICK).predict(X)  # one class alone
    assert np.all(probs[:, 1] < 0.2)
    probs = wide_limit.fit(X, LABELS, likelihood="categorical", num_classes=5, **QUICK).predict(X)
    assert np.all((probs[:, 3:] > 0) & (probs[:, 3:] < 0.2))
    np.testing.assert_allclose(probs[:, 3], probs[:, 4], rtol=1e-3)  # nothing tells them apart
    probs = wide_limit.fit(X[:4], [0, 1, 0, 1], likelihood="bernoulli").predict(X)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.slow
def test_images_by_a_convolutional_network():
    images = np.random.default_rng(4).normal(size=(24, 6, 6, 1))
    labels = (images[:, 2:4, 2:4].mean(axis=(1, 2, 3)) > 0).astype(int)
    network = nn.CNN(depth=1, width=4, activation="relu")
    fit = wide_limit.fit(images, labels, likelihood="bernoulli", network=network)
    assert fit.predict(images[:5]).shape == (5, 2) and fit.network.w_std is not None


@pytest.mark.slow
def test_a_second_fit_of_other_rows_compiles_nothing():
    options = {"likelihood": "categorical", "activation": "tanh", "depth": 1}
    with compilations() as first:
        wide_limit.fit(X[:24], LABELS[:24], **options)
    with compilations() as second:
        wide_limit.fit(2 * np.column_stack([X, X**2])[:18], LABELS[:18], **options)
    assert first and not second


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (np.column_stack([LABELS > 0, LABELS > 1]), {"likelihood": "bernoulli"}, r"labels must have shape \(n,\)"),
        (LABELS, {"likelihood": "categorical", "offset": 1.0}, "an offset is of logits"),
        (LABELS, {"likelihood": "categorical", "labels": "one-hot"}, "labels must be one of"),
        (LABELS + 0.5, {"likelihood": "categorical", "num_classes": 4}, "whole numbers"),
        (X[:, 0], {"labels": "logits"}, "'labels' must not be given"),
    ],
)
def test_mistakes(y, options, message):
    with pytest.raises(ValueError, match=message):
        wide_limit.fit(X, y, **options)


def test_what_probabilities_do_not_take():
    fit = wide_limit.fit(X, LABELS, likelihood="categorical", **QUICK)
    with pytest.raises(ValueError, match="'with_noise' must not be given where the likelihood is 'categorical'"):
        fit.predict(X[:2], with_noise=True)
    with pytest.raises(ValueError, match="needs no surrogate"):
        fit.surrogate()


@pytest.mark.slow
def test_copies_that_stay_in_are_told():
    x, labels = np.tile(X, (2, 1)), np.tile(LABELS, 2)
    with pytest.warns(UserWarning, match="30 of 60 rows repeat others, labels included"):
        wide_limit.fit(x, labels, likelihood="categorical", **QUICK)


@pytest.mark.fault("wide_limit/_label_regression.py", "if len(labels) <= FEW_LABELS:", "if len(labels) <= 0:")
@pytest.mark.slow
def test_few_labels_that_say_nothing_are_not_believed():
    """Coin flips: scales that fit twelve of them gave a log loss of 2.2, where log 2 is the best."""
    random = np.random.default_rng(0)
    x, labels = random.normal(size=(12, 4)), np.arange(12) % 2
    x_new, labels_new = random.normal(size=(300, 4)), random.integers(0, 2, 300)
    fit = wide_limit.fit(x, labels, likelihood="bernoulli")
    log_loss = -np.log(fit.predict(x_new)[np.arange(300), labels_new]).mean()
    assert log_loss < 0.95 and -fit.held_out.mean() > 0.6
