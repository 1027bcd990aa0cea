"""Guides with flax encoders, and mutable state."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from numpyro.contrib.module import flax_module, nnx_module
from numpyro.infer import Predictive
from numpyro.primitives import mutable

from numpyro_wide import AmortizedForwardKL
from tests.amortized.cases import ENTROPY, normal_model
from tests.marks import parametrize

positive = dist.constraints.positive


class Linen(linen.Module):
    """A linear path and a hidden layer, so that the exact posterior mean is within reach."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.concatenate([x, jnp.tanh(linen.Dense(4)(x))]))[0]


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.readout = nnx.Linear(1, 4, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.readout(jnp.concatenate([x, jnp.tanh(self.hidden(x))]))[0]


def linen_guide(observed_values):
    encoder = flax_module("encoder", Linen(), input_shape=(1,))
    scale = numpyro.param("scale", 1.0, constraint=positive)
    numpyro.sample("theta", dist.Normal(encoder(observed_values["x"][None]), scale))


@cache  # a guide has one, made outside of its traces
def nnx_module_named(name):
    rngs = nnx.Rngs(0)
    return NNX(rngs) if name == "encoder" else nnx.Dropout(0.1, rngs=rngs)


def nnx_guide(observed_values):
    encoder = nnx_module("encoder", nnx_module_named("encoder"))
    scale = numpyro.param("scale", 1.0, constraint=positive)
    numpyro.sample("theta", dist.Normal(encoder(observed_values["x"][None]), scale))


def dropout_guide(observed_values):
    """A module without parameters, whose random state moves on."""
    encoder = flax_module("encoder", Linen(), input_shape=(1,))
    scale = numpyro.param("scale", 1.0, constraint=positive)
    loc = encoder(observed_values["x"][None])
    nnx_module("dropout", nnx_module_named("dropout"))(loc)
    numpyro.sample("theta", dist.Normal(loc, scale))


@pytest.mark.as_compiled
@parametrize("guide", [linen_guide, nnx_guide, dropout_guide], rest="slow")
def test_flax_encoders(guide):
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, 1000))
    trainer = AmortizedForwardKL(normal_model, guide, optimiser, observed="x", batch_size=32)
    params, state, losses = trainer.run(jax.random.key(0), 1000, progress_bar=False)
    assert losses.shape == (1000,)
    log_q = trainer.guide_log_prob(params, trainer.simulate(jax.random.key(1), 20_000))
    assert -float(log_q.mean()) == pytest.approx(ENTROPY, abs=0.02 + 4 * float(log_q.std()) / 20_000**0.5)
    draws = Predictive(guide, params=params, num_samples=50)(jax.random.key(2), {"x": jnp.array(1.0)})["theta"]
    assert draws.shape == (50,)
    assert (state.mutable_state is None) == (guide is not dropout_guide)
    if guide is dropout_guide:
        counts = [leaf for leaf in jax.tree.leaves(state.mutable_state) if leaf.dtype == jnp.uint32 and leaf.ndim == 0]
        assert [int(count) for count in counts] == [1000]


class Normalised(linen.Module):
    """Batch normalisation over the simulations of a step."""

    @linen.compact
    def __call__(self, x, train):
        axis_name = "simulations" if train else None
        x = linen.BatchNorm(use_running_average=not train, momentum=0.95, axis_name=axis_name)(x)
        return linen.Dense(1)(x)[0]


@pytest.mark.as_compiled
def test_batch_normalisation_over_the_simulations():
    def model(train):
        theta = numpyro.sample("theta", dist.Normal(3.0, 1.5))
        numpyro.sample("x", dist.Normal(2 * theta, 1.0))

    def guide(observed_values, train):
        x = jnp.atleast_1d(observed_values["x"])
        encoder = flax_module("encoder", Normalised(), x, False, mutable=["batch_stats"])
        numpyro.sample("theta", dist.Normal(encoder(x, train), numpyro.param("scale", 1.0, constraint=positive)))

    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, 500))
    trainer = AmortizedForwardKL(model, guide, optimiser, observed="x", batch_size=64)
    params, state, _ = trainer.run(jax.random.key(0), 500, True, progress_bar=False)
    running = state.mutable_state["encoder$state"]["batch_stats"]["BatchNorm_0"]
    # Averages over some 39 batches of 64 draws of x, of mean 6 and variance 10; a lone simulation has variance 0.
    assert float(running["mean"][0]) == pytest.approx(6.0, abs=4 * np.sqrt(10 / (39 * 64)))
    assert float(running["var"][0]) == pytest.approx(10.0, abs=4 * 10 * np.sqrt(2 / (39 * 64)))
    posterior = Predictive(guide, params=params, num_samples=4000)
    for x in (2.0, 9.0):
        exact_mean, exact_scale = 3 + 3 * 1.5**2 * (x - 6) / 10 * 2 / 3, np.sqrt(1.5**2 * (1 - 0.9))
        draws = posterior(jax.random.key(1), {"x": jnp.array(x)}, False)["theta"]
        assert float(draws.mean()) == pytest.approx(exact_mean, abs=0.15)
        assert float(draws.std()) == pytest.approx(exact_scale, rel=0.1)


@pytest.mark.as_compiled
def test_mutable_state_is_averaged_over_the_simulations():
    def guide(observed_values):
        seen = mutable("seen", {"mean": jnp.array(0.0), "steps": jnp.array(0)})
        seen["mean"] = 0.5 * seen["mean"] + 0.5 * observed_values["x"]
        seen["steps"] = seen["steps"] + 1
        numpyro.sample("theta", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    trainer = AmortizedForwardKL(normal_model, guide, optax.sgd(0.1), observed="x", batch_size=8000)
    state = trainer.init(jax.random.key(0))
    for expected in (0.35, 0.525):  # the data's mean is 0.7
        state, _ = trainer.update(state)
        assert float(state.mutable_state["seen"]["mean"]) == pytest.approx(expected, abs=0.03)
    assert int(state.mutable_state["seen"]["steps"]) == 2
    assert state.mutable_state["seen"]["mean"].shape == ()
    # A step that is skipped leaves it as it was.
    broken = state._replace(optim_state=trainer.optim.init({"loc": jnp.array(jnp.nan)}))
    new, _ = jax.jit(trainer.stable_update)(broken)
    assert float(new.mutable_state["seen"]["mean"]) == float(state.mutable_state["seen"]["mean"])
