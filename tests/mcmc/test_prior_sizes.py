"""Outputs that the prior makes much larger than the observations are told of where a chain starts."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen
from numpyro.infer import MCMC, NUTS

from numpyro_wide import collapse_readout, repriorise
from numpyro_wide._traces import prior_sizes
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, bnn
from tests.marks import parametrize

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(30, 5)).astype("f")
Y = np.sin(X[:, 0])
SITES = {"readout": "readout", "features": "features"}
MESSAGE = "outputs of the model are about [0-9.]+ a priori, and the observations of site 'y' 0.58"


class Dense(linen.Module):
    """Two layers whose outputs are divided by a number."""

    divisor: float = 1.0

    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(64)(jnp.tanh(linen.Dense(64)(x)))) / self.divisor


def own(divisor):
    def model(x, y=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([5, 64]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / divisor)
        readout = numpyro.sample("readout", dist.Normal(0, 1).expand([64]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ readout, 0.3), obs=y)

    return model


def network(divisor):
    return bnn(Dense(divisor), None, 0.3)


def collapsed(model):
    return collapse_readout(model, **SITES, observed="y")


def repriorised(model):
    return repriorise(model, **SITES, targets="y", noise_scale=0.3)


def same(model):
    return model


def start(kernel, model):
    kernel(model).init(KEY, 1, None, (X, Y), {})


# NUTS sees a model of one's own only where it is wrapped by `collapse_readout`.
@pytest.mark.fault("_traces.py", "jnp.square(fn.mean) + fn.variance", "jnp.square(fn.mean)")
@pytest.mark.fault("nn/_models.py", '{"y": (np.sqrt(variance), np.sqrt(size)', '{"y": (variance / size, np.sqrt(size)')
@parametrize(
    ("kernel", "make", "wrap"),
    [
        *[(SplitHMC, make, wrap) for make in (network, own) for wrap in (same, collapsed, repriorised)],
        *[(NUTS, network, wrap) for wrap in (same, collapsed)],
        (NUTS, own, collapsed),
    ],
    rest="slow",
)
def test_features_that_grow_with_the_width_are_told(kernel, make, wrap):
    with pytest.warns(UserWarning, match=MESSAGE) as told:
        start(kernel, wrap(make(1.0)))
    assert len({str(warning.message) for warning in told}) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(kernel, wrap(make(8.0)))


@pytest.mark.slow
def test_scales_that_are_given_are_meant():
    for kernel in (SplitHMC, NUTS):
        for wrap in (same, collapsed):
            start(kernel, wrap(bnn(FCN(1, 20, readout_w_std=10.0), None, 0.3)))


@pytest.mark.fault("_traces.py", "jnp.sqrt(jnp.median(squares))", "jnp.median(squares)")
def test_sizes_are_root_mean_squares():
    model = own(1.0)
    (prior, observed) = prior_sizes(KEY, collapsed(model), (X, Y), {})["y"]
    weights = np.random.default_rng(1).normal(size=(200, 5, 64))
    exact = np.sqrt(np.mean(np.sum(np.tanh(X @ weights) ** 2, axis=2)))
    assert 0.6 * exact < prior < 1.5 * exact  # a median of eight draws of one readout each
    np.testing.assert_allclose(observed, np.sqrt(np.mean(Y**2)), rtol=1e-6)


def test_improper_priors_are_left_alone():
    def improper(x, y=None):
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(level + 0 * x[:, 0], 0.3), obs=y)

    start(SplitHMC, improper)


def test_other_likelihoods_are_left_alone():
    def classes(x, y=None):
        logits = 100 * numpyro.sample("w", dist.Normal(0, 1)) * x[:, 0]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    MCMC(SplitHMC(classes), num_warmup=1, num_samples=1).run(KEY, X, (Y > 0).astype(int))
