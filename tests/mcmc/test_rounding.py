"""Warmups that arrive although energies are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from tests.mcmc.cases import ADJUSTED, KERNELS


def rare(data):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    numpyro.sample("other", dist.Normal(0.0, 1.0))  # the microcanonical kernel needs two coordinates
    numpyro.sample("obs", dist.Binomial(data["n"], probs=p), obs=data["x"])


@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.slow) for name in ADJUSTED if name != "split")]
)
def test_warmup_arrives_where_energies_are_rounded(name):
    """3849 of 5 million in float32, from where energies of millions have no digit behind the point (NumPyro's test)."""
    mcmc = MCMC(ADJUSTED[name](rare), num_warmup=300, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(2), {"n": 5_000_000, "x": 3849})
    p = np.asarray(mcmc.get_samples()["p"])
    np.testing.assert_allclose(p.mean(), 3849 / 5e6, rtol=0.05)
    assert len(np.unique(p)) > 10


# Of sixteen chains of the adjusted microcanonical kernel all arrive, but one or two stand still there, and say so.
HARDY = [name for name in KERNELS if name not in ("split", "microcanonical")]


def rare_by_logits(data):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    numpyro.sample("other", dist.Normal(0.0, 1.0))
    numpyro.sample("obs", dist.Binomial(data["n"], logits=jnp.log(p) - jnp.log1p(-p)), obs=data["x"])


@pytest.mark.parametrize("name", ["split", *(pytest.param(name, marks=pytest.mark.slow) for name in HARDY)])
def test_warmup_arrives_where_no_digit_is_left_even_at_the_mode(name):
    """Of a binomial by logits float32 keeps steps of eight nats, more than the posterior has from top to foot."""
    mcmc = MCMC(
        KERNELS[name](rare_by_logits),
        num_warmup=900,
        num_samples=400,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), {"n": 5_000_000, "x": 3849})
    p = np.asarray(mcmc.get_samples(group_by_chain=True)["p"])
    # The density is a staircase: a step of eight nats is four standard deviations of p, of 1.6 % each, two are six.
    np.testing.assert_allclose(p.mean(axis=1), 3849 / 5e6, rtol=0.15)
    assert min(len(np.unique(chain)) for chain in p) > 10
