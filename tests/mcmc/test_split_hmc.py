"""How far a draw of SplitHMC turns, by the step size, and the velocity that lives on between draws."""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_wide.mcmc import SplitHMC, split_hmc
from tests.marks import parametrize
from tests.mcmc.cases import ADJUSTED, chain

STIFF, NEAR = jnp.linspace(0.02, 1.0, 8), jnp.linspace(0.3, 1.0, 8)


def chains(scale, num_warmup, num_draws, keep, num_chains=20, **settings):
    """Warm chains up on N(0, scale²) and go on: the last state, and what ``keep`` takes of every step."""
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum((z / scale) ** 2), adapt_reference=False, **settings)
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), num_warmup, jnp.tile(scale, (num_chains, 1)))
    return chain(kernel, state, num_warmup + num_draws, keep=keep)


def num_rotations(step_size, **settings):
    """Rotations of a draw in warmup, and after it."""
    fixed = {"step_size": step_size, "adapt_step_size": False, **settings}
    _, num_grad = chains(NEAR, 2, 2, lambda s: s.num_grad, num_chains=1, **fixed)
    return int(num_grad[1, 0]), int(num_grad[-1, 0])


@pytest.mark.fault("mcmc/split_hmc.py", "jnp.sqrt(jnp.minimum(step_size / WHOLE_FROM, 1.0))", "step_size / step_size")
@pytest.mark.fault("mcmc/split_hmc.py", "LONGEST_DRAW + (1.0 - LONGEST_DRAW) * share", "1.0 + 0.0 * share")
@pytest.mark.fault("mcmc/_kernel.py", "0, num_proposals, lambda", "0, 1, lambda")
@parametrize(
    ("step_size", "trajectory", "draw"),
    [(0.1, 12, 24), (2.0, 1, 1), (0.5, 4, 4), (0.3, 7, 7), (0.02, 27, 135), (0.0005, 128, 1024)],
    rest="slow",
)
def test_trajectories_grow_like_the_root_of_whole_ones_and_draws_like_whole_ones(step_size, trajectory, draw):
    """Down to steps of 0.3 a draw is a whole trajectory, of 2 radians; below that it is up to 3 radians in several."""
    assert num_rotations(step_size) == (trajectory, draw)


def test_whoever_names_a_persistence_has_whole_trajectories():
    assert num_rotations(0.02, persistence=0.0) == (100, 100)
    assert num_rotations(0.02, persistence=0.5, trajectory_angle=1.0) == (50, 50)
    assert num_rotations(0.02, num_steps=30) == (30, 30)


def test_all_chains_of_a_run_are_in_one_regime():
    last, num_grad = chains(jnp.linspace(0.06, 1.0, 8), 150, 1, lambda s: s.num_grad)
    assert np.ptp(last.step_size) > 0  # of a few percent
    assert num_grad[-1].max() <= 1.25 * num_grad[-1].min()


@pytest.mark.fault(
    "mcmc/split_hmc.py", "jnp.exp(-angle / self._trajectory_angle)", "-jnp.expm1(-angle / self._trajectory_angle)"
)
@parametrize(("num_steps", "expected"), [(3, np.exp(-0.3)), ("auto", np.exp(-1 / 3**0.5))], rest="slow")
def test_a_draw_keeps_the_share_of_its_velocity_that_the_angle_leaves(monkeypatch, num_steps, expected):
    monkeypatch.setattr(split_hmc, "JITTER", 0.0)
    kernel = SplitHMC(
        potential_fn=lambda z: 0.5 * jnp.sum(z**2),
        num_steps=num_steps,
        step_size=0.1,
        trajectory_angle=1.0,
        adapt_step_size=False,
    )
    # In warmup, where a draw is one trajectory.
    state = kernel.init(jax.random.split(jax.random.key(0), 4), 10, jnp.zeros((4, 20000)))
    after, num_grad = chain(kernel, state, 1, keep=lambda s: s.num_grad)
    # From z = 0 a rotation by an angle a leaves cos a of the velocity, of which exp(−a) is old.
    angle = 0.1 * int(num_grad[0, 0])
    for old, new in zip(state.r, after.r, strict=True):
        correlation = np.mean(np.asarray(old) * np.asarray(new))
        np.testing.assert_allclose(correlation, np.exp(-angle) * np.cos(angle), atol=4.5 / 20000**0.5)
    np.testing.assert_allclose(np.exp(-angle), expected, rtol=0.05)


@pytest.mark.fault("mcmc/_kernel.py", "is_warming_up & (adapt_state.max_steps < num_steps)", "is_warming_up & False")
@pytest.mark.fault(
    "mcmc/_kernel.py", "is_warming_up & (adapt_state.max_steps < num_steps)", "adapt_state.max_steps < num_steps"
)
@parametrize(
    ("i", "max_steps", "num_steps", "num_trajectories"), [(5, 1, 1, 1), (5, 99, 17, 1), (50, 1, 17, 3)], rest="slow"
)
def test_a_chain_that_falls_in_warmup_keeps_no_velocity(monkeypatch, i, max_steps, num_steps, num_trajectories):
    monkeypatch.setattr(split_hmc, "JITTER", 0.0)
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z**2), step_size=0.05, find_heuristic_step_size=False)
    state = kernel.init(jax.random.key(0), 50, jax.random.normal(jax.random.key(1), (20000,)))
    adapted = state.adapt_state._replace(max_steps=jnp.array(max_steps))
    after = kernel.sample(state._replace(i=jnp.array(i), adapt_state=adapted), (), {})
    assert after.num_grad == num_steps * num_trajectories
    angle = num_steps * 0.05
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    expected = np.array([0.0, 1.0])  # correlations of position and velocity with the first velocity
    for _ in range(num_trajectories):
        expected = turn @ (expected * [1.0, 0.0 if num_steps == 1 else np.exp(-angle / 2)])
    np.testing.assert_allclose(np.mean(np.asarray(state.r * after.r)), expected[1], atol=0.03)


@pytest.mark.slow
def test_short_draws_have_more_effective_ones_a_gradient_of_what_is_stiff():
    def ess_per_gradient(num_draws, **settings):
        _, (z, num_grad) = chains(STIFF, 300, num_draws, lambda s: (s.z, s.num_grad), num_chains=4, **settings)
        draws, cost = np.asarray(z)[300:].swapaxes(0, 1), int(np.sum(num_grad[300:]))
        return np.array([arviz.ess(draws[..., i]) for i in (0, 1, 2, 7)]) / cost

    short, whole = ess_per_gradient(2000), ess_per_gradient(600, persistence=0.0)
    gain = short / whole
    assert np.all(gain[:3] > 1.5)
    # The criterion: the product of what is gained where the posterior is narrow and what is lost where it is wide.
    assert gain[:3].mean() * gain[3] > 1.0


# A warmup that arrives although energies are rounded ------------------------------------------------------------------


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


@pytest.mark.as_compiled
@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.slow) for name in ADJUSTED if name != "split")]
)
def test_warmup_arrives_where_energies_are_rounded(name):
    p = draws_of(ADJUSTED[name], False, 1)
    np.testing.assert_allclose(p.mean(), 3849 / 5e6, rtol=0.05)
    assert len(np.unique(p)) > 10


@pytest.mark.as_compiled
@pytest.mark.fault("mcmc/_adaptation.py", "(state.probe_error < MAX_ROUNDING)", "(state.probe_error < 0)")
@pytest.mark.parametrize(
    ("name", "rtol", "num_distinct"), [("split", 0.03, 20), pytest.param("langevin", 0.3, 5, marks=pytest.mark.slow)]
)
def test_warmup_arrives_where_no_energy_shows_how_much_of_it_is_rounded(name, rtol, num_distinct):
    p = draws_of(ADJUSTED[name], True, 4)
    np.testing.assert_allclose(p.mean(axis=1), 3849 / 5e6, rtol=rtol)
    assert min(len(np.unique(chain)) for chain in p) > num_distinct
