"""The classifier's probabilities, held to SciPy's quadrature, and to what labels there are."""

import pickle

import numpy as np
import pytest

from numpyro_wide import wide_limit
from numpyro_wide.estimators import WideBNNClassifier
from numpyro_wide.estimators._classifier import convergence
from numpyro_wide.wide_limit._observations import Observations

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(45, 2))
WORDS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0] + 0.2 * RANDOM.normal(size=45), [-0.5, 0.5])]


def test_the_fit_is_a_limit_of_its_labels(monkeypatch):
    model = WideBNNClassifier(random_state=0).fit(X, X[:, 0] > 0)
    monkeypatch.delattr(Observations, "fitted")  # the surrogate is found once, and in the fit
    assert isinstance(model.fit_, wide_limit.WideLimitFit) and model.fit_.likelihood == "bernoulli"
    inputs = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], model.fit_.predict(inputs), rtol=1e-9)


def test_words_for_labels_and_what_is_told():
    model = WideBNNClassifier(random_state=0).fit(X, WORDS)
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
    limit = WideBNNClassifier(method="limit", random_state=0).fit(X, labels)
    assert model.method_ == "chains" and "R-hat" in str(model.report_) and model.score(X, labels) > 0.8
    # Both average over the same posterior but for the width of the network and the surrogate's approximation.
    assert np.abs(model.predict_proba(X) - limit.predict_proba(X)).mean() < 0.1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X), rtol=1e-9)
    assert model.predictive_.draws["readout_base"].shape[0] == len(model.draws_["readout_base"])


def test_a_single_chain_is_settled_without_an_r_hat():
    own = np.random.default_rng(0).uniform(size=(200, 20))
    is_settled, lines = convergence(own, 1)
    assert is_settled and "a single chain" in lines[-1]
    assert "R-hat of probabilities" in convergence(own, 2)[1][-1]
