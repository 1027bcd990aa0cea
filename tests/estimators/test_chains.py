"""Chains of the estimators: how long they run, and what is compiled for them."""

from dataclasses import replace
from hashlib import sha256
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy.optimize import minimize
from scipy.special import logsumexp

from numpyro_wide._arviz import effective_sample_size
from numpyro_wide.estimators import WideBNNRegressor, _chains
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._chains import (
    FlatTarget,
    convergence,
    finite_draws,
    largest_rhat,
    latent_shapes,
    run_chains,
    starts_near,
    weigh,
)
from numpyro_wide.estimators._plan import Schedule, plan_regression
from numpyro_wide.estimators._policy import in_precision, needs_double
from numpyro_wide.estimators._posteriors import DrawnPosterior, Network, collapsed
from numpyro_wide.estimators._scoring import chain_weights
from numpyro_wide.wide_limit import WideLimitFit
from tests.marks import parametrize

RANDOM = np.random.default_rng(2)
X = np.random.default_rng(0).uniform(-2, 2, (40, 2))
Y = np.sin(X[:, 0]) + 0.3 * np.random.default_rng(1).normal(size=40)
SCALES = {"b_std": 0.5, "readout_w_std": 1.0, "readout_b_std": 0.1, "w_std": np.ones(1), "noise": 0.3}


NETWORK = Network(1, 4, "erf", None, False)
SCHEDULE = Schedule(1, 4, False, 40, 50, 0, 200, (200, 400, 800), 20, "float32", num_pieces=15)


class CountedClock(Clock):
    """A clock whose budget is over at the looks at it from a number on."""

    def __init__(self, number):
        super().__init__(1e6)
        self.number = number

    @property
    def is_over(self):
        self.number -= 1
        return self.number < 0


def run(judge, optima=(), schedule=SCHEDULE, network=NETWORK, num_looks=1000, num_chains=2):
    report = Report("chains")
    with CountedClock(num_looks) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chains, "judge", lambda network, draws, *_: (draws, *judge(draws)))
        form = {"clock": clock, "key": jax.random.key(0), "report": report}
        found = run_chains(network, (SCALES, X, Y), (X, Y), num_chains, schedule, optima=optima, **form)
    return found, str(report)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_chains.py", "parts = jnp.split(z, ends[:-1])", "parts = jnp.split(z[::-1], ends[:-1])")
@pytest.mark.fault("estimators/_chains.py", "0.5 * jnp.sum(z**2) - log_evidence", "-log_evidence")
@parametrize(
    "network",
    [
        Network(1, 4, "erf", None, by_row=True),
        Network(1, 4, "tanh", 2, by_row=True),
        Network(1, 4, "relu", 2, by_row=False),
        Network(1, 4, "erf", 2, by_row=False, is_latent=False),
    ],
    rest="slow",
)
def test_a_vector_has_the_density_of_the_collapsed_model_up_to_a_constant(network):
    y = Y if network.num_outputs is None else np.stack([Y, Y**2], axis=1)
    model, args = collapsed(network), jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (SCALES, X, y))
    target = FlatTarget(network, args, latent_shapes(network, args))
    start = starts_near([{"hidden.hidden_0.kernel": np.ones((2, 4))}], jax.random.key(0), target.shapes, 3)
    z = target.vectors(start) + 0.5 * jax.random.normal(jax.random.key(1), target.vectors(start).shape)
    first = jax.tree.map(itemgetter(1), start)
    jax.tree.map(np.testing.assert_array_equal, target.values(target.vectors(start)[1]), first)
    expected = [log_density(model, args, {}, target.values(one))[0] for one in z]
    found = jax.vmap(target.potential_energy)(z)
    np.testing.assert_allclose(found - found[0], expected[0] - jnp.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_chains.py", "optima[chain % len(optima)]", "optima[0]")
def test_chains_start_near_the_optima_in_turn():
    optima = [{"hidden.hidden_0.kernel": np.full((2, 4), size), "hidden.hidden_0.bias": np.ones(4)} for size in (9, -9)]
    network, args = Network(1, 4, "erf", None, by_row=True), jax.tree.map(jnp.asarray, (SCALES, X, Y))
    start = starts_near(optima, jax.random.key(0), latent_shapes(network, args), 3)
    kernel = start["hidden.hidden_0.kernel"]
    np.testing.assert_allclose(kernel.mean(axis=(1, 2)), [9, -9, 9], atol=0.2)
    assert 0.05 < np.std(kernel[0] - kernel[2]) < 0.3  # apart
    assert start["noise.hidden_0.kernel"].shape == (3, 2, 16) and not start["noise_level_base"].any()
    sites = trace(seed(collapsed(network), 0)).get_trace(*args)
    assert set(start) == {n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
    found, report = run(lambda *_: (True, []), optima=optima)
    assert found.num_steps == 400 and "from optima of the race, with scales and noise held" in report
    assert np.isfinite(found.mcmc.get_samples()["hidden.hidden_0.kernel"]).all()


@pytest.mark.slow
def test_a_single_chain_starts_near_an_optimum():
    found, _ = run(lambda *_: (True, []), optima=[{"hidden.hidden_0.kernel": np.ones((2, 4))}], num_chains=1)
    assert found.mcmc.get_samples()["hidden.hidden_0.kernel"].shape == (20, 2, 4)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_chains.py", "target._replace(used=held)", "target")
@pytest.mark.fault("estimators/_chains.py", "held[None] * ", "")
def test_noise_by_row_is_constant_at_first(monkeypatch):
    starts = []

    class Seen(MCMC):
        def warmup(self, rng_key, init_params, **form):
            starts.append((init_params, self.sampler.get_potential_fn()))
            super().warmup(rng_key, init_params=init_params, **form)

    network, args = Network(1, 4, "erf", None, by_row=True), jax.tree.map(jnp.asarray, (SCALES, X, Y))
    target = FlatTarget(network, args, latent_shapes(network, args))
    is_readout = target.without("noise.readout") == 0
    assert is_readout.sum() == 16
    monkeypatch.setattr(_chains, "MCMC", Seen)
    schedule, optima = (
        replace(SCHEDULE, num_constant=100, looks=(100,), num_pieces=5),
        [{"hidden.hidden_0.kernel": np.ones((2, 4))}],
    )
    found, report = run(lambda *_: (True, []), optima, schedule, network)
    assert found.num_steps == 200 + 100 + 200 + 100
    assert "500 warmup steps, first with constant noise, and 100 after them" in report
    (_, constant), (start, varying) = starts
    assert not start[:, is_readout].any() and start[:, ~is_readout].all()  # from where the first phase came to
    moved = start[0] + is_readout
    np.testing.assert_allclose(constant(moved) - constant(start[0]), 8.0, rtol=1e-3)  # the prior of N(0, I) alone
    assert abs(varying(moved) - varying(start[0]) - 8.0) > 0.1
    np.testing.assert_allclose(constant(start[0]), varying(start[0]), rtol=1e-6)


@pytest.mark.fault("estimators/_chains.py", "if is_settled or", "if lines or")
@pytest.mark.slow
def test_chains_that_have_not_settled_go_on_for_twice_as_many_steps():
    seen = []

    def judge(draws):
        seen.append(np.asarray(draws["hidden.hidden_0.kernel"]))
        return len(seen) == 3, [f"look {len(seen)}"]

    found, report = run(judge)
    assert found.num_steps == 200 + 200 + 400 + 800
    assert "200 warmup steps and 1400 after them" in report and "budget" not in report
    assert "look 3" in report and "look 2" not in report
    assert [draws.shape[:1] for draws in seen] == 3 * [(40,)]  # 20 of each chain, however long
    assert np.ptp(np.concatenate(seen), axis=0).min() > 0
    np.testing.assert_array_equal(found.mcmc.get_samples()["hidden.hidden_0.kernel"], seen[-1])
    assert found.mcmc.get_extra_fields(group_by_chain=True)["num_grad"].shape == (2, 20)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_chains.py", "not (pieces and clock.is_over)", "True")
@pytest.mark.fault("estimators/_chains.py", "join(mcmc, pieces[-PIECES:])", "join(mcmc, pieces)")
def test_the_end_of_the_budget_ends_the_chains_and_the_plan_repeats_them():
    never = lambda *_: (False, [])  # noqa: E731
    found, report = run(never, num_looks=6)  # four pieces of the first look, once after it, one of the second
    assert found.num_steps == 200 + 200 + 2 * 80 and found.schedule.num_pieces == 7
    assert "the chains were ended by the budget, after 560 of 1600 steps" in report
    again, report = run(never, schedule=found.schedule)
    assert again.num_steps == found.num_steps and again.schedule == found.schedule and "budget" not in report
    for name, draws in found.mcmc.get_samples().items():
        assert len(draws) == 40
        np.testing.assert_array_equal(again.mcmc.get_samples()[name], draws)


@pytest.mark.as_compiled
@pytest.mark.fault("estimators/_policy.py", "noise_scale**2 < rounding", "noise_scale**2 < 0")
@parametrize(("readout_w_std", "is_double"), [(2.0, False), (400.0, True)], rest="slow")
def test_precision_is_double_where_features_hide_the_noise(readout_w_std, is_double):
    scales = SCALES | {"readout_w_std": readout_w_std}
    noise = scales.pop("noise")
    fit = WideLimitFit("relu", 1, 0.0, noise, scales, {}, [], X, Y)
    prior_variance = np.mean(np.diagonal(fit.nngp(X)))
    found, reason = needs_double(noise, prior_variance, len(X))
    assert found is is_double and f"float{64 if is_double else 32} (noise 0.3 is " in reason
    assert needs_double(0.01, 0.0, len(X)) == (True, "float64 (noise 0.01 is below 0.02)")  # whatever the features
    planned = in_precision(replace(SCHEDULE, precision="auto"), noise, prior_variance, Report("precision"))
    assert planned == (
        replace(SCHEDULE, num_adam=25, num_warmup=100, looks=(100, 200, 400), precision="float64")
        if is_double
        else SCHEDULE
    )
    model = collapsed(Network(1, 100, "relu", None, False))
    args = jax.tree.map(jnp.asarray, (scales | {"noise": noise}, X, Y))
    sites = trace(seed(substitute(model, {"noise_base": 0.0, "readout_w_std_base": 0.0}), 0)).get_trace(*args)
    assert np.isfinite(float(sites["y"]["fn"].log_prob(sites["y"]["value"]))) is not is_double


@pytest.mark.fault("estimators/_chains.py", "0]) * np.cumsum(weights)", "0]) * np.cumsum(0 * weights + 1 / num_chains)")
def test_chains_that_predict_rows_left_out_better_have_more_draws():
    random = np.random.default_rng(0)
    network, draws = Network(1, 4, "erf", None, False), np.arange(200.0)
    posterior = DrawnPosterior(network, {"z": draws}, (SCALES, X, Y))
    mean = Y[:, None] + 0.3 * random.normal(size=(40, 1)) + np.repeat([0.0, 2.0], 100)[:, None, None]
    moments = mean, np.full((200, 40, 1), 0.01), np.full((200, 40, 1), 0.09)
    posterior._last = {sha256(X.tobytes()).digest(): moments}
    line = weigh(posterior, 2, moments, Y[:, None])
    assert line == "weights of the chains: 0.75, 0.25"  # halfway from a half to all
    kept = posterior.draws["z"]
    assert len(kept) == 200 and (kept < 100).sum() == 150 and set(kept) > set(range(100))
    np.testing.assert_array_equal(posterior.function(X)[0], mean[kept.astype(int)])


def test_weights_of_chains_are_halfway_to_the_best_mixture():
    log_densities = np.random.default_rng(1).normal(size=(3, 400))
    found = chain_weights(log_densities)

    def loss(free):
        return -np.mean(logsumexp(log_densities, axis=0, b=np.append(free, 1 - free.sum())[:, None]))

    best = minimize(loss, np.full(2, 0.3), bounds=[(0, 0.5)] * 2, tol=1e-10).x
    np.testing.assert_allclose(found[:2], (best + 1 / 3) / 2, atol=2e-3)
    np.testing.assert_allclose(chain_weights(np.zeros((4, 9))), 0.25)
    assert np.isfinite(chain_weights(np.array([[0.0], [-1e4]]))).all()


@pytest.mark.fault("estimators/_chains.py", "if not found.unsettled:", "if found.largest > 0:")
def test_judgement_of_chains():
    random = np.random.default_rng(0)
    y, variance = np.zeros((20, 1)), np.ones((800, 20, 1))
    alike = random.normal(size=(800, 20, 1))
    assert convergence(alike, variance, y, 4)[::2] == (True, True)
    apart = alike + 5.0 * np.repeat(np.arange(4), 200)[:, None, None]
    is_settled, lines, agree, rhat = convergence(apart, variance, y, 4)  # longer chains would not meet
    assert is_settled and not agree and rhat > 2 and "an ensemble" in lines[-1]
    halves = np.repeat(np.tile([0.0, 0.5], 4), 100)[:, None, None]
    is_settled, lines, *_ = convergence(
        alike + np.repeat(np.arange(4), 200)[:, None, None] * 0.3 + halves, variance, y, 4
    )
    assert not is_settled and "not settled" in lines[-2] and "times as many steps" in lines[-1]
    moving = alike + np.tile(np.linspace(0, 5, 200), 4)[:, None, None]
    is_settled, lines, *_ = convergence(moving, variance, y, 4)
    assert not is_settled and "not settled" in lines[-1]  # all move alike, and R-hat tells nothing of it
    assert "a single chain" in convergence(moving, variance, y, 1)[1][-1]


@pytest.mark.fault("estimators/_chains.py", 'if "." not in name', 'if "b_std" not in name')
def test_a_posterior_asks_for_agreement_of_function_noise_and_scales_each():
    random = np.random.default_rng(0)
    draws = {"hidden.hidden_0.kernel": np.repeat(np.arange(4.0), 500)[:, None, None] + np.zeros((2000, 2, 4))}
    draws |= {"b_std_base": random.normal(size=2000), "noise_base": random.normal(size=2000)}
    mean, noise = random.normal(size=(2, 2000, 5, 1))
    noise = np.exp(noise)
    apart = np.repeat(np.arange(4.0), 500)

    def worst(mean=mean, noise=noise, **changed):
        return largest_rhat(DrawnPosterior(NETWORK, draws | changed, (SCALES, X, Y)), mean, noise, 4)

    assert worst()[0] < 1.01  # weights may differ: units have no order
    assert worst(mean=mean + apart[:, None, None] * np.eye(5)[2][None, :, None])[1] == "the function"
    assert worst(noise=noise * np.exp(apart)[:, None, None])[1] == "the noise"
    rhat, name = worst(b_std_base=draws["b_std_base"] + apart)
    assert name == "b_std" and rhat == pytest.approx(1.5, abs=0.2)  # of variances 1 within and 5/4 between, by ranks


@pytest.mark.slow
def test_a_posterior_is_that_of_nuts():
    plan = plan_regression(40, 2, 1, method="posterior", hidden=(4,), time_budget=120)
    model = WideBNNRegressor(plan=plan, random_state=0).fit(X, Y)
    assert model.method_ == "posterior" and model.summary_["rhat"] <= 1.01 and model.summary_["agrees"]
    nuts = MCMC(NUTS(model.model_), num_warmup=500, num_samples=2000, num_chains=1, progress_bar=False)
    nuts.run(jax.random.key(0), *jax.tree.map(jnp.asarray, model.model_args_))
    expected = nuts.get_samples()
    for name, draws in model.draws_.items():
        if "." not in name:
            error = (1 / effective_sample_size(np.asarray(expected[name])[None]) + 1 / 1000) ** 0.5
            np.testing.assert_array_less(
                abs(draws.mean(axis=0) - expected[name].mean(axis=0)), 4 * error * draws.std(axis=0)
            )
            np.testing.assert_allclose(draws.std(axis=0), expected[name].std(axis=0), rtol=0.2)


@pytest.mark.fault("estimators/_chains.py", "chain in chains])", "chain in chains]) * 0 + np.arange(is_finite.size)")
def test_draws_that_are_not_finite_are_left_out_and_counted():
    function = [RANDOM.normal(size=(40, 5, 1)) for _ in range(3)]
    kept, num_chains, lines = finite_draws(tuple(function), 4)
    np.testing.assert_array_equal(kept, np.arange(40))
    assert (num_chains, lines) == (4, [])
    function[1][[3, 12, 14], 2] = np.nan
    function[0][31:39] = np.inf  # most of the last chain
    kept, num_chains, (line,) = finite_draws(tuple(function), 4)
    assert num_chains == 3 and line.startswith("11 of 40 draws have predictions that are not finite")
    np.testing.assert_array_equal(kept.reshape(3, 8) // 10, np.repeat(np.arange(3), 8).reshape(3, 8))
    assert not set(kept) & {3, 12, 14} and all(np.isfinite(part[kept]).all() for part in function)
    with pytest.raises(FloatingPointError, match="no draw of the chains"):
        finite_draws((np.full((40, 5, 1), np.nan),), 4)
