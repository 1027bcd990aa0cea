"""The classifier's probabilities: the limit's, or averages over chains, calibrated by leave-one-out."""

import pickle

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import softmax

from numpyro_wide import wide_limit
from numpyro_wide.estimators import WideBNNClassifier, _classifier
from numpyro_wide.estimators import _scoring as scoring
from numpyro_wide.estimators._base import Report
from numpyro_wide.estimators._chains import Run
from numpyro_wide.estimators._classifier import DrawnClasses
from numpyro_wide.estimators._plan import Plan, plan_classification
from numpyro_wide.estimators._policy import without_copies
from numpyro_wide.estimators._posteriors import Network
from numpyro_wide.wide_limit._label_regression import Calibration
from tests.marks import parametrize

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(45, 2))
QUICK = {"activation": "erf", "depth": 1, "input_scale": False, "progress_bar": False}
WORDS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0] + 0.2 * RANDOM.normal(size=45), [-0.5, 0.5])]


@pytest.mark.as_compiled
def test_the_fit_is_a_limit_of_its_labels():
    model = WideBNNClassifier(method="limit", random_state=0).fit(X, X[:, 0] > 0)
    assert isinstance(model.fit_, wide_limit.WideLimitFit) and model.fit_.likelihood == "bernoulli"
    inputs = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(model.predict_proba(X), model.fit_.predict(inputs), rtol=1e-9)


@pytest.mark.fault("estimators/_policy.py", "x, x[first]))", "x, x))")
@pytest.mark.fault("estimators/_policy.py", "1 - shares @ shares", "1.0")
def test_labels_that_were_measured_twice_are_no_copies():
    """Each of 26 inputs has two labels that say nothing of it: the mean of all labels is predicted."""
    random = np.random.default_rng(1)
    x, y = np.repeat(random.normal(size=(26, 1)), 2, axis=0), random.random(52) < 0.9
    model = WideBNNClassifier(method="limit", hidden=(5,), time_budget=5.0, random_state=0).fit(x, y)
    assert "22 of 52 rows are like others, but measured" in str(model.report_) and len(model.fit_.inputs) == 52
    np.testing.assert_allclose(model.predict_proba(x)[:, 1].mean(), y.mean(), atol=0.03)
    # Ones that are rare among many measurements, in 7 of 10 groups, in one of 5, and in one of 26 pairs.
    for num_inputs, num_each, num_ones in ((10, 100, 7), (5, 10, 1), (26, 2, 1)):
        labels, inputs = np.zeros((num_inputs, num_each), bool), np.arange(num_inputs).repeat(num_each)[:, None]
        labels[:num_ones, 0] = True
        assert len(without_copies(inputs, labels.ravel(), Report("rare"))[0]) == labels.size
    # Mistakes in one of twenty pairs: more are measurements.
    for num_different, num_rows in ((0, 26), (1, 27), (2, 52)):
        labels = x[:, 0] > 0
        labels[: 2 * num_different : 2] ^= True
        report = Report("copies")
        assert len(without_copies(x, labels, report)[0]) == num_rows
        assert (num_different > 0) or "26 of 52 rows are copies" in report.warnings[0]


@pytest.mark.slow
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


@pytest.mark.fault(
    "estimators/_classifier.py",
    "self.weight * probs + (1 - self.weight) * self.limit.fit.predict(x)",
    "(1 - self.weight) * probs + self.weight * self.limit.fit.predict(x)",
)
@pytest.mark.slow
def test_auto_stacks_limit_and_chains():
    labels = X[:, 0] > 0
    model = WideBNNClassifier(hidden=(20,), random_state=0, num_chains=2).fit(X, labels)
    assert model.method_ == "stacked" and "weight of the chains, stacked" in str(model.report_)
    weight, inputs = model._posterior.weight, (X - X.mean(axis=0)) / X.std(axis=0)
    chains = model._posterior.calibration(model._posterior.codes(inputs)).mean(axis=0)
    expected = weight * chains + (1 - weight) * model.fit_.predict(inputs)
    np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-9)
    assert 0.1 < weight < 0.9
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), model.predict_proba(X))


@pytest.mark.fault("estimators/_scoring.py", "softmax(by_weight) @ weights", "weights[np.argmax(by_weight)]")
@parametrize("num_rows", [1, 7], rest="slow")
def test_stacking_weight(num_rows):
    certain, impossible = np.zeros(num_rows), np.full(num_rows, -200.0)
    # The posterior of the weight is Beta(1 + n, 1).
    assert scoring.stacking_weight(certain, impossible) == pytest.approx((num_rows + 1) / (num_rows + 2), abs=1e-4)
    assert scoring.stacking_weight(impossible, certain) == pytest.approx(1 / (num_rows + 2), abs=1e-4)
    one, other = np.log(RANDOM.uniform(0.1, 0.9, size=(2, num_rows)))
    density = lambda weight: np.prod(weight * np.exp(one) + (1 - weight) * np.exp(other))  # noqa: E731
    expected = quad(lambda w: w * density(w), 0, 1)[0] / quad(density, 0, 1)[0]
    assert scoring.stacking_weight(one, other) == pytest.approx(expected, abs=1e-4)


@pytest.mark.fault("estimators/_classifier.py", "replace(some, targets=codes[others],", "replace(limit, targets=codes,")
def test_the_limit_is_judged_by_rows_that_it_has_not_seen(monkeypatch):
    rows, sizes = RANDOM.normal(size=(60, 2)), []
    labels = (rows[:, 0] > 0).astype(int)
    limit = wide_limit.fit(rows, labels, likelihood="bernoulli", **QUICK)

    def classes_of(x):
        return np.eye(2)[labels[[np.argmin(np.sum((rows - row) ** 2, axis=1)) for row in x]]]

    class _Useless:
        def codes(self, x):
            return -5 * classes_of(x)[None]

    def predict(self, x):
        sizes.append((len(self.targets), len(x)))
        return classes_of(x) - 0.5, np.ones(len(x))

    monkeypatch.setattr(_classifier, "run_codes", lambda *_: Run(_Useless()))
    monkeypatch.setattr(Plan, "having_run", lambda plan, _: plan)
    monkeypatch.setattr(WideBNNClassifier, "_fit_limit", lambda *_: limit)
    monkeypatch.setattr(wide_limit.WideLimitFit, "predict", predict)
    model = WideBNNClassifier(random_state=0).fit(rows, labels)
    assert sizes == [(48, 12)] and model.method_ == "limit" and "the limit is better" in str(model.report_)


class _StoppedError(Exception):
    """Raised in the place of a second run."""


@pytest.mark.as_compiled
@pytest.mark.fault(
    "estimators/_classifier.py",
    "some = replace(limit, inputs=limit.inputs[others], targets=labels[others])",
    "some = limit",
)
def test_rows_that_calibrate_are_not_seen_by_the_chains(monkeypatch):
    seen = []

    def run(limit, schedule, *_):
        seen.append(limit)
        if len(seen) == 2:
            raise _StoppedError
        return Run(_Constant(limit), schedule=schedule)

    class _Constant:
        def __init__(self, limit):
            self.rows = limit.inputs

        def codes(self, x):
            assert not np.isin(x[:, 0], self.rows[:, 0]).any()
            return np.zeros((3, len(x), 3))

    monkeypatch.setattr(_classifier, "run_codes", run)
    with pytest.raises(_StoppedError):
        WideBNNClassifier(plan=plan_classification(45, 2, 3, method="chains", hidden=(5,))).fit(X, WORDS)
    assert [len(limit.inputs) for limit in seen] == [36, 45] and [len(limit.targets) for limit in seen] == [36, 45]


@pytest.mark.fault("estimators/_classifier.py", "of_all.changed(of_limit, of_chains)", "of_chains")
def test_calibration_of_chains_differs_from_the_limit_as_on_rows_left_out(monkeypatch):
    class _Constant:
        model = known = draws = None

        def codes(self, x):
            return np.zeros((3, len(x), 3))

    priors, nodes = [], np.linspace(0.9, 1.1, 17)
    found = iter([Calibration(6 * nodes, np.ones(17) / 17, np.ones(3)), Calibration(4 * nodes, None, 2 * np.ones(3))])

    def of_rows_left_out(values, labels, prior):
        priors.append((values.ndim, prior))
        return next(found)

    limit = wide_limit.fit(X, np.unique(WORDS, return_inverse=True)[1], likelihood="categorical", **QUICK)
    monkeypatch.setattr(Calibration, "log_probs", lambda self, values, labels: np.zeros(len(labels)))
    monkeypatch.setattr(_classifier, "run_codes", lambda *_: Run(_Constant()))
    monkeypatch.setattr(Plan, "having_run", lambda plan, _: plan)
    monkeypatch.setattr(_classifier.Calibration, "of", of_rows_left_out)
    monkeypatch.setattr(WideBNNClassifier, "_fit_limit", lambda *_: limit)
    model = WideBNNClassifier(method="chains", random_state=0).fit(X, WORDS)
    assert [dimension for dimension, _ in priors] == [3, 2]  # chains, then the limit
    for _, prior in priors:
        assert np.exp(prior.mean[0]) == pytest.approx(limit.calibration.slopes[8])
        np.testing.assert_array_equal(prior.mean[1:], limit.calibration.shift)
        assert np.all(prior.spread == 0.2)
    calibration = model._posterior.calibration
    np.testing.assert_allclose(calibration.slopes, 1.5 * limit.calibration.slopes)
    np.testing.assert_allclose(calibration.shift, limit.calibration.shift - 1)
    np.testing.assert_array_equal(calibration.weights, limit.calibration.weights)


def test_probabilities_of_draws_are_averaged():
    codes = np.eye(2)[(X[:8, 0] > 0).astype(int)] - 0.5
    medians = {"w_std": np.array([1.0]), "b_std": np.array(0.0), "readout_w_std": np.array(1.0), "noise": np.array(0.4)}
    kernels, network = RANDOM.normal(size=(5, 2, 4)), Network(1, 4, "tanh", 2, by_row=False, is_latent=False)
    posterior = DrawnClasses(network, {"hidden.hidden_0.kernel": kernels}, (medians, X[:8], codes))
    posterior.calibration = Calibration(np.array([2.0, 3.0]), np.array([0.25, 0.75]), np.array([0.1, -0.1]))
    known, new = (np.tanh(x @ kernels / np.sqrt(2)) / np.sqrt(4) for x in (X[:8], X[8:12]))
    expected = 0.0
    for psi, psi_new in zip(known, new, strict=True):
        mean = psi_new @ psi.T @ np.linalg.solve(psi @ psi.T + 0.16 * np.eye(8), codes)
        for slope, weight in ((2.0, 0.25), (3.0, 0.75)):
            expected += weight / 5 * softmax(slope * mean + [0.1, -0.1], axis=1)
    np.testing.assert_allclose(posterior.predict(X[8:12]), expected, rtol=1e-8)
