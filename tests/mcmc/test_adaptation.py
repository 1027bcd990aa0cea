"""What warmup learns, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.mcmc._adaptation import AcceptanceRule, from_real_line, to_real_line
from tests.marks import parametrize
from tests.mcmc.cases import ADJUSTED, KERNELS, UNADJUSTED, chain

SCALES = jnp.array([0.2, 0.5, 1.0, 3.0])


def stretched(z):
    return 0.5 * jnp.sum((z / SCALES) ** 2)


def fields(state):
    return state.step_size, state.accept_prob, state.num_grad


@parametrize("name", ADJUSTED, rest="slow")
def test_warmup_reaches_the_target_and_then_stops(name):
    settings, target = {"target_accept_prob": 0.7}, 0.7
    if name.startswith("split"):
        settings["adapt_reference"] = False  # it would make the target N(0, I), where nothing is rejected
    kernel = KERNELS[name](potential_fn=stretched, **settings)
    state = kernel.init(jax.random.key(0), 1500, jnp.ones(4))
    _, (step_size, accept_prob, num_grad) = chain(kernel, state, 3500, keep=fields)
    assert len(set(step_size[100:1400].tolist())) > 3
    assert len(set(step_size[1500:].tolist())) == 1
    # With a whole number of turns to a trajectory the acceptance moves in leaps.
    tolerance = 0.15 if name in ("split", "split-whole", "microcanonical") else 0.06
    assert abs(float(accept_prob[1500:].mean()) - target) < tolerance
    if name == "split-whole":
        np.testing.assert_allclose(num_grad[1500:] * step_size[1500:], 2.0, rtol=1e-5)
        assert num_grad[-1] > 1


@pytest.mark.fault("mcmc/_kernel.py", "4 * tolerance**3", "4 * (2 * tolerance) ** 3")
@parametrize("name", UNADJUSTED, rest="slow")
def test_warmup_reaches_the_energy_error_of_the_tolerance_and_then_stops(name):
    kernel = KERNELS[name](potential_fn=lambda z: 2.0 * jnp.sum(z**2), bias_tolerance=0.1)
    state = kernel.init(jax.random.split(jax.random.key(0), 6), 1000, jnp.ones((6, 40)))
    _, (step_size, energy_error) = chain(kernel, state, 3000, keep=lambda s: (s.step_size, s.energy_error))
    assert len(set(step_size[100:900, 0].tolist())) > 3
    assert jnp.all(step_size[1000:] == step_size[-1])
    # Six chains, each with a step that comes of some hundred squares of energy errors, whose tails are heavy.
    np.testing.assert_allclose(np.cbrt(np.mean(energy_error[1000:] ** 2) / 40 / 4), 0.1, rtol=0.12)
    if name == "unadjusted":
        # A leapfrog of phase 2ε has the mean square ((2ε)⁶ / 16) / (1 − ε²) and the variance 1 / (1 − ε²), on the
        # scale of the posterior's.
        expected = np.sqrt(np.roots([4.0, 0.0, 4 * 0.1**3, -4 * 0.1**3])[-1].real)
        np.testing.assert_allclose(step_size[-1], expected, rtol=0.07)


@parametrize("name", ["langevin", "split"], rest="slow")
def test_adaptation_can_be_switched_off(name):
    step = 2.0 / 80  # of the two radians of a trajectory the automatic number of turns needs a whole fraction
    kernel = KERNELS[name](potential_fn=stretched, step_size=step, adapt_step_size=False)
    state = kernel.init(jax.random.key(0), 20, jnp.ones(4))
    _, (step_size, *_) = chain(kernel, state, 30, keep=fields)
    np.testing.assert_allclose(step_size, step, rtol=1e-5)


@pytest.mark.fault("mcmc/_adaptation.py", "| (energy_error < gross)", "| (energy_error < jnp.inf)")
@parametrize("name", UNADJUSTED, rest="slow")
def test_unadjusted_samplers_survive_a_first_step_that_is_far_too_large(name):
    kernel = KERNELS[name](potential_fn=stretched, step_size=50.0)
    state = kernel.init(jax.random.key(0), 500, jnp.ones(4))
    last, z = chain(kernel, state, 3000, keep=lambda s: s.z)
    assert jnp.max(jnp.abs(z / SCALES)) < 8
    assert last.mean_accept_prob > 0.9
    assert jnp.all(jnp.any(jnp.diff(z[500:], axis=0) != 0, axis=1))


@parametrize("bound", [None, 2.0], rest="slow")
def test_the_real_line_and_back(bound):
    steps = jnp.array([1e-6, 0.3, 1.5])
    np.testing.assert_allclose(from_real_line(to_real_line(steps, bound), bound), steps, rtol=1e-5)
    np.testing.assert_allclose(to_real_line(jnp.array(1e-6), 1.0), np.log(1e-6), rtol=1e-5)
    largest = from_real_line(jnp.array(1e9), bound)
    assert jnp.isfinite(largest) and (bound is None or largest == bound)
    assert from_real_line(jnp.array(-1e9), bound) > 0


@parametrize(
    ("start", "bound", "expected"), [(100.0, None, 0.78125), (1e-3, None, 1.024), (0.3, 0.5, 0.5)], rest="slow"
)
def test_the_search_stops_beyond_the_target(start, bound, expected):
    rule = AcceptanceRule(0.5, bound, True)
    state = rule.start(jnp.array(start), searches=True)
    for _ in range(30):
        step = rule.step_size(state, jnp.array(False))
        if not rule.is_searching(state):
            break
        state = rule.update(state, jnp.where(step < 1.0, 0.1, 5.0), jnp.array(0.0), jnp.array(False))
    np.testing.assert_allclose(step, expected, rtol=1e-2 if bound else 1e-6)


def test_a_step_holds_one_gradient():
    """A gradient is what is written twice and compiled twice."""
    traced = []

    def potential_fn(z):
        traced.append(z)
        return 0.5 * jnp.sum(z**2)

    kernel = SplitHMC(potential_fn=potential_fn)
    state = kernel.init(jax.random.key(0), 50, jnp.ones(4))
    traced.clear()
    jax.make_jaxpr(lambda state: kernel.sample(state, (), {}))(state)
    assert len(traced) == 1
