"""The isokinetic steps against quadrature, autodiff Jacobians, time reversal and BlackJAX's, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.integrate import solve_ivp

from numpyro_wide.mcmc import _integrators as isokinetic
from tests.conftest import enable_x64
from tests.marks import parametrize
from tests.mcmc.test_integrators import evaluator, pair, strict_ranks
from tests.mcmc.test_integrators import skewed as skewed_of_pair

pytestmark = pytest.mark.usefixtures("x64", "strict_ranks")
__all__ = ["strict_ranks"]

SIZE = 5  # of the positions that `pair` makes
UNIT, SCALE = np.ones(SIZE), np.array([0.5, 1.5, 0.7, 1.0, 2.0])


def vector(seed):
    return ravel_pytree(pair(seed))[0]


def skewed(x):
    return skewed_of_pair({"a": x[:2], "b": x[None, 2:]})


def start(seed=0):
    return vector(seed), isokinetic.unit(vector(seed + 1))


def step(position, direction, scale, potential=skewed):
    evaluate = evaluator(potential)
    return isokinetic.isokinetic_step(evaluate, evaluate(position), direction, jnp.array(0.3), scale)


def tangent_basis(direction):
    """Orthonormal columns at right angles to a direction."""
    return np.linalg.svd(np.asarray(direction)[None])[2][1:].T


@pytest.mark.fault("mcmc/_integrators.py", "downhill = -gradient /", "downhill = gradient /")
@parametrize("time", [1e-3, 0.2, 0.7, 3.0], rest="slow")
def test_a_kick_solves_its_differential_equation(time):
    gradient, direction = vector(3), start()[1]
    slope = -np.sqrt(SIZE) / (SIZE - 1) * np.asarray(gradient)
    solved = solve_ivp(lambda _, u: slope - u * (u @ slope), (0, time), direction, rtol=1e-11, atol=1e-12)
    turned, _ = isokinetic.isokinetic_kick(direction, gradient, jnp.array(time))
    np.testing.assert_allclose(turned, solved.y[:, -1], atol=1e-8)


@pytest.mark.fault("mcmc/_integrators.py", "(size - 1) * _log_cosh_plus", "size * _log_cosh_plus")
@parametrize("time", [1e-3, 0.2, 0.7, 3.0], rest="slow")
@parametrize("seed", [0, 1, 2], rest="slow")
def test_a_kick_tells_how_it_stretches_the_sphere(time, seed):
    gradient, direction = vector(seed + 5), start(seed)[1]

    def kick(u):
        return isokinetic.isokinetic_kick(u, gradient, jnp.array(time))[0]

    jacobian = tangent_basis(kick(direction)).T @ jax.jacfwd(kick)(direction) @ tangent_basis(direction)
    _, change = isokinetic.isokinetic_kick(direction, gradient, jnp.array(time))
    assert abs(change) > 1e-4
    np.testing.assert_allclose(change, -np.linalg.slogdet(jacobian)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.as_compiled
@parametrize("scale", [UNIT, SCALE], ids=["unit mass", "mass"], rest="slow")
def test_a_step_tells_how_it_stretches_positions_and_directions(scale):
    position, direction = start()

    def move(x, u):
        end, turned, _ = step(x, u, scale)
        return end.z, turned

    blocks = jax.jacfwd(move, (0, 1))(position, direction)
    before, after = tangent_basis(direction), tangent_basis(move(position, direction)[1])
    (zz, zu), (uz, uu) = blocks
    jacobian = np.block([[zz, zu @ before], [after.T @ uz, after.T @ uu @ before]])
    end, _, energy_error = step(position, direction, scale)
    log_volume = end.potential_energy - skewed(position) - energy_error
    assert abs(log_volume) > 0.05
    np.testing.assert_allclose(log_volume, np.linalg.slogdet(jacobian)[1], rtol=1e-9)


@pytest.mark.fault("mcmc/_integrators.py", "OUTER_KICK * step_size)\n    #", "0.5 * OUTER_KICK * step_size)\n    #")
@parametrize("scale", [UNIT, SCALE], ids=["unit mass", "mass"], rest="slow")
def test_a_step_retraces_its_way_when_the_direction_is_turned_round(scale):
    position, direction = start()
    end, turned, energy_error = step(position, direction, scale)
    back, back_direction, back_error = step(end.z, -turned, scale)
    assert jnp.all(jnp.abs(end.z - position) > 1e-3)
    assert abs(energy_error) > 1e-4
    np.testing.assert_allclose(back.z, position, rtol=1e-11)
    np.testing.assert_allclose(back_direction, -direction, rtol=1e-10)
    np.testing.assert_allclose(back_error, -energy_error, rtol=1e-9)


def test_energy_error_of_a_trajectory_falls_as_the_square_of_the_step():
    def error_after(count):
        evaluate, (position, direction) = evaluator(skewed), start()

        def body(_, carry):
            point, u, error = carry
            point, u, change = isokinetic.isokinetic_step(evaluate, point, u, jnp.array(1.0 / count), UNIT)
            return point, u, error + change

        return jax.lax.fori_loop(0, count, body, (evaluate(position), direction, jnp.array(0.0)))[2]

    errors = [error_after(count) for count in (40, 80, 160)]
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], 4.0, rtol=0.1)


@pytest.mark.fault("mcmc/_integrators.py", "half * (scale * direction)", "half * direction")
def test_a_mass_is_a_change_of_units():
    position, direction = start()
    found, *others = step(SCALE * position, direction, SCALE)
    expected, *expected_others = step(position, direction, UNIT, lambda x: skewed(SCALE * x))
    for one, other in zip([found.z / SCALE, *others], [expected.z, *expected_others], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11)


def test_without_a_force_it_flies_straight_on():
    evaluate = evaluator(lambda z: 0.0 * jnp.sum(z))
    x, u = jnp.array([0.3, -1.2, 2.0]), jnp.array([0.6, 0.0, -0.8])
    end, turned, energy_error = isokinetic.isokinetic_step(evaluate, evaluate(x), u, jnp.array(0.31), np.ones(3))
    np.testing.assert_allclose(end.z, x + np.sqrt(3) * 0.31 * u, rtol=1e-14)
    np.testing.assert_allclose(turned, u, rtol=1e-14)
    assert energy_error == 0


@parametrize("x64", [False, True], rest="slow")
def test_a_force_of_any_size_turns_it_downhill_and_no_further(x64):
    for factor in (1e-12, 1e-6, 1e3, 1e12):
        with enable_x64(x64):
            direction, gradient = jnp.array([0.6, 0.0, -0.8]), factor * jnp.array([3.0, 4.0, 0.0])
            turned, change = isokinetic.isokinetic_kick(direction, gradient, jnp.array(1.0))
        angle = 5 * factor * np.sqrt(3) / 2
        expected = 2 * (angle + np.log((1 - 0.36) / 2)) if angle > 50 else 2 * np.log1p(-0.36 * angle)
        np.testing.assert_allclose(change, expected, rtol=1e-4)
        if factor >= 1e3:
            np.testing.assert_allclose(turned, [-0.6, -0.8, 0.0], atol=1e-6)


def test_a_step_is_that_of_blackjax():
    blackjax = pytest.importorskip("blackjax")
    integrators = blackjax.mcmc.integrators
    (position, direction), variances = start(), np.array([0.5, 1.5, 0.7, 1.0, 2.0]) ** 2

    def log_density(z):
        return -skewed(z)

    state = integrators.IntegratorState(position, direction, *jax.value_and_grad(log_density)(position))
    theirs = integrators.isokinetic_mclachlan(log_density, jnp.array(variances))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        state, change = theirs(state, np.sqrt(SIZE) * 0.3)
    end, turned, energy_error = step(position, direction, scale=SCALE)
    expected = change - state.logdensity + log_density(position)
    for found, wanted in ((end.z, state.position), (turned, state.momentum), (energy_error, expected)):
        np.testing.assert_allclose(ravel_pytree(found)[0], ravel_pytree(wanted)[0], rtol=1e-9)
