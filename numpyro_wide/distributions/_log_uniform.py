"""KL divergence of a normal from the log-uniform prior, by Dawson's integral."""

import math

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erf
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_positive

_SMALL, _LARGE = 1.0, 30.0
# The sampling error is exp(-(π/2h)²): 1e-12 for this step.
_STEP = 0.3
_NUM_SAMPLES = 19  # odd multiples of the step, up to √30 + 5.6
_NUM_TAYLOR = 20
_NUM_ASYMPTOTIC = 12
_DOUBLE_FACTORIALS = [float(math.prod(range(1, 2 * k, 2))) for k in range(_NUM_TAYLOR + 1)]  # (2k−1)!!


def _polynomial(coefficients: list[float], x: Array) -> Array:
    return jnp.polyval(jnp.asarray(coefficients[::-1], x.dtype), x)


def dawson_potential(u: Array) -> Array:
    r"""Evaluate F(u), the integral of $D_+(\sqrt u)/\sqrt u$, with $F(0) = -(γ + \log 2)/2$."""
    is_small, is_large = u <= _SMALL, u > _LARGE
    at_zero = -0.5 * (float(jnp.euler_gamma) + math.log(2.0))
    # F'(u) = Σ (−2u)^k / (2k+1)!!
    low = jnp.where(is_small, u, _SMALL)
    slopes = [(-2.0) ** k / _DOUBLE_FACTORIALS[k + 1] for k in range(_NUM_TAYLOR)]
    taylor = at_zero + low * _polynomial([slope / (k + 1) for k, slope in enumerate(slopes)], low)
    # ∫₀^√u 2 D₊(t) dt, term by term in Rybicki's sum.
    x = jnp.sqrt(jnp.where(is_small | is_large, _LARGE, u))
    sampled = jnp.zeros_like(x)
    for n in range(1, 2 * _NUM_SAMPLES, 2):
        sampled = sampled + (2.0 * math.erf(n * _STEP) + erf(x - n * _STEP) - erf(x + n * _STEP)) / n
    # F(u) = ½ log 2u − Σ_j (2j−1)!! / (2j (2u)^j)
    high = jnp.where(is_large, u, _LARGE)
    tail = [0.0, *(_DOUBLE_FACTORIALS[j] / (2 * j) for j in range(1, _NUM_ASYMPTOTIC))]
    asymptotic = 0.5 * jnp.log(2.0 * high) - _polynomial(tail, 0.5 / high)
    return jnp.where(is_small, taylor, jnp.where(is_large, asymptotic, at_zero + sampled))


def log_uniform_kl(loc: ArrayLike, scale: ArrayLike) -> Array:
    """Return the KL of N(loc, scale²) from $C/|w|$, but for a constant (Hron 2018, Prop. 2; :eq:`dawson`).

    Args:
        loc: mean of the guide, of any shape.
        scale: standard deviation of the guide, positive, broadcast against ``loc``.

    Example:
        >>> from numpyro_wide.distributions import log_uniform_kl
        >>> round(float(log_uniform_kl(0.0, 1.0)), 4)
        -0.6352
    """
    check_positive("scale", scale)
    loc, scale = as_floats(loc, scale, names=("loc", "scale"))
    return dawson_potential(0.5 * jnp.square(loc / scale))
