"""Dual activations in closed form: Gaussian expectations of products of an activation and of its derivative.

For (u, v) ~ N(0, [[a, c], [c, b]]) each function maps (a, b, c, e) to E[φ(u) φ(v)] and E[φ'(u) φ'(v)], where e is
:func:`reduced_determinant`, 0 for u = v. All work elementwise on arrays that broadcast, and none has a NaN in its
derivatives, at a = b = c or at zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.wide_limit._arctangent import angle_of

Dual = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


class Moments(NamedTuple):
    """Moments of a layer's units at single inputs.

    Attributes:
        variance: variance of the preactivations u, (n, ...).
        product: E[φ(u)²], (n, ...).
        slope: E[φ'(u)²], (n, ...).
        error: largest share of a moment that a series leaves out, a number.
    """

    variance: Array
    product: Array
    slope: Array
    error: Array


class ClosedForm(NamedTuple):
    """Activation whose expectations are known.

    Attributes:
        dual: one of the functions below.
    """

    dual: Dual

    def moments(self, variance: Array) -> Moments:
        """Return the moments at single inputs, of variances (n, ...)."""
        product, slope = self.dual(variance, variance, variance, jnp.zeros_like(variance))
        return Moments(variance, product, slope, jnp.zeros((), variance.dtype))

    def pairs(self, one: Moments, other: Moments, covariance: Array, determinant: Array) -> tuple[Array, Array]:
        """Return E[φ(u) φ(v)] and E[φ'(u) φ'(v)], for moments that broadcast against the covariance."""
        return self.dual(one.variance, other.variance, covariance, determinant)


def reduced_determinant(p: Array, q: Array, r: Array, w_var: Array, b_var: Array) -> Array:
    """Return (ab − c²) / max(a, b, 1) of a layer, with a = w p + β, b = w q + β and c = w r + β.

    It equals w² (pq − r²) + w β (p + q − 2r) over the same: of a, b and c themselves, float32 has lost the bias where
    the inputs are large, and with it what tells opposite inputs from dependent ones.
    """
    # In terms of differences pq − r² is exactly 0 at p = q = |r|, where it may leave rounding of order p²: a compiler
    # fuses multiplication and addition. With the smaller factor over the unit no term exceeds the larger variance.
    low, high = jnp.where(p < q, p, q), jnp.where(p < q, q, p)
    size = jnp.where(r < 0, -r, r)  # not abs, whose slope of 0 at 0 would lose the second derivative there
    unit = _unit(w_var * p + b_var, w_var * q + b_var)
    gram = (w_var * (high - size)) * (w_var * low / unit) + (w_var * size / unit) * (w_var * (low - size))
    return gram + (w_var * b_var / unit) * ((p - r) + (q - r))


def erf(a: Array, b: Array, c: Array, e: Array) -> tuple[Array, Array]:
    """Return the dual of the error function (Williams 1996).

    E[φφ] = (2/π) arcsin(2c / √((1 + 2a)(1 + 2b))) and E[φ'φ'] = (4/π) / √((1 + 2a)(1 + 2b) − 4c²).
    """
    root = _root_and_ratio(1 + 2 * a + 2 * b, 4 * e, _unit(a, b))[0]
    # arcsin(s/h) as an angle between the legs s and √(h² − s²): its derivative is finite up to s = h.
    return (2 / jnp.pi) * angle_of(2 * c / root, jnp.ones_like(root)), (4 / jnp.pi) / root


def relu(a: Array, b: Array, c: Array, _: Array) -> tuple[Array, Array]:
    """Return the dual of the rectifier, with θ = arccos(c / √(ab)) (Cho and Saul 2009, equations 6 and 7, halved).

    E[φφ] = (√(ab) sin θ + (π − θ) c) / 2π and E[φ'φ'] = (π − θ) / 2π. The second has a cusp at θ = 0, so
    its derivative there is set to the mean of the two sides, 0.
    """
    scale = jnp.sqrt(jnp.where(a > 0, a, 1)) * jnp.sqrt(jnp.where(b > 0, b, 1))
    cosine = c / scale  # c = 0 wherever a variance is 0
    sine_squared = (1 - cosine) * (1 + cosine)
    # A sine at the level of rounding is taken as 0. Square root and angle never see the excluded entries,
    # else the infinite derivative at 0, times the 0 of the other branch, would be NaN.
    apart = (a > 0) & (b > 0) & (sine_squared > 8 * jnp.finfo(cosine.dtype).eps)
    sine = jnp.sqrt(jnp.where(apart, sine_squared, 1))
    angle = jnp.where(apart, angle_of(sine, cosine), (1 - jnp.sign(cosine)) * (jnp.pi / 2))
    slope = (jnp.pi - angle) / (2 * jnp.pi)
    return jnp.where(apart, scale * sine, 0) / (2 * jnp.pi) + slope * c, slope


def gelu(a: Array, b: Array, c: Array, e: Array) -> tuple[Array, Array]:
    """Return the dual of the exact GELU, φ(u) = u Φ(u) with Φ the normal distribution function (Tsuchida 2021).

    By Stein's lemma, with D = (1 + a)(1 + b) − c², G = 1 / (2π√D), S = 1/(1 + a) + 1/(1 + b), and
    P = E[Φ(u) Φ(v)] = 1/4 + arcsin(c / √((1 + a)(1 + b))) / 2π:
    E[φφ] = cP + G (ab − c² + c²S) and E[φ'φ'] = P + Gc (S + 1/D).
    """
    root, ratio = _root_and_ratio(1 + a + b, e, _unit(a, b))
    cotangent = c / root
    S = 1 / (1 + a) + 1 / (1 + b)
    # 1/4 + arctan(c / √D) / 2π, whose two terms cancel for c near −√(ab).
    P = angle_of(jnp.ones_like(cotangent), -cotangent) / (2 * jnp.pi)
    return c * P + (ratio + cotangent * (c * S)) / (2 * jnp.pi), P + cotangent * (S + 1 / root**2) / (2 * jnp.pi)


def identity(a: Array, b: Array, c: Array, _: Array) -> tuple[Array, Array]:
    """Return the dual of φ(u) = u: c and 1."""
    return c, jnp.ones_like(c)


def _unit(a: Array, b: Array) -> Array:
    """Return what determinants are divided by, for products of two variances overflow in float32 from 1.8e19 on.

    No result depends on it.
    """
    return jax.lax.stop_gradient(jnp.maximum(jnp.maximum(a, b), 1))


def _root_and_ratio(least: Array, e: Array, unit: Array) -> tuple[Array, Array]:
    """Return √D and eu / √D with D = least + eu, u the unit: positive in float32 too, as ``least`` is."""
    least = least / unit
    # Off the diagonal, rounding below 0 could outweigh `least` for huge variances. The floor lies well below 0,
    # for at a tie `maximum` would halve the derivative, and e = 0 is the diagonal of every kernel.
    e = jnp.maximum(e, -0.5 * least)
    root, scale = jnp.sqrt(least + e), jnp.sqrt(unit)
    return scale * root, scale * (e / root)


DUALS: dict[str, Dual] = {"erf": erf, "gelu": gelu, "identity": identity, "relu": relu}
