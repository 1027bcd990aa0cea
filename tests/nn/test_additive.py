"""Features of additive networks against loops, and models of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from numpyro.infer.util import log_density
from scipy import special, stats

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.nn import FCN, AdditiveNetwork, bnn
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X, LAW = (RNG.normal(size=(num, 3)) for num in (7, 5))
WHICH = [(2, 1), (0,), (0, 1, 2)]


@pytest.mark.fault("nn/_additive.py", "weights, units(nodes), 1, ", "jnp.ones(1, x.dtype), units(x).mean(0)[None], 1, ")
@parametrize("law", [LAW, "uniform", "normal"], rest="slow")
def test_features_are_products_of_centred_units(x64, law):
    scales = {"w_std": [0.5, 0.3, 0.8], "relevance": [1.0, 2.0, 0.5], "order_scale": [1.0, 0.3, 0.2]}
    network = AdditiveNetwork(3, 4, "erf", dense=6, which=WHICH, law=law, **scales, b_std=0.5, readout_b_std=0.2)
    params = network.init(jax.random.key(0), X)
    found = np.asarray(network.apply(params, X))
    kernel, bias = (np.asarray(params["params"][name]) for name in ("kernel", "bias"))

    def unit(i, u, x):
        return special.erf(scales["w_std"][i] * kernel[i, u] * x + 0.5 * bias[i, u])

    def mean(i, u):
        if law is LAW:
            return np.mean(unit(i, u, LAW[:, i]))
        known = stats.norm() if law == "normal" else stats.uniform(-(3**0.5), 2 * 3**0.5)
        return known.expect(lambda x: unit(i, u, x), epsabs=1e-10)

    columns = [
        scales["order_scale"][len(term) - 1]
        / 2
        * np.prod([scales["relevance"][i] * (unit(i, u, X[:, i]) - mean(i, u)) for i in term], axis=0)
        for term in [(0,), (1, 2), (0, 1, 2)]
        for u in range(4)
    ]
    np.testing.assert_allclose(found[:, :12], np.stack(columns, axis=1), atol=1e-6)
    block = FCN(1, 6, "erf").apply({"params": params["params"]["dense"]}, X)
    np.testing.assert_allclose(found[:, 12:18], block, rtol=1e-12)
    np.testing.assert_allclose(found[:, 18:], 0.2, rtol=1e-12)


@pytest.mark.slow
def test_models_with_latent_scales_collapse_and_predict(x64):
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
    priors = {"relevance": dist.HalfNormal(1.0).expand([3]), "order_scale": dist.LogNormal(0.0, 1.0).expand([2])}
    network = AdditiveNetwork(2, 3, law=X)
    models = [bnn(network, None, dist.LogNormal(-1.0, 1.0), scales=priors, block_size=size) for size in (None, 3)]
    sites = trace(seed(models[0], jax.random.key(1))).get_trace(X, y)
    latent = {name: site["value"] for name, site in sites.items() if site["type"] == "sample" and name != "y"}
    assert latent["hidden.kernel"].shape == (3, 3) and latent["relevance_base"].shape == (3,)
    readout = latent.pop("readout")
    features, noise = np.asarray(sites["features"]["value"]), float(sites["noise"]["value"])
    expected = stats.multivariate_normal(np.zeros(7), features @ features.T + noise**2 * np.eye(7)).logpdf(y)
    expected += sum(np.sum(stats.norm.logpdf(value)) for value in latent.values())
    for model in models:
        collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        density = lambda latent, collapsed=collapsed: log_density(collapsed, (X, y), {}, latent)[0]  # noqa: E731
        value, slope = jax.value_and_grad(density)(latent)
        np.testing.assert_allclose(value, expected, rtol=1e-9)
        assert all(jnp.isfinite(leaf).all() for leaf in slope.values())
    # At new rows the units keep the means over the law.
    draws = jax.tree.map(lambda value: value[None], latent)
    collapsed = collapse_readout(models[0], readout="readout", features="features", observed="y")
    mean = ReadoutPredictive(collapsed, draws, (X, y))(jax.random.key(2), X[:2])["mean"]
    weights = np.linalg.solve(features @ features.T + noise**2 * np.eye(7), y)
    np.testing.assert_allclose(mean[0], features[:2] @ features.T @ weights, rtol=1e-8)
    assert readout.shape == (18,)
