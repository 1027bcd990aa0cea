"""Angle of a point of the plane, by arithmetic that a compiler vectorises: XLA calls a library for each on a CPU."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_EIGHTH = float(np.tan(np.pi / 8))
_DEGREES = {4: 6, 8: 12}  # of the polynomial, by the bytes of a number: its error lies below their rounding


@jax.custom_jvp
def angle_of(y: Array, x: Array) -> Array:
    """Return the angle of the points (x, y), as ``jnp.arctan2`` does; 0 at the origin."""
    along, across = jnp.abs(x), jnp.abs(y)
    low, high = jnp.minimum(along, across), jnp.maximum(along, across)
    # Angles up to π/4 become ones up to π/8, where few terms will do.
    is_steep = low > _EIGHTH * high
    below = jnp.where(is_steep, low + high, high)
    ratio = jnp.where(is_steep, low - high, low) / jnp.where(below > 0, below, 1)
    square, total = ratio**2, jnp.zeros_like(ratio)
    for coefficient in _coefficients(ratio.dtype.itemsize):
        total = total * square + coefficient
    found = ratio * total + jnp.where(is_steep, np.pi / 4, 0.0)
    found = jnp.where(across > along, np.pi / 2 - found, found)
    found = jnp.where(x < 0, np.pi - found, found)
    return jnp.where(y < 0, -found, found)


@angle_of.defjvp
def _angle_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    y, x = primals
    y_dot, x_dot = tangents
    square = x**2 + y**2
    return angle_of(y, x), (x * y_dot - y * x_dot) / jnp.where(square > 0, square, 1)


@lru_cache
def _coefficients(num_bytes: int) -> tuple[float, ...]:
    """Return the polynomial that arctan(r) / r is of r², up to r = tan(π/8), highest degree first."""
    degrees = np.arange(40)
    series = np.polynomial.Polynomial((-1.0) ** degrees / (2 * degrees + 1))
    found = series.convert(kind=np.polynomial.Chebyshev, domain=[0, _EIGHTH**2]).truncate(_DEGREES[num_bytes] + 1)
    return tuple(found.convert(kind=np.polynomial.Polynomial).coef[::-1].tolist())
