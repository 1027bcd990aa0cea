"""Integrators of Hamiltonian and isokinetic dynamics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.util import identity

PyTree = Any


class Point(NamedTuple):
    """A position with its potential energy U and the gradient of U, None for a kernel that needs none."""

    z: PyTree
    potential_energy: Array
    z_grad: PyTree


Evaluate = Callable[[PyTree], Point]


def flattened(point: Point, evaluate: Evaluate) -> tuple[Point, Evaluate, Callable[[Array], PyTree]]:
    """Return a point and the function to points as vectors, and the map of vectors back to trees."""
    _, unravel = ravel_pytree(point.z)

    def flat(point: Point) -> Point:
        return Point(ravel_pytree(point.z)[0], point.potential_energy, ravel_pytree(point.z_grad)[0])

    return flat(point), lambda x: flat(evaluate(unravel(x))), unravel


def normal_like(rng_key: Array, tree: PyTree) -> PyTree:
    """Draw a pytree of independent N(0, 1) numbers with the shapes and dtypes of ``tree``."""
    # One draw for all leaves compiles faster than one a leaf, and a network has many.
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.random.normal(rng_key, flat.shape, flat.dtype))


def total(tree: PyTree) -> Array:
    """Sum all entries of all leaves."""
    return sum((jnp.asarray(jnp.sum(leaf), float) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def size_of(tree: PyTree) -> int:
    """Count the entries of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def half_square_difference(a: PyTree, b: PyTree) -> Array:
    """Compute ½‖a‖² − ½‖b‖² as ½ Σ (a − b)(a + b).

    With many dimensions the two norms are large and close together, and their difference would lose its
    digits in float32; the elementwise form does not.
    """
    return 0.5 * total(jax.tree.map(lambda x, y: (x - y) * (x + y), a, b))


def select(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """Take ``a`` where the scalar ``condition`` holds and ``b`` elsewhere, untouched by NaNs in the other."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def refresh_momentum(momentum: PyTree, noise: PyTree, persistence: float | Array) -> PyTree:
    """Replace a part of a momentum by noise, leaving N(0, I) invariant: ρ m + √(1 − ρ²) ξ."""
    # Without the cancellation of 1 − ρ² near ρ = 1.
    fresh = jnp.sqrt((1 - persistence) * (1 + persistence))
    return jax.tree.map(lambda m, xi: persistence * m + fresh * xi, momentum, noise)


def leapfrog(evaluate: Evaluate, point: Point, momentum: PyTree, step_size: Array) -> tuple[Point, PyTree]:
    """Take one kick-drift-kick step of H(x, m) = U(x) + ½‖m‖²: the point and the momentum at its end."""
    momentum = _kick(momentum, point.z_grad, 0.5 * step_size)
    end = evaluate(jax.tree.map(lambda x, m: x + step_size * m, point.z, momentum))
    return end, _kick(momentum, end.z_grad, 0.5 * step_size)


def rotate(position: PyTree, velocity: PyTree, angle: Array) -> tuple[PyTree, PyTree]:
    """Follow the flow of ½‖x‖² + ½‖v‖² exactly: a rotation of every pair (x, v) by ``angle``."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jax.tree.map(lambda x, v: cos * x + sin * v, position, velocity)
    return turned, jax.tree.map(lambda x, v: cos * v - sin * x, position, velocity)


def split_trajectory(
    evaluate: Evaluate,
    point: Point,
    velocity: PyTree,
    angle: Array,
    num_steps: int | Array,
    reference: Any = None,  # N(m, C) with ``center(z)``, z − m, and ``covariance(gradient)``, C g
) -> tuple[Point, PyTree]:
    """Follow H = ½‖ψ‖² + Φ + ½‖v‖², x = m + S ψ, by kicks of Φ between exact rotations of (ψ, v) (:eq:`split`).

    ``velocity`` is S v, with the law N(0, C): in the coordinates (x − m, S v) rotations are the same, and a kick is by
    C ∇U − (x − m). One rotation, of the mean ``angle``, makes a leapfrog (Beskos et al. 2011; Shahbaba et al. 2014).
    Two have the kicks of a two-stage integrator (Blanes, Casas, Sanz-Serna 2014, eq. 6.6), three and more are leapfrogs
    whose first and last steps are shorter (:eq:`graded`). ``num_steps`` may be traced.
    """
    center, covariance = (identity, identity) if reference is None else (reference.center, reference.covariance)
    kicks, turns = (tuple(share * angle for share in shares) for shares in trajectory_shares(num_steps))

    def kick(velocity: PyTree, point: Point, index: int | Array) -> PyTree:
        from_end = jnp.minimum(index, num_steps - index)
        time = jnp.where(from_end == 0, kicks[0], jnp.where(from_end == 1, kicks[1], kicks[2]))
        return jax.tree.map(lambda v, g, x: v - time * (g - x), velocity, covariance(point.z_grad), center(point.z))

    def body(i: Array, carry: tuple[Point, PyTree]) -> tuple[Point, PyTree]:
        point, velocity = carry
        centered = center(point.z)
        turn = jnp.where(jnp.minimum(i, num_steps - 1 - i) == 0, turns[0], turns[1])
        turned, velocity = rotate(centered, kick(velocity, point, i), turn)
        # By what it moves, which is exact where m = 0.
        position = jax.tree.map(lambda x, old, new: x - old + new, point.z, centered, turned)
        return evaluate(position), velocity

    end, velocity = jax.lax.fori_loop(0, num_steps, body, (point, velocity))
    return end, kick(velocity, end, 0)


# The first two kicks and the first rotation of a graded trajectory, in units of those in its midst.
_FIRST_KICK, _SECOND_KICK, _FIRST_ROTATION = 0.2779464851257588, 0.9497268599869967, 0.7276733451127554
_OUTER_KICK_OF_TWO = 2 * 0.21178


def trajectory_shares(num_steps: int | Array) -> tuple[Array, Array]:
    """Return lengths of the first kick, the second, and those between; and of the first rotation and those between.

    A trajectory is the same backwards. Kicks add up to ``num_steps``, and rotations as well.
    """
    steps = jnp.asarray(num_steps, float)
    unit = steps / (steps - 2 + 2 * _FIRST_ROTATION)
    two_kicks = jnp.array([_OUTER_KICK_OF_TWO, 2 - 2 * _OUTER_KICK_OF_TWO, 1.0])
    kicks = jnp.where(num_steps == 2, two_kicks, jnp.array([_FIRST_KICK, _SECOND_KICK, 1.0]) * unit)
    turns = jnp.where(num_steps <= 2, 1.0, jnp.array([_FIRST_ROTATION, 1.0]) * unit)
    return jnp.where(num_steps == 1, 0.5, kicks), turns


def crank_nicolson_langevin(point: Point, noise: PyTree, step_size: Array) -> PyTree:
    """Propose x' with (2 + δ) x' = (2 − δ) x − 2δ ∇Φ(x) + √(8δ) ξ (Cotter et al. 2013; :eq:`pcnl`)."""
    denominator = 2 + step_size
    decay, drift = (2 - step_size) / denominator, 2 * step_size / denominator
    spread = jnp.sqrt(8 * step_size) / denominator
    gradient = _reference_gradient(point)
    return jax.tree.map(lambda x, g, xi: decay * x - drift * g + spread * xi, point.z, gradient, noise)


def crank_nicolson_langevin_energy_error(start: Point, end: Point, step_size: Array) -> Array:
    """Compute −log of the acceptance ratio of :func:`crank_nicolson_langevin`.

    The ratio is exp(ρ(x, x') − ρ(x', x)) with
    ρ(x, x') = Φ(x) + ½⟨x' − x, ∇Φ(x)⟩ + ¼δ⟨x + x', ∇Φ(x)⟩ + ¼δ‖∇Φ(x)‖² (Cotter et al. 2013, covariance I).
    Written with g = ∇Φ(x) and g' = ∇Φ(x'), the difference is summed elementwise.
    """
    gradients = _reference_gradient(start), _reference_gradient(end)
    along = jax.tree.map(lambda x, y, g, h: 0.5 * (y - x) * (g + h), start.z, end.z, *gradients)
    across = jax.tree.map(lambda x, y, g, h: (g - h) * (x + y + g + h), start.z, end.z, *gradients)
    return reference_energy_difference(start, end) - total(along) - 0.25 * step_size * total(across)


def reference_energy_difference(start: Point, end: Point) -> Array:
    """Compute Φ(x') − Φ(x) from the potentials at x and x'."""
    return end.potential_energy - start.potential_energy - half_square_difference(end.z, start.z)


def _kick(momentum: PyTree, gradient: PyTree, time: Array) -> PyTree:
    return jax.tree.map(lambda m, g: m - time * g, momentum, gradient)


def _reference_gradient(point: Point) -> PyTree:
    return jax.tree.map(lambda g, x: g - x, point.z_grad, point.z)


# McLachlan's two-stage integrator of minimal norm: kicks of λ, 1 − 2λ and λ around two drifts of one half (McLachlan
# 1995; Omelyan, Mryglod, Folk 2003), which is what the papers use.
OUTER_KICK = 0.1931833275037836
GRADIENTS_PER_STEP = 2


def unit(momentum: Array) -> Array:
    """Return the direction of a momentum of any length."""
    return momentum / jnp.linalg.norm(momentum)


def isokinetic_kick(direction: Array, gradient: Array, time: Array) -> tuple[Array, Array]:
    """Turn a direction (d,) towards −g for a time, exactly (:eq:`isokinetic-kick`).

    Also returns −log of the factor by which the map stretches volumes on the sphere; ``gradient`` is g = S ∇U.
    """
    size, length = gradient.size, jnp.linalg.norm(gradient)
    # Without a force there is no direction to turn to, and no turn.
    downhill = -gradient / jnp.where(length > 0, length, 1.0)
    cos = jnp.clip(jnp.sum(downhill * direction), -1.0, 1.0)
    angle = size**0.5 / (size - 1) * time * length
    # Hyperbolic functions of a large angle overflow; their ratios do not.
    decay, lost = jnp.exp(-angle), -jnp.expm1(-angle)
    along = lost * (1 + decay + cos * lost)
    turned = unit(2 * decay * direction + along * downhill)
    return turned, (size - 1) * _log_cosh_plus(angle, cos)


def isokinetic_step(
    evaluate: Evaluate, point: Point, direction: Array, step_size: Array, scale: Array
) -> tuple[Point, Array, Array]:
    """Take one step of minimal norm: kick, drift, kick, drift, kick.

    A position (d,) moves by about ``step_size`` in every coordinate; ``scale`` is the square root S of the inverse
    mass, (d,).
    Also returns the error in the energy: the change of U less the logarithm of the stretched volume, zero for the exact
    flow (:eq:`isokinetic-error`).
    """
    half = 0.5 * direction.size**0.5 * step_size
    start_energy = point.potential_energy

    def body(i: Array, carry: tuple[Point, Array, Array]) -> tuple[Point, Array, Array]:
        point, direction, stretched = carry
        time = jnp.where(i == 0, OUTER_KICK, 1 - 2 * OUTER_KICK) * step_size
        direction, change = isokinetic_kick(direction, scale * point.z_grad, time)
        return evaluate(point.z + half * (scale * direction)), direction, stretched + change

    # A loop, so that the gradient is compiled once.
    point, direction, stretched = jax.lax.fori_loop(0, 2, body, (point, direction, jnp.zeros_like(start_energy)))
    direction, change = isokinetic_kick(direction, scale * point.z_grad, OUTER_KICK * step_size)
    # The two energies are large, and what is left of them small: their difference first.
    return point, direction, (point.potential_energy - start_energy) + (stretched + change)


def _log_cosh_plus(angle: Array, cos: Array) -> Array:
    """Compute log(cosh δ + c sinh δ), with all its digits where δ is small and without overflow where it is large."""
    small = jnp.minimum(angle, 1.0)
    near = jnp.log1p(2 * jnp.square(jnp.sinh(0.5 * small)) + cos * jnp.sinh(small))
    far = angle + jnp.log(0.5 * (1 + cos) + 0.5 * (1 - cos) * jnp.exp(-2 * angle))
    return jnp.where(angle < 1, near, far)
