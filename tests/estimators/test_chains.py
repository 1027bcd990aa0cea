"""Chains of the estimators: how long they run, and what is compiled for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.estimators import WideBNNRegressor, _chains, _regression_fit
from numpyro_wide.estimators._chains import Convergence, convergence, run_chains
from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._network import Network, collapsed
from numpyro_wide.estimators._report import Report
from tests.compilations import compilations

X = np.random.default_rng(0).uniform(-2, 2, (40, 2))
Y = np.sin(X[:, 0]) + 0.3 * np.random.default_rng(1).normal(size=40)
SCALES = {"b_std": 0.5, "readout_w_std": 1.0, "readout_b_std": 0.1, "w_std": np.ones(1), "noise": 0.3}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name in ("_NUM_ADAM", "_NUM_WARMUP", "_NUM_SAMPLES"):
        monkeypatch.setattr(_chains, name, 200)


class GivenClock(Clock):
    """A clock by which seconds are left until it is told otherwise."""

    left = 1e6


def run(judge):
    model = collapsed(Network(1, 4, "erf", None, False))
    args = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (SCALES, X, Y))
    report = Report("chains")
    with GivenClock(1e6) as clock:
        options = {"hold": "scales", "judge": lambda draws: judge(draws, clock)}
        return run_chains(model, args, 2, clock, jax.random.key(0), report, **options), str(report)


def test_chains_that_have_not_settled_go_on_for_twice_as_many_steps():
    seen = []

    def judge(draws, clock):
        seen.append(draws["hidden.hidden_0.kernel"])
        return Convergence(len(seen) == 3, (f"look {len(seen)}",))

    found, report = run(judge)
    assert found.num_steps == 200 + 7 * 200
    assert "800 steps of warmup and 800 after it" in report
    assert "look 3" in report and "look 2" not in report
    assert [draws.shape[:1] for draws in seen] == 3 * [(400,)]  # 200 of each chain, however long
    assert np.ptp(np.concatenate(seen), axis=0).min() > 0
    np.testing.assert_array_equal(found.draws["hidden.hidden_0.kernel"], seen[-1])
    assert found.mcmc.get_extra_fields(group_by_chain=True)["num_grad"].shape == (2, 200)


def test_chains_that_never_settle_end_with_the_budget():
    looks = []

    def judge(draws, clock):
        looks.append(draws)
        clock.left = 0.0 if len(looks) == 2 else clock.left
        return Convergence(False, ())

    assert run(judge)[0].num_steps == 200 + 3 * 200 and len(looks) == 2


def test_judgement_of_chains():
    random = np.random.default_rng(0)
    y, variance = np.zeros((20, 1)), np.ones((800, 20, 1))
    alike = random.normal(size=(800, 20, 1))
    assert convergence(alike, variance, y, 4).is_settled
    apart = alike + 5.0 * np.repeat(np.arange(4), 200)[:, None, None]
    found = convergence(apart, variance, y, 4)  # longer chains would not meet
    assert found.is_settled and "an ensemble" in found.lines[-1]
    moving = alike + np.tile(np.linspace(0, 5, 200), 4)[:, None, None]
    found = convergence(moving, variance, y, 4)
    assert not found.is_settled and "not settled" in found.lines[-1]
    assert "a single chain" in convergence(moving, variance, y, 1).lines[-1]


@pytest.mark.parametrize("noise", ["constant", "by_row"])
def test_a_fit_to_other_data_of_the_same_shape_compiles_nothing(noise, monkeypatch):
    monkeypatch.setattr(_regression_fit, "convergence", lambda *_: Convergence(True, ()))

    def fit(x, y):
        options = {"method": "chains", "noise": noise, "hidden": (4,), "num_chains": 2, "random_state": 0}
        return WideBNNRegressor(**options).fit(x, y).predict(x)

    fit(X, Y)
    with compilations() as compiled:
        fit(X[::-1], Y**2)
    assert compiled == []
