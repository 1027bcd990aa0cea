"""Training on simulations that are given, against least squares and in all the ways that they may be wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL
from numpyro_wide.amortized._training_data import epochs
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.nn import ResidualEncoder
from tests.amortized.cases import ENTROPY, INTERCEPT, SCALE, SLOPE, linear_guide, normal_model
from tests.compilations import compilations

KEY = jax.random.key(3)


def pairs(number, seed=0):
    """Simulations of the conjugate model, by NumPy."""
    rng = np.random.default_rng(seed)
    theta = 0.7 + 1.3 * rng.normal(size=number)
    return {"theta": theta.astype(np.float32), "x": (theta + 0.5 * rng.normal(size=number)).astype(np.float32)}


def prior_alone():
    numpyro.sample("theta", dist.Normal(0.7, 1.3))


def trainer(optim=None, model=normal_model, guide=linear_guide, **options):
    return AmortizedForwardKL(model, guide, optim or optax.adam(0.01), **{"observed": "x", "batch_size": 8, **options})


def test_full_batches_lead_to_least_squares():
    """The best guide of these very pairs is their regression line with its residual deviation."""
    given = pairs(50)
    training = trainer(optax.adam(optax.cosine_decay_schedule(0.05, 1500)), prior_alone, batch_size=50)
    params = training.run(KEY, 1500, simulations=given, progress_bar=False).params
    slope, intercept = np.polyfit(given["x"], given["theta"], 1)
    residual = given["theta"] - slope * given["x"] - intercept
    np.testing.assert_allclose(params["slope"], slope, atol=1e-3)
    np.testing.assert_allclose(params["intercept"], intercept, atol=1e-3)
    np.testing.assert_allclose(params["scale"], residual.std(), rtol=1e-3)


@pytest.mark.as_compiled
def test_a_run_goes_on_as_one_longer_run_and_holds_the_last_out():
    given, options = pairs(70), {"held_out": 20, "evaluate_every": 8, "progress_bar": False}
    whole = trainer().run(KEY, 40, simulations=given, **options)
    parts = [trainer().run(KEY, 7, simulations=given, **options)]
    for num_steps in (1, 20, 12):
        parts.append(trainer().run(KEY, num_steps, init_state=parts[-1].state, simulations=given, **options))
    np.testing.assert_array_equal(jnp.concatenate([part.losses for part in parts]), whole.losses)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(parts[-1].params[name], value)
    seen = whole.state.held_out
    last = {name: values[-20:] for name, values in given.items()}
    expected = -float(jnp.mean(trainer(guide=linear_guide).guide_log_prob(seen.best_params, last)))
    assert float(seen.best_loss) == pytest.approx(expected, rel=1e-5)
    # What is held out is not trained on.
    changed = {name: np.concatenate([values[:50], values[50:] + 1]) for name, values in given.items()}
    np.testing.assert_array_equal(trainer().run(KEY, 40, simulations=changed, **options).losses, whole.losses)


@pytest.mark.fault("amortized/_training_data.py", "random.fold_in(shuffle_key, first_step // length)", "shuffle_key")
def test_an_epoch_has_every_simulation_once_in_a_new_order():
    numbers = {"z": jnp.arange(26)}
    length, draw, gather = epochs(KEY, numbers, 6)
    assert length == 4
    seen = []
    for first in (0, 4):
        entries = draw(jnp.asarray(first))
        batches = [gather(jax.tree.map(lambda leaf, i=i: leaf[i], entries)) for i in range(4)]
        assert [int(step) for step in entries[1]] == list(range(first, first + 4))
        seen.append(np.concatenate([draws["z"] for draws, _ in batches]))
        assert len(set(seen[-1].tolist())) == 24  # the last two wait for another epoch
    assert not np.array_equal(*seen)


@pytest.mark.as_compiled
def test_an_external_simulator_with_an_auto_guide():
    """The model has no likelihood: the simulator is NumPy's. The loss is the posterior's entropy."""
    guide = AutoAmortized(prior_alone, observed="x", encoder=ResidualEncoder(width=32, depth=2))
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, 600))
    training = trainer(optimiser, prior_alone, guide, batch_size=128)
    result = training.run(KEY, 600, simulations=pairs(12_000), held_out=2000, progress_bar=False)
    assert float(result.state.held_out.best_loss) == pytest.approx(ENTROPY, abs=0.06)
    draws = Predictive(guide, params=result.params, num_samples=5000)(jax.random.key(1), {"x": 1.5})["theta"]
    np.testing.assert_allclose(draws.mean(), SLOPE * 1.5 + INTERCEPT, atol=0.05)
    np.testing.assert_allclose(draws.std(), SCALE, rtol=0.1)


def test_the_first_state_takes_few_programs_and_arrays_of_constraints_are_numbers():
    def prior():
        numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([7]).to_event(1))

    given = {name: np.random.default_rng(0).normal(size=(40, 7)) for name in ("theta", "x")}
    guide = AutoAmortized(prior, observed="x", encoder=ResidualEncoder(width=9, depth=1))
    with compilations() as programs:
        trainer(model=prior, guide=guide).init(KEY, simulations=given)
    assert 0 < len(programs) < 16, programs  # operation by operation there were 93

    def bounded(observed_values):
        support = dist.constraints.interval(jnp.zeros(2), 3 * jnp.ones(2))
        first, second = numpyro.param("bounds", jnp.array([1.0, 2.5]), constraint=support)
        numpyro.sample("theta", dist.Normal(first, second))

    training = trainer(optax.sgd(1e-6), prior_alone, bounded)
    state = training.init(KEY, simulations=pairs(40))
    np.testing.assert_allclose(training.get_params(state)["bounds"], [1.0, 2.5], rtol=1e-5)
    unconstrained = training.optim.get_params(state.optim_state)["bounds"]
    np.testing.assert_allclose(unconstrained, np.log([1 / 2, 2.5 / 0.5]), rtol=1e-5)


def test_simulations_that_failed_are_counted_and_left_out():
    given = pairs(60)
    failed = {name: values.copy() for name, values in given.items()}
    failed["x"] = failed["x"].astype(float)
    failed["x"][[3, 40]], failed["theta"][5] = (np.nan, 1e39), np.inf  # the former is infinite in single precision
    kept = {name: np.delete(values, [3, 5, 40]) for name, values in given.items()}
    with pytest.warns(UserWarning, match="3 of 60 simulations hold NaN or infinity, and are left out") as caught:
        losses = trainer().run(KEY, 10, simulations=failed, progress_bar=False).losses
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(losses, trainer().run(KEY, 10, simulations=kept, progress_bar=False).losses)


def positive_model():
    numpyro.sample("x", dist.Normal(numpyro.sample("theta", dist.LogNormal(0.0, 1.0)), 1.0))


def dependent_model():
    high = numpyro.sample("high", dist.LogNormal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(numpyro.sample("theta", dist.Uniform(0.0, high)), 1.0))


GIVEN = {"theta": np.ones(20), "x": np.ones(20)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"simulations": [1, 2]}, ValueError, "dictionary with the observed site 'x', but got a list"),
        ({"simulations": {"theta": np.ones(20)}}, ValueError, "the observed site 'x', but got 'theta'"),
        ({"simulations": {"x": np.ones(20)}}, ValueError, "the latent site of the guide 'theta', but got 'x'"),
        ({"simulations": GIVEN | {"x": np.ones(19)}}, ValueError, "lengths are {'theta': 20, 'x': 19}"),
        ({"simulations": {"theta": 1.0, "x": 1.0}}, ValueError, "lengths are {'theta': 0, 'x': 0}"),
        ({"simulations": GIVEN | {"theta": np.ones((20, 2))}}, ValueError, r"shape \(\) after .*but has \(2,\)"),
        ({"simulations": GIVEN | {"x": np.ones((20, 1))}}, ValueError, r"'x'\] must have the shape \(\)"),
        (
            {"simulations": GIVEN | {"x": np.full(20, np.nan)}},
            ValueError,
            "fewer than two of the simulations are finite",
        ),
        (
            {"model": positive_model, "simulations": GIVEN | {"theta": -np.ones(20)}},
            ValueError,
            "must lie in the support",
        ),
        (
            {"model": dependent_model, "guide": None, "simulations": GIVEN | {"high": 2 * np.ones(20)}},
            ValueError,
            "supports that do not vary with other sites, but those of 'theta' do",
        ),
        ({"held_out": 15}, ValueError, "batch of 8 to train on, but of 20 finite ones 15 are held out"),
        ({"guide": None, "simulations": {"x": np.ones(20)}}, ValueError, "latent site 'theta', but got 'x'"),
    ],
)
def test_mistakes(change, error, message):
    arguments = {"simulations": GIVEN, **change}
    model = arguments.pop("model", normal_model)
    guide = arguments.pop("guide", linear_guide) or AutoAmortized(model, observed="x")
    with pytest.raises(error, match=message):
        trainer(model=model, guide=guide).run(KEY, 5, progress_bar=False, **arguments)
