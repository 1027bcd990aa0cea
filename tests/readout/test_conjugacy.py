"""What collapse_readout accepts and refuses, at any scale and under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.nn import softplus
from numpyro.handlers import seed, trace

from numpyro_wide import collapse_readout

SITES = {"readout": "w", "features": "features", "observed": "y"}
PSI = np.random.default_rng(1).normal(size=(6, 4)).astype("f")
Y = np.ones((6, 2), "f")


def run(model, *args):
    return trace(seed(model, jax.random.key(0))).get_trace(*args)


def under_jit(model, *args):
    return jax.jit(lambda *args: run(model, *args)["y"]["fn"].log_prob(args[1]))(*args)


def under_vmap(model, *args):
    batch = [jnp.stack([jnp.asarray(arg)] * 2) for arg in args]
    return jax.vmap(lambda *args: run(model, *args)["y"]["fn"].log_prob(args[1]))(*batch)


CALLS = {"plain": run, "jit": under_jit, "vmap": under_vmap}


def observed_as(mean_of, after=None, noise=0.3):
    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([psi.shape[1], 2]).to_event(2))
        numpyro.sample("y", dist.Normal(mean_of(features, w), noise).to_event(2), obs=y)
        if after is not None:
            after(features, w, y)

    return collapse_readout(model, **SITES)


def second_likelihood(features, w, y):
    numpyro.sample("y2", dist.Normal(features @ w, 0.5).to_event(2), obs=y)


BROKEN = {
    "three times": lambda psi, w: 3 * (psi @ w),
    "half a per cent off": lambda psi, w: 1.005 * (psi @ w),
    "squared": lambda psi, w: (psi @ w) ** 2,
    "a square added": lambda psi, w: psi @ w + (psi @ w) ** 2,
    "through a jitted function": lambda psi, w: jax.jit(jnp.tanh)(psi @ w),
    "one column missing": lambda psi, w: psi[:, :3] @ w[:3],
    "transposed": lambda psi, w: (psi @ w)[::-1],
}
RIGHT = {
    "product": lambda psi, w: psi @ w,
    "offset": lambda psi, w: psi @ w + jnp.sin(psi).sum(1, keepdims=True),
    "einsum": lambda psi, w: jnp.einsum("nd,dk->nk", psi, w) - 2.0,
    "column by column": lambda psi, w: jnp.stack([psi @ w[:, 0], psi @ w[:, 1]], axis=1),
    "in a jitted function": jax.jit(lambda psi, w: softplus(psi[:, :1]) + psi @ w),
}


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mean", BROKEN)
def test_another_mean_is_refused_at_every_scale(mean, call, scale):
    with pytest.raises(ValueError, match="mean of observed site 'y' must be features @ readout plus terms without"):
        CALLS[call](observed_as(BROKEN[mean]), scale * PSI, Y)


@pytest.mark.filterwarnings("ignore:the noise of observed site 'y' is too small")  # at the largest scale
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mean", RIGHT)
def test_the_mean_is_accepted_at_every_scale(mean, call, scale):
    CALLS[call](observed_as(RIGHT[mean]), np.float32(scale) * PSI, Y)


@pytest.mark.parametrize("call", CALLS)
def test_two_likelihoods_of_one_readout_are_refused(call):
    with pytest.raises(ValueError, match="the distribution of site 'y2' depends on the readout 'w'"):
        CALLS[call](observed_as(RIGHT["product"], second_likelihood), PSI, Y)


@pytest.mark.parametrize("call", CALLS)
def test_features_that_depend_on_the_readout_are_refused(call):
    def model(psi, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([psi.shape[1], 2]).to_event(2))
        features = numpyro.deterministic("features", psi * jnp.cos(w[0, 0]))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)

    with pytest.raises(ValueError, match="the features 'features' depend on the readout 'w'"):
        CALLS[call](collapse_readout(model, **SITES), PSI, Y)


def test_every_new_shape_is_looked_at():
    """A model may be right for some shapes alone."""
    model = observed_as(lambda psi, w: psi @ w if psi.shape[0] == 6 else 2 * (psi @ w))
    run(model, PSI, Y)
    with pytest.raises(ValueError, match="mean of observed site"):
        run(model, PSI[:5], Y[:5])


def test_numbers_are_looked_at_after_a_traced_call():
    """Under jit the factor is a number drawn at random; the first call outside sees that it is not one."""
    factor = jnp.asarray(2.0)

    def model(psi, factor, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(features @ w * factor, 0.3).to_event(2), obs=y)

    for call in (run, lambda *args: jax.jit(lambda *args: run(*args)["y"]["value"], static_argnums=0)(*args)):
        with pytest.raises(ValueError, match="mean of observed site"):
            call(collapse_readout(model, **SITES), PSI, factor, Y)


def test_deterministic_sites_that_move_are_not_recorded():
    def after(features, w, y):
        numpyro.deterministic("moves", w.sum())
        numpyro.deterministic("stays", features.sum())

    sites = run(observed_as(RIGHT["product"], after), PSI, Y)
    assert "stays" in sites and "moves" not in sites
