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
from numpyro_wide.mcmc._adaptation import Autocorrelation
from tests.marks import parametrize
from tests.mcmc.cases import ADJUSTED, chain

STIFF, NEAR = jnp.linspace(0.02, 1.0, 8), jnp.linspace(0.3, 1.0, 8)


def chains(scale, num_warmup, num_draws, keep, num_chains=20, **settings):
    """Warm chains up on N(0, scale²) and go on: the last state, and what ``keep`` takes of every step."""
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum((z / scale) ** 2), adapt_reference=False, **settings)
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), num_warmup, jnp.tile(scale, (num_chains, 1)))
    return chain(kernel, state, num_warmup + num_draws, keep=keep)


def num_rotations(step_size, **settings):
    fixed = {"step_size": step_size, "adapt_step_size": False, **settings}
    _, num_grad = chains(NEAR, 0, 2, lambda s: s.num_grad, num_chains=1, **fixed)
    return int(num_grad[-1, 0])


@pytest.mark.fault("mcmc/split_hmc.py", "*= jnp.sqrt(jnp.minimum(state.step_size / WHOLE_FROM, 1.0))", "*= 1.0")
@parametrize(
    ("step_size", "expected"), [(2.0, 1), (0.5, 4), (0.3, 7), (0.1, 12), (0.02, 26), (0.0005, 128)], rest="slow"
)
def test_rotations_grow_like_the_root_of_those_of_a_whole_trajectory(step_size, expected):
    """Whole trajectories, of 2 radians, down to steps of 0.3; below that 2 / √(0.3 h) rotations."""
    assert num_rotations(step_size) == expected


@pytest.mark.fault("mcmc/_kernel.py", "0, num_proposals, lambda", "0, 1, lambda")
@pytest.mark.fault("mcmc/split_hmc.py", "math.log(CORRELATION_LEFT) / jnp.log", "CORRELATION_LEFT / jnp.log")
@pytest.mark.fault("mcmc/_adaptation.py", "value - anchor", "value")
@pytest.mark.fault("mcmc/_adaptation.py", "mean**2, product - mean**2", "mean**2, product")
@parametrize(("correlation", "expected"), [(0.5, 3), (-0.3, 1), (0.1, 1), (0.3, 2), (0.7, 5), (0.95, 8)], rest="slow")
def test_a_draw_has_as_many_trajectories_as_the_energy_takes_to_forget(correlation, expected):
    """Powers of the correlation of energies, by NumPy, down to 0.15."""
    noise, energies = np.random.default_rng(0).normal(size=4000), np.zeros(4000)
    for i in range(1, 4000):
        energies[i] = correlation * energies[i - 1] + noise[i]
    energies = (5e3 + energies).astype("f")
    mixing, _ = jax.lax.scan(lambda sums, x: (sums.add(x), None), Autocorrelation.start(jnp.float32), energies)
    np.testing.assert_allclose(mixing.estimate(), np.corrcoef(energies[1:], energies[:-1])[0, 1], atol=2e-3)

    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z**2), step_size=0.1, adapt_step_size=False)
    state = kernel.init(jax.random.key(0), 50, jnp.ones(3))
    state = state._replace(adapt_state=state.adapt_state._replace(mixing=mixing))
    assert kernel.sample(state, (), {}).num_grad == 12  # in warmup
    after = kernel.sample(state._replace(i=jnp.array(50)), (), {})
    assert after.num_grad == 12 * expected and after.i == 51


@pytest.mark.fault("mcmc/_kernel.py", "- 0.5 * total(jax.tree.map(jnp.square, state.z))", "")
@pytest.mark.fault("mcmc/_kernel.py", "is_late = is_warming_up &", "is_late = ")
def test_the_energy_is_that_beside_the_standard_normal_and_of_warmup():
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z**2) + jnp.sum(jnp.cos(z)), adapt_reference=False)
    z, energies = chain(
        kernel, kernel.init(jax.random.key(0), 100, jnp.ones(50)), 120, keep=lambda s: (s.z, s.adapt_state.mixing.sums)
    )[1]
    beside = np.cos(np.asarray(z, float)).sum(axis=1)[35:100]
    np.testing.assert_allclose(energies[-1][:3], [65, *(np.sum((beside - beside[0]) ** p) for p in (1, 2))], rtol=1e-3)


def test_whoever_names_a_persistence_has_whole_trajectories():
    assert num_rotations(0.02, persistence=0.0) == 100
    assert num_rotations(0.02, persistence=0.5, trajectory_angle=1.0) == 50
    assert num_rotations(0.02, num_steps=30) == 30


@pytest.mark.as_compiled
@pytest.mark.fault("mcmc/_kernel.py", "adapt_state.mixing.pooled(),", "adapt_state.mixing,")
def test_all_chains_of_a_run_are_in_one_regime():
    last, (num_grad, mixing) = chains(jnp.linspace(0.06, 1.0, 8), 150, 1, lambda s: (s.num_grad, s.adapt_state.mixing))
    # A few percent of the step size apart; whole trajectories would have about 24 rotations.
    assert np.ptp(last.step_size) > 0
    assert num_grad[-1].max() <= 1.25 * num_grad[-1].min()
    rotations = np.round(2 / np.sqrt(0.3 * np.asarray(last.step_size)))
    assert rotations.max() < 0.7 * 2.0 / last.step_size.max()
    of_warmup = jax.tree.map(lambda leaf: leaf[149], mixing)
    variance, covariance = np.mean(jax.vmap(Autocorrelation.moments)(of_warmup), axis=0)
    np.testing.assert_array_equal(num_grad[-1], rotations * round(np.log(0.15) / np.log(covariance / variance)))


@pytest.mark.fault("mcmc/split_hmc.py", "jnp.exp(-angle /", "-jnp.expm1(-angle /")
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
    state = kernel.init(jax.random.split(jax.random.key(0), 4), 0, jnp.zeros((4, 20000)))
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
@parametrize(("i", "max_steps", "num_steps"), [(5, 1, 1), (5, 99, 16), (50, 1, 16)], rest="slow")
def test_a_chain_that_falls_in_warmup_keeps_no_velocity(monkeypatch, i, max_steps, num_steps):
    monkeypatch.setattr(split_hmc, "JITTER", 0.0)
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z**2), step_size=0.05, find_heuristic_step_size=False)
    state = kernel.init(jax.random.key(0), 50, jax.random.normal(jax.random.key(1), (20000,)))
    adapted = state.adapt_state._replace(max_steps=jnp.array(max_steps))
    after = kernel.sample(state._replace(i=jnp.array(i), adapt_state=adapted), (), {})
    assert after.num_grad == num_steps
    angle = num_steps * 0.05
    expected = 0.0 if num_steps == 1 else np.exp(-angle / 2) * np.cos(angle)
    np.testing.assert_allclose(np.mean(np.asarray(state.r * after.r)), expected, atol=0.03)


@pytest.mark.slow
def test_short_trajectories_have_more_effective_draws_a_gradient_of_what_is_stiff(monkeypatch):
    monkeypatch.setattr(split_hmc, "MAX_TRAJECTORIES", 1)

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
