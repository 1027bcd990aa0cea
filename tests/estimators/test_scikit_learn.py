"""scikit-learn's habits: its own checks, pipelines, searches, clones, DataFrames."""

import logging
import re

import joblib
import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

from numpyro_wide.estimators import WideBNNClassifier, WideBNNRegressor
from tests.marks import parametrize

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 2))
Y = X[:, 0] + 0.1 * RANDOM.normal(size=30)
QUICK = (
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_estimators_unfitted",
    "check_fit2d_1sample",
    "check_dict_unchanged",
    "check_n_features_in",
)


# Seconds that pay for one architecture: the checks ask for manners, in some fifty fits.
SHORT = {"method": "limit", "time_budget": 9.0}


@parametrize("name", QUICK, rest="slow")
@parametrize("kind", [WideBNNRegressor, WideBNNClassifier], rest="slow")
def test_some_of_the_checks(kind, name):
    getattr(estimator_checks, name)(kind.__name__, kind(**SHORT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [WideBNNRegressor, WideBNNClassifier])
def test_all_checks(kind):
    estimator_checks.check_estimator(kind(**SHORT), on_skip=None)


@pytest.mark.as_compiled
def test_pipelines_searches_scores_and_clones(tmp_path):
    pipeline = make_pipeline(StandardScaler(), WideBNNRegressor(method="limit", random_state=0))
    search = GridSearchCV(pipeline, {"widebnnregressor__hidden": ["auto", (20,)]}, cv=2).fit(X, Y)
    assert search.best_score_ > 0.9 and cross_val_score(search.best_estimator_, X, Y, cv=2).min() > 0.9
    best = search.best_estimator_[-1]
    assert clone(best).get_params() == best.get_params() and not hasattr(clone(best), "report_")
    joblib.dump(search, tmp_path / "search.joblib")
    np.testing.assert_array_equal(joblib.load(tmp_path / "search.joblib").predict(X), search.predict(X))


def test_bags_of_rows_that_are_drawn_several_times():
    bags = BaggingRegressor(WideBNNRegressor(method="limit", random_state=0), n_estimators=1, random_state=0).fit(X, Y)
    assert len(bags.estimators_[0].fit_.inputs) == len(np.unique(bags.estimators_samples_[0])) < 30
    assert bags.score(X, Y) > 0.9


def test_calibration():
    model = CalibratedClassifierCV(WideBNNClassifier(**SHORT, random_state=0), cv=2).fit(X, X[:, 0] > 0)
    assert model.score(X, X[:, 0] > 0) > 0.9


@pytest.mark.slow
def test_processes_of_their_own():
    model = WideBNNRegressor(method="limit", random_state=0)
    np.testing.assert_allclose(
        cross_val_score(model, X, Y, cv=2, n_jobs=2), cross_val_score(model, X, Y, cv=2), rtol=1e-6
    )


def test_names_of_columns():
    frame = pandas.DataFrame(X, columns=["left", "right"])
    model = WideBNNRegressor(method="limit", random_state=0).fit(frame, Y)
    assert model.feature_names_in_.tolist() == ["left", "right"] and model.n_features_in_ == 2
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["right", "left"]])


def test_the_plan_is_logged_before_it_is_begun(caplog):
    with caplog.at_level(logging.INFO, logger="numpyro_wide.estimators"):
        model = WideBNNRegressor(method="limit", random_state=0).fit(X, Y)
    assert caplog.messages[0].startswith("Plan: 30 rows, 2 columns; method limit")
    assert str(model.plan_) in "\n".join(model.report_.sections["Plan"])
    assert next(iter(model.report_.sections)) == "Plan"


def test_a_budget_that_pays_for_no_chains_is_said():
    told = pytest.warns(UserWarning, match="too few for a finite network: the limit predicts; give a larger")
    with told as found:
        model = WideBNNRegressor(method="chains", time_budget=1e-3, num_chains=1, random_state=0).fit(X, Y)
    assert model.method_ == "limit" and found[0].filename == __file__
    assert "too few for a finite network: the limit predicts" in str(model.report_)


@parametrize(
    ("options", "stages"),
    [({"progress_bar": False}, []), ({}, ["scales of the inf", "leave-one-out", "done"])],
    rest="slow",
)
def test_a_bar_tells_what_is_being_done(options, stages, bars, capsys):
    WideBNNRegressor(method="limit", time_budget=60, random_state=0, **options).fit(X, Y)
    shown = capsys.readouterr().err
    assert all(stage in shown for stage in stages) and ("of 60" in shown) == bool(stages)
    starts = [int(start) for start in re.findall(r"since second (\d+) of 60", shown)]
    assert starts == sorted(starts)
