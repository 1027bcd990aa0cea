"""The classifier's probabilities: the limit's, or averages over chains, calibrated by leave-one-out."""

import pickle

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm

from numpyro_wide import wide_limit
from numpyro_wide.estimators import WideBNNClassifier
from numpyro_wide.estimators._classifier import DrawnClasses
from numpyro_wide.estimators._posteriors import Network

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(45, 2))
WORDS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0] + 0.2 * RANDOM.normal(size=45), [-0.5, 0.5])]


def test_the_fit_is_a_limit_of_its_labels():
    model = WideBNNClassifier(method="limit", random_state=0).fit(X, X[:, 0] > 0)
    assert isinstance(model.fit_, wide_limit.WideLimitFit) and model.fit_.likelihood == "bernoulli"
    inputs = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(model.predict_proba(X), model.fit_.predict(inputs), rtol=1e-9)


def test_words_for_labels_and_what_is_told():
    model = WideBNNClassifier(method="limit", random_state=0).fit(X, WORDS)
    assert model.classes_.tolist() == ["high", "low", "middle"] and model.score(X, WORDS) > 0.8
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(probs))
    assert model.method_ == "limit" and "held out" in str(model.report_) and "high: " in str(model.report_)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), probs)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [WORDS, X[:, 0] > 0], ids=["three", "two"])
def test_chains(labels):
    model = WideBNNClassifier(method="chains", hidden=(20,), random_state=0, num_chains=2).fit(X, labels)
    limit = WideBNNClassifier(method="limit", hidden=(20,), random_state=0).fit(X, labels)
    assert model.method_ == "chains" and "R-hat" in str(model.report_) and model.score(X, labels) > 0.8
    # Both average over the same posterior but for the width of the network.
    assert np.abs(model.predict_proba(X) - limit.predict_proba(X)).mean() < 0.1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X), rtol=1e-9)
    assert "chains minus limit" in str(model.report_)


def test_leave_one_out_of_draws_is_that_of_dense_algebra():
    """A draw weighs for a row by the inverse of the density of its code there, given all other rows."""
    x, labels = X[:8], (X[:8, 0] > 0).astype(int)
    codes, noise = np.eye(2)[labels] - 0.5, 0.4
    medians = {"w_std": np.array([1.0]), "b_std": np.array(0.0), "readout_w_std": np.array(1.0)}
    kernels = RANDOM.normal(size=(5, 2, 4))
    network = Network(1, 4, "tanh", 2, by_row=False, is_latent=False)
    known = {**medians, "noise": np.array(noise)}, x, codes
    posterior = DrawnClasses(network, {"hidden.hidden_0.kernel": kernels}, known)
    found = posterior.calibrate(labels)
    features = np.tanh(x @ kernels / np.sqrt(2)) / np.sqrt(4)
    for row in range(8):
        others = np.arange(8) != row
        log_weights, probs = [], []
        for psi in features:
            covariance = psi @ psi.T + noise**2 * np.eye(8)
            gain = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, row])
            mean, variance = gain @ codes[others], covariance[row, row] - gain @ covariance[others, row]
            log_weights.append(-norm.logpdf(codes[row], mean, np.sqrt(variance)).sum())
            probs.append(posterior.calibration(mean)[labels[row]])
        expected = np.log(np.sum(softmax(log_weights) * probs))
        np.testing.assert_allclose(found.by_row[row], expected, rtol=1e-6)
    np.testing.assert_allclose(posterior.predict(x).sum(axis=1), 1.0, rtol=1e-9)
