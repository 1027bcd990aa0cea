"""A warmup that arrives although energies are rounded."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from tests.mcmc.cases import ADJUSTED


def rare(data):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    numpyro.sample("other", dist.Normal(0.0, 1.0))  # the microcanonical kernel needs two coordinates
    numpyro.sample("obs", dist.Binomial(data["n"], probs=p), obs=data["x"])


@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.slow) for name in ADJUSTED if name != "split")]
)
def test_warmup_arrives_where_energies_are_rounded(name):
    """3849 of 5 million in float32, from where energies of millions have no digit behind the point (NumPyro's test)."""
    mcmc = MCMC(ADJUSTED[name](rare), num_warmup=300, num_samples=200)
    mcmc.run(jax.random.key(2), {"n": 5_000_000, "x": 3849})
    p = np.asarray(mcmc.get_samples()["p"])
    np.testing.assert_allclose(p.mean(), 3849 / 5e6, rtol=0.05)
    assert len(np.unique(p)) > 10
