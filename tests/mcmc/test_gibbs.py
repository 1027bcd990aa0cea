"""Kernels as blocks of NumPyro's Gibbs: where they start, what the other blocks are given, and what they draw."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, Gibbs

from numpyro_wide.mcmc import SplitHMC
from tests.marks import parametrize
from tests.mcmc.cases import ADJUSTED, check


def correlated():
    a = jnp.log(numpyro.sample("a", dist.LogNormal(1.0, 1.0)))
    b = numpyro.sample("b", dist.Normal(1.0 + 0.8 * (a - 1.0), 0.6))
    numpyro.deterministic("sum", a + b)  # where a model has such sites, NumPyro runs it for the values to keep


def correlated_pair():
    pair = numpyro.sample("a", dist.Normal(1.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("b", dist.Normal(1.0 + 0.8 * (pair[0] - 1.0), 0.6))


@pytest.mark.as_compiled
@pytest.mark.fault("mcmc/_target.py", "biject_to(supports[name])(value)", "value")
@pytest.mark.fault(
    "mcmc/_kernel.py",
    "return state._replace(potential_energy=point.potential_energy, z_grad=point.z_grad)",
    "return state",
)
@parametrize("name", ["langevin", "pcn", "pcnl", "split", "microcanonical"], rest="slow")
def test_kernels_are_blocks_of_gibbs(name):
    model = correlated_pair if name == "microcanonical" else correlated  # which does not work on one coordinate
    block = ADJUSTED[name](model, find_heuristic_step_size=False)
    kernel = Gibbs([(block, ["a"]), (NUTS(model), ["b"])])
    mcmc = MCMC(kernel, num_warmup=300, num_samples=4000, num_chains=4, chain_method=jax.vmap, progress_bar=False)
    mcmc.run(jax.random.key(0))
    draws = mcmc.get_samples(group_by_chain=True)
    a, b = draws["a"].reshape(4, 4000, -1)[..., 0] - 1.0, draws["b"] - 1.0
    if model is correlated:
        a = np.log(draws["a"]) - 1.0
        np.testing.assert_allclose(draws["sum"], a + b + 2.0, atol=1e-5)
    moments = {"a": (a, 0.0), "b": (b, 0.0), "a²": (a**2, 1.0), "b²": (b**2, 1.0), "ab": (a * b, 0.8)}
    for label, (values, truth) in moments.items():
        check(values, truth, label)


def blocks(model, *partition):
    return Gibbs([(SplitHMC(model, find_heuristic_step_size=False), sites) for sites in partition])


@pytest.mark.fault("mcmc/_target.py", "biject_to(supports[name]).inv(value)", "value")
@pytest.mark.slow
def test_blocks_start_where_the_prior_is():
    def model():
        numpyro.sample("a", dist.LogNormal(5.0, 1.0))
        numpyro.sample("b", dist.Dirichlet(jnp.ones(3)))

    kernel = blocks(model, ["a"], ["b"])
    starts = [kernel.init(key, 0, None, (), {}) for key in jax.random.split(jax.random.key(0), 20)]
    sites = [kernel.postprocess_fn((), {})(state.z) for state in starts]
    a = np.log([site["a"] for site in sites])
    assert abs(a.mean() - 5.0) < 4 / 20**0.5 and 0.4 < a.std() < 1.8
    np.testing.assert_allclose([site["b"].sum() for site in sites], 1.0, rtol=1e-5)


@pytest.mark.as_compiled
def test_what_a_simplex_is_given():
    def model(counts):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("other", dist.Normal(0.0, 1.0))
        numpyro.sample("counts", dist.Multinomial(100, share), obs=counts)
        numpyro.deterministic("first", share[0])

    mcmc = MCMC(blocks(model, ["share"], ["other"]), num_warmup=300, num_samples=4000)
    mcmc.run(jax.random.key(0), jnp.array([60, 30, 10]))
    draws = mcmc.get_samples(group_by_chain=True)
    for i, mean in enumerate((61 / 103, 31 / 103, 11 / 103)):
        check(draws["share"][..., i], mean, f"share {i}")
    np.testing.assert_allclose(draws["first"], draws["share"][..., 0], rtol=1e-5)


@pytest.mark.parametrize(
    "bounded",
    [
        lambda a: dist.Uniform(0.0, a),
        lambda a: dist.Uniform(0.0, a).expand([2]).to_event(1),
        lambda a: dist.TruncatedNormal(0.0, 1.0, high=a),
    ],
    ids=["uniform", "event", "truncated"],
)
def test_a_bound_that_another_block_moves_is_refused(bounded):
    def model():
        numpyro.sample("s", bounded(numpyro.sample("a", dist.LogNormal(0.0, 1.0))))

    with pytest.raises(ValueError, match="this block of Gibbs, which has 's', are arrays.*Uniform"):
        blocks(model, ["a"], ["s"]).init(jax.random.key(0), 10, None, (), {})
