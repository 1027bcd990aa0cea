"""Race of architectures: its networks, its order, and what it hands to the chains."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.estimators import WideBNNRegressor, _policy, _race
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._plan import plan_regression
from numpyro_wide.estimators._posteriors import LimitPosterior
from numpyro_wide.estimators._race import Entry, Optimum
from numpyro_wide.machine import double_precision
from numpyro_wide.nn import FCN
from numpyro_wide.nn._layers import scaled_features
from numpyro_wide.wide_limit import WideLimitFit
from tests.marks import parametrize

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RANDOM.normal(size=60)
PARTS = [(np.arange(48), np.arange(48, 60)), (np.arange(12, 60), np.arange(12))]


PLAN = plan_regression(60, 2, 1, time_budget=60.0, method="chains", hidden=(32,))


def run(x=X, y=Y, parts=PARTS[:1], runs=None, num_steps=20, seed=0, budget=1e6):
    plan = replace(PLAN, race_runs=runs or tuple((1, part) for part in range(len(parts))))
    with Clock(budget) as clock:
        return _race.race(x, y, parts, plan, clock, np.random.RandomState(seed), num_steps)


def first_of(raced):
    return _race.in_order(_race.joined(raced), False)[0]


def started(largest):
    return {name: values[0] for name, values in _race._starts(np.random.RandomState(1), 1, largest, 2).items()}


@pytest.mark.fault("estimators/_race.py", "kernels[layer] for layer in", "kernels[-1 - layer] for layer in")
@pytest.mark.fault("estimators/_race.py", "index < entry.depth", "index < 9")
@parametrize(("depth", "activation"), [(1, "tanh"), (2, "relu"), (3, "gelu")], rest="slow")
def test_the_network_is_that_of_the_chains(depth, activation):
    largest = 3
    entry = Entry(depth, _race.RACED.index(activation), 1.3, 0.3)
    weights = started(largest) | {"b_std": jnp.array([0.5, -0.3, 0.2])}
    weights["input_scale"] = jnp.array([0.7, -0.4])
    scales = _race._scales(weights, entry)
    w_std = np.array([(1 - _race._B_STD**2) ** 0.5, 1.3, 1.3])[:depth]
    form = {"b_std": scales["b_std"][:depth], "input_scale": scales["input_scale"], "w_std": w_std}
    form |= {"readout_w_std": scales["readout_w_std"], "readout_b_std": _race._READOUT_B_STD}
    sites = _race._by_site(depth, weights)
    assert len(sites) == 2 * depth
    kinds = "kernel", "bias"
    layers = {f"hidden_{i}": {kind: sites[f"hidden.hidden_{i}.{kind}"] for kind in kinds} for i in range(depth)}
    expected = FCN(depth, _race.RACE_UNITS, activation, **form).apply({"params": layers}, jnp.asarray(X))
    hidden = _race.hidden_of(weights, entry, jnp.asarray(X))
    found = scaled_features(hidden, scales["readout_w_std"], _race._READOUT_B_STD)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_slope_of_the_potential_is_that_of_differences():
    with double_precision():
        entry = Entry(jnp.asarray(2), jnp.asarray(1), jnp.asarray(1.3), jnp.asarray(0.3))
        weights = started(2)
        energy = jax.jit(lambda weights: _race.potential(weights, entry, jnp.asarray(X), jnp.asarray(Y)))
        slope = jax.jit(jax.grad(energy))(weights)
        direction = jax.tree.map(lambda leaf: jnp.asarray(RANDOM.normal(size=leaf.shape)), weights)
        ahead = energy(jax.tree.map(lambda w, d: w + 1e-5 * d, weights, direction))
        behind = energy(jax.tree.map(lambda w, d: w - 1e-5 * d, weights, direction))
        along = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(direction), strict=True))
        np.testing.assert_allclose((ahead - behind) / 2e-5, along, rtol=1e-6)


def test_weights_are_those_of_the_levels_the_best_first():
    found = first_of(run(num_steps=100))
    assert len(found.weights) == 3 and found.weights[0]["hidden.hidden_0.kernel"].shape == (2, 32)
    form = {name: found.scales[name] for name in ("b_std", "input_scale", "w_std", "readout_b_std")}
    errors = []
    for weights in found.weights:
        layers = {"hidden_0": {kind: weights[f"hidden.hidden_0.{kind}"] for kind in ("kernel", "bias")}}
        network = FCN(1, 32, found.activation, readout_w_std=found.scales["readout_w_std"], **form)
        known, new = (np.asarray(network.apply({"params": layers}, jnp.asarray(x))) for x in (X[:48], X[48:]))
        mean = new @ np.linalg.solve(known.T @ known + found.level**2 * np.eye(33), known.T @ Y[:48])
        errors.append(np.sqrt(np.mean((mean - Y[48:]) ** 2)))
    # The other levels have other scales and noises, which start the chains alike.
    assert errors[0] < 1.1 * min(errors) and errors[0] < 0.5 * Y.std()


def test_order_of_the_rows_changes_nothing():
    moved = [(RANDOM.permutation(learnt), left_out) for learnt, left_out in PARTS]
    both = (_race.joined(run(parts=parts)) for parts in (PARTS, moved))
    for one, other in zip(*both, strict=True):
        assert one.activation == other.activation
        np.testing.assert_allclose(one.error, other.error, rtol=1e-3)


@pytest.mark.as_compiled
def test_the_known_architecture_wins():
    # Kinks along a slope: ReLUs make it of one layer, and smooth units round it off.
    x = RANDOM.uniform(-2, 2, (300, 1))
    y = 4 * np.abs(((x[:, 0] + 2) % 1) - 0.5) - 1
    parts = [(np.arange(240), np.arange(240, 300))]
    races = [_race.in_order(_race.joined(run(x, y, parts, num_steps=300, seed=seed)), False) for seed in range(3)]
    optima = min(races, key=lambda optima: optima[0].error)  # an optimum may be a local one
    assert optima[0].activation == "relu"
    assert [one.error for one in optima[1:]] == sorted(one.error for one in optima[1:])
    assert optima[0].noise_scale == 0.8 * optima[0].error


@pytest.mark.fault("estimators/_race.py", "    if not is_finite.any():", "    if False:")
def test_what_diverges_is_left_out(monkeypatch):
    [found] = run()
    explosive = dict(_race.ACTIVATIONS, tanh=lambda u: jnp.exp(jnp.exp(50 * u)))
    monkeypatch.setattr(_race, "ACTIVATIONS", explosive)
    [others] = run()
    assert {one.activation for one in found} == set(_race.RACED)
    assert {one.activation for one in others} == set(_race.RACED) - {"tanh"}
    assert all(np.isfinite(one.error) for one in others)
    assert len(_race.joined([found, others])) == len(_race.joined([others, found])) == len(_race.RACED) - 1


@pytest.mark.fault("estimators/_race.py", "if raced and clock.is_over", "if raced and False")
def test_a_race_ends_with_the_budget():
    assert len(run(parts=PARTS, num_steps=2, budget=1e-3)) == 1


def test_parts_are_left_out_in_turn():
    raced = run(parts=PARTS)
    [apart] = run(parts=PARTS[1:])
    assert len(raced) == 2 and len(raced[1]) == len(apart)
    for one in _race.joined(raced):
        of_part = [next(other for other in part if other.activation == one.activation) for part in raced]
        np.testing.assert_array_equal(one.residuals, np.concatenate([other.residuals for other in of_part]))
        ranks = [(level, part) for level in range(3) for part in range(2)]
        assert all(one.weights[at] is of_part[part].weights[level] for at, (level, part) in enumerate(ranks))


@pytest.mark.fault("estimators/_race.py", "order[num_learnt : num_learnt + num_held])", "order[:num_held])")
def test_rows_left_out_are_not_learnt_from():
    for num_rows, budget, sizes in ((160, 60.0, (128, 32)), (3000, 60.0, (800, 700)), (3000, 600.0, (2400, 600))):
        plan = replace(plan_regression(num_rows, 4, 1, time_budget=budget), race_runs=((1, 0), (1, 4)))
        parts = _race.parted(plan, np.random.RandomState(0))
        for learnt, left_out in parts:
            assert (len(learnt), len(left_out)) == sizes and not set(learnt) & set(left_out)
        left_out = np.concatenate([part for _, part in parts])
        assert len(parts) == 5 and len(set(left_out)) == min(num_rows, 5 * sizes[1])


def test_several_targets_are_raced_together():
    [found] = run(y=np.stack([Y, -Y], axis=1))
    assert found[0].residuals.shape == (12, 2)


def optimum(depth, error, activation="tanh"):
    return Optimum(depth, activation, 0.3, np.full((12, 1), error), {}, 1.0, [])


def test_layers_that_gain_less_than_a_standard_error_are_not_taken():
    residuals = RANDOM.normal(size=(200, 1))
    deep = optimum(3, 0.0)._replace(residuals=residuals)
    for factor, depths in ((1.01, [1, 3, 2]), (1.5, [3, 2, 1])):
        shallow, middle = (optimum(depth, 0.0)._replace(residuals=factor * residuals[::-1]) for depth in (1, 2))
        assert [one.depth for one in _race.in_order([middle, shallow, deep], False)] == depths
    assert _race.in_order([], False) == []


@pytest.mark.fault("estimators/_race.py", "(max if prefers_depth else min)", "(min)")
def test_long_chains_take_layers_that_lose_less_than_a_standard_error():
    residuals = RANDOM.normal(size=(200, 1))
    shallow = optimum(1, 0.0)._replace(residuals=residuals)
    for factor, depths in ((1.01, [3, 1, 2]), (1.5, [1, 2, 3])):
        middle, deep = (optimum(depth, 0.0)._replace(residuals=factor * residuals[::-1]) for depth in (2, 3))
        middle = middle._replace(residuals=1.4 * residuals)
        assert [one.depth for one in _race.in_order([middle, shallow, deep], True)] == depths


def with_limit(noise_scale, optima, monkeypatch, **options):
    scales = {"w_std": np.ones(1), "b_std": 0.5, "readout_w_std": 1.0, "readout_b_std": 0.1}
    limit = LimitPosterior(WideLimitFit("erf", 1, 0.0, noise_scale, scales, {}, [], X, Y))
    plan = replace(PLAN, race_runs=((1, 0),), race_rows=(48, 12), **options)
    monkeypatch.setattr(_race, "race", lambda *_: [optima])
    report = Report("race")
    with Clock(1e6) as clock:
        found, _ = _race.with_limit(limit, limit.fit.nngp(X), plan, clock, np.random.RandomState(0), report)
    return limit, found, str(report)


@pytest.mark.fault("estimators/_race.py", "np.mean(of_limit**2)) < optima[0].noise_scale", "np.mean(of_limit**2)) < 0")
def test_the_limit_takes_part_with_its_own_error(monkeypatch):
    limit, found, report = with_limit(0.1, [optimum(1, 5.0)], monkeypatch)
    assert found == [] and "the limit's error is below 0.8 of the least" in report
    plan = replace(PLAN, race_runs=((1, 0),), race_rows=(48, 12))
    learnt, left_out = _race.parted(plan, np.random.RandomState(0))[0]
    alone = WideLimitFit("erf", 1, 0.0, 0.1, limit.fit.scales, {}, [], X[learnt], Y[learnt])
    error = np.sqrt(np.mean((np.asarray(alone.predict(X[left_out])[0]) - Y[left_out]) ** 2))
    assert f"the limit {error:7.4f}" in report
    assert with_limit(0.1, [optimum(1, 1e-3)], monkeypatch)[1] != []
    assert with_limit(0.1, [], monkeypatch)[1] == []


def test_a_race_that_the_budget_ends_is_planned_as_it_was_run(monkeypatch):
    scales = {"w_std": np.ones(1), "b_std": 0.5, "readout_w_std": 1.0, "readout_b_std": 0.1}
    limit = LimitPosterior(WideLimitFit("erf", 1, 0.0, 0.1, scales, {}, [], X, Y))
    runs = tuple((depth, part) for part in range(2) for depth in (2, 3, 1))
    plan = replace(PLAN, hidden="auto", race_runs=runs, race_rows=(48, 12))
    residuals = 1e-3 * RANDOM.normal(size=(12, 1))
    for number, num_depths in ((2, 2), (3, 3), (5, 3)):  # the second part is not complete
        done = [[optimum(depth, 0.0)._replace(residuals=residuals)] for depth, _ in runs[:number]]
        monkeypatch.setattr(_race, "race", lambda *_, done=done: done)
        with Clock(1e6) as clock:
            report = Report("race")
            found, run = _race.with_limit(limit, limit.fit.nngp(X), plan, clock, np.random.RandomState(0), report)
        assert run == replace(plan, race_runs=runs[:number]) and f"after {number} of 6 runs" in str(report)
        assert len(found) == num_depths and all(one.residuals.shape == (12, 1) for one in found)


@pytest.mark.as_compiled
def test_the_plan_says_whether_layers_are_preferred(monkeypatch):
    residuals = 1e-3 * RANDOM.normal(size=(200, 1))
    both = [optimum(depth, 0.0)._replace(residuals=residuals[:: 2 * depth - 3]) for depth in (1, 2)]
    for prefers_depth, depth, kind in ((True, 2, "most"), (False, 1, "fewest")):
        monkeypatch.setattr(_race, "joined", lambda _: both)
        _, found, report = with_limit(0.1, both, monkeypatch, prefers_depth=prefers_depth)
        assert found[0].depth == depth and f"the first has the {kind} layers" in report


@pytest.mark.fault(
    "estimators/_policy.py",
    'known = {**chosen.scales, "noise": chosen.noise_scale}, *data',
    'known = {**self.fit.scales, "noise": self.fit.noise_scale}, *data',
)
@parametrize("method", ["auto", "limit"], rest="slow")
@pytest.mark.slow
def test_chains_start_with_the_winner(method, monkeypatch):
    seen = []
    scales = {"w_std": np.ones(2), "input_scale": np.array([1.0, 3.0]), "b_std": 0.5}
    scales |= {"readout_w_std": 1.5, "readout_b_std": 0.3}
    winner = Optimum(2, "gelu", 0.3, np.full((12, 1), 0.5), scales, 2.0, [{"hidden": np.ones(3)}])
    monkeypatch.setattr(_policy, "with_limit", lambda limit, gram, plan, *_: ([winner], plan))

    def run_chains(network, known, scored, num_chains, schedule, *, optima, **form):
        seen.append((known, schedule.precision, optima))
        raise FloatingPointError("none")

    monkeypatch.setattr(_policy, "run_chains", run_chains)
    x = RANDOM.normal(size=(120, 2))
    plan = plan_regression(120, 2, 1, method=method, time_budget=300.0)
    with nullcontext() if method == "limit" else pytest.warns(UserWarning, match="given up"):
        model = WideBNNRegressor(plan=plan, random_state=0).fit(x, x[:, 0])
    assert model.method_ == "limit"
    if method == "limit":
        assert not seen
        return
    ((medians, _, _), precision, optima) = seen[0]
    assert float(medians["noise"]) == pytest.approx(0.8 * 0.5) and precision == "float32"
    np.testing.assert_allclose(medians["input_scale"], [1.0, 3.0])
    assert "2 x 32 gelu units, noise by row" in str(model.report_)
    assert optima == winner.weights
