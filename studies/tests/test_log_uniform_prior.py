"""The prior of variational Gaussian dropout: what it refuses, and the penalty that `TraceQKL` makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

from numpyro_wide import TraceQKL, log_uniform_kl, quasi_kl
from studies._log_uniform_prior import ImproperLogUniform, flat_prototype

WEIGHT = 3.0


def test_broadcasting_and_quasi_kl():
    loc, scale = jnp.arange(6.0).reshape(2, 3), jnp.array([1.0, 2.0, 3.0])
    prior = ImproperLogUniform().expand([3]).to_event(1)
    rows = quasi_kl(dist.Normal(loc, scale).to_event(1), prior)
    np.testing.assert_allclose(rows, log_uniform_kl(loc, scale).sum(-1), rtol=1e-6)
    assert prior.event_shape == (3,)
    assert prior.batch_shape == ()


def model(x, y=None):
    w = numpyro.sample("w", ImproperLogUniform(WEIGHT).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


@pytest.fixture
def data():
    x = jax.random.normal(jax.random.key(1), (50, 2))
    return x, x @ jnp.array([1.5, 0.0]) + 0.5 * jax.random.normal(jax.random.key(2), (50,))


def test_sampling_and_map_are_refused(data):
    with pytest.raises(ValueError, match=r"Prop\. 1"):
        MCMC(NUTS(model), num_warmup=1, num_samples=1).run(jax.random.key(0), *data)
    with pytest.raises(ValueError, match=r"Prop\. 1"):
        numpyro.handlers.seed(AutoDelta(model), 0)(*data)
    for guide, loss in (
        (AutoDelta(flat_prototype(model)), Trace_ELBO()),
        (AutoDelta(flat_prototype(model)), TraceQKL()),
        (AutoNormal(flat_prototype(model)), TraceMeanField_ELBO()),
    ):
        with pytest.raises(ValueError, match="TraceQKL"):
            SVI(model, guide, numpyro.optim.Adam(0.01), loss).run(jax.random.key(0), 1, *data, progress_bar=False)
    with pytest.raises(ValueError, match="sampled"):
        Predictive(model, num_samples=1)(jax.random.key(0), data[0])


def test_penalised_likelihood_loss(data):
    guide = AutoNormal(flat_prototype(model))
    svi = SVI(model, guide, numpyro.optim.Adam(0.02), TraceQKL())
    state = svi.init(jax.random.key(0), *data)
    params = svi.get_params(state)
    loc, scale = params["w_auto_loc"], params["w_auto_scale"]
    by_site = TraceQKL(sum_sites=False).loss(jax.random.key(3), params, model, guide, *data)
    np.testing.assert_allclose(by_site["w"], WEIGHT * log_uniform_kl(loc, scale).sum(), rtol=1e-6)
    fit = svi.run(jax.random.key(0), 600, *data, progress_bar=False)
    loc = fit.params["w_auto_loc"]
    assert abs(loc[0] - 1.5) < 0.25
    # The weight that does nothing is shrunk below the least-squares estimate's size.
    least_squares = jnp.linalg.lstsq(*data)[0]
    assert abs(loc[1]) < abs(least_squares[1])
