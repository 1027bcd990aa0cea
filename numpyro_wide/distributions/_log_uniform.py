"""Log-uniform prior, its KL divergence from a normal, and Dawson's integral."""

import math
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import erf
from numpyro.distributions import constraints

from numpyro_wide._checks import as_floats, check_positive

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
    r"""Evaluate $D_+(\sqrt u)/\sqrt u$ for $u \ge 0$."""
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
    """Evaluate F(u), the integral of ``dawson_ratio``; -(γ + log 2)/2 at 0."""
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


_REASON = (
    "ImproperLogUniform, p(w) = C/|w|, has infinite mass at 0, and so has its posterior (Hron 2018, Prop. 1): neither "
    "can be sampled. Fit a Normal guide of flat_prototype(model) with the loss PenalizedMaximumLikelihood."
)


class ImproperLogUniform(dist.Distribution):
    """Improper prior $p(w) = C/|w|$ of variational Gaussian dropout.

    It has no draws and no posterior (Hron 2018, Prop. 1). Use a Normal guide of
    :func:`~numpyro_wide.autoguide.flat_prototype`, and the loss :class:`~numpyro_wide.elbo.PenalizedMaximumLikelihood`.

    Args:
        batch_shape: shape of independent weights.
        validate_args: as in NumPyro.

    Example:
        >>> from numpyro_wide.distributions import ImproperLogUniform
        >>> ImproperLogUniform().expand([3]).to_event(1).event_shape
        (3,)
        >>> ImproperLogUniform().log_prob(1.0)
        Traceback (most recent call last):
            ...
        ValueError: ImproperLogUniform, p(w) = C/|w|, has infinite mass at 0, ...
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, batch_shape: tuple[int, ...] = (), *, validate_args: bool | None = None):
        super().__init__(tuple(batch_shape), (), validate_args=validate_args)

    def log_prob(self, value: Any, intermediates: Any = None) -> NoReturn:
        """Refuse."""
        raise ValueError(_REASON)

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> NoReturn:
        """Refuse."""
        raise ValueError(_REASON)


def log_uniform_kl(loc: Any, scale: Any) -> Array:
    """Return the KL of N(loc, scale²) from $C/|w|$, but for a constant (Hron 2018, Prop. 2; :eq:`dawson`).

    Args:
        loc: mean of the guide, of any shape.
        scale: standard deviation of the guide, positive, broadcast against ``loc``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.distributions import log_uniform_kl
        >>> round(float(log_uniform_kl(0.0, 1.0)), 4)
        -0.6352
        >>> slope = jax.grad(log_uniform_kl)(jnp.array(2.0), 1.0)  # D₊(√2) √2
        >>> round(float(slope), 4)
        0.64
    """
    check_positive("scale", scale)
    loc, scale = as_floats(loc, scale, names=("loc", "scale"))
    return _log_uniform_penalty(0.5 * jnp.square(loc / scale))


@jax.custom_jvp
def _log_uniform_penalty(u: Array) -> Array:
    return dawson_potential(u)


@_log_uniform_penalty.defjvp
def _log_uniform_penalty_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (u,), (du,) = primals, tangents
    return _log_uniform_penalty(u), dawson_ratio(u) * du
