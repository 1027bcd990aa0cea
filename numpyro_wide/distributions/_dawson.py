r"""Dawson's integral in the form that the log-uniform penalty needs (Mathematics, :eq:`dawson`).

With $D_+(x) = e^{-x^2}\int_0^x e^{t^2}dt$ and $x = \sqrt u$, the two functions here are

.. math:: g(u) = D_+(\sqrt u)/\sqrt u, \qquad
          F(u) = \tfrac12\Big(\log 2 + e^{-u}\sum_k \tfrac{u^k}{k!}\psi(\tfrac12 + k)\Big), \qquad F' = g.

Three regions, each smooth and free of cancellation: a Taylor series for $u \le 1$, Rybicki's sampled
Gaussian for $1 < u \le 30$, and the asymptotic series beyond. Every branch sees an argument clipped
to its own region, so the branch that is not taken cannot send a NaN through the gradient.
"""

import math

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erf

_SMALL, _LARGE = 1.0, 30.0
# The sampling error is exp(-(π/2h)²): 1e-12 for this step.
_STEP = 0.3
_NUM_SAMPLES = 19  # odd multiples of the step, up to √30 + 5.6
_NUM_TAYLOR = 20
_NUM_ASYMPTOTIC = 12


def _horner(coefficients: list[float], x: Array) -> Array:
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _taylor_coefficients() -> list[float]:
    # g(u) = Σ (−2u)^k / (2k+1)!!
    coefficients = [1.0]
    for k in range(1, _NUM_TAYLOR):
        coefficients.append(coefficients[-1] * -2.0 / (2 * k + 1))
    return coefficients


def _double_factorials() -> list[float]:
    # (2j−1)!! for j = 0, 1, ...
    values = [1.0]
    for j in range(1, _NUM_ASYMPTOTIC):
        values.append(values[-1] * (2 * j - 1))
    return values


def _regions(u: Array) -> tuple[Array, Array, Array]:
    return jnp.minimum(u, _SMALL), jnp.clip(u, _SMALL, _LARGE), jnp.maximum(u, _LARGE)


def _select(u: Array, small: Array, middle: Array, large: Array) -> Array:
    return jnp.where(u <= _SMALL, small, jnp.where(u <= _LARGE, middle, large))


def dawson_ratio(u: Array) -> Array:
    r"""Evaluate $D_+(\sqrt u)/\sqrt u$ for $u \ge 0$; it is 1 at 0, like $1/2u$ far out."""
    low, middle, high = _regions(u)
    x = jnp.sqrt(middle)
    sampled = jnp.zeros_like(x)
    for i in range(_NUM_SAMPLES):
        n = 2 * i + 1
        sampled = sampled + (jnp.exp(-jnp.square(x - n * _STEP)) - jnp.exp(-jnp.square(x + n * _STEP))) / n
    rybicki = sampled / (math.sqrt(math.pi) * x)
    inverse = 0.5 / high
    return _select(u, _horner(_taylor_coefficients(), low), rybicki, inverse * _horner(_double_factorials(), inverse))


def dawson_potential(u: Array) -> Array:
    """Evaluate F(u), whose derivative is ``dawson_ratio``; it is -(γ + log 2)/2 at 0."""
    low, middle, high = _regions(u)
    at_zero = -0.5 * (float(jnp.euler_gamma) + math.log(2.0))
    taylor = at_zero + low * _horner([c / (k + 1) for k, c in enumerate(_taylor_coefficients())], low)
    # ∫₀^√u 2 D₊(t) dt, term by term in Rybicki's sum.
    x = jnp.sqrt(middle)
    sampled = jnp.zeros_like(x)
    for i in range(_NUM_SAMPLES):
        n = 2 * i + 1
        sampled = sampled + (2.0 * math.erf(n * _STEP) + erf(x - n * _STEP) - erf(x + n * _STEP)) / n
    # F(u) = ½ log 2u − Σ_j (2j−1)!! / (2j (2u)^j)
    inverse = 0.5 / high
    tail = [0.0] + [value / (2 * j) for j, value in enumerate(_double_factorials()) if j]
    asymptotic = 0.5 * jnp.log(2.0 * high) - _horner(tail, inverse)
    return _select(u, taylor, at_zero + sampled, asymptotic)
