"""Trajectories that warmup cuts into parts where whole ones are long, and the velocity that lives on between them."""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.mcmc import SplitHMC, split_hmc
from numpyro_wide.mcmc.split_hmc import MANY, PARTS
from tests.mcmc.cases import chain

STIFF, NEAR = jnp.linspace(0.02, 1.0, 8), jnp.linspace(0.3, 1.0, 8)


def chains(scale, num_warmup, num_draws, keep, num_chains=20, **settings):
    """Warm chains up on N(0, scale²) and go on: the last state, and what ``keep`` takes of every step."""
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum((z / scale) ** 2), adapt_reference=False, **settings)
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), num_warmup, jnp.tile(scale, (num_chains, 1)))
    return chain(kernel, state, num_warmup + num_draws, keep=keep)


def test_long_trajectories_are_cut_into_parts_after_three_quarters_of_warmup_for_good():
    last, (cut, num_grad, step_size) = chains(STIFF, 100, 60, lambda s: (s.adapt_state.is_cut, s.num_grad, s.step_size))
    assert np.all(cut[75:])
    assert np.all(num_grad[100:] == np.round(2.0 / np.asarray(last.step_size) / PARTS))
    assert np.all(step_size[100:] == last.step_size)
    # While a chain is on its way, trajectories are whole, but for probes and the first ones.
    assert np.median(num_grad[40:75]) > MANY


def test_short_trajectories_stay_whole_and_keep_no_velocity():
    before, _ = chains(NEAR, 100, 50, lambda s: None, num_chains=400)
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum((z / NEAR) ** 2), adapt_reference=False)
    kernel.init(jax.random.key(0), 0, NEAR)
    after = kernel.sample(before, (), {})
    assert not np.any(after.adapt_state.is_cut)
    np.testing.assert_allclose(after.num_grad * after.step_size, 2.0, rtol=1e-5)
    assert np.all(np.asarray(after.num_grad) <= MANY)
    # N(0, I) forgets; what is left of the old velocity would come back turned by two radians.
    fresh, old = (np.asarray(part) for part in (after.r, before.r))
    assert abs(np.corrcoef(fresh[:, -1], old[:, -1])[0, 1]) < 4.5 / 400**0.5


def test_without_warmup_the_step_size_that_is_given_decides():
    for step_size, expected in ((2.0 / MANY, False), (2.0 / (MANY + 1), True)):
        last, num_grad = chains(NEAR, 0, 3, lambda s: s.num_grad, step_size=step_size, adapt_step_size=False)
        assert np.all(last.adapt_state.is_cut == expected)
        assert np.all(num_grad == (round((MANY + 1) / PARTS) if expected else MANY))


def test_a_short_step_that_is_given_cuts_nothing_on_the_way():
    _, num_grad = chains(NEAR, 40, 5, lambda s: s.num_grad, step_size=2.0 / (MANY + 1), adapt_step_size=False)
    assert np.all(num_grad[:30] == MANY + 1)
    assert np.all(num_grad[30:] == round((MANY + 1) / PARTS))


@pytest.mark.parametrize("settings", [{"persistence": 0.0}, {"num_steps": 30}])
def test_who_names_a_persistence_or_a_number_of_rotations_has_them(settings):
    last, num_grad = chains(STIFF, 60, 10, lambda s: s.num_grad, **settings)
    assert not np.any(last.adapt_state.is_cut)
    assert np.all(num_grad[60:] >= 30)


def test_a_part_keeps_the_share_of_its_velocity_that_is_left_of_the_angle(monkeypatch):
    monkeypatch.setattr(split_hmc, "JITTER", 0.0)
    kernel = SplitHMC(
        potential_fn=lambda z: 0.5 * jnp.sum(z**2),
        num_steps=3,
        step_size=0.1,
        trajectory_angle=1.0,
        adapt_step_size=False,
    )
    state = kernel.init(jax.random.split(jax.random.key(0), 4), 0, jnp.zeros((4, 20000)))
    after, _ = chain(kernel, state, 1)
    # From z = 0 a rotation by 0.3 rad leaves cos 0.3 of the velocity, of which 1 − 0.3 / 1 is old.
    for old, new in zip(state.r, after.r, strict=True):
        correlation = np.mean(np.asarray(old) * np.asarray(new))
        np.testing.assert_allclose(correlation, 0.7 * np.cos(0.3), atol=4.5 / 20000**0.5)


def test_parts_have_more_effective_draws_a_gradient_of_what_is_stiff():
    def ess_per_gradient(num_draws, **settings):
        _, (z, num_grad) = chains(STIFF, 300, num_draws, lambda s: (s.z, s.num_grad), num_chains=4, **settings)
        draws, cost = np.asarray(z)[300:].swapaxes(0, 1), int(np.sum(num_grad[300:]))
        return np.array([arviz.ess(draws[..., i]) for i in (0, 1, 2, 7)]) / cost

    parts, whole = ess_per_gradient(6000), ess_per_gradient(600, persistence=0.0)
    gain = parts / whole
    assert np.all(gain[:3] > 1.5)
    # The criterion: the product of what is gained where the posterior is narrow and what is lost where it is wide.
    assert gain[:3].mean() * gain[3] > 1.0


def cut_and_step_size(least, num_warmup):
    def keep(state):
        return state.adapt_state.is_cut, state.step_size

    return map(np.asarray, chains(jnp.linspace(least, 1.0, 8), num_warmup, 5, keep, num_chains=50)[1])


def test_the_decision_stays_until_warmup_ends():
    cut, step_size = cut_and_step_size(0.05, 200)
    # While the step size is still being found, trajectories of more than so many rotations come and go.
    assert np.any((np.round(2.0 / step_size) > MANY)[150:200] != cut[150:200])
    assert np.all(cut[149:199] == cut[149])
    assert np.all(cut[199:] == cut[-1])
    assert np.all(cut[:149] == cut[0])


def test_trajectories_that_turn_out_long_at_the_end_of_warmup_are_cut_then():
    cut, step_size = cut_and_step_size(0.06, 60)
    whole, is_long = ~cut[58], np.round(2.0 / step_size[-1]) > MANY
    assert np.any(whole & is_long)
    np.testing.assert_array_equal(cut[-1][whole], is_long[whole])
    assert np.all(cut[-1][~whole])
