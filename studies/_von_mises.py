"""Von Mises distribution in natural parameters η = κ (cos μ, sin μ), T(θ) = (cos θ, sin θ): uniform at zero."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import i0e
from jax.typing import ArrayLike
from numpyro.distributions.util import promote_shapes

_SMALL, _LARGE = 0.5, 30.0  # limits of the two series


class VonMises(dist.VonMises):
    """Von Mises distributions by their natural parameters (..., 2)."""

    reparametrized_params: ClassVar[list[str]] = []  # draws are by rejection
    pytree_data_fields = ("natural",)

    def __init__(self, natural: Array, *, validate_args: bool | None = None):
        self.natural = natural
        is_zero = jnp.all(natural == 0, axis=-1)
        # At zero any direction will do; NumPyro's sampler divides by the concentration.
        east = jnp.where(is_zero, 1, natural[..., 0])
        concentration = jnp.sqrt(jnp.maximum(jnp.sum(natural**2, axis=-1), 1e-12))
        super().__init__(jnp.arctan2(natural[..., 1], east), concentration, validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Evaluate the log density at any real angles."""
        point = jnp.stack([jnp.cos(value), jnp.sin(value)], axis=-1)
        natural, point = promote_shapes(self.natural, point)
        squared_norm = jnp.sum(natural**2, axis=-1)
        is_small = squared_norm < _SMALL**2
        near_zero = jnp.sum(natural * point, axis=-1) - _log_bessel_series(squared_norm)
        eta = jnp.where(is_small[..., None], jnp.array([1, 0], natural.dtype), natural)
        beyond = _alignment(eta, point) - _log_scaled_bessel(jnp.sqrt(jnp.sum(eta**2, axis=-1)))
        return jnp.where(is_small, near_zero, beyond) - math.log(2 * math.pi)


@jax.custom_jvp
def _alignment(eta: Array, point: Array) -> Array:
    """Compute η·T − κ for a unit vector T, as −½ κ |T − η/κ|²: the two terms cancel."""
    concentration = jnp.sqrt(jnp.sum(eta**2, axis=-1))
    return -0.5 * concentration * jnp.sum((point - eta / concentration[..., None]) ** 2, axis=-1)


@_alignment.defjvp
def _alignment_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Write T − η/κ along η as −½ |T − η/κ|², against cancellation."""
    (eta, point), (d_eta, d_point) = primals, tangents
    mode = eta / jnp.sqrt(jnp.sum(eta**2, axis=-1, keepdims=True))
    across = jnp.stack([-mode[..., 1], mode[..., 0]], axis=-1)
    sine = jnp.sum(across * point, axis=-1, keepdims=True)
    gap = jnp.sum((point - mode) ** 2, axis=-1, keepdims=True)
    tangent = jnp.sum((sine * across - 0.5 * gap * mode) * d_eta + eta * d_point, axis=-1)
    return _alignment(eta, point), tangent


def _log_bessel_series(squared: Array) -> Array:
    """Compute log I₀(κ) from κ² < ¼, by I₀ = Σ (κ²/4)^k / k!²."""
    quarter = jnp.where(squared < _SMALL**2, squared, 0) / 4
    series = [math.factorial(k) ** -2.0 for k in range(9, 0, -1)]
    return jnp.log1p(jnp.polyval(jnp.array([*series, 0.0], quarter.dtype), quarter))


def _log_scaled_bessel(concentration: Array) -> Array:
    """Compute log (e^−κ I₀(κ)) for κ ≥ ½, with accurate derivatives."""
    is_large = concentration > _LARGE
    middle = jnp.log(i0e(jnp.where(is_large, 1, concentration)))
    # Asymptotic series: √(2πκ) e^−κ I₀ = Σ ((2k − 1)!!)² / (k! (8κ)^k) (Abramowitz and Stegun, 9.7.1).
    high = jnp.where(is_large, concentration, _LARGE)
    series = [math.prod(range(1, 2 * k, 2)) ** 2 / math.factorial(k) for k in range(16, 0, -1)]
    total = jnp.polyval(jnp.array([*series, 0.0], high.dtype), 1 / (8 * high))
    return jnp.where(is_large, jnp.log1p(total) - 0.5 * jnp.log(2 * math.pi * high), middle)
