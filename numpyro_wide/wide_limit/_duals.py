"""Dual activations: closed forms and Hermite series."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import roots_hermitenorm

from numpyro_wide._activations import Activation, activation_function
from numpyro_wide._checks import is_known

_EIGHTH = float(np.tan(np.pi / 8))
_ARCTANGENT_DEGREES = {4: 6, 8: 12}  # of the polynomial, by the bytes of a number


@jax.custom_jvp
def angle_of(y: Array, x: Array) -> Array:
    """Return ``jnp.arctan2(y, x)``; 0 at the origin."""
    along, across = jnp.abs(x), jnp.abs(y)
    low, high = jnp.minimum(along, across), jnp.maximum(along, across)
    # Angles up to π/8 need few terms.
    is_steep = low > _EIGHTH * high
    below = jnp.where(is_steep, low + high, high)
    ratio = jnp.where(is_steep, low - high, low) / jnp.where(below > 0, below, 1)
    square, total = ratio**2, jnp.zeros_like(ratio)
    for coefficient in _coefficients(ratio.dtype.itemsize):
        total = total * square + coefficient
    angle = ratio * total + jnp.where(is_steep, np.pi / 4, 0.0)
    angle = jnp.where(across > along, np.pi / 2 - angle, angle)
    angle = jnp.where(x < 0, np.pi - angle, angle)
    return jnp.where(y < 0, -angle, angle)


@angle_of.defjvp
def _angle_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    y, x = primals
    y_dot, x_dot = tangents
    square = x**2 + y**2
    return angle_of(y, x), (x * y_dot - y * x_dot) / jnp.where(square > 0, square, 1)


@lru_cache
def _coefficients(num_bytes: int) -> tuple[float, ...]:
    """Return arctan(r) / r as a polynomial of r² up to r = tan(π/8), highest degree first."""
    degrees = np.arange(40)
    series = np.polynomial.Polynomial((-1.0) ** degrees / (2 * degrees + 1))
    chebyshev = series.convert(kind=np.polynomial.Chebyshev, domain=[0, _EIGHTH**2]).truncate(
        _ARCTANGENT_DEGREES[num_bytes] + 1
    )
    return tuple(chebyshev.convert(kind=np.polynomial.Polynomial).coef[::-1].tolist())


Dual = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


class Moments(NamedTuple):
    """Moments of a layer's units at single inputs, (n, ...)."""

    variance: Array  # of the preactivations u
    product: Array  # E[φ(u)²]
    slope: Array  # E[φ'(u)²]
    error: Array  # largest share that a series leaves out
    coefficients: Any = None  # of a series, α_k by degree, (terms, n, ...)
    slope_at_zero: Any = None  # of a series, φ'(0)


class ClosedForm(NamedTuple):
    """Activation with closed-form expectations."""

    dual: Dual  # one of the functions below

    def moments(self, variance: Array) -> Moments:
        """Return the moments at single inputs, of variances (n, ...)."""
        product, slope = self.dual(variance, variance, variance, jnp.zeros_like(variance))
        return Moments(variance, product, slope, jnp.zeros((), variance.dtype))

    def pairs(self, left: Moments, right: Moments, covariance: Array, determinant: Array) -> tuple[Array, Array]:
        """Return E[φ(u) φ(v)] and E[φ'(u) φ'(v)]."""
        return self.dual(left.variance, right.variance, covariance, determinant)


def reduced_determinant(p: Array, q: Array, r: Array, w_var: Array, b_var: Array) -> Array:
    """Return (ab − c²) / max(a, b, 1) of a layer, with a = w p + β, b = w q + β and c = w r + β."""
    # In terms of differences pq − r² is exactly 0 at p = q = |r|, and no term exceeds the larger variance.
    low, high = jnp.where(p < q, p, q), jnp.where(p < q, q, p)
    size = jnp.where(r < 0, -r, r)  # abs has no second derivative at 0
    unit = _unit(w_var * p + b_var, w_var * q + b_var)
    gram = (w_var * (high - size)) * (w_var * low / unit) + (w_var * size / unit) * (w_var * (low - size))
    return gram + (w_var * b_var / unit) * ((p - r) + (q - r))


def determinant_of_numbers(x1: Array, x2: Array, w_var: Array, b_var: Array) -> Array:
    """Return :func:`reduced_determinant` of units that see one number: p = x₁², q = x₂² and r = x₁ x₂."""
    return w_var * (x1 - x2) ** 2 * (b_var / _unit(w_var * x1**2 + b_var, w_var * x2**2 + b_var))


def erf(a: Array, b: Array, c: Array, e: Array) -> tuple[Array, Array]:
    """Return the dual of the error function (Williams 1996)."""
    root = _root_and_ratio(1 + 2 * a + 2 * b, 4 * e, _unit(a, b))[0]
    # arcsin(s/h) as an angle, of finite derivative up to s = h.
    return (2 / jnp.pi) * angle_of(2 * c / root, jnp.ones_like(root)), (4 / jnp.pi) / root


def relu(a: Array, b: Array, c: Array, _: Array) -> tuple[Array, Array]:
    """Return the dual of the rectifier (Cho and Saul 2009, equations 6 and 7, halved)."""
    scale = _root(a) * _root(b)
    cosine = c / scale  # c = 0 wherever a variance is 0
    sine_squared = (1 - cosine) * (1 + cosine)
    # A sine of rounding is 0; root and angle never see it, else their derivatives would be NaN.
    apart = (a > 0) & (b > 0) & (sine_squared > 8 * jnp.finfo(cosine.dtype).eps)
    sine = jnp.sqrt(jnp.where(apart, sine_squared, 1))
    angle = jnp.where(apart, angle_of(sine, cosine), (1 - jnp.sign(cosine)) * (jnp.pi / 2))
    slope = (jnp.pi - angle) / (2 * jnp.pi)
    return jnp.where(apart, scale * sine, 0) / (2 * jnp.pi) + slope * c, slope


def gelu(a: Array, b: Array, c: Array, e: Array) -> tuple[Array, Array]:
    """Return the dual of the exact GELU (Tsuchida 2021)."""
    root, ratio = _root_and_ratio(1 + a + b, e, _unit(a, b))
    cotangent = c / root
    S = 1 / (1 + a) + 1 / (1 + b)
    # 1/4 + arctan(c / √D) / 2π without cancellation near −√(ab).
    P = angle_of(jnp.ones_like(cotangent), -cotangent) / (2 * jnp.pi)
    return c * P + (ratio + cotangent * (c * S)) / (2 * jnp.pi), P + cotangent * (S + 1 / root**2) / (2 * jnp.pi)


def identity(a: Array, b: Array, c: Array, _: Array) -> tuple[Array, Array]:
    """Return the dual of φ(u) = u: c and 1."""
    return c, jnp.ones_like(c)


def _unit(a: Array, b: Array) -> Array:
    """Return the divisor that keeps determinants from overflow in float32."""
    return jax.lax.stop_gradient(jnp.maximum(jnp.maximum(a, b), 1))


def _root_and_ratio(least: Array, e: Array, unit: Array) -> tuple[Array, Array]:
    """Return √D and eu / √D with D = least + eu, u the unit."""
    least = least / unit
    # Rounding below 0 must not outweigh `least`; at a tie `maximum` would halve the derivative.
    e = jnp.maximum(e, -0.5 * least)
    root, scale = jnp.sqrt(least + e), jnp.sqrt(unit)
    return scale * root, scale * (e / root)


# By name, and JAX's functions: a kink's series converges slowly.
DUALS: dict[str | Callable, Dual] = {"erf": erf, "gelu": gelu, "identity": identity, "relu": relu}
DUALS |= {jax.lax.erf: erf, jax.scipy.special.erf: erf, jax.nn.relu: relu}


_DEGREES, _NODES = 128, 256
_CHUNK = 16  # terms that one step of the loop adds


class HermiteSeries:
    """Dual of an activation by a Hermite series (Mathematics, :eq:`mehler`)."""

    def __init__(self, function: Callable[[Array], Array]):
        self._function = function
        self._first, self._stride = _parity(function)

    def moments(self, variance: Array) -> Moments:
        """Return the moments at single inputs, of variances (n, ...)."""
        nodes, weights, basis = (jnp.asarray(array, variance.dtype) for array in _rule())
        basis = basis[self._first :: self._stride]
        root = jnp.where(variance > 0, _root(variance), 0)
        values, slopes = self._with_slope(root[..., None] * jnp.expand_dims(nodes, range(root.ndim)))
        at_zero, slope_at_zero = self._with_slope(jnp.zeros((), variance.dtype))
        average = lambda samples: jnp.matmul(samples, weights, precision="highest")  # noqa: E731
        product, slope = average(values**2), average(slopes**2)
        # Without φ(0), against rounding of small coefficients.
        coefficients = jnp.moveaxis(jnp.matmul(values - at_zero, basis.T, precision="highest"), -1, 0)
        if not self._first:
            coefficients = coefficients.at[0].add(at_zero)
        degrees = jnp.expand_dims(jnp.arange(self._first, _DEGREES, self._stride), range(1, coefficients.ndim))
        omitted = product - jnp.sum(coefficients**2, axis=0)
        slope_omitted = variance * slope - jnp.sum(degrees.astype(variance.dtype) * coefficients**2, axis=0)
        error = jnp.maximum(_share(omitted, product), _share(slope_omitted, variance * slope))
        return Moments(variance, product, slope, jnp.max(error), coefficients, slope_at_zero)

    def pairs(self, left: Moments, right: Moments, covariance: Array, _: Array) -> tuple[Array, Array]:
        """Return E[φ(u) φ(v)] and E[φ'(u) φ'(v)]."""
        alive = (left.variance > 0) & (right.variance > 0)
        root = jnp.where(alive, _root(left.variance) * _root(right.variance), 1)
        cosine = covariance / root
        argument = cosine if self._stride == 1 else cosine**2
        value, derivative = _horner(left.coefficients, right.coefficients, argument)
        if self._stride == 2:
            derivative = 2 * cosine * derivative
        if self._first:
            value, derivative = cosine * value, value + cosine * derivative
        at_zero = self._mean_slope(left) * self._mean_slope(right)
        return value, jnp.where(alive, derivative / root, at_zero)

    def _with_slope(self, u: Array) -> tuple[Array, Array]:
        """Return φ and φ' at u."""
        values, slopes = jax.jvp(self._function, (u,), (jnp.ones_like(u),))
        return values.astype(u.dtype), slopes.astype(u.dtype)

    def _mean_slope(self, moments: Moments) -> Array:
        """Return E[φ'(u)], the coefficient of degree 1 over √a."""
        alive = moments.variance > 0
        linear_coefficient = jnp.zeros_like(moments.variance)
        if self._stride == 1 or self._first:
            linear_coefficient = moments.coefficients[1 - self._first]
        return jnp.where(alive, linear_coefficient / _root(moments.variance), moments.slope_at_zero)


def _horner(first: Array, second: Array, argument: Array) -> tuple[Array, Array]:
    """Return Σ_k a_k b_k t^k and its derivative by t = ``argument``, for a = ``first`` and b = ``second``."""

    def add(carried: tuple[Array, Array], coefficients: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        value, derivative = carried
        for left, right in zip(coefficients[0][::-1], coefficients[1][::-1], strict=True):
            derivative = derivative * argument + value
            value = value * argument + left * right
        return (value, derivative), None

    chunks = [leaf.reshape(-1, _CHUNK, *leaf.shape[1:]) for leaf in (first, second)]
    zeros = jnp.zeros_like(argument)
    # A gradient keeps the values between chunks alone.
    return jax.lax.scan(jax.checkpoint(add, prevent_cse=False), (zeros, zeros), chunks, reverse=True)[0]


@lru_cache(maxsize=1)
def _rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nodes, weights of sum 1, and weighted normalised Hermite polynomials, (degrees, nodes)."""
    nodes, weights = roots_hermitenorm(_NODES)
    weights = weights / weights.sum()
    polynomials = [np.ones(_NODES), nodes]
    for k in range(1, _DEGREES - 1):
        polynomials.append((nodes * polynomials[k] - np.sqrt(k) * polynomials[k - 1]) / np.sqrt(k + 1))
    return nodes, weights, weights * np.stack(polynomials)


def _parity(function: Callable[[Array], Array]) -> tuple[int, int]:
    """Return the first degree with a coefficient, and the stride; (1, 2) of an odd function."""
    nodes = np.linspace(0.01, 7, 200)
    with jax.ensure_compile_time_eval():
        stacked = jax.jit(lambda u: jnp.stack([function(u), function(-u), function(0 * u)]))(jnp.asarray(nodes))
    positive, negative, zero = np.asarray(stacked)
    if np.array_equal(positive, -negative) and not zero.any():
        return 1, 2
    return (0, 2) if np.array_equal(positive, negative) else (0, 1)


def _root(variance: Array) -> Array:
    """Return the root, or 1 at 0, where its derivative would be NaN."""
    return jnp.sqrt(jnp.where(variance > 0, variance, 1))


def _share(remainder: Array, total: Array) -> Array:
    """Return the remainder's share of the total, without a derivative."""
    remainder, total = jax.lax.stop_gradient((remainder, total))
    return jnp.where(total > 0, jnp.abs(remainder) / jnp.where(total > 0, total, 1), 0)


_TOLERANCE = 1e-5


def activation_dual(activation: Activation) -> ClosedForm | HermiteSeries:
    """Return the expectations of an activation."""
    if activation in DUALS:
        return ClosedForm(DUALS[activation])
    return HermiteSeries(activation_function(activation))


def activation_name(activation: Activation) -> str:
    """Return the name of an activation."""
    return activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))


def warn_of_truncation(error: float | Array) -> None:
    """Warn of a series that leaves out too much."""
    if is_known(error) and np.max(error) > _TOLERANCE:
        warnings.warn(
            f"the activation's Hermite series leaves out up to {np.max(error):.1e} of the kernels, relatively; scale "
            "inputs and weights down, or take 'erf', 'gelu', 'identity' or 'relu', of closed forms.",
            UserWarning,
            stacklevel=3,  # the caller of a kernel
        )
