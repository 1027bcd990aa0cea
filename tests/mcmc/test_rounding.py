"""A warmup that arrives although energies are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from tests.mcmc.cases import ADJUSTED

pytestmark = pytest.mark.as_compiled


def rare(data, by_logits):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    numpyro.sample("other", dist.Normal(0.0, 1.0))  # the microcanonical kernel needs two coordinates
    # By logits, an energy of tens is the difference of numbers of 7e7, whose last digit in float32 is worth 8.
    form = {"logits": jnp.log(p) - jnp.log1p(-p)} if by_logits else {"probs": p}
    numpyro.sample("obs", dist.Binomial(data["n"], **form), obs=data["x"])


def draws_of(kernel, by_logits, num_chains):
    """Return draws of 3849 of 5 million in float32, (chain, draw), energies of millions at first (NumPyro's test)."""
    mcmc = MCMC(kernel(rare), num_warmup=400, num_samples=200, num_chains=num_chains, chain_method="vectorized")
    mcmc.run(jax.random.key(0), {"n": 5_000_000, "x": 3849}, by_logits)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["p"])


@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.slow) for name in ADJUSTED if name != "split")]
)
def test_warmup_arrives_where_energies_are_rounded(name):
    p = draws_of(ADJUSTED[name], False, 1)
    np.testing.assert_allclose(p.mean(), 3849 / 5e6, rtol=0.05)
    assert len(np.unique(p)) > 10


@pytest.mark.fault("mcmc/_adaptation.py", "(state.probe_error < MAX_ROUNDING)", "(state.probe_error < 0)")
@pytest.mark.parametrize(
    ("name", "rtol", "num_distinct"), [("split", 0.03, 20), pytest.param("langevin", 0.3, 5, marks=pytest.mark.slow)]
)
def test_warmup_arrives_where_no_energy_shows_how_much_of_it_is_rounded(name, rtol, num_distinct):
    p = draws_of(ADJUSTED[name], True, 4)
    np.testing.assert_allclose(p.mean(axis=1), 3849 / 5e6, rtol=rtol)
    assert min(len(np.unique(chain)) for chain in p) > num_distinct
