"""Chains that stand still or hardly move: warmups that recover from rounding, and runs that say so where not."""

import pickle
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.mcmc._moves import Moves
from tests.mcmc.cases import ADJUSTED, KERNELS


def narrow(z):
    return 1e12 * jnp.sum((z - 0.3) ** 2)


def run(method, num_chains, potential_fn=narrow):
    kernel = SplitHMC(potential_fn=potential_fn, adapt_step_size=False, step_size=0.5)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=60, num_chains=num_chains, chain_method=method, progress_bar=False)
    first = jnp.ones(3) if num_chains == 1 else jnp.ones((num_chains, 3))
    mcmc.run(jax.random.key(num_chains), init_params=first)
    return mcmc


@pytest.mark.parametrize(("method", "num_chains"), [("sequential", 1), ("vectorized", 2), (jax.vmap, 2)])
def test_a_run_that_stands_still_says_so_once(method, num_chains):
    with pytest.warns(RuntimeWarning, match=r"still: 0 of 60 draws moved, step size 5\.0e-01, which began at 5\.0e-01"):
        mcmc = run(method, num_chains)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = pickle.loads(pickle.dumps(jax.tree.map(lambda x: x, mcmc.last_state)))
        run("sequential", 1, potential_fn=lambda z: 0.5 * jnp.sum(z**2))  # one that moves says nothing
    if num_chains == 1:
        assert "stands still" in mcmc.sampler.get_diagnostics_str(state)


@pytest.mark.parametrize(
    "kernel", [SplitHMC, partial(SplitHMC, persistence=0.0), partial(MicrocanonicalLangevin, adapt_mass_matrix=False)]
)
def test_trajectories_at_their_largest_number_of_steps_are_told(kernel):
    scale = jnp.array([0.01, 0.02, 1.0])

    def run_short(max_num_steps):
        short = kernel(potential_fn=lambda z: 0.5 * jnp.sum((z / scale) ** 2), max_num_steps=max_num_steps)
        mcmc = MCMC(short, num_warmup=100, num_samples=60, num_chains=2, chain_method="vectorized", progress_bar=False)
        mcmc.run(jax.random.key(0), init_params=jnp.tile(scale, (2, 1)))

    with pytest.warns(RuntimeWarning, match=r"2 of 2 chains break their trajectories off: 60 of 60 draws ended at max"):
        run_short(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_short(100_000)


@pytest.mark.parametrize(
    ("num_moves", "num_capped", "words"),
    [
        (2, 90, "stands still: 2 of 100 draws moved.*not of the posterior"),
        (3, 90, r"hardly moves: 3 of 100 draws were accepted.*float64.*hold=\"scales\".*Microcanonical"),
        (10, 0, "hardly moves: 10 of 100"),
        (11, 51, "breaks its trajectories off: 51 of 100 draws ended at max_num_steps.*float64.*raise max_num_steps"),
        (11, 50, None),
    ],
)
@pytest.mark.parametrize("num_draws", [100, 40])
def test_the_worst_fault_is_told(num_moves, num_capped, num_draws, words):
    counts = [jnp.array(count) for count in (num_moves, num_capped, num_draws)]
    moves = Moves(*counts, jnp.array(0.1), jnp.array(0.1), jax.random.bits(jax.random.key(num_moves)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.tree.map(lambda x: x, moves)
    assert len(told) == (words is not None and num_draws == 100)
    if told:
        assert re.search(words, str(told[0].message))


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


# Steps differ by a factor of hundreds there, and a chain of small ones arrives as well.
@pytest.mark.filterwarnings("ignore:.*break their trajectories off")
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
