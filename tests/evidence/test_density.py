"""What chains sample, and what is integrated, against NumPyro's own potential energy: nothing is lost or left over."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition, mask, scale
from numpyro.infer.util import potential_energy
from scipy import stats

from numpyro_wide import collapse_readout, repriorise, surrogate_targets
from numpyro_wide.evidence._density import draw, log_density
from tests.marks import parametrize
from tests.models import network, small_data

KEY = jax.random.key(0)
X, Y = small_data()


def constrained(x, y=None):
    """Supports of every sort: positive, an interval, a simplex, ordered; a factor; priors that depend on each other."""
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    place = numpyro.sample("place", dist.Uniform(-scale, 2.0))
    pair = numpyro.sample("pair", dist.MultivariateNormal(jnp.ones(2), jnp.eye(2) * 0.5 + 0.5))
    with numpyro.plate("rows", 4):
        local = numpyro.sample("local", dist.LogNormal(place, 1.0))
    numpyro.factor("extra", -jnp.sum(pair**2))
    numpyro.sample("y", dist.Normal(x[:4, 0] * shares[0] + local, rate), obs=y)


def classes(x, y=None):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 10]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 10**0.5)
    w = numpyro.sample("w", dist.Normal(0, 1.5).expand([10]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=features @ w).to_event(1), obs=y)


def handled(x, y=None):
    """Likelihoods that are masked, or raised to a power, for all rows or for each; plates, one in the other."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("groups", 2, dim=-2):
        group = numpyro.sample("group", dist.Normal(mean, 0.7))
        with numpyro.plate("rows", 4, dim=-1), mask(mask=jnp.array([True, False, True, True])):
            numpyro.sample("in groups", dist.Normal(group, 1.0), obs=jnp.stack([y, y]))
    with scale(scale=0.3):
        numpyro.sample("tempered", dist.Normal(mean, 1.0).expand([4]), obs=y)
        numpyro.factor("extra", mean)
    with scale(scale=jnp.array([0.5, 1.0, 2.0, 0.1])):
        numpyro.sample("weighted", dist.Normal(mean, 1.0).expand([4]), obs=y)


def correlated(x, y=None):
    """Correlations, as a factor and as a matrix, and a funnel."""
    root = numpyro.sample("root", dist.LKJCholesky(3, 1.5))
    matrix = numpyro.sample("matrix", dist.LKJ(2, 2.0))
    neck = numpyro.sample("neck", dist.Normal(0, 3))
    funnel = numpyro.sample("funnel", dist.Normal(0, jnp.exp(neck / 2)).expand([4]).to_event(1))
    numpyro.sample("three", dist.MultivariateNormal(jnp.zeros(3), scale_tril=root), obs=y[:3])
    numpyro.sample("two", dist.MultivariateNormal(jnp.zeros(2), matrix), obs=y[:2])
    numpyro.sample("y", dist.Normal(funnel, 1.0).to_event(1), obs=y)


READOUT = {"readout": "w", "features": "features"}
MODELS = {
    "plain": (network, (X, Y)),
    "collapsed": (collapse_readout(network, **READOUT, observed="y"), (X, Y)),
    "repriorised": (repriorise(network, **READOUT, targets="y", noise_scale="sigma"), (X, Y)),
    "classes": (
        repriorise(classes, **READOUT, targets="y", surrogate=partial(surrogate_targets, likelihood="bernoulli")),
        (X, jnp.arange(30) % 2),
    ),
    "constrained": (constrained, (X, Y[:4, 0])),
    "handled": (handled, (X, Y[:4, 0])),
    "correlated": (correlated, (X, Y[:4, 0])),
}


@pytest.mark.fault("evidence/_density.py", "self.log_dets[name] = jnp.sum(", "self.log_dets[name] = 0 * jnp.sum(")
@pytest.mark.fault("evidence/_density.py", "if name not in bases", "if True")
@pytest.mark.fault("readout/_draws.py", 'log_prob if site["scale"] is None else site["scale"] * log_prob', "log_prob")
@parametrize("name", MODELS, rest="slow")
@pytest.mark.usefixtures("x64")
def test_both_parts_make_the_potential_energy(name):
    model, args = MODELS[name]
    args = jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, args)

    @jax.jit
    def compare(key):
        z, log_weight = draw(partial(model, *args), key)
        z = jax.tree.map(lambda leaf: leaf + 0.1, z)  # where no draw is
        found = log_density(partial(model, *args), z)
        standard = sum(jnp.sum(dist.Normal(0, 1).log_prob(leaf)) for leaf in jax.tree.leaves(z))
        return -(found.start + standard + found.weight), potential_energy(model, args, {}, z), log_weight

    for key in jax.random.split(KEY):
        found, expected, log_weight = compare(key)
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        assert np.isfinite(log_weight)


def test_draws_are_of_the_prior_and_weights_are_the_likelihood():
    model, args = MODELS["constrained"]
    keys = jax.random.split(KEY, 2000)
    z, log_weights = jax.jit(jax.vmap(lambda key: draw(partial(model, *args), key)))(keys)
    assert stats.kstest(z["scale"], lambda v: stats.halfcauchy.cdf(np.exp(v))).pvalue > 1e-3
    assert stats.kstest(z["pair"][:, 0], stats.norm(1, 1).cdf).pvalue > 1e-3
    again = jax.jit(jax.vmap(lambda z: log_density(partial(model, *args), z).weight))(z)
    usual = np.isfinite(log_weights) & (np.abs(log_weights) < 1e3)
    assert usual.mean() > 0.5
    np.testing.assert_allclose(again[usual], log_weights[usual], rtol=1e-3, atol=1e-3)


def test_nothing_is_rounded_off_where_priors_are_standard_normal():
    """10⁵ weights: their log density alone would be rounded to 0.01."""

    def wide(y=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([50, 2000]).to_event(2))
        numpyro.sample("y", dist.Normal(jnp.mean(hidden[0]), 1.0), obs=y)

    z, log_weight = draw(partial(wide, 0.5), KEY)
    found = log_density(partial(wide, 0.5), z)
    assert abs(found.start) < 1e-6
    np.testing.assert_allclose(found.weight, log_weight, rtol=1e-6)


def test_conditioned_sites_are_no_longer_integrated():
    fixed = collapse_readout(condition(network, {"sigma": 0.3}), **READOUT, observed="y")
    z, log_weight = jax.jit(lambda: draw(partial(fixed, X, Y), KEY))()
    assert list(z) == ["hidden"]
    expected = jax.jit(lambda z: potential_energy(fixed, (X, Y), {}, z))(z)
    standard = jnp.sum(dist.Normal(0, 1).log_prob(z["hidden"]))
    # NumPyro counts the conditioned noise's own prior as a factor of the joint density, and so do we.
    np.testing.assert_allclose(-log_weight - standard, expected, rtol=1e-4)
