"""Scales for classes, counts and heavy tails: bound and gradient against quadrature, differences and scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from scipy.integrate import quad
from scipy.special import expit, softmax
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import DotProduct

from numpyro_wide import fitted_surrogate, wide_limit
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._fit import Bound
from numpyro_wide.wide_limit._likelihoods import logistic_averages, softmax_averages
from numpyro_wide.wide_limit._observations import Observations
from numpyro_wide.wide_limit._scale_problem import ScaleProblem
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 2))
LOGIT = 3 * np.sin(2 * X[:, 0])
OUTCOMES = (RNG.random(30) < expit(LOGIT)).astype(int)
CLASSES = np.digitize(X[:, 0] + 0.3 * RNG.normal(size=30), [-0.6, 0.5])
COUNTS = RNG.poisson(np.exp(1 + np.sin(2 * X[:, 0])))
# What scipy.stats says of two observations, given their function values along the last axis.
KINDS = {
    "bernoulli": ([1, 0], {}, lambda y, f: scipy.stats.bernoulli.logpmf(y, expit(f))),
    "binomial": ([3, 0], {"total_count": [4, 6]}, lambda y, f: scipy.stats.binom.logpmf(y, [4, 6], expit(f))),
    "poisson": ([4, 0], {}, lambda y, f: scipy.stats.poisson.logpmf(y, np.exp(f))),
    "negative_binomial": (
        [4, 0],
        {"concentration": 1.5},
        lambda y, f: scipy.stats.nbinom.logpmf(y, 1.5, 1.5 / (1.5 + np.exp(f))),
    ),
    "student_t": ([0.4, -0.8], {"df": 4.0, "scale": 0.5}, lambda y, f: scipy.stats.t.logpdf(y, 4.0, f, 0.5)),
}


def bound_of(x, y, likelihood, size=2.0, activation="erf", depth=1, **options):
    with double_precision():
        problem = ScaleProblem.of(activation, depth, np.asarray(x, float), size, False, False)
        return Bound(problem, Observations.of(y, likelihood, options, options.pop("offset", 0.0)))


@parametrize("likelihood", KINDS, rest="slow")
def test_the_bound_is_just_below_the_integral(likelihood):
    """On two rows, by Gauss and Hermite's rule in two dimensions, all constants included."""
    y, options, log_prob = KINDS[likelihood]
    bound = bound_of(X[:2], y, likelihood, **options)
    with double_precision():
        value = -bound(np.zeros(3))[0]
        gram = bound.problem.gram(np.zeros(3))
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    pairs = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    logs = np.sum(log_prob(np.array(y), pairs @ np.linalg.cholesky(gram).T), axis=1)
    shares = np.outer(weights, weights).ravel() / np.sum(weights) ** 2
    exact = np.log(np.sum(shares * np.exp(logs)))
    # That of Student's t is the bound of its scale mixture, which is lower.
    assert exact - (0.25 if likelihood == "student_t" else 0.1) < value < exact + 1e-6


def test_the_bound_of_classes_is_just_below_the_integral():
    """Two rows of three classes, by Sobol's points in six dimensions."""
    bound = bound_of(X[:2], [2, 0], "categorical", num_classes=3)
    with double_precision():
        value = -bound(np.zeros(3))[0]
        root = np.linalg.cholesky(bound.problem.gram(np.zeros(3)))
    normals = scipy.stats.norm.ppf(scipy.stats.qmc.Sobol(6, seed=0).random_base2(16)).reshape(-1, 2, 3)
    probs = softmax(root @ normals, axis=-1)
    exact = np.log(np.mean(probs[:, 0, 2] * probs[:, 1, 0]))
    assert exact - 0.15 < value < exact + 1e-3


@pytest.mark.fault("wide_limit/_variational.py", "- state.alpha.shape[1]", "- 2 * state.alpha.shape[1]")
@parametrize("likelihood", [*KINDS, "categorical"], rest="slow")
def test_the_gradient_is_that_of_differences(likelihood, monkeypatch):
    """The envelope: with its best Gaussian held, the bound moves by the prior alone."""
    monkeypatch.setattr("numpyro_wide.wide_limit._fit._TOLERANCE", 1e-6)
    y = {"bernoulli": OUTCOMES, "categorical": CLASSES, "student_t": LOGIT}.get(likelihood, COUNTS)
    options = {"categorical": {"num_classes": 3}, "binomial": {"total_count": COUNTS + 2}}
    options = options.get(likelihood, KINDS.get(likelihood, ([], {}))[1])
    bound = bound_of(X, y, likelihood, **options)
    at, steps = np.array([0.2, -0.1, 0.3]), 1e-3 * np.eye(3)
    with double_precision():
        gradient = bound(at)[1]
        differences = [(bound(at + step)[0] - bound(at - step)[0]) / 2e-3 for step in steps]
    np.testing.assert_allclose(gradient, differences, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_the_bound_is_near_scikit_learns_laplace_evidence():
    """Of the same kernel; on breast cancer both are within a few hundredths of a nat a row."""
    x, y = load_breast_cancer(return_X_y=True)
    x, y = (x[:80] - x.mean(axis=0)) / x.std(axis=0), y[:80]
    bound = bound_of(x, y, "bernoulli")
    with double_precision():
        value, gram = -bound(np.zeros(3))[0], bound.problem.gram(np.zeros(3))
    # Inputs whose inner products are the kernel.
    features = np.linalg.cholesky(gram + 1e-9 * np.eye(80))
    peer = GaussianProcessClassifier(DotProduct(1e-6, "fixed"), optimizer=None).fit(features, y)
    assert abs(value - peer.log_marginal_likelihood_value_) < 0.02 * 80


@pytest.mark.fault("wide_limit/_likelihoods.py", "~narrow, None] - logistics) /", "~narrow, None] - 0 * logistics) /")
@pytest.mark.parametrize("scale", [0.1, 0.6, 3.0, 50.0])
def test_averages_of_a_logistic_function(scale):
    found = logistic_averages(np.array([0.7]), np.array([scale**2]))
    functions = lambda f: np.logaddexp(0, f), expit, lambda f: expit(f) * expit(-f)
    for value, function in zip(found, functions, strict=True):
        integrand = lambda f, g=function: g(f) * scipy.stats.norm.pdf(f, 0.7, scale)  # noqa: E731
        span = 12 * scale
        expected = quad(integrand, 0.7 - span, 0.7 + span, points=[0.0, 0.7], limit=500)[0]
        np.testing.assert_allclose(value[0], expected, rtol=1e-6)


@pytest.mark.fault("wide_limit/_likelihoods.py", "/ scale[:, None], _FARTHEST), 1", "/ scale[:, None], _FARTHEST), 0.9")
@pytest.mark.parametrize("scale", [1e-6, 0.3, 4.0, 60.0])
def test_averages_of_a_softmax(scale):
    """Against draws in antithetic pairs, and each other: they are derivatives of the first."""
    mean, variance = max(scale, 1.0) * np.array([[0.3, -1.0, 0.9]]), np.array([scale**2])
    found = softmax_averages(mean, variance)
    half = np.random.default_rng(1).normal(size=(200_000, 3))
    logits = mean + scale * np.concatenate([half, -half])
    probs = softmax(logits, axis=1)
    np.testing.assert_allclose(found.probs[0], probs.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(found.probs.sum(), 1.0, rtol=1e-6)
    normaliser = scipy.special.logsumexp(logits, axis=1)
    np.testing.assert_allclose(found.log_normaliser[0], normaliser.mean(), atol=2e-3 * max(scale, 1))
    step = 1e-3 * max(scale, 1.0)
    moved = [softmax_averages(mean + sign * step * np.eye(3), np.tile(variance, 3)) for sign in (1, -1)]
    np.testing.assert_allclose((moved[0][0] - moved[1][0]) / (2 * step), found.probs[0], atol=1e-5)
    np.testing.assert_allclose((moved[0][1] - moved[1][1]) / (2 * step), found.curvature[0], rtol=1e-4, atol=1e-6)
    if scale > 0.1:
        raised, lowered = (softmax_averages(mean, variance * (1 + sign * 1e-3)).log_normaliser for sign in (1, -1))
        half_trace = 0.5 * np.trace(found.curvature[0])
        np.testing.assert_allclose((raised - lowered) / (2e-3 * variance), half_trace, rtol=1e-4)


@pytest.mark.as_compiled
@parametrize(("labels", "likelihood"), [(OUTCOMES, "bernoulli"), (CLASSES, "categorical")], rest="slow")
def test_probabilities_are_averages_over_the_posterior_of_the_logits(labels, likelihood):
    fit = wide_limit.fit(X, labels, likelihood=likelihood, labels="logits", num_restarts=1)
    x_new = RNG.normal(size=(6, 2))
    with double_precision():
        gram = np.asarray(wide_limit.fcn_kernel(1, "erf", **fit.scales)(np.concatenate([X, x_new]))[0])
        options = {"num_classes": 3} if likelihood == "categorical" else {}
        targets, noise = map(np.asarray, fitted_surrogate(labels, likelihood, gram[:30, :30], **options))
        np.testing.assert_allclose(fit.surrogate().targets, targets, rtol=1e-6)
    gain = np.linalg.solve(gram[:30, :30] + np.diag(noise.ravel() ** 2), gram[:30, 30:]).T
    mean, variance = gain @ targets.reshape(30, -1), np.diagonal(gram[30:, 30:] - gain @ gram[:30, 30:])
    draws = mean + np.sqrt(variance)[:, None] * RNG.normal(size=(40_000, *mean.shape))
    expected = expit(draws[..., 0]).mean(axis=0) if likelihood == "bernoulli" else softmax(draws, axis=-1).mean(axis=0)
    np.testing.assert_allclose(fit.predict(x_new), expected, atol=0.01)
    assert fit.noise_scale is None and fit.likelihood == likelihood and "held out" in str(fit)


@parametrize("likelihood", [kind for kind in KINDS if kind != "bernoulli"], rest="slow")
def test_moments_of_observations_are_those_of_draws(likelihood):
    observed = LOGIT + 0.3 * RNG.normal(size=30) if likelihood == "student_t" else np.minimum(COUNTS, 6)
    options = {"binomial": {"total_count": 6}}.get(likelihood, KINDS[likelihood][1])
    fit = wide_limit.fit(X, observed, likelihood=likelihood, num_restarts=1, **options)
    mean, variance = fit.predict(X[:3])
    with double_precision():
        ((of_f, spread),) = fit._moments(X[:3])
    f = of_f[:, 0] + np.sqrt(spread) * RNG.normal(size=(400_000, 3))
    draws = {
        "binomial": lambda: RNG.binomial(6, expit(f)),
        "poisson": lambda: RNG.poisson(np.exp(f)),
        "negative_binomial": lambda: RNG.poisson(np.exp(f) * RNG.gamma(1.5, 1 / 1.5, size=f.shape)),
        "student_t": lambda: f + 0.5 * RNG.standard_t(4.0, size=f.shape),
    }[likelihood]()
    np.testing.assert_allclose(mean, draws.mean(axis=0), rtol=0.02, atol=0.01)
    np.testing.assert_allclose(variance, draws.var(axis=0), rtol=0.1)


@pytest.mark.fault("wide_limit/_fit.py", "score = max(candidates", "score = min(candidates")
@pytest.mark.slow
def test_the_choice_predicts_as_well_as_the_best_of_a_grid_of_readouts():
    x, y = load_wine(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    x, y = ((x - x.mean(axis=0)) / x.std(axis=0))[rows], y[rows]
    fit = wide_limit.fit(x[:100], y[:100], likelihood="categorical", labels="logits", activation="relu", num_restarts=1)

    def score(readout):
        probs = replace(fit, scales=fit.scales | {"readout_w_std": readout}).predict(x[100:])
        return -np.mean(np.log(probs[np.arange(78), y[100:]]))

    chosen = fit.scales["readout_w_std"]
    assert score(chosen) < min(score(size * 2**0.5) for size in (1, 3, 10, 30, 100, 300)) + 0.02


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_label_regression.py", "np.flatnonzero(folds != fold),", "np.flatnonzero(folds >= 0),")
@parametrize(("labels", "likelihood"), [(OUTCOMES, "bernoulli"), (CLASSES, "categorical")], rest="slow")
def test_labels_left_out_are_as_probable_as_by_refits(labels, likelihood):
    fit = wide_limit.fit(X, labels, likelihood=likelihood, labels="logits", num_restarts=1, progress_bar=False)
    folds = np.empty(30, int)
    folds[np.argsort(labels, kind="stable")] = np.tile(np.arange(10), 3)  # of every class about a tenth
    for fold in range(10):
        out = folds == fold
        one = replace(fit, inputs=fit.inputs[~out], targets=fit.targets[~out])
        probs = one.predict(X[out])
        probs = probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)
        np.testing.assert_allclose(fit.held_out[out], np.log(probs[np.arange(3), labels[out]]), atol=1e-6)


def test_several_outputs_and_one_row():
    outputs = np.stack([OUTCOMES, 1 - OUTCOMES], axis=1)
    form = {"likelihood": "bernoulli", "labels": "logits", "num_restarts": 1, "progress_bar": False}
    fit = wide_limit.fit(X, outputs, **form)
    assert fit.predict(X).shape == (30, 2) and fit.held_out is None
    for labels in ("codes", "logits", "auto"):
        with pytest.raises(ValueError, match="at least two rows"):
            wide_limit.fit(X[:1], OUTCOMES[:1], likelihood="bernoulli", labels=labels)


@pytest.mark.fault("wide_limit/_fit.py", "return max(candidates", "return min(candidates")
@pytest.mark.slow
def test_codes_or_logits_by_labels_left_out():
    form = {"activation": "erf", "depth": 1, "input_scale": False, "num_restarts": 1}
    codes = wide_limit.fit(X, OUTCOMES, likelihood="bernoulli", **form)
    logits = wide_limit.fit(X, OUTCOMES, likelihood="categorical", labels="logits", **form)
    better = max(codes, logits, key=lambda fit: fit.held_out.mean())
    found = wide_limit.fit(X, OUTCOMES, likelihood="bernoulli", labels="auto", **form)
    assert found.predict(X).shape == (30, 2)
    assert found.scales == better.scales and abs(codes.held_out.mean() - logits.held_out.mean()) > 1e-3


@pytest.mark.slow
def test_separable_labels_one_class_and_missing_classes_have_probabilities():
    separable = (X[:, 0] > 0).astype(float)
    options = {"labels": "logits", "num_restarts": 1}
    fit = wide_limit.fit(X, separable, likelihood="bernoulli", **options)
    probs = fit.predict(np.array([[2.0, 0.0], [-2.0, 0.0]]))
    assert 0.9 < probs[0] < 1 and 0 < probs[1] < 0.1
    assert np.all(wide_limit.fit(X, 0 * CLASSES, likelihood="bernoulli", **options).predict(X) < 0.2)
    probs = wide_limit.fit(X, CLASSES, likelihood="categorical", num_classes=5, **options).predict(X)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-9)
    assert np.all((probs[:, 3:] > 0) & (probs[:, 3:] < 0.2))
    np.testing.assert_allclose(probs[:, 3], probs[:, 4], rtol=1e-6)  # nothing tells them apart


def test_counts_of_a_million():
    counts = RNG.poisson(1e6 * np.exp(0.1 * X[:, 0]))
    fit = wide_limit.fit(X, counts, likelihood="poisson", offset=np.log(1e6), num_restarts=1)
    mean, variance = fit.predict(X)
    np.testing.assert_allclose(mean, 1e6 * np.exp(0.1 * X[:, 0]), rtol=5e-3)
    assert np.all(variance > 0.9 * mean)


@pytest.mark.slow
def test_parameters_that_differ_by_row_are_asked_for_again():
    counts, trials = np.minimum(COUNTS, 4), 4 + np.arange(30) % 3
    fit = wide_limit.fit(X, counts, likelihood="binomial", total_count=trials, num_restarts=1)
    with pytest.raises(ValueError, match="'total_count' differ by row in the fit; give those of the new rows"):
        fit.predict(X[:2])
    one, two = fit.predict(X[:2], total_count=1)[0], fit.predict(X[:2], total_count=[2, 2])[0]
    np.testing.assert_allclose(2 * one, two)
    for options, message in (({"df": 3.0}, "'df' must not be given"), ({"with_noise": True}, "drop it")):
        with pytest.raises(ValueError, match=message):
            fit.predict(X[:2], total_count=1, **options)
    normal = wide_limit.fit(X, LOGIT, num_restarts=1)
    with pytest.raises(ValueError, match="'offset' must not be given"):
        normal.predict(X[:2], offset=1.0)
    with pytest.raises(ValueError, match="needs no surrogate"):
        normal.surrogate()
