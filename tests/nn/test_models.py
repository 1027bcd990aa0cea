"""Networks inside NumPyro models: a site for each parameter, NumPyro's random modules, every handler of the package."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from flax.nnx.bridge import ToNNX
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_wide import ReadoutPredictive, collapse_readout, guide_draws, linear_gaussian, repriorise, wide_limit_draws
from numpyro_wide.nn import FCN, bnn, network_parameters, random_network
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X, X_NEW = RNG.normal(size=(12, 3)).astype("f"), RNG.normal(size=(5, 3)).astype("f")
Y = (np.sin(2 * X[:, :2]) + 0.4).astype("f")
NETWORK = FCN(2, 9, "erf", b_std=0.3, readout_b_std=0.2)
NOISE = 0.3


class Affine(nnx.Module):
    """An NNX module of a user's own, with a key for dropout."""

    def __init__(self, num_inputs, num_outputs, *, rngs):
        self.kernel = nnx.Param(jnp.zeros((num_inputs, num_outputs)))
        self.bias = nnx.Param(jnp.zeros((num_outputs,)))
        self.dropout = nnx.Dropout(0.0, deterministic=True, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x @ self.kernel + self.bias)


def as_nnx():
    return ToNNX(NETWORK, rngs=nnx.Rngs(0)).lazy_init(X)


def wrap(model, noise_scale=NOISE):
    return (
        repriorise(model, readout="readout", features="features", targets="y", noise_scale=noise_scale),
        collapse_readout(model, readout="readout", features="features", observed="y"),
    )


def values_of(model, *args, **data):
    sites = trace(substitute(seed(model, jax.random.key(3)), data=data)).get_trace(*args)
    return {name: site["value"] for name, site in sites.items() if site["type"] != "plate"}


def sites_of(draws, prefix="hidden"):
    """The network's share of the draws."""
    return {name: values for name, values in draws.items() if name.startswith(prefix + ".")}


def log_prior(draws):
    return sum(dist.Normal(0, 1).log_prob(value).sum() for value in draws.values())


@pytest.mark.fault("nn/_random.py", "jax.tree.structure(shapes), values)", "jax.tree.structure(shapes), values[::-1])")
@parametrize("make", [lambda: NETWORK, as_nnx], ids=["linen", "nnx"], rest="slow")
def test_every_parameter_is_a_site_of_its_own(make):
    module = make()
    draws = values_of(lambda: random_network("net", module, X)(X))
    assert {name: value.shape for name, value in draws.items()} == {
        "net.hidden_0.kernel": (3, 9),
        "net.hidden_0.bias": (9,),
        "net.hidden_1.kernel": (9, 9),
        "net.hidden_1.bias": (9,),
    }
    expected = {
        layer: {kind: draws[f"net.{layer}.{kind}"] for kind in ("kernel", "bias")} for layer in ("hidden_0", "hidden_1")
    }
    plain = lambda params: params if module is NETWORK else nnx.to_pure_dict(params)  # noqa: E731
    params = network_parameters({**draws, "readout": jnp.ones(9)}, "net", module, X)
    jax.tree.map(np.testing.assert_array_equal, plain(params), expected)
    with seed(rng_seed=0), substitute(data=draws):
        features = random_network("net", module, X)(X)
    np.testing.assert_allclose(features, NETWORK.apply({"params": expected}, X), rtol=1e-5)
    by_draw = {name: jnp.stack([value, 2 * value])[None] for name, value in draws.items()}
    by_draw = plain(network_parameters(by_draw, "net", module, X))
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[0, 1], 2 * one), by_draw, expected)


def test_parameters_of_nested_layers_and_scalars():
    class Layers(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Affine(3, 2, rngs=nnx.Rngs(0)), Affine(2, 2, rngs=nnx.Rngs(0))])
            self.value = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            return self.value * self.layers[1](self.layers[0](x))

    draws = values_of(lambda: random_network("net", Layers(), X)(X))
    a, b = draws["net.layers.0.kernel"], draws["net.layers.0.bias"]
    c, d = draws["net.layers.1.kernel"], draws["net.layers.1.bias"]
    with seed(rng_seed=0), substitute(data=draws):
        features = random_network("net", Layers())(X)
    np.testing.assert_allclose(features, draws["net.value"] * ((X @ a + b) @ c + d), rtol=1e-4, atol=1e-5)


def test_prior_is_standard_normal():
    model = lambda: random_network("net", FCN(2, 40), X)  # noqa: E731
    sites = trace(seed(model, jax.random.key(0))).get_trace()
    values = np.concatenate([np.ravel(site["value"]) for site in sites.values()]).astype(float)
    density = sum(site["fn"].log_prob(site["value"]) for site in sites.values())
    assert density == pytest.approx(-0.5 * np.sum(values**2 + np.log(2 * np.pi)), rel=1e-5)
    assert abs(values.mean()) < 4 / values.size**0.5
    assert abs(values.var() - 1) < 4 * (2 / values.size) ** 0.5


def test_random_modules_of_numpyro_give_the_same_network():
    params = NETWORK.init(jax.random.key(0), X)["params"]
    features = random_features = NETWORK.apply({"params": params}, X)

    def flax_model():
        return random_flax_module("net", NETWORK, dist.Normal(), input_shape=(1, 3))(X)

    def nnx_model():
        return random_nnx_module("net", as_nnx(), dist.Normal())(X)

    data = {f"net/{layer}.{name}": value for layer, part in params.items() for name, value in part.items()}
    for model in (flax_model, nnx_model):
        with seed(rng_seed=0), substitute(data=data):
            random_features = model()
        np.testing.assert_allclose(random_features, features, rtol=1e-6)


@pytest.mark.as_compiled
@parametrize("num_outputs", [2, None], ids=["matrix", "vector"], rest="slow")
def test_bnn_under_the_handlers_against_the_closed_form(num_outputs):
    y = Y if num_outputs else Y[:, 0]
    model = bnn(NETWORK, num_outputs, NOISE)
    repriorised, collapsed = wrap(model)
    drawn = values_of(repriorised, X, y)
    hidden, phi = sites_of(drawn), drawn["readout_base"]
    features = NETWORK.apply({"params": network_parameters(drawn, "hidden", NETWORK, X)}, X)
    evidence = linear_gaussian.log_evidence(features, y, NOISE)
    got = log_density(collapsed, (X, y), {}, hidden)[0]
    np.testing.assert_allclose(got, log_prior(hidden) + evidence, rtol=1e-5)
    latent = {**hidden, "readout_base": phi}
    got = log_density(repriorised, (X, y), {}, latent)[0]
    np.testing.assert_allclose(got, log_prior(latent) + evidence, rtol=1e-4)
    np.testing.assert_allclose(
        drawn["readout"], linear_gaussian.readout_map(features, y, phi, NOISE)[0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_bnn_from_fit_to_prediction():
    """A latent noise, SVI on the repriorised model, predictions without targets."""
    model = bnn(NETWORK, 2, dist.HalfNormal(0.5))
    repriorised, _ = wrap(model, "noise")
    guide = AutoNormal(repriorised)
    fit = SVI(repriorised, guide, numpyro.optim.Adam(0.02), Trace_ELBO()).run(
        jax.random.key(0), 300, X, Y, progress_bar=False
    )
    assert fit.losses[-50:].mean() < fit.losses[:50].mean() - 5
    draws = guide_draws(jax.random.key(1), repriorised, guide, fit.params, 200, X, Y)
    predictions = Predictive(model, draws)(jax.random.key(2), X)
    assert predictions["y"].shape == (200, 12, 2)
    assert np.sqrt(np.mean((predictions["y"].mean(0) - Y) ** 2)) < 0.5 * Y.std()


@pytest.mark.as_compiled
def test_bnn_with_an_nnx_module_and_images():
    nnx_model = bnn(Affine(3, 7, rngs=nnx.Rngs(0)), 2, NOISE)
    drawn = values_of(nnx_model, X, Y)
    expected = X @ drawn["hidden.kernel"] + drawn["hidden.bias"]
    np.testing.assert_allclose(drawn["features"], expected, rtol=1e-4, atol=1e-5)
    _, collapsed = wrap(nnx_model)
    np.testing.assert_allclose(
        log_density(collapsed, (X, Y), {}, sites_of(drawn))[0],
        log_prior(sites_of(drawn)) + linear_gaussian.log_evidence(drawn["features"], Y, NOISE),
        rtol=1e-5,
    )
    # Grey levels as bytes are numbers like any others.
    grey = np.random.default_rng(0).integers(0, 255, (2, 3, 3), np.uint8)
    with pytest.warns(UserWarning, match="standardise the inputs"):
        sites = values_of(bnn(FCN(1, 4), None, NOISE), grey)
        np.testing.assert_array_equal(sites["y"], values_of(bnn(FCN(1, 4), None, NOISE), grey.astype("f"))["y"])


def standard_bnn(width=8):
    """The standard parametrisation: the scales in the priors, not in the network."""

    def features_net(x):
        weights = numpyro.sample("hidden.hidden_0.kernel", dist.Normal(0, 1.3 / 3**0.5).expand([3, width]).to_event(2))
        return jnp.tanh(x @ weights)

    return bnn(features_net, 2, NOISE, readout_scale=width**-0.5)


@pytest.mark.fault("nn/_models.py", "dist.Normal(0, readout_scale)", "dist.Normal(0, 1)")
@pytest.mark.slow
def test_standard_parametrisation_gives_the_same_under_every_handler():
    width = 8
    ntk, standard = bnn(FCN(1, width, jnp.tanh, w_std=1.3, readout_w_std=1.0), 2, NOISE), standard_bnn(width)
    kernel = "hidden.hidden_0.kernel"
    scale = {kernel: 1.3 / 3**0.5, "readout": width**-0.5, "readout_base": 1.0}
    (ntk_repriorised, ntk_collapsed), (repriorised, collapsed) = wrap(ntk), wrap(standard)

    draws = wide_limit_draws(jax.random.key(0), ntk_repriorised, 6, X, Y)
    standard_draws = wide_limit_draws(jax.random.key(0), repriorised, 6, X, Y)
    for name, value in draws.items():
        np.testing.assert_allclose(standard_draws[name], scale[name] * value, rtol=1e-3, atol=1e-4)

    one = {name: value[0] for name, value in draws.items() if name != "readout"}
    standard_one = {name: value[0] for name, value in standard_draws.items() if name != "readout"}
    change_of_variables = 3 * width * np.log(scale[kernel])
    for ours, theirs, sites in (
        (repriorised, ntk_repriorised, (kernel, "readout_base")),
        (collapsed, ntk_collapsed, (kernel,)),
    ):
        density = log_density(ours, (X, Y), {}, {name: standard_one[name] for name in sites})[0]
        expected = log_density(theirs, (X, Y), {}, {name: one[name] for name in sites})[0]
        np.testing.assert_allclose(density + change_of_variables, expected, rtol=1e-4)

    predictions = Predictive(ntk, draws)(jax.random.key(1), X_NEW)["y"]
    np.testing.assert_allclose(
        Predictive(standard, standard_draws)(jax.random.key(1), X_NEW)["y"], predictions, atol=1e-3
    )

    exact = ReadoutPredictive(ntk_collapsed, sites_of(draws), (X, Y))(jax.random.key(2), X_NEW)
    standard_exact = ReadoutPredictive(collapsed, sites_of(standard_draws), (X, Y))(jax.random.key(2), X_NEW)
    for name, value in exact.items():
        np.testing.assert_allclose(standard_exact[name], value, rtol=1e-3, atol=1e-3)

    def guide(x, y=None):
        for name, value in standard_one.items():
            numpyro.sample(name, dist.Delta(value, event_dim=value.ndim))

    guided = guide_draws(jax.random.key(3), repriorised, guide, {}, 1, X, Y)
    np.testing.assert_allclose(guided["readout"][0], standard_draws["readout"][0], rtol=1e-4, atol=1e-5)
