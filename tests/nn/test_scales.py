"""Scales by layer, by input, traced and with a prior: of the networks, of the model made of them, of their kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_wide import collapse_readout, repriorise
from numpyro_wide.nn import CNN, FCN, NTKDense, WideResNet, bnn
from numpyro_wide.nn._models import scale_site
from numpyro_wide.wide_limit import fcn_kernel
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("f")
Y = np.sin(X[:, 0]).astype("f")
SCALES = {"w_std": (1.3, 0.7), "b_std": (0.2, 0.0), "readout_w_std": 1.1, "readout_b_std": 0.4}
INPUT_SCALE = np.array([1.0, 0.5, 2.0])


def by_hand(params, x, w_std, b_std, readout_w_std, readout_b_std):
    """The features in NumPy, layer by layer."""
    hidden = np.asarray(x, float) * INPUT_SCALE
    for layer, (w, b) in enumerate(zip(w_std, b_std, strict=True)):
        given = params[f"hidden_{layer}"]
        hidden = w / np.sqrt(hidden.shape[1]) * hidden @ np.asarray(given["kernel"], float)
        hidden = np.tanh(hidden + b * np.asarray(given.get("bias", 0.0), float))
    constant = np.full((len(x), 1), readout_b_std)
    return np.concatenate([readout_w_std / np.sqrt(hidden.shape[1]) * hidden, constant], axis=1)


def test_scales_by_layer_and_by_input():
    network = FCN(2, 7, "tanh", **SCALES, input_scale=INPUT_SCALE)
    params = network.init(jax.random.key(0), X)["params"]
    assert "bias" in params["hidden_0"] and "bias" not in params["hidden_1"]
    features = network.apply({"params": params}, X)
    np.testing.assert_allclose(features, by_hand(params, X, **SCALES), rtol=1e-5, atol=1e-6)


def test_traced_scales_give_the_features_and_gradients_of_known_ones():
    params = FCN(2, 7, "tanh", **{**SCALES, "b_std": 0.2}).init(jax.random.key(0), X)

    def features(scales):
        return FCN(2, 7, "tanh", **scales).apply(params, X)

    scales = {"w_std": jnp.array([1.3, 0.7]), "b_std": 0.2, "readout_w_std": 1.1, "readout_b_std": 0.4}
    scales["input_scale"] = jnp.asarray(INPUT_SCALE, jnp.float32)
    np.testing.assert_allclose(jax.jit(features)(scales), features(scales), rtol=1e-5, atol=1e-6)

    def loss(scales):
        return jnp.sum(features(scales) ** 2)

    slopes = jax.grad(loss)(scales)
    for name, scale in scales.items():
        for index in np.ndindex(np.shape(scale)):
            move = np.zeros(np.shape(scale), "f")
            move[index] = 1e-2
            moved = [float(loss({**scales, name: scale + sign * move})) for sign in (1, -1)]
            np.testing.assert_allclose(np.asarray(slopes[name])[index], (moved[0] - moved[1]) / 2e-2, rtol=2e-2)


@parametrize("network", [CNN(2, 4, b_std=0.1), WideResNet(1, 4, b_std=0.1)], rest="slow")
def test_convolutional_networks_take_traced_scales(network):
    images = jnp.ones((2, 8, 8, 1))
    known = network.clone(w_std=1.2, readout_w_std=0.9, readout_b_std=0.3)
    params = known.init(jax.random.key(0), images)

    def features(w_std, readout_w_std, readout_b_std):
        scales = {"w_std": w_std, "readout_w_std": readout_w_std, "readout_b_std": readout_b_std}
        return network.clone(**scales).apply(params, images)

    np.testing.assert_allclose(jax.jit(features)(1.2, 0.9, 0.3), known.apply(params, images), rtol=1e-4, atol=1e-5)


@pytest.mark.as_compiled
def test_the_kernel_is_the_limit_of_the_scaled_network():
    network = FCN(2, 4000, "erf", **SCALES, input_scale=INPUT_SCALE)
    features = network.apply(network.init(jax.random.key(1), X), X)
    nngp, _ = fcn_kernel(2, "erf", **network.scales())(X)
    np.testing.assert_allclose(features @ features.T, nngp, atol=5 * 1.1**2 / 4000**0.5)
    plain, _ = fcn_kernel(2, "erf", **SCALES)(X * INPUT_SCALE.astype("f"))
    np.testing.assert_allclose(nngp, plain, rtol=1e-6)


PRIORS = {
    "w_std": dist.LogNormal(0.1, 0.3).expand([2]).to_event(1),
    "b_std": dist.HalfNormal(0.5),
    "input_scale": dist.LogNormal(0.0, 1.0).expand([3]),
    "readout_w_std": 1.1,
}


def test_latent_scales_have_standard_normal_coordinates():
    model = bnn(FCN(2, 7, "tanh"), None, dist.HalfNormal(0.3), scales=PRIORS)
    base = {
        "w_std_base": jnp.array([0.5, -1.0]),
        "b_std_base": 1.5,
        "input_scale_base": jnp.array([1.0, 0.0, -2.0]),
        "noise_base": -0.7,
    }
    sites = trace(substitute(seed(model, jax.random.key(0)), base)).get_trace(X, Y)
    for name, value in base.items():
        np.testing.assert_allclose(sites[name]["fn"].log_prob(value), scipy.stats.norm.logpdf(value).sum(), rtol=1e-5)
    found = {name: sites[name]["value"] for name in ("w_std", "b_std", "input_scale", "noise")}
    np.testing.assert_allclose(found["w_std"], np.exp(0.1 + 0.3 * np.array([0.5, -1.0])), rtol=1e-5)
    np.testing.assert_allclose(found["input_scale"], np.exp([1.0, 0.0, -2.0]), rtol=1e-5)
    for name, scale in {"b_std": 0.5, "noise": 0.3}.items():
        quantile = scipy.stats.halfnorm.ppf(scipy.stats.norm.cdf(base[f"{name}_base"]), scale=scale)
        np.testing.assert_allclose(found[name], quantile, rtol=1e-4)


def test_a_model_with_latent_scales_has_the_density_of_one_with_their_values():
    model = bnn(FCN(2, 7, "tanh"), None, dist.LogNormal(-1.0, 0.5), scales=PRIORS)
    drawn = trace(seed(model, jax.random.key(2))).get_trace(X, Y)
    values = {name: site["value"] for name, site in drawn.items() if site["type"] == "sample" and name != "y"}
    scales = {name: np.asarray(drawn[name]["value"]) for name in ("w_std", "b_std", "input_scale")}
    fixed = bnn(FCN(2, 7, "tanh", readout_w_std=1.1, **scales), None, np.asarray(drawn["noise"]["value"]))
    of_base = sum(scipy.stats.norm.logpdf(values[name]).sum() for name in values if name.endswith("_base"))
    others = {name: value for name, value in values.items() if not name.endswith("_base")}
    expected = log_density(fixed, (X, Y), {}, others)[0] + of_base
    np.testing.assert_allclose(log_density(model, (X, Y), {}, values)[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_both_handlers_take_them():
    model = bnn(FCN(1, 20, "tanh"), None, dist.LogNormal(-1.0, 0.5), scales={"w_std": dist.LogNormal(0, 0.5)})
    mapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale="noise")
    collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
    for wrapped in (mapped, collapsed):
        mcmc = MCMC(NUTS(wrapped, max_tree_depth=4), num_warmup=20, num_samples=10)
        mcmc.run(jax.random.key(0), X, Y)
        draws = mcmc.get_samples()
        assert {"noise", "noise_base", "w_std", "w_std_base"} <= draws.keys()
        np.testing.assert_allclose(draws["w_std"], np.exp(0.5 * draws["w_std_base"]), rtol=1e-5)


@parametrize(
    ("prior", "reference"),
    [
        (dist.HalfNormal(0.7), scipy.stats.halfnorm(scale=0.7)),
        (dist.HalfCauchy(0.7), scipy.stats.halfcauchy(scale=0.7)),
        (dist.Exponential(2.0), scipy.stats.expon(scale=0.5)),
        (dist.LogNormal(0.3, 0.7), scipy.stats.lognorm(0.7, scale=np.exp(0.3))),
        (dist.Uniform(0.1, 3.0), scipy.stats.uniform(0.1, 2.9)),
    ],
    rest="slow",
)
def test_images_of_normal_numbers_are_quantiles_in_both_tails(prior, reference):
    z = np.array([-6.0, -4.0, -1.0, -1e-3, 0.0, 0.5, 2.0, 5.0, 7.0, 10.0], "f")

    def model(base):
        with numpyro.handlers.substitute(data={"s_base": base}):
            return scale_site("s", prior.expand(z.shape))

    with numpyro.handlers.seed(rng_seed=0):
        found = model(jnp.asarray(z))
        slopes = jax.grad(lambda base: model(base).sum())(jnp.asarray(z))
    z = np.minimum(z, 8.0) if isinstance(prior, dist.HalfCauchy) else z
    below, above = reference.ppf(scipy.stats.norm.cdf(z)), reference.isf(scipy.stats.norm.sf(z))
    np.testing.assert_allclose(found, np.where(z < 0, below, above), rtol=2e-5)
    assert np.isfinite(slopes).all()
    assert np.all(slopes[:8] > 0)


@pytest.mark.fault("nn/_layers.py", "is_zero(layer.b_std)", "isinstance(layer.b_std, int | float) and layer.b_std == 0")
@pytest.mark.parametrize("make", [lambda b_std: NTKDense(4, b_std=b_std), lambda b_std: FCN(1, 4, b_std=b_std)])
@parametrize("zero", [0, 0.0, np.float32(0), np.zeros(()), jnp.float32(0)], rest="slow")
def test_a_bias_of_scale_zero_is_no_parameter(make, zero):
    shapes = jax.eval_shape(make(zero).init, jax.random.key(0), X)["params"]
    assert "bias" not in shapes and "bias" not in shapes.get("hidden_0", {})
    assert FCN(1, 4, readout_b_std=zero).apply(FCN(1, 4).init(jax.random.key(0), X), X).shape == (6, 4)
