"""Starts at an optimum: against the mode in closed form, with sites that are held, and where the potential is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy

from numpyro_wide import repriorise
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, NoiseNetwork, bnn
from numpyro_wide.runs import init_to_optimum
from tests.compilations import compilations
from tests.marks import parametrize

X = jnp.array([[1.0, 0.2], [0.3, -1.0], [-0.7, 0.4], [0.1, 2.0]])
Y = jnp.array([1.0, -2.0, 0.5, 3.0])


def line(x, y=None):
    """Linear regression with a latent noise."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(jnp.array([0.5, -1.0]), 2.0).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ slopes, noise), obs=y)


def mode(noise):
    precision = X.T @ X / noise**2 + jnp.eye(2) / 4
    return np.linalg.solve(precision, X.T @ Y / noise**2 + jnp.array([0.5, -1.0]) / 4)


def start_of(**options):
    return init_to_optimum(jax.random.key(0), line, X, Y, progress_bar=False, **options)


def test_the_mode_given_what_is_held():
    start = start_of(num_chains=3, num_steps=2000, hold={"noise": 0.3})
    np.testing.assert_allclose(start["noise"], np.full(3, np.log(0.3)), rtol=1e-6)
    np.testing.assert_allclose(start["slopes"], np.tile(mode(0.3), (3, 1)), rtol=1e-3)


@pytest.mark.as_compiled
def test_the_mode_of_all_sites():
    start = start_of(num_steps=3000, step_size=0.05)
    slope = jax.grad(lambda z: potential_energy(line, (X, Y), {}, z))(start)
    assert start["slopes"].shape == (2,)
    for leaf in jax.tree.leaves(slope):
        np.testing.assert_allclose(leaf, 0.0, atol=0.02)


def test_every_chain_keeps_its_best_position_where_steps_leave_the_support():
    def bounded():
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.factor("inside", jnp.sum(jnp.log(1 - z**2)) + 3 * z[0])  # NaN beyond one

    inside = numpyro.infer.init_to_value(values={"z": jnp.array([0.2, -0.5])})
    start = init_to_optimum(
        jax.random.key(0), bounded, num_steps=50, step_size=0.9, init_strategy=inside, progress_bar=False
    )
    at_start = potential_energy(bounded, (), {}, {"z": jnp.array([0.2, -0.5])})
    assert potential_energy(bounded, (), {}, start) <= at_start


@pytest.mark.as_compiled
@pytest.mark.fault("runs/_optimum.py", 'name.startswith("noise.")', "False")
def test_scales_are_held_at_their_medians_in_a_word():
    prior = dist.LogNormal(0.2, 0.5)
    model = bnn(FCN(1, 3, "erf"), None, NoiseNetwork(0.3, width=2), scales={"w_std": prior})
    wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale="noise")
    start = init_to_optimum(jax.random.key(0), wrapped, X, Y, hold="scales", num_steps=3, progress_bar=False)
    held = [name for name, value in start.items() if not np.any(value)]
    noise = ["noise.hidden_0.bias", "noise.hidden_0.kernel", "noise.readout", "noise_amplitude_base"]
    assert sorted(held) == [*noise, "noise_level_base", "w_std_base"]
    assert sorted(start.keys() - held) == ["hidden.hidden_0.kernel", "readout_base"]
    sites = trace(seed(substitute(model, start), 0)).get_trace(X)
    np.testing.assert_allclose(sites["noise"]["value"], np.full(4, 0.3), rtol=1e-6)
    np.testing.assert_allclose(sites["w_std"]["value"], np.exp(0.2), rtol=1e-6)


@pytest.mark.slow
@parametrize("kernel", [NUTS, SplitHMC], rest="slow")
def test_chains_start_there(kernel):
    start = start_of(num_chains=2, num_steps=500, hold={"noise": 0.3})
    mcmc = MCMC(kernel(line, step_size=1e-6, adapt_step_size=False), num_warmup=0, num_samples=1, num_chains=2,
                chain_method="vectorized")  # fmt: skip
    mcmc.run(jax.random.key(1), X, Y, init_params=start)
    np.testing.assert_allclose(mcmc.get_samples(group_by_chain=True)["slopes"][:, 0], start["slopes"], atol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hold": {"noize": 1.0}},
            "hold names the latent site 'noize', which the model does not have; its latent sites are 'noise', 'slopes'",
        ),
        ({"hold": "noise"}, "hold must be one of 'scales' or values by the name of the site, but got 'noise'"),
        ({"hold": "scales"}, "the model has none; its latent sites are 'noise', 'slopes'"),
        ({"hold": {"slopes": jnp.ones(3)}}, r"hold\['slopes'\] must be of the site's shape, \(2,\)"),
        ({"hold": {"slopes": jnp.ones(2), "noise": 1.0}}, "nothing to optimise"),
        ({"hold": {"noise": 1e-30}, "num_steps": 2}, "potential energy of chains .0. was not finite"),
        ({"num_steps": 0}, "num_steps must be"),
        ({"num_chains": 0}, "num_chains must be"),
        ({"step_size": -1.0}, "step_size must be"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        start_of(**options)


def test_a_key_is_asked_for():
    with pytest.raises(TypeError, match="rng_key"):
        init_to_optimum(0, line, X, Y)


def test_optima_of_other_data_are_compiled_no_more():
    found = {}
    for y in (Y, 2 * Y):
        with compilations() as compiled:
            found = init_to_optimum(
                jax.random.key(0), line, X, y, num_chains=3, num_steps=1500, hold={"noise": 0.3}, progress_bar=False
            )
    assert compiled == []
    expected = np.linalg.solve(X.T @ X / 0.09 + jnp.eye(2) / 4, X.T @ (2 * Y) / 0.09 + jnp.array([0.5, -1.0]) / 4)
    np.testing.assert_allclose(found["slopes"], np.tile(expected, (3, 1)), rtol=1e-3)


def test_a_support_that_a_parameter_moves_is_that_of_the_start():
    """NumPyro keeps its bounds with the functions that it makes of a model."""

    def model():
        end = numpyro.sample("end", dist.Uniform(2.0, 3.0))
        numpyro.sample("z", dist.Uniform(0.0, end))

    start = init_to_optimum(jax.random.key(0), model, num_chains=2, num_steps=5, progress_bar=False)
    assert start["z"].shape == (2,) and np.isfinite(start["z"]).all()
