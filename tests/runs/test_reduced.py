"""What is stored in the place of the weights is what the weights would have given."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, Predictive

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise
from numpyro_wide.diagnostics import function_ess, projected_ess, random_projections
from numpyro_wide.mcmc import MicrocanonicalLangevin, PreconditionedCrankNicolson
from numpyro_wide.readout import readout_function, site_function
from numpyro_wide.runs import reduced
from tests.models import small_data

WIDTH = 6
X_TEST = np.linspace(-1.2, 1.2, 4, dtype="f")[:, None]
KEY = jax.random.key(3)


def network(x, y=None):
    """One tanh layer with a known noise, and its function as a site."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    features = numpyro.deterministic("features", scale * jnp.tanh(2 * x @ hidden))
    w = numpyro.sample("w", dist.Normal(0.3, 1.2).expand([WIDTH, 1]).to_event(2))
    function = numpyro.deterministic("function", features @ w + 0.5)
    numpyro.sample("y", dist.Normal(function, 0.2).to_event(2), obs=y)


REPRIORISED = repriorise(network, readout="w", features="features", targets="y", noise_scale=0.2)
COLLAPSED = collapse_readout(network, readout="w", features="features", observed="y")
FUNCTIONS = {
    "projections": random_projections(KEY, ["w", "hidden"], num_projections=7),
    "predictions": site_function(network, "function", X_TEST),
    "means": site_function(network, "y", X_TEST),
}


def run(kernel, **options):
    options = {"num_warmup": 20, "num_samples": 15, "num_chains": 2, "chain_method": "vectorized", **options}
    mcmc = MCMC(kernel, **options)
    mcmc.run(jax.random.key(0), *small_data(10))
    return mcmc


@pytest.fixture(scope="module")
def stored():
    """A run of NUTS that stores the weights and what would take their place."""
    kernel = reduced(NUTS(REPRIORISED, max_tree_depth=2), drop=["w_base"], functions=FUNCTIONS)
    return run(kernel).get_samples(group_by_chain=True)


@pytest.mark.slow
def test_projections_and_function_values_are_those_of_the_full_draws(stored):
    assert set(stored) == {"hidden", "w", "scale", "function", *FUNCTIONS}
    weights = {name: stored[name] for name in ("hidden", "w")}
    project = random_projections(KEY, weights, num_projections=7)
    expected = jax.vmap(jax.vmap(project))(weights)
    np.testing.assert_allclose(stored["projections"], expected, rtol=1e-4, atol=1e-5)
    latent = {**weights, "scale": stored["scale"]}
    predictions = Predictive(network, latent, batch_ndims=2, return_sites=["function"])(KEY, X_TEST)["function"]
    np.testing.assert_allclose(stored["predictions"], predictions, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(stored["means"], stored["predictions"])


@pytest.mark.fault(
    "runs/_reduced.py", "{name: value for name, value in sites.items() if name not in self.drop}", "dict(sites)"
)
@pytest.mark.parametrize(
    "kernel_class", [PreconditionedCrankNicolson, pytest.param(MicrocanonicalLangevin, marks=pytest.mark.slow)]
)
def test_a_reduced_run_stores_no_weights_resumes_and_shows_the_kernel_s_diagnostics(kernel_class):
    sites = ["hidden", "scale"]
    kernel = reduced(kernel_class(COLLAPSED), drop=sites, functions={"along": random_projections(KEY, sites)})
    mcmc = run(kernel, num_chains=1)
    assert set(mcmc.get_samples()) == {"along"}
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *small_data(10))
    state = mcmc.last_state
    last = {"hidden": state.z["hidden"], "scale": jnp.exp(state.z["scale"])}
    expected = random_projections(KEY, last)(last)
    np.testing.assert_allclose(mcmc.get_samples()["along"][-1], expected, rtol=1e-4, atol=1e-5)
    assert kernel.get_diagnostics_str(state) == kernel_class(COLLAPSED).get_diagnostics_str(state)


def test_a_reduced_kernel_is_pickled():
    projections = random_projections(KEY, "w")
    expected = projections({"w": jnp.ones(3)})
    kernel = pickle.loads(pickle.dumps(reduced(NUTS(REPRIORISED, max_tree_depth=3), drop="hidden")))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(projections))({"w": jnp.ones(3)}), expected)
    assert kernel.model.readout == "w" and kernel.kernel._max_tree_depth == 3


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_functions.py", "read_run(form, draw, args, kwargs)", "read_run(form, draw, args, {})")
def test_readout_function_is_the_mean_of_readout_predictive():
    x, y = small_data(10)
    draws = {"hidden": jax.random.normal(jax.random.key(0), (3, 1, WIDTH)), "scale": jnp.array([0.5, 1.0, 2.0])}
    expected = ReadoutPredictive(COLLAPSED, draws, (x, y))(KEY, X_TEST)["mean"]
    found = jax.vmap(readout_function(COLLAPSED, (x, y), X_TEST))(draws)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    by_keyword = jax.vmap(readout_function(COLLAPSED, (x,), model_kwargs={"y": y}, x=X_TEST))(draws)
    np.testing.assert_array_equal(by_keyword, found)


@pytest.mark.slow
def test_function_ess_is_the_projected_ess_of_the_function_values(stored):
    latent = {name: stored[name] for name in ("hidden", "scale", "w")}
    function = site_function(network, "function", X_TEST)
    found = function_ess(function, latent, KEY, num_projections=5, batch_size=4)
    values = Predictive(network, latent, batch_ndims=2, return_sites=["function"])(KEY, X_TEST)["function"]
    expected = projected_ess({"f": values}, KEY, num_projections=5)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ["hiden"]}, "drop names the site 'hiden', which .*not have; its sites are .*'hidden'"),
        ({"drop": [], "functions": {"w": jnp.sum}}, "functions has 'w', the name of a stored site"),
        ({"drop": [], "functions": {"p": random_projections(KEY, ["v"])}}, "but 'v' is missing; it has .*'w'"),
    ],
)
def test_wrong_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(reduced(NUTS(network), **options), num_warmup=0, num_samples=1, num_chains=1)


def test_what_is_not_a_kernel_or_a_function_is_refused():
    with pytest.raises(TypeError, match=r"kernel must be an MCMC kernel.* wrap the kernel, not the model"):
        reduced(network, drop=["hidden"])
    with pytest.raises(TypeError, match=r"functions\['p'\] must be a function of a draw, but is a list"):
        reduced(NUTS(network), drop=["hidden"], functions={"p": ["hidden"]})
    with pytest.raises(ValueError, match="sites must name the sites to project"):
        random_projections(KEY, [])
    with pytest.raises(TypeError, match="model must come from collapse_readout or repriorise"):
        readout_function(network, small_data())
    potential = reduced(NUTS(potential_fn=lambda z: jnp.sum(z**2)), drop=["hidden"])
    chain = MCMC(potential, num_warmup=0, num_samples=1)
    with pytest.raises(ValueError, match="draws must be dictionaries of sites"):
        chain.run(KEY, init_params=jnp.zeros(2))


def test_a_site_function_refuses_a_draw_without_the_weights():
    with pytest.raises(ValueError, match=r"must hold the latent sites .*, but 'w' is missing.*readout_function"):
        site_function(network, "function", X_TEST)({"hidden": jnp.ones((1, WIDTH)), "scale": 1.0})
    with pytest.raises(ValueError, match="site names the site 'f', which the model does not have; its sites are"):
        site_function(network, "f", X_TEST)({})


def test_a_readout_function_refuses_arguments_without_the_observations():
    x, y = small_data(10)
    with pytest.raises(
        TypeError, match=r"model_args must be a tuple .*, but is an ndarray; .*\(model, \(x, y\), x_new\)"
    ):
        readout_function(COLLAPSED, x, y)
    with pytest.raises(ValueError, match="the observed site 'y' is not observed with these model_args"):
        readout_function(COLLAPSED, (x,), X_TEST)({"hidden": jnp.ones((1, WIDTH)), "scale": 1.0})
    with pytest.raises(ValueError, match="the observed site 'y' is not observed with these model_args"):
        readout_function(COLLAPSED, (), X_TEST, model_kwargs={"x": x})({"hidden": jnp.ones((1, WIDTH)), "scale": 1.0})
