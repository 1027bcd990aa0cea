"""The classifier's probabilities, held to SciPy's quadrature, and to what labels there are."""

import pickle

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, softmax
from scipy.stats import norm

from numpyro_wide import wide_limit
from numpyro_wide.estimators import WideBNNClassifier
from numpyro_wide.estimators._class_limit import ClassLimit, ClassScales, _averaged
from numpyro_wide.machine import double_precision

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(45, 2))
WORDS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0] + 0.2 * RANDOM.normal(size=45), [-0.5, 0.5])]


def test_probabilities_are_averages_over_the_logits():
    found = _averaged(np.array([[0.7]]), np.array([4.0]))[0, 1]
    expected = quad(lambda logit: expit(logit) * norm.pdf(logit, 0.7, 2.0), -20, 20)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    mean = np.array([[0.3, -1.0, 2.0]])
    draws = mean + 1.5 * RANDOM.normal(size=(200_000, 3))
    np.testing.assert_allclose(_averaged(mean, np.array([2.25]))[0], softmax(draws, axis=1).mean(0), atol=0.02)


def test_logits_are_those_of_a_gaussian_process_of_the_surrogate():
    labels = (X[:, 0] > 0).astype(int)
    limit = ClassLimit.fit(ClassScales("erf", 1, 10.0), X, labels, 2)
    x_new = RANDOM.normal(size=(5, 2))
    with double_precision():
        kernel = wide_limit.fcn_kernel(1, "erf", **limit.scales.keywords())
        gram = np.asarray(kernel(np.concatenate([X, x_new]))[0])
    gain = np.linalg.solve(gram[:45, :45] + np.diag(limit.noise_variance), gram[:45, 45:]).T
    mean, variance = limit.logits(x_new)
    np.testing.assert_allclose(mean, gain @ limit.targets, rtol=1e-6)
    np.testing.assert_allclose(variance, np.diagonal(gram[45:, 45:] - gain @ gram[:45, 45:]), rtol=1e-5)


def test_words_for_labels_and_what_is_told():
    model = WideBNNClassifier(random_state=0).fit(X, WORDS)
    assert model.classes_.tolist() == ["high", "low", "middle"] and model.score(X, WORDS) > 0.8
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(probs))
    assert model.method_ == "limit" and "readout scale" in str(model.report_) and "high: " in str(model.report_)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), probs)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [WORDS, X[:, 0] > 0], ids=["three", "two"])
def test_chains(labels):
    model = WideBNNClassifier(method="chains", hidden=(20,), random_state=0, num_chains=2).fit(X, labels)
    limit = WideBNNClassifier(method="limit", random_state=0).fit(X, labels)
    assert model.method_ == "chains" and "R-hat" in str(model.report_) and model.score(X, labels) > 0.8
    # Both average over the same posterior but for the width of the network and the surrogate's approximation.
    assert np.abs(model.predict_proba(X) - limit.predict_proba(X)).mean() < 0.1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X), rtol=1e-9)
    assert model.predictive_.draws["readout_base"].shape[0] == len(model.draws_["readout_base"])
