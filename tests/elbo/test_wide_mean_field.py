"""A mean-field guide of a wide network with its readout integrated out reaches the NNGP posterior."""

from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

SCALE, NOISE, WIDTH = 2**0.5, 0.1, 500
GRID = np.linspace(-2.5, 2.5, 41, dtype=np.float32)[:, None]


def erf_network(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([WIDTH]).to_event(1))
    features = numpyro.deterministic("features", SCALE / WIDTH**0.5 * jax.lax.erf(SCALE * (x @ w + b)))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([WIDTH]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ v, NOISE).to_event(1), obs=y)


@pytest.fixture(scope="module")
def sine():
    rng = np.random.default_rng(1)
    x = rng.uniform(-1.7, 1.7, 20)
    return x[:, None].astype("f"), (1.4 * np.sin(2.7 * x) + NOISE * rng.normal(size=20)).astype("f")


@pytest.mark.slow
def test_collapsed_mean_field_reaches_the_nngp(sine):
    x, y = sine
    kernel = fcn_kernel(1, "erf", w_std=SCALE, b_std=SCALE, readout_w_std=SCALE)
    train = kernel(x)[0]
    limit, covariance = gp_posterior(train, kernel(GRID, x)[0], kernel(GRID)[0], y, NOISE)
    evidence = float(gp_log_evidence(train, y, NOISE))

    collapsed = collapse_readout(erf_network, readout="v", features="features", observed="y")
    guide = AutoNormal(collapsed, init_loc_fn=init_to_mean, init_scale=1.0)
    svi = SVI(collapsed, guide, numpyro.optim.Adam(0.005), TraceMeanField_ELBO(num_particles=2))
    params = svi.run(jax.random.key(0), 300, x, y, progress_bar=False).params
    loss = partial(TraceMeanField_ELBO(num_particles=200, vectorize_particles=False).loss, jax.random.key(1))
    elbo = -jax.jit(lambda p: loss(p, collapsed, guide, x, y))(params)
    draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(400,))
    predictions = ReadoutPredictive(collapsed, draws, (x, y))(jax.random.key(3), GRID)
    mean, sd = predictions["mean"].mean(0), np.sqrt(predictions["variance"].mean(0) + predictions["mean"].var(0))
    assert np.sqrt(np.mean((mean - limit) ** 2)) < 0.02
    assert np.sqrt(np.mean((sd - np.sqrt(np.diag(covariance))) ** 2)) < 0.03
    # The guide bounds the evidence of this width, which differs from the limit's by a number of order 1/width.
    assert abs(elbo - evidence) < 1
