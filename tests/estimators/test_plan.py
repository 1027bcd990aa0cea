"""Plans: pure functions of shapes, options and a speed; and fits by one plan, which are equal to the last bit."""

import itertools
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from numpyro_wide.estimators import WideBNNClassifier, WideBNNRegressor, _plan
from numpyro_wide.estimators._plan import (
    COMPILING,
    Plan,
    gradient_seconds,
    looks_of,
    plan_classification,
    plan_regression,
)
from tests.marks import parametrize

BUDGETS = 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0
ROWS = 10, 300, 3000, 100_000


def seconds_of(schedule, num_chains=4):
    """Return the seconds of a plan's chains, by the table of costs, without compilation."""
    gradient = num_chains * gradient_seconds(schedule.num_rows, schedule.depth, schedule.units, schedule.by_row)
    return gradient * (2.6 * schedule.num_steps + 3 * schedule.num_kept)


def test_a_gradient_takes_longer_for_more_rows_and_wider_or_deeper_networks():
    small = gradient_seconds(10_000, 1, 50)
    assert gradient_seconds(20_000, 1, 50) == pytest.approx(2 * small, rel=0.02)
    assert gradient_seconds(10_000, 1, 500) == pytest.approx(100 * small, rel=0.02)
    assert gradient_seconds(10_000, 3, 50) == pytest.approx(3 * small, rel=0.02)


@pytest.mark.fault("estimators/_plan.py", "num_steps, length = num_steps - length, 2 * length", "num_steps -= length")
def test_looks_are_twice_as_long_each():
    assert looks_of(8999) == (8999,) and looks_of(9000) == (3000, 6000)
    assert looks_of(50_000) == (3000, 6000, 12_000, 29_000)


@pytest.mark.fault("estimators/_plan.py", "seconds - race_seconds, _depths", "seconds, _depths")
@pytest.mark.fault("estimators/_plan.py", "    seconds -= min(LIMIT_SHARE", "    seconds -= 0 * min(LIMIT_SHARE")
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_plan_keeps_to_its_budget_and_a_larger_one_pays_for_more(num_rows):
    plans = [plan_regression(num_rows, 8, 1, time_budget=budget, num_chains=4) for budget in BUDGETS]
    for plan in plans:
        assert plan.compared_rows <= plan.fitted_rows <= plan.known_rows == min(num_rows, 3000)
        assert plan.compared_rows <= 200 and plan.fitted_rows <= 1000
        race = 0.004 * plan.race_rows[0] * len(plan.race_runs)
        weights = 45 * plan.num_weighted * gradient_seconds(num_rows, max(plan.depths), 50)
        limit = min(0.3 * plan.time_budget, 0.03 * plan.fitted_rows)
        for schedule in plan.schedules:
            assert limit + race + weights + seconds_of(schedule) + COMPILING["chains"] < plan.time_budget
            assert schedule.num_rows in (num_rows, 3000) and schedule.num_warmup <= 2000
            assert all(length % schedule.num_kept == 0 for length in schedule.looks)
        assert {depth for depth, _ in plan.race_runs} <= {one.depth for one in plan.schedules}
        assert Plan.from_json(plan.to_json()) == plan
    for smaller, larger in itertools.pairwise(plans):
        assert smaller.fitted_rows <= larger.fitted_rows and len(smaller.race_runs) <= len(larger.race_runs)
        assert {one.depth for one in smaller.schedules} <= {one.depth for one in larger.schedules}
        for schedule in smaller.schedules:
            longer = larger.schedule(schedule.depth)
            assert longer.by_row >= schedule.by_row and longer.num_rows >= schedule.num_rows
            if (longer.by_row, longer.num_rows) == (schedule.by_row, schedule.num_rows):
                assert longer.num_steps > schedule.num_steps


def test_plans_of_a_budget():
    by_budget = {budget: plan_regression(300, 8, 1, time_budget=budget) for budget in BUDGETS}
    assert by_budget[1.0].schedules == () and "chains of 1 x 50 units: fewer than" in str(by_budget[1.0])
    assert by_budget[10.0].race_runs == () and by_budget[30.0].race_runs[0] == (2, 0)
    assert len(by_budget[600.0].race_runs) == 15 and by_budget[600.0].prefers_depth
    assert all(schedule.num_constant for schedule in by_budget[600.0].schedules) and not by_budget[60.0].prefers_depth
    few = plan_regression(10, 8, 1)
    assert few.num_weighted == 500 and few.depths == (1,) and not few.by_column and few.noise == "constant"
    assert plan_regression(100_000, 8, 1, time_budget=60.0).schedules[0].num_rows == 3000
    assert (
        plan_regression(200, 30, 1).noise == "constant"
        and plan_regression(200, 30, 1, noise="by_row").schedules[0].by_row
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"num_columns": 1}, False),
        ({"num_columns": 51}, False),
        ({"time_budget": 30.0}, False),
        ({"time_budget": 30.0, "method": "limit"}, True),
        ({"num_rows": 50}, True),
        ({"num_rows": 49, "method": "limit"}, False),
        ({"method": "chains"}, False),
        ({"hidden": (50,)}, False),
        ({"noise": "by_row"}, False),
    ],
)
def test_structured_limits_are_candidates_where_nothing_else_is_asked_for(options, expected):
    shape = {"num_rows": 300, "num_columns": 8, "num_outputs": 1, "time_budget": 60.0}
    plan = plan_regression(**shape | options)
    assert plan.structures == (("dense", "additive", "both") if expected else ("dense",))


def test_a_plan_on_a_machine_half_as_fast_is_that_of_half_the_seconds():
    slow = plan_regression(1000, 8, 1, time_budget=120.0, speed=2.0)
    assert replace(slow, time_budget=60.0, speed=1.0) == plan_regression(1000, 8, 1, time_budget=60.0)
    slow = plan_classification(1000, 8, 3, time_budget=120.0, speed=2.0)
    assert replace(slow, time_budget=60.0, speed=1.0) == plan_classification(1000, 8, 3, time_budget=60.0)


def test_what_is_asked_for_is_planned():
    plan = plan_regression(300, 8, 1, hidden=(7, 7), noise="by_row", method="chains")
    assert [(one.depth, one.units, one.by_row) for one in plan.schedules] == [(2, 7, True)]
    assert plan.depths == (2,) and {depth for depth, _ in plan.race_runs} == {2} and not plan.num_weighted
    assert plan_regression(300, 8, 1, method="limit").schedules == ()
    weighted = plan_regression(300, 8, 1, method="weighted", time_budget=0.01)
    assert weighted.num_weighted == 50 and weighted.schedules == () and weighted.race_runs == ()
    codes = plan_classification(300, 8, 3, hidden=[20])
    assert [(one.depth, one.units, one.by_row) for one in codes.schedules] == [(1, 20, False)]
    assert plan_classification(10_000, 8, 3, time_budget=9.0).known_rows < 3000


def test_the_plan_of_a_posterior():
    plan = plan_regression(400, 8, 1, method="posterior")
    (schedule,) = plan.schedules
    assert schedule.adjusted and (schedule.depth, schedule.units, schedule.by_row) == (1, 50, False)
    assert schedule.num_warmup == schedule.num_kept == schedule.looks[0] == 500 and schedule.num_rows == 400
    assert (
        plan.race_runs == ()
        and plan.structures == ("dense",)
        and plan.depths == (1,)
        and Plan.from_json(plan.to_json()) == plan
    )
    longer = plan_regression(400, 8, 1, method="posterior", time_budget=2000).schedules[0]
    assert sum(longer.looks) > 3 * sum(schedule.looks)
    few = plan_regression(400, 8, 1, method="posterior", time_budget=30)
    assert few.schedules == () and "the posterior of 1 x 50 units: fewer than 1000 trajectories" in str(few)
    (asked,) = plan_regression(400, 8, 1, method="posterior", hidden=(7, 7), noise="by_row").schedules
    assert (asked.depth, asked.units, asked.by_row) == (2, 7, True)


def test_a_speed_is_measured_once():
    assert _plan.measured_speed() == _plan.measured_speed() > 0
    steps = 2 * np.log2(_plan.measured_speed())
    assert abs(steps - round(steps)) < 0.01  # of factors of √2


def _busy(stop):
    while not stop.is_set():
        sum(range(10_000))


X = np.random.default_rng(0).normal(size=(150, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=150)


@pytest.fixture
def busy():
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_busy, args=(stop,))
    process.start()
    yield
    stop.set()
    process.join()


def _quick(plan, num_runs):
    """Return a plan with few steps."""
    short = {
        "num_adam": 20,
        "num_constant": 100,
        "num_warmup": 60,
        "looks": (100, 200),
        "num_kept": 20,
        "num_pieces": 10,
    }
    schedules = tuple(replace(one, **short) for one in plan.schedules)
    return replace(plan, schedules=schedules, race_runs=plan.race_runs[:num_runs])


@pytest.mark.as_compiled
@parametrize(
    ("model", "plan", "y", "num_runs"),
    [
        (WideBNNRegressor, plan_regression(150, 2, 1, hidden=(4,), noise="constant", method="chains"), Y, 0),
        (WideBNNRegressor, plan_regression(150, 2, 1, hidden=(32,)), Y, 1),
        (WideBNNClassifier, plan_classification(150, 2, 2, hidden=(4,), method="chains"), Y > 0, 0),
    ],
    rest="slow",
)
def test_fits_by_a_plan_are_equal_to_the_last_bit_whatever_runs_beside_them(model, plan, y, num_runs, request):
    first = model(plan=_quick(plan, num_runs), random_state=0).fit(X, y)
    request.getfixturevalue("busy")
    again = model(plan=first.plan_.to_json(), random_state=0).fit(X, y)
    assert again.plan_ == first.plan_ and again.method_ == first.method_ != "limit"
    assert first.plan_.schedules[0].precision == "float32"
    predict = "predict_proba" if y.dtype == bool else "predict_interval"
    np.testing.assert_array_equal(getattr(again, predict)(X), getattr(first, predict)(X))
    for name, draws in first.draws_.items():
        np.testing.assert_array_equal(again.draws_[name], draws)
