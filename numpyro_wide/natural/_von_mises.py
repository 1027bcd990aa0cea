"""Von Mises distribution in natural parameters, smooth at zero and exact for huge concentrations."""

import math
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import i0e
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_wide._checks import as_floats
from numpyro_wide.natural._domain import family, shifted

_SMALL, _LARGE = 0.5, 30.0  # between them the library's scaled Bessel function is used


@family(constraints.real_vector)
def VonMises(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> "NaturalVonMises":
    r"""Von Mises distribution on the circle with $T(\theta) = (\cos\theta, \sin\theta)$, η = κ (cos μ, sin μ).

    $\log q = \eta^\top T(\theta) - \log I_0(\lVert\eta\rVert) - \log 2\pi$. Every vector of two numbers is
    allowed: at η = 0 the distribution is uniform, and its log density smooth, to all orders. The log density
    holds its digits in float32 up to concentrations of millions: nothing is computed on the scale of
    $I_0(\kappa) \approx e^\kappa$.

    Args:
        natural: natural parameters η, (..., 2).
        shift: number or array that is added to η. McNamara 2025, Appendix E, takes 1e-4, for a polar form of the
            parameters is singular at zero; this form does not need it.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A NumPyro distribution over angles with ``loc`` μ and ``concentration`` κ; batch shape (...).

    Raises:
        ValueError: unless the last axis has two entries.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> score = jax.jit(jax.grad(lambda eta: natural.VonMises(eta).log_prob(0.0)))
        >>> score(jnp.zeros(2)).tolist(), natural.VonMises(jnp.zeros(2), shift=1e-4).batch_shape
        ([1.0, 0.0], ())
    """
    return NaturalVonMises(shifted(natural, shift, VonMises, 2), validate_args=validate_args)


class NaturalVonMises(dist.VonMises):
    """NumPyro's von Mises distribution with a log density computed from η itself."""

    reparametrized_params: ClassVar[list[str]] = []  # draws are by rejection
    pytree_data_fields = ("natural",)

    def __init__(self, natural: Array, *, validate_args: bool | None = None):
        self.natural = natural
        is_zero = jnp.all(natural == 0, axis=-1)
        # At zero any direction will do, and a concentration that NumPyro's sampler does not divide by.
        east = jnp.where(is_zero, 1, natural[..., 0])
        concentration = jnp.maximum(_norm(natural), 1e-6)
        super().__init__(jnp.arctan2(natural[..., 1], east), concentration, validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Evaluate the log density at the angles ``value``, any real numbers: it is periodic."""
        natural, value = as_floats(self.natural, value)
        point = jnp.stack([jnp.cos(value), jnp.sin(value)], axis=-1)
        natural, point = _of_equal_rank(natural, point)
        squared_norm = jnp.sum(natural**2, axis=-1)
        is_small = squared_norm < _SMALL**2
        near_zero = jnp.sum(natural * point, axis=-1) - _log_bessel_series(squared_norm)
        eta = jnp.where(is_small[..., None], jnp.array([1, 0], natural.dtype), natural)
        beyond = _alignment(eta, point) - _log_scaled_bessel(jnp.sqrt(jnp.sum(eta**2, axis=-1)))
        return jnp.where(is_small, near_zero, beyond) - math.log(2 * math.pi)


def _of_equal_rank(*arrays: Array) -> list[Array]:
    """Give all arrays the same number of axes, by leading axes of length 1."""
    rank = max(array.ndim for array in arrays)
    return [array.reshape((1,) * (rank - array.ndim) + array.shape) for array in arrays]


@jax.custom_jvp
def _alignment(eta: Array, point: Array) -> Array:
    """Compute η·T − κ for a unit vector T, as −½ κ |T − η/κ|²: the two terms are of the size of κ, and cancel."""
    concentration = jnp.sqrt(jnp.sum(eta**2, axis=-1))
    return -0.5 * concentration * jnp.sum((point - eta / concentration[..., None]) ** 2, axis=-1)


@_alignment.defjvp
def _alignment_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Write T − η/κ along η as −½ |T − η/κ|², which the difference would lose in the rounding of two unit vectors."""
    (eta, point), (d_eta, d_point) = primals, tangents
    mode = eta / jnp.sqrt(jnp.sum(eta**2, axis=-1, keepdims=True))
    across = jnp.stack([-mode[..., 1], mode[..., 0]], axis=-1)
    sine = jnp.sum(across * point, axis=-1, keepdims=True)
    gap = jnp.sum((point - mode) ** 2, axis=-1, keepdims=True)
    tangent = jnp.sum((sine * across - 0.5 * gap * mode) * d_eta + eta * d_point, axis=-1)
    return _alignment(eta, point), tangent


def _norm(vector: Array) -> Array:
    """Compute the Euclidean norm along the last axis, with derivative 0 at 0."""
    squared = jnp.sum(vector**2, axis=-1)
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _log_bessel_series(squared: Array) -> Array:
    """Compute log I₀(κ) from κ² < ¼, by the power series I₀ = Σ (κ²/4)^k / k!²."""
    quarter = jnp.where(squared < _SMALL**2, squared, 0) / 4
    return jnp.log1p(_polynomial((0.0, *(math.factorial(k) ** -2.0 for k in range(1, 10))), quarter))


def _log_scaled_bessel(concentration: Array) -> Array:
    """Compute log (e^−κ I₀(κ)) for κ ≥ ½, with derivatives that keep their relative accuracy however large κ is."""
    is_large = concentration > _LARGE
    middle = jnp.log(i0e(jnp.where(is_large, 1, concentration)))
    # Asymptotic series: √(2πκ) e^−κ I₀ = Σ ((2k − 1)!!)² / (k! (8κ)^k) (Abramowitz and Stegun, 9.7.1).
    high = jnp.where(is_large, concentration, _LARGE)
    double_factorials = [math.prod(range(1, 2 * k, 2)) for k in range(17)]
    series = (0.0, *(double_factorials[k] ** 2 / math.factorial(k) for k in range(1, 17)))
    total = _polynomial(series, 1 / (8 * high))
    return jnp.where(is_large, jnp.log1p(total) - 0.5 * jnp.log(2 * math.pi * high), middle)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Sum cₖ xᵏ by Horner's rule; the derivative is another such sum, for reverse mode would keep every step of it."""
    total = jnp.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = coefficient + x * total
    return total


@_polynomial.defjvp
def _polynomial_jvp(coefficients: tuple[float, ...], primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    derivative = tuple(k * coefficient for k, coefficient in enumerate(coefficients))[1:]
    return _polynomial(coefficients, x), _polynomial(derivative or (0.0,), x) * dx
