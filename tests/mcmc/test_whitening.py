"""The momentum length and mass that the microcanonical kernel learns, and the bias that its tolerance allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import lfilter

from numpyro_wide.mcmc import MicrocanonicalLangevin, microcanonical
from numpyro_wide.mcmc._integrators import Point
from numpyro_wide.mcmc._whitening import Whitening, autocorrelation_time
from tests.marks import parametrize
from tests.mcmc.cases import KERNELS, chain


def autoregressive(rho, num_draws, size, seed=0):
    """Stationary chains of variance 1, (draw, chain)."""
    noise = np.random.default_rng(seed).normal(size=(num_draws, size))
    noise[1:] *= np.sqrt(1 - rho**2)
    return lfilter([1.0], [1.0, -rho], noise, axis=0).astype("f")


@parametrize("rho", [-0.4, 0.0, 0.5, 0.9], rest="slow")
def test_autocorrelation_time_of_an_autoregression(rho):
    traces = np.concatenate([3.0 + autoregressive(rho, 3000, 16), np.zeros((501, 16), "f")])
    found = autocorrelation_time(jnp.array(traces), jnp.array(3000))
    np.testing.assert_allclose(found, (1 + rho) / (1 - rho), rtol=0.12)


def window(draws, start, draw_length=0.7):
    """Close a window of these draws."""
    seen = jax.lax.scan(lambda known, z: (known.count_draw(Point(z, None, None)), None), start, jnp.array(draws))[0]
    return seen.close(jnp.array(draw_length), 0.4)


def fresh(size):
    return Whitening.start(jnp.zeros(size), 0.8, 2000)


def test_a_window_learns_scales_that_differ_and_none_that_differ_by_chance():
    size, rho = 200, 0.8
    unequal, equal = np.exp(np.linspace(-2, 2, size)).astype("f"), np.full(size, 3.0, "f")
    draws = autoregressive(rho, 900, size)
    by_chance = np.std(np.log(draws.std(axis=0)))
    assert by_chance > 0.04  # 900 draws are worth 100
    for scales in (unequal, equal):
        found = np.log(window(draws * scales, fresh(size)).scale / scales)
        assert abs(found.mean()) < 0.02
        assert found.std() < (1.1 if scales is unequal else 0.4) * by_chance


@pytest.mark.fault(
    "mcmc/_whitening.py",
    "jnp.sqrt(self.length * per_autocorrelation * draw_length * time)",
    "per_autocorrelation * draw_length * time",
)
def test_a_window_learns_the_momentum_length_once_the_scales_are_known():
    size, rho, draw_length = 64, 0.8, 0.7
    draws = autoregressive(rho, 1500, size)
    first = window(draws, fresh(size), draw_length)
    assert first.length == jnp.float32(0.8)
    expected = np.sqrt(0.8 * 0.4 * draw_length * (1 + rho) / (1 - rho))
    second = window(draws, first, draw_length)
    np.testing.assert_allclose(second.length, expected, rtol=0.08)
    assert second.num_draws == 0 and not jnp.any(second.traces)


def test_a_window_in_which_nothing_moved_teaches_nothing():
    closed = window(np.ones((50, 8), "f"), fresh(8)._replace(scale=jnp.full(8, 2.0), num_windows=jnp.array(1)))
    np.testing.assert_array_equal(closed.scale, 2.0)
    assert closed.length == jnp.float32(0.8)


def test_short_warmups_learn_the_step_size_alone():
    kernel = MicrocanonicalLangevin(potential_fn=lambda z: 0.5 * jnp.sum((z / 5) ** 2))
    known = chain(kernel, kernel.init(jax.random.key(0), 19, jnp.ones(4)), 20)[0].adapt_state.preconditioner
    assert known.length == 1.0 and jnp.all(known.scale == 1)


@parametrize("name", ["microcanonical", "microcanonical-unadjusted"], rest="slow")
def test_warmup_learns_scales(name):
    scales = jnp.exp(jnp.linspace(-2.0, 2.0, 12))
    kernel = KERNELS[name](potential_fn=lambda z: 0.5 * jnp.sum((z / scales) ** 2))
    last, _ = chain(kernel, kernel.init(jax.random.key(0), 2000, jnp.ones(12)), 2000, keep=lambda s: s.i)
    known = last.adapt_state.preconditioner
    np.testing.assert_allclose(known.scale, scales, rtol=0.35)
    assert 0.5 < known.length < 2.5 and last.step_size > 0.5


@pytest.mark.slow
def test_draws_are_a_number_of_steps_apart():
    """With energy errors of single steps, so that the step size does not depend on their number."""
    steps = {}
    for num_steps in (1, 6):
        kernel = MicrocanonicalLangevin(potential_fn=lambda z: 0.5 * jnp.sum(z**2), adjusted=False, num_steps=num_steps)
        state = kernel.init(jax.random.key(0), 600, jnp.ones(50))
        last, num_grad = chain(kernel, state, 650, keep=lambda s: s.num_grad)
        assert jnp.all(num_grad == 2 * num_steps)
        steps[num_steps] = float(last.step_size)
    np.testing.assert_allclose(steps[6], steps[1], rtol=0.1)


def test_directions_forget_themselves_over_the_momentum_length():
    kernel = MicrocanonicalLangevin(potential_fn=lambda z: 0.0 * jnp.sum(z), adjusted=False, step_size=0.2)
    _, (r, z) = chain(kernel, kernel.init(jax.random.key(0), 0, jnp.ones(500)), 200, keep=lambda s: (s.r, s.z))
    np.testing.assert_allclose(np.mean(r[1:] ** 2, axis=1), 1.0, rtol=1e-4)
    np.testing.assert_allclose(np.mean(r[2:] * r[1:-1]), np.exp(-0.2), rtol=0.01)
    np.testing.assert_allclose(np.mean(r[6:] * r[1:-5]), np.exp(-1.0), rtol=0.03)
    np.testing.assert_allclose(np.diff(z, axis=0), 0.2 * r[1:], atol=1e-5)


@pytest.mark.fault("mcmc/microcanonical.py", "ADJUSTED_FORGETTING if adjusted else 1.0", "1.0")
@pytest.mark.slow
def test_adjusted_trajectories_forget_their_direction_over_twice_their_length(monkeypatch):
    monkeypatch.setattr(microcanonical, "JITTER", 0.0)
    kernel = MicrocanonicalLangevin(potential_fn=lambda z: 0.0 * jnp.sum(z), step_size=0.2, adapt_step_size=False)
    _, (z, num_grad) = chain(
        kernel, kernel.init(jax.random.key(0), 0, jnp.ones(500)), 100, keep=lambda s: (s.z, s.num_grad)
    )
    assert jnp.all(num_grad == 2 * 5)
    lags = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    np.testing.assert_allclose(
        np.mean(np.diff(z, axis=0) ** 2), 0.2**2 * np.sum(np.exp(-0.2 / 2.0) ** lags), rtol=0.015
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unadjusted", "microcanonical-unadjusted"])
@pytest.mark.parametrize("tolerance", [0.05, 0.1])
def test_variances_are_as_biased_as_the_tolerance_allows_and_no_more(name, tolerance):
    scales, num_chains = jnp.exp(jnp.linspace(-0.5, 0.5, 40)), 32
    kernel = KERNELS[name](
        potential_fn=lambda z: 0.5 * jnp.sum((z / scales) ** 2),
        bias_tolerance=tolerance,
        **({"damping": 0.5} if name == "unadjusted" else {}),
    )
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), 1000, jnp.ones((num_chains, 40)))
    _, z = chain(kernel, state, 5000, keep=lambda s: s.z)
    biases = np.var(np.asarray(z[1000:], dtype=float).reshape(-1, 40) / scales, axis=0) - 1
    # Of 32 chains of 4000 steps: the error of a variance is near 1 % for the slower ones of the two samplers.
    assert np.sqrt(np.mean(biases**2)) < 1.15 * tolerance
    assert np.sqrt(np.mean(biases**2)) > 0.25 * tolerance
