"""Bad input: an error that says so, or a right answer."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
from sklearn.exceptions import NotFittedError

from numpyro_wide.estimators import WideBNNClassifier, WideBNNRegressor, _policy
from numpyro_wide.estimators._plan import plan_regression
from tests.marks import parametrize

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 2))
Y = X[:, 0] + 0.1 * RANDOM.normal(size=24)
LABELS = (X[:, 0] > 0).astype(int)
PLAN = plan_regression(24, 2, 1, method="limit")
LIMIT = {"method": "limit", "random_state": 0}


def _with(values, row, value):
    changed = np.array(values, float)
    changed[row] = value
    return changed


REFUSED = [
    (WideBNNRegressor(method="best"), X, Y, "method must be one of"),
    (WideBNNRegressor(noise="none"), X, Y, "noise must be one of"),
    (WideBNNRegressor(noise="by_row", method="limit"), X, Y, 'noise="by_row" needs a finite network, but method is'),
    (WideBNNRegressor(num_chains=0), X, Y, "num_chains must be a whole number of at least 1, but got 0"),
    (WideBNNRegressor(time_budget=-1.0), X, Y, "time_budget must be a positive number of seconds, or None"),
    (WideBNNRegressor(hidden=50), X, Y, r'hidden must be "auto" or the widths of the hidden layers, such as \(50,\)'),
    (WideBNNRegressor(hidden=(50, 20)), X, Y, "the hidden layers must have the same width"),
    (WideBNNRegressor(hidden=(0,)), X, Y, "the width of a hidden layer must be a whole number of at least 1"),
    (WideBNNRegressor(), _with(X, 3, np.nan), Y, "Input X contains NaN"),
    (WideBNNRegressor(), _with(X, 3, np.inf), Y, "Input X contains infinity"),
    (WideBNNRegressor(), X, _with(Y, 3, np.nan), "Input y contains NaN"),
    (WideBNNRegressor(), X, _with(Y, 3, np.inf), "Input y contains infinity"),
    (WideBNNRegressor(), X[:1], Y[:1], "1 sample"),
    (
        WideBNNRegressor(),
        X,
        LABELS.astype(str).astype(object) + "th",
        "y holds words, but must hold numbers; WideBNNClassifier learns",
    ),
    (WideBNNRegressor(), X, np.where(LABELS, "red", "blue"), "y holds words, but must hold numbers"),
    (WideBNNRegressor(), X, np.column_stack([Y, np.full(24, 5.0)]), r"columns \[1\] of y are constant"),
    (WideBNNRegressor(), X, Y[:5], "inconsistent numbers of samples"),
    (WideBNNRegressor(plan=PLAN), X[:20], Y[:20], r"plan is of a regression of \(24, 2, 1\) rows, columns and outputs"),
    (WideBNNClassifier(plan=PLAN.to_json()), X, LABELS, "plan is of a regression"),
    (
        WideBNNRegressor(plan=replace(PLAN, target_transform="log")),
        X,
        Y,
        'target_transform="log" needs positive targets',
    ),
    (WideBNNRegressor(plan="ten minutes"), X, Y, "plan must be plan_ of an earlier fit, or its text"),
    (WideBNNClassifier(), X, np.zeros(24), "y must hold at least two classes"),
    (WideBNNClassifier(), X, Y, "Unknown label type: continuous"),
    (WideBNNClassifier(method="weighted"), X, LABELS, "method must be one of"),
    (WideBNNClassifier(), _with(X, 3, np.nan), LABELS, "Input X contains NaN"),
]


@pytest.mark.fault("estimators/_regressor.py", "(plan.target_transform, targets)", "(self.target_transform, targets)")
@pytest.mark.parametrize(("model", "x", "y", "message"), REFUSED, ids=[row[-1][:40] for row in REFUSED])
def test_what_cannot_be_fitted_is_refused(model, x, y, message):
    with pytest.raises(ValueError, match=message):
        model.fit(x, y)


def test_a_column_of_words_is_named(fitted):
    frame = pandas.DataFrame({"width": X[:, 0], "colour": np.where(LABELS, "red", "blue")})
    for model, y in ((WideBNNRegressor(), Y), (WideBNNClassifier(), LABELS)):
        with pytest.raises(ValueError, match=r"columns \['colour'\] of X hold words; encode them first"):
            model.fit(frame, y)
    with pytest.raises(ValueError, match=r"columns \[1\] of X hold words"):
        fitted.predict(frame.to_numpy())
    with pytest.raises(ValueError, match=r"columns \['colour'\] of X hold words"):  # a missing number is no word
        WideBNNRegressor().fit(frame.assign(width=_with(X[:, 0], 3, np.nan)), Y)


def test_weights_of_rows_are_refused():
    for model, y in ((WideBNNRegressor(), Y), (WideBNNClassifier(), LABELS)):
        with pytest.raises(TypeError, match="sample_weight"):
            model.fit(X, y, sample_weight=np.ones(24))


@pytest.fixture(scope="module")
def fitted():
    return WideBNNRegressor(**LIMIT).fit(X, Y)


def test_what_cannot_be_predicted_is_refused(fitted):
    with pytest.raises(ValueError, match="standard deviations or covariances, not both"):
        fitted.predict(X, return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, such as 0.9 for 90 %, but got 90"):
        fitted.predict_interval(X, 90)
    with pytest.raises(ValueError, match=r"y must have the shape \(24,\), as the targets of the fit had"):
        fitted.log_density(X, np.column_stack([Y, Y]))
    with pytest.raises(ValueError, match="n_samples must be a whole number of at least 1, but got 0"):
        fitted.sample_y(X, 0)
    with pytest.raises(ValueError, match="expecting 2 features"):
        fitted.predict(X[:, :1])
    with pytest.raises(ValueError, match="Input X contains NaN"):
        fitted.predict(_with(X, 3, np.nan))


def test_levels_are_numbers(fitted):
    for level in ((0.5, 0.9), "0.9", None):
        with pytest.raises(TypeError, match="level must be a number, such as 0.9"):
            fitted.predict_interval(X, level)
    for levels in ("median", [0.5, None], [True], [[0.1], [0.2, 0.3]]):
        with pytest.raises(TypeError, match="quantiles must be numbers, such as"):
            fitted.predict_quantiles(X, levels)


@pytest.mark.parametrize("name", ["predict", "predict_interval", "predict_quantiles", "sample_y"])
def test_what_is_not_fitted_says_so(name):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(WideBNNRegressor(), name)(X)


def test_constant_targets_are_predicted():
    mean, deviation = WideBNNRegressor(random_state=0).fit(X, np.full(24, 3.5)).predict(X + 1, return_std=True)
    np.testing.assert_allclose(mean, 3.5, rtol=1e-12)
    assert deviation.max() < 0.1


def test_a_constant_column_changes_nothing(fitted):
    model = WideBNNRegressor(**LIMIT).fit(np.insert(X, 1, 7.0, axis=1), Y)
    np.testing.assert_allclose(model.predict(np.insert(X, 1, -3.0, axis=1)), fitted.predict(X), rtol=1e-12)
    assert "constant columns left out: 1" in str(model.report_)


def test_columns_that_say_nothing_leave_the_mean():
    mean, deviation = WideBNNRegressor(**LIMIT).fit(np.ones((24, 3)), Y).predict(np.ones((2, 3)), return_std=True)
    np.testing.assert_allclose(mean, Y.mean(), atol=0.1)
    np.testing.assert_allclose(deviation, Y.std(), rtol=0.3)


def test_units_of_the_targets_and_of_the_columns_change_nothing(fitted):
    model = WideBNNRegressor(**LIMIT).fit(X * [1e-6, 1e6], 1e8 + 1e8 * Y)
    np.testing.assert_allclose((model.predict(X * [1e-6, 1e6]) - 1e8) / 1e8, fitted.predict(X), atol=1e-4)


@pytest.mark.fault("estimators/_base.py", "shares = values / size", "shares, size = values, 1.0")
@pytest.mark.slow
@parametrize("size", [1e-200, 1e200], rest="slow")
def test_numbers_whose_squares_are_out_of_range(size, fitted):
    model = WideBNNRegressor(**LIMIT).fit(size * X, size * Y)
    mean, deviation = (part / size for part in model.predict(size * X, return_std=True))
    np.testing.assert_allclose([mean, deviation], fitted.predict(X, return_std=True), rtol=1e-3)
    density = fitted.log_density(X, Y) - np.log(size)
    np.testing.assert_allclose(model.log_density(size * X, size * Y), density, rtol=1e-3)
    with pytest.raises(ValueError, match="the covariances of targets with the standard deviation .* are out of range"):
        model.predict(size * X, return_cov=True)
    classes = WideBNNClassifier(**LIMIT).fit(size * X, LABELS)
    assert np.isfinite(classes.predict_proba(size * X)).all() and classes.score(size * X, LABELS) > 0.8


def test_more_columns_than_rows():
    x = RANDOM.normal(size=(12, 40))
    mean, deviation = WideBNNRegressor(**LIMIT).fit(x, x[:, 0]).predict(RANDOM.normal(size=(5, 40)), return_std=True)
    assert np.isfinite(mean).all() and (deviation > 0.3).all()  # nothing can be sure of so little


@pytest.mark.fault("estimators/_policy.py", "if are_measured and counts.min() < counts.max():", "if True:")
def test_copies_of_rows_do_not_decide_the_noise():
    x = RANDOM.normal(size=(60, 1))
    y = x[:, 0] + RANDOM.normal(size=60)
    once = WideBNNRegressor(**LIMIT).fit(x, y)
    few = x.round()  # four doses
    for inputs, alone in ((x, once), (few, WideBNNRegressor(**LIMIT).fit(few, y))):
        told = "120 of 180 rows are copies of others, inputs and targets: each row counts once"
        with pytest.warns(UserWarning, match=told):
            thrice = WideBNNRegressor(**LIMIT).fit(np.tile(inputs, (3, 1)), np.tile(y, 3))
        assert told in str(thrice.report_) and len(thrice.fit_.inputs) == 60
        np.testing.assert_allclose(thrice.predict(x), alone.predict(x), rtol=1e-3)
        np.testing.assert_allclose(thrice.fit_.noise_scale, alone.fit_.noise_scale, rtol=1e-3)
    some = WideBNNRegressor(**LIMIT).fit(np.concatenate([x, x[:5]]), np.concatenate([y, y[:5]]))  # without a warning
    assert "5 of 65 rows are copies" in str(some.report_)
    np.testing.assert_allclose(some.fit_.noise_scale, once.fit_.noise_scale, rtol=1e-3)


def test_equal_rows_of_inputs_that_take_few_values_are_measurements():
    x = np.repeat([0.0, 1.0], 100)[:, None]
    y = np.tile(np.repeat([0.0, 1.0], [10, 90]), 2)  # of each input the same, nine times one to once zero
    model = WideBNNRegressor(**LIMIT).fit(x, y)
    assert "copies" not in str(model.report_)
    mean, deviation = model.predict(np.array([[0.0], [1.0]]), return_std=True)
    np.testing.assert_allclose(mean, 0.9, atol=0.01)
    np.testing.assert_allclose(deviation, 0.3, rtol=0.03)


@pytest.mark.slow
def test_a_finite_network_that_fails_leaves_the_limit(monkeypatch):
    def fail(*_, **__):
        raise ValueError("nowhere finite")

    monkeypatch.setattr(_policy, "run_chains", fail)
    plan = replace(plan_regression(24, 2, 1), num_weighted=0)
    with pytest.warns(UserWarning, match="given up, and the limit predicts: nowhere finite"):
        model = WideBNNRegressor(plan=plan, random_state=0).fit(X, Y)
    assert model.method_ == "limit" and "nowhere finite" in str(model.report_)
    with pytest.raises(ValueError, match="nowhere finite"):
        WideBNNRegressor(plan=replace(plan, method="chains"), random_state=0).fit(X, Y)


@pytest.mark.slow
def test_a_finite_network_is_fitted_to_each_row_once():
    options = {"method": "weighted", "noise": "by_row", "hidden": (3,), "random_state": 0}
    with pytest.warns(UserWarning, match="24 of 48 rows are copies"):
        model = WideBNNRegressor(**options).fit(np.concatenate([X, X]), np.concatenate([Y, Y]))
    assert len(model.model_args_[1]) == 24
