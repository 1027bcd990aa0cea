"""Chains whose programs are kept: the draws of NumPyro's own loop, and nothing compiled by runs that come after."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_wide import collapse_readout
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from tests.compilations import compilations

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 8, dtype="f")[:, None]
Y = np.sin(3 * X[:, 0])
NOISE = 0.3


def network(median):
    """A model with the median of a scale in its closure, and a noise among its globals."""

    def model(x, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(jnp.log(median), 0.3))
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 4]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(scale * x @ hidden))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, NOISE).to_event(1), obs=y)

    return collapse_readout(model, readout="w", features="features", observed="y")


def chains(model, kind=SplitHMC, once=True, **options):
    kernel = kind(model)
    method = kernel.compiled_once if once else "vectorized"
    options = {"num_warmup": 25, "num_samples": 12, "num_chains": 2, "progress_bar": False} | options
    return MCMC(kernel, chain_method=method, **options)


def draws(mcmc, y=Y, **options):
    mcmc.run(KEY, X, y, **options)
    return jax.device_get((mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)))


@pytest.mark.as_compiled
@pytest.mark.fault("mcmc/_chains.py", "remainder == thinning - 1", "remainder == 0")
@pytest.mark.usefixtures("x64")  # in which rounding, that differs between programs, does not lead chains apart
@pytest.mark.parametrize("kind", [SplitHMC, MicrocanonicalLangevin])
def test_the_draws_are_those_of_the_vectorised_loop(kind):
    fields = {"extra_fields": ("num_grad", "~z.hidden", "adapt_state.max_steps")}
    found, expected = (draws(chains(network(2.0), kind, once, thinning=5), **fields) for once in (True, False))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), found, expected)


@pytest.mark.as_compiled
@pytest.mark.parametrize("once", [True, False])
def test_models_that_differ_in_a_function_in_python_have_their_own_posteriors(once):
    """Normal of one row in closed form, with the observation's offset by a callback."""

    def model_of(fn):
        def model():
            z = numpyro.sample("z", dist.Normal(0, 1))
            offset = jax.pure_callback(fn, jax.ShapeDtypeStruct((), "f"))
            numpyro.sample("y", dist.Normal(z + offset, 0.5), obs=0.0)

        return model

    for offset in (-2.0, 2.0):
        mcmc = chains(model_of(lambda offset=offset: np.float32(offset)), once=once, num_warmup=100, num_samples=200)
        mcmc.run(KEY)
        np.testing.assert_allclose(mcmc.get_samples()["z"].mean(), -offset / 1.25, atol=0.15)


def test_warmup_and_a_run_that_goes_on():
    both = []
    for once in (True, False):
        mcmc = chains(network(2.0), once=once)
        mcmc.warmup(KEY, X, Y, collect_warmup=True)
        of_warmup = mcmc.get_samples()["hidden"]
        both.append((of_warmup, draws(mcmc)[0]["hidden"], np.asarray(mcmc.last_state.i)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), *both)


@pytest.mark.fault("mcmc/_chains.py", "run_program(loop, *loop_arguments)", "jax.jit(loop)(*loop_arguments)")
@pytest.mark.slow
def test_other_data_and_medians_of_the_same_shape_find_the_programs():
    first = draws(chains(network(jnp.float32(2.0))))[0]
    with compilations() as compiled:
        second = draws(chains(network(jnp.float32(2.0))))[0]
        third = draws(chains(network(jnp.float32(40.0))), -2 * Y)[0]
    assert compiled == []
    np.testing.assert_array_equal(second["hidden"], first["hidden"])
    assert np.median(third["scale"]) > 3 * np.median(first["scale"])


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_warmup_and_runs_of_other_lengths_are_one_program():
    both = []
    for once in (True, False):
        mcmc = chains(network(jnp.float32(2.0)), once=once)
        mcmc.warmup(KEY, X, Y)
        draws(mcmc)
        mcmc.num_samples, mcmc.thinning = 36, 3
        with compilations() as compiled:
            both.append(draws(mcmc)[0]["hidden"])
            mcmc.warmup(KEY, X, Y)
        assert (compiled == []) == once
    assert both[0].shape == (2, 12, 1, 4)
    # Rounding, which differs between programs, leads chains apart in the end.
    np.testing.assert_allclose(*(found[:, :6] for found in both), rtol=2e-3, atol=2e-3)


@pytest.mark.fault("mcmc/_chains.py", "!= signature or not all(map(is_, kernel._loop.leaves, leaves))", "!= signature")
@pytest.mark.slow
def test_a_run_that_goes_on_with_the_same_arrays_traces_nothing():
    traced = []

    def model(x, y):
        traced.append(y)
        numpyro.sample("y", dist.Normal(x[:, 0] * numpyro.sample("w", dist.Normal(0, 1)), NOISE).to_event(1), obs=y)

    def go_on(mcmc, *arrays):
        del traced[:]
        mcmc.run(KEY, *arrays)
        return mcmc.get_samples()["w"], len(traced)

    x, y = jnp.asarray(X), jnp.asarray(Y)
    mcmc = chains(model)
    mcmc.warmup(KEY, x, y)
    first, num_traced = go_on(mcmc, x, y)
    assert num_traced == 0
    other, num_traced = go_on(mcmc, x, 1 - 2 * y)
    assert num_traced > 0
    fresh = chains(model)
    fresh.post_warmup_state = mcmc.post_warmup_state
    np.testing.assert_array_equal(go_on(fresh, x, 1 - 2 * y)[0], other)
    np.testing.assert_array_equal(go_on(fresh, x, y)[0], first)
    changed = np.array(Y)  # an array of NumPy's may hold other numbers in the next run
    go_on(mcmc, x, changed)
    changed[:] = 1 - 2 * Y
    np.testing.assert_array_equal(go_on(mcmc, x, changed)[0], other)


@pytest.mark.as_compiled
def test_a_global_that_has_changed_is_followed(monkeypatch):
    mcmc = chains(network(jnp.float32(2.0)))
    before = draws(mcmc, extra_fields=("potential_energy",))[1]["potential_energy"]
    monkeypatch.setitem(globals(), "NOISE", 3.0)
    after = draws(mcmc, extra_fields=("potential_energy",))[1]["potential_energy"]
    expected = draws(chains(network(2.0), once=False), extra_fields=("potential_energy",))[1]["potential_energy"]
    assert np.abs(after - before).min() > 0.01
    np.testing.assert_allclose(after, expected, rtol=2e-3, atol=2e-3)
