"""The pure steps against closed forms, time reversal, volume and proposal densities, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import fsolve

from numpyro_wide.mcmc import _integrators as integrators
from numpyro_wide.mcmc._integrators import Point, half_square_difference
from tests.marks import parametrize

pytestmark = pytest.mark.usefixtures("x64", "strict_ranks")


@pytest.fixture
def strict_ranks():
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        yield


def evaluator(potential):
    def evaluate(z):
        return Point(z, *jax.value_and_grad(potential)(z))

    return evaluate


def skewed(z):
    """Neither symmetric nor separable, so that a lost sign or a swapped pair shows."""
    a, b = z["a"], z["b"]
    return jnp.sum(jnp.exp(0.5 * a) - 0.3 * a) + 0.5 * jnp.sum((b - a[0] ** 2) ** 2) + 0.1 * jnp.sum(b**4)


def pair(seed):
    key_a, key_b = jax.random.split(jax.random.key(seed))
    return {"a": jax.random.normal(key_a, (2,)), "b": jax.random.normal(key_b, (1, 3))}


def leap(z, m):
    return integrators.leapfrog(evaluator(skewed), evaluator(skewed)(z), m, jnp.array(0.3))


def split(num_steps):
    def trajectory(z, m):
        return integrators.split_trajectory(evaluator(skewed), evaluator(skewed)(z), m, jnp.array(0.2), num_steps)

    return trajectory


STEPS = parametrize("step", [leap, *map(split, (1, 2, 3, 6))], rest="slow")


def test_leapfrog_reaches_the_closed_form_end_point_of_an_oscillator():
    frequency, step_size, count = jnp.array([0.5, 2.0, 1.75]), 0.4, 7
    evaluate = evaluator(lambda x: 0.5 * jnp.sum((frequency * x) ** 2))
    start, momentum = jnp.array([1.0, -0.3, 0.8]), jnp.array([0.2, 1.1, -0.6])
    point, end_momentum = evaluate(start), momentum
    for _ in range(count):
        point, end_momentum = integrators.leapfrog(evaluate, point, end_momentum, jnp.array(step_size))
    # One step is a rotation of (x, m / stretch) by theta.
    theta = jnp.arccos(1 - (step_size * frequency) ** 2 / 2)
    stretch = frequency * jnp.sqrt(1 - (step_size * frequency) ** 2 / 4)
    u, m = start, momentum
    expected = u * jnp.cos(count * theta) + m / stretch * jnp.sin(count * theta)
    np.testing.assert_allclose(point.z, expected, rtol=1e-12)
    expected = m * jnp.cos(count * theta) - stretch * u * jnp.sin(count * theta)
    np.testing.assert_allclose(end_momentum, expected, rtol=1e-12)


@pytest.mark.fault("mcmc/_integrators.py", "cos * v - sin * x", "cos * v + sin * x")
@STEPS
def test_steps_retrace_their_way_when_the_momentum_is_turned_round(step):
    start, momentum = pair(0), pair(1)
    end, end_momentum = step(start, momentum)
    back, back_momentum = step(end.z, jax.tree.map(jnp.negative, end_momentum))
    moved = ravel_pytree(end.z)[0] - ravel_pytree(start)[0]
    assert jnp.all(jnp.abs(moved) > 1e-3)
    np.testing.assert_allclose(ravel_pytree(back.z)[0], ravel_pytree(start)[0], rtol=1e-12)
    np.testing.assert_allclose(ravel_pytree(back_momentum)[0], -ravel_pytree(momentum)[0], rtol=1e-12)


@pytest.mark.as_compiled
@STEPS
def test_steps_preserve_volume(step):
    flat, unravel = ravel_pytree((pair(0), pair(1)))

    def move(flat):
        end, momentum = step(*unravel(flat))
        return ravel_pytree((end.z, momentum))[0]

    jacobian = jax.jacfwd(move)(flat)
    assert jnp.max(jnp.abs(jacobian - jnp.eye(flat.size))) > 0.1
    np.testing.assert_allclose(jnp.linalg.det(jacobian), 1.0, rtol=1e-12)


def energy_error_of_trajectories(count, each):
    """Error after a turn by one radian in ``count`` rotations, ``each`` of them a trajectory."""
    evaluate, start, velocity = evaluator(skewed), evaluator(skewed)(pair(0)), pair(1)

    def trajectory(_, carry):
        return integrators.split_trajectory(evaluate, *carry, jnp.array(1.0 / count), each)

    end, end_velocity = jax.lax.fori_loop(0, count // each, trajectory, (start, velocity))
    return end.potential_energy - start.potential_energy + half_square_difference(end_velocity, velocity)


def test_energy_error_of_leapfrogs_falls_as_the_square_of_the_step():
    errors = [energy_error_of_trajectories(count, each=1) for count in (40, 80, 160)]
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], 4.0, rtol=0.06)


def test_graded_ends_take_the_energy_error_away_that_leapfrogs_have():
    for count in (20, 40, 80):
        leapfrogs, graded = (abs(energy_error_of_trajectories(count, each)) for each in (1, count))
        assert graded < 0.1 * leapfrogs


@pytest.mark.fault("mcmc/_integrators.py", "0.2779464851257588, 0.9497268599869967,", "0.25, 0.97767,")
@pytest.mark.parametrize("counts", [(20, 40), (35, 70)])
def test_mean_energy_error_in_a_stiff_direction_is_of_eighth_order(counts):
    frequency, phase = 1e4, 8.0

    def mean_energy_error(count):
        evaluate = evaluator(lambda x: 0.5 * (frequency * x) ** 2)

        def move(start):
            angle = jnp.array(phase / frequency / count)
            end, velocity = integrators.split_trajectory(
                evaluate, evaluate(start[0] / frequency), start[1], angle, count
            )
            return jnp.stack([end.z * frequency, velocity])

        matrix = np.asarray(jax.jacfwd(move)(jnp.zeros(2)))
        return 0.5 * np.sum(matrix**2) - 1  # E ΔH from draws of exp(−H), which are N(0, I) in these units

    np.testing.assert_allclose(mean_energy_error(counts[0]) / mean_energy_error(counts[1]), 2.0**8, rtol=0.2)


def test_rotation_is_sine_and_cosine_to_machine_precision():
    x, v, angle = np.array([0.3, -1.2, 2.0]), np.array([-0.7, 0.4, 1.5]), 0.83
    turned_x, turned_v = integrators.rotate({"x": jnp.array(x)}, {"x": jnp.array(v)}, jnp.array(angle))
    expected = (x + 1j * v) * np.exp(-1j * angle)
    np.testing.assert_allclose(turned_x["x"], expected.real, atol=1e-15)
    np.testing.assert_allclose(turned_v["x"], expected.imag, atol=1e-15)


def test_split_trajectory_on_the_reference_is_one_rotation():
    evaluate = evaluator(lambda x: 0.5 * jnp.sum(x**2))
    x, v = jnp.array([0.3, -1.2, 2.0]), jnp.array([-0.7, 0.4, 1.5])
    end, velocity = integrators.split_trajectory(evaluate, evaluate(x), v, jnp.array(0.31), 5)
    expected_x, expected_v = integrators.rotate(x, v, jnp.array(5 * 0.31))
    np.testing.assert_allclose(end.z, expected_x, atol=1e-14)
    np.testing.assert_allclose(velocity, expected_v, atol=1e-14)


def graded_ends():
    """First two kicks and first rotation, from the order conditions."""

    def conditions(values):
        first, second, turn = values
        both = first + second
        third = first * turn * (first + 2 * second) + both**2 / 2 - second * turn * (both + 0.5)
        return both - turn - 0.5, 2 * first * turn - turn**2 + 0.125, third

    return fsolve(conditions, (0.3, 0.9, 0.7), xtol=1e-13)


@parametrize("num_steps", [1, 2, 3, 4, 7], rest="slow")
@parametrize("traced", [False, True], rest="slow")
def test_split_trajectory_on_a_gaussian_is_a_product_of_kicks_and_turns(num_steps, traced):
    curvature, slope, angle = 3.0, 0.7, 0.2
    first, second, end_turn = graded_ends()
    unit = num_steps / (num_steps - 2 + 2 * end_turn)
    kicks = {1: [0.5, 0.5], 2: [2 * 0.21178, 2 - 4 * 0.21178, 2 * 0.21178]}.get(
        num_steps, unit * np.array([first, second, *[1.0] * (num_steps - 3), second, first])
    )
    turns = [1.0] * num_steps if num_steps < 3 else unit * np.array([end_turn, *[1.0] * (num_steps - 2), end_turn])
    np.testing.assert_allclose([np.sum(kicks), np.sum(turns)], num_steps)

    # In the homogeneous coordinates (x, v, 1), with grad Phi = (curvature - 1) x + slope.
    expected = np.array([0.9, -0.4, 1.0])
    for kick, turn in zip(kicks, [*turns, 0.0], strict=True):
        time, cos, sin = angle * kick, np.cos(angle * turn), np.sin(angle * turn)
        expected = np.array([[1, 0, 0], [-time * (curvature - 1), 1, -time * slope], [0, 0, 1]]) @ expected
        expected = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) @ expected
    evaluate = evaluator(lambda x: 0.5 * curvature * x**2 + slope * x)
    start, count = evaluate(jnp.array(0.9)), jnp.array(num_steps) if traced else num_steps
    end, velocity = integrators.split_trajectory(evaluate, start, jnp.array(-0.4), jnp.array(angle), count)
    np.testing.assert_allclose([end.z, velocity], expected[:2], rtol=1e-13)


def test_crank_nicolson_moves_as_defined_and_keeps_the_reference():
    x, noise, step_size = jnp.array([0.3, -1.2]), jnp.array([1.1, 0.5]), jnp.array(0.6)
    np.testing.assert_allclose(integrators.refresh_momentum(noise, x, step_size), 0.8 * x + 0.6 * noise, rtol=1e-14)
    np.testing.assert_array_equal(integrators.refresh_momentum(noise, x, jnp.array(1.0)), noise)


def test_crank_nicolson_langevin_solves_its_defining_equation():
    start, noise, delta = evaluator(skewed)(pair(0)), pair(1), 0.7
    end = integrators.crank_nicolson_langevin(start, noise, jnp.array(delta))
    x, y, g, xi = (ravel_pytree(tree)[0] for tree in (start.z, end, start.z_grad, noise))
    np.testing.assert_allclose(
        (2 + delta) * y, (2 - delta) * x - 2 * delta * (g - x) + np.sqrt(8 * delta) * xi, rtol=1e-13
    )


@pytest.mark.fault(
    "mcmc/_integrators.py",
    "end.potential_energy - start.potential_energy - half_square_difference(end.z, start.z)",
    "end.potential_energy - start.potential_energy",
)
@pytest.mark.fault("mcmc/_integrators.py", " - total(along) - 0.25 * step_size * total(across)", " - total(along)")
@pytest.mark.parametrize("step_size", [0.05, 0.7, 2.0])
def test_energy_errors_of_crank_nicolson_are_metropolis_hastings_ratios(step_size):
    start, end = (evaluator(skewed)(pair(seed)) for seed in (0, 1))
    x, y, g, h = (ravel_pytree(tree)[0] for tree in (start.z, end.z, start.z_grad, end.z_grad))

    def log_ratio(mean, variance):
        """log of p(y) q(y -> x) / (p(x) q(x -> y)) for Gaussian proposals with this mean and variance."""
        forward = -0.5 * jnp.sum((y - mean(x, g)) ** 2) / variance
        backward = -0.5 * jnp.sum((x - mean(y, h)) ** 2) / variance
        return start.potential_energy - end.potential_energy + backward - forward

    denominator = 2 + step_size

    def langevin_mean(x, g):
        return ((2 - step_size) * x - 2 * step_size * (g - x)) / denominator

    error = integrators.crank_nicolson_langevin_energy_error(start, end, jnp.array(step_size))
    np.testing.assert_allclose(error, -log_ratio(langevin_mean, 8 * step_size / denominator**2), rtol=1e-11)
    beta = step_size / 2.5
    error = integrators.reference_energy_difference(start, end)
    expected = -log_ratio(lambda x, _: np.sqrt(1 - beta**2) * x, beta**2)
    np.testing.assert_allclose(error, expected, rtol=1e-11)


@pytest.mark.as_compiled
def test_differences_of_squares_keep_their_digits_in_float32():
    rng = np.random.default_rng(0)
    a = rng.normal(size=200_000).astype(np.float32)
    b = (a + 1e-4 * rng.normal(size=a.size)).astype(np.float32)
    exact = 0.5 * np.sum(a.astype(float) ** 2 - b.astype(float) ** 2)
    np.testing.assert_allclose(half_square_difference({"x": jnp.array(a)}, {"x": jnp.array(b)}), exact, rtol=1e-4)
    of_sums = 0.5 * (np.sum(a**2, dtype=np.float32) - np.sum(b**2, dtype=np.float32))
    assert abs(of_sums - exact) > 1e-2 * abs(exact)
