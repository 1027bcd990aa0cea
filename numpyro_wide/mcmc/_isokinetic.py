"""Isokinetic steps: pure functions of arrays, without randomness, state or acceptance.

A momentum of fixed length has only a direction u, a point of the unit sphere of all d coordinates together. Positions
move by √d u a unit of time, as a momentum drawn from N(0, I) would on average, so that steps compare with a leapfrog's.
With S the square root of the inverse of a diagonal mass and g = S ∇U(z),

    dz/dt = √d S u,    du/dt = −√d (I − u uᵀ) g / (d − 1)

keeps exp(−U(z)) times the uniform law of u (:eq:`isokinetic`).
"""

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._point import Evaluate, Point, PyTree, size_of, total

# McLachlan's two-stage integrator of minimal norm: kicks of λ, 1 − 2λ and λ around two drifts of one half (McLachlan
# 1995; Omelyan, Mryglod, Folk 2003), which is what the papers use.
OUTER_KICK = 0.1931833275037836
GRADIENTS_PER_STEP = 2


def unit(tree: PyTree) -> PyTree:
    """Return the direction of a momentum of any length."""
    length = _norm(tree)
    return jax.tree.map(lambda x: x / length, tree)


def isokinetic_kick(direction: PyTree, gradient: PyTree, time: Array) -> tuple[PyTree, Array]:
    """Turn a direction towards −g for a time, exactly (:eq:`isokinetic-kick`).

    Args:
        direction: direction u, a pytree of length 1.
        gradient: scaled gradient g = S ∇U, a pytree like the direction, of at least 2 numbers in all.
        time: duration of the turn, in units of the step size, not negative.

    Returns:
        The direction afterwards, and −log of the factor by which the map stretches volumes on the sphere.
    """
    size = size_of(gradient)
    length = _norm(gradient)
    # Without a force there is no direction to turn to, and no turn.
    divisor = jnp.where(length > 0, length, 1.0)
    downhill = jax.tree.map(lambda g: -g / divisor, gradient)
    cos = jnp.clip(total(jax.tree.map(jnp.multiply, downhill, direction)), -1.0, 1.0)
    angle = size**0.5 / (size - 1) * time * length
    # Hyperbolic functions of a large angle overflow; their ratios do not.
    decay, lost = jnp.exp(-angle), -jnp.expm1(-angle)
    along = lost * (1 + decay + cos * lost)
    turned = unit(jax.tree.map(lambda u, e: 2 * decay * u + along * e, direction, downhill))
    return turned, (size - 1) * _log_cosh_plus(angle, cos)


def isokinetic_step(
    evaluate: Evaluate, point: Point, direction: PyTree, step_size: Array, scale: PyTree = None
) -> tuple[Point, PyTree, Array]:
    """Take one step of minimal norm: kick, drift, kick, drift, kick.

    Args:
        evaluate: function from a position to its :class:`Point`; called twice.
        point: point at which the step starts.
        direction: direction u, a pytree of length 1.
        step_size: step ε, a scalar; a position moves by about ε in every coordinate.
        scale: square root S of the inverse mass, a pytree like the position, or None for 1.

    Returns:
        The :class:`Point` and the direction at the end, and the error in the energy: what U has changed by less the
        logarithm of the stretched volume, zero for the exact flow (:eq:`isokinetic-error`).
    """
    half = 0.5 * size_of(point.z) ** 0.5 * step_size
    before, stretched = point.potential_energy, jnp.zeros_like(point.potential_energy)
    for share in (OUTER_KICK, 1 - 2 * OUTER_KICK):
        direction, change = isokinetic_kick(direction, _scaled(point.z_grad, scale), share * step_size)
        stretched += change
        velocity = _scaled(direction, scale)
        point = evaluate(jax.tree.map(lambda z, v: z + half * v, point.z, velocity))
    direction, change = isokinetic_kick(direction, _scaled(point.z_grad, scale), OUTER_KICK * step_size)
    # The two energies are large, and what is left of them small: their difference first.
    return point, direction, (point.potential_energy - before) + (stretched + change)


def _scaled(tree: PyTree, scale: PyTree) -> PyTree:
    return tree if scale is None else jax.tree.map(jnp.multiply, tree, scale)


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(total(jax.tree.map(jnp.square, tree)))


def _log_cosh_plus(angle: Array, cos: Array) -> Array:
    """Compute log(cosh δ + c sinh δ), with all its digits where δ is small and without overflow where it is large."""
    small = jnp.minimum(angle, 1.0)
    near = jnp.log1p(2 * jnp.square(jnp.sinh(0.5 * small)) + cos * jnp.sinh(small))
    far = angle + jnp.log(0.5 * (1 + cos) + 0.5 * (1 - cos) * jnp.exp(-2 * angle))
    return jnp.where(angle < 1, near, far)
