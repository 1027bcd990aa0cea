"""Velocities and thresholds of acceptance that live on from step to step (Neal 2020): their law, and for how long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.mcmc._state import shift_threshold
from tests.mcmc.cases import chain

LOC, SCALE = jnp.array([0.5, -0.3, 0.2]), jnp.array([0.3, 0.5, 0.8])
NUM_CHAINS = 32768
# Four tenths of the proposals are refused, and the threshold moves by a tenth of its range a step.
SETTINGS = {"step_size": 0.5, "num_steps": 2, "trajectory_angle": 10.0, "persistence": "auto"}


class WithoutCarrying(SplitHMC):
    """Keeps its threshold where it goes to another density."""

    def sample(self, state, *args):
        following = super().sample(state, *args)
        moved = following.potential_energy != state.potential_energy
        change = jnp.where(moved, following.energy_error, 0.0)
        return following._replace(threshold=following.threshold * jnp.exp(-change))


class WithoutFlip(SplitHMC):
    """Keeps its velocity after a rejection."""

    def _propose(self, *args):
        proposal = super()._propose(*args)
        return proposal._replace(r_rejected=jax.tree.map(jnp.negative, proposal.r_rejected))


def largest_z_score(kernel_class):
    """Start chains in the joint law of position, velocity and threshold, and see whether they have left it."""
    kernel = kernel_class(
        potential_fn=lambda z: 0.5 * jnp.sum(((z - LOC) / SCALE) ** 2),
        adapt_step_size=False,
        adapt_reference=False,
        **SETTINGS,
    )
    first = LOC + SCALE * jax.random.normal(jax.random.key(1), (NUM_CHAINS, 3))
    state = kernel.init(jax.random.split(jax.random.key(0), NUM_CHAINS), 0, first)
    state, accept_prob = chain(kernel, state, 20, keep=lambda state: jnp.mean(state.accept_prob))
    x, velocity = (np.asarray(part, float) for part in ((state.z - LOC) / SCALE, state.r))
    threshold = np.asarray(jnp.abs(state.threshold), float) - 0.5
    energy = 0.5 * np.sum(x**2, axis=1) - 1.5
    of_velocity = 0.5 * np.sum(velocity**2, axis=1) - 1.5
    zero_mean = [threshold, threshold**2 - 1 / 12, energy, energy**2 - 1.5, of_velocity, np.sum(x * velocity, axis=1)]
    zero_mean += [threshold * energy, threshold * of_velocity, energy * of_velocity, *x.T, *(x**2 - 1).T]
    scores = [abs(values.mean()) / values.std() * NUM_CHAINS**0.5 for values in zero_mean]
    return max(scores), float(jnp.mean(accept_prob))


def test_position_velocity_and_threshold_keep_their_joint_law():
    score, accept_prob = largest_z_score(SplitHMC)
    assert 0.3 < accept_prob < 0.8
    assert score < 4.5


@pytest.mark.parametrize("broken", [WithoutCarrying, WithoutFlip])
def test_broken_thresholds_lose_it(broken):
    score, _ = largest_z_score(broken)
    assert score > 7


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0, 1.9])
def test_a_shifted_threshold_stays_uniform(shift):
    before = jnp.linspace(-1, 1, 2001)[1:-1]
    after = np.asarray(shift_threshold(before, jnp.asarray(shift)))
    assert np.all(np.abs(after) <= 1)
    np.testing.assert_allclose(np.sort(after), before, atol=2e-3)


def after_warmup(scale):
    """Warm chains up on N(0, scale²) in eight directions, and return rotations, shares of the angle and two states."""
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum((z / scale) ** 2), persistence="auto", adapt_reference=False)
    state = kernel.init(jax.random.split(jax.random.key(0), 200), 100, jnp.tile(scale, (200, 1)))
    state, _ = chain(kernel, state, 100, keep=lambda state: None)
    last, _ = chain(kernel, state, 1)
    num_grad = np.asarray(last.num_grad)
    return num_grad, np.minimum(num_grad * np.asarray(last.step_size) / 2.0, 1), state, last


def test_few_rotations_make_a_trajectory_whose_velocity_lives_on():
    num_grad, share, *_ = after_warmup(jnp.linspace(0.02, 1.0, 8))
    assert np.all(num_grad == 6)
    assert np.all(share < 0.5)


def test_a_whole_trajectory_forgets_its_velocity_and_its_threshold():
    num_grad, share, before, after = after_warmup(jnp.ones(8))
    assert np.all(num_grad == 1)
    np.testing.assert_allclose(share, 1.0, rtol=1e-6)
    # Of a posterior N(0, I) every proposal is accepted, and a threshold is drawn afresh.
    pairs = [(before.threshold, after.threshold), (before.r.ravel(), after.r.ravel())]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / len(a) ** 0.5


def test_a_short_trajectory_keeps_the_share_of_its_velocity_that_is_left_of_the_angle():
    kernel = SplitHMC(
        potential_fn=lambda z: 0.5 * jnp.sum(z**2),
        persistence="auto",
        num_steps=3,
        step_size=0.1,
        trajectory_angle=1.0,
        angle_jitter=0.0,
        adapt_step_size=False,
    )
    state = kernel.init(jax.random.split(jax.random.key(0), 4), 0, jnp.zeros((4, 20000)))
    after, _ = chain(kernel, state, 1)
    # From z = 0 a rotation by 0.3 rad leaves cos 0.3 of the velocity, of which 1 − 0.3 / 1 is old.
    for old, new in zip(state.r, after.r, strict=True):
        correlation = np.mean(np.asarray(old) * np.asarray(new))
        np.testing.assert_allclose(correlation, 0.7 * np.cos(0.3), atol=4.5 / 20000**0.5)
