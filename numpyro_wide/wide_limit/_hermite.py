"""Dual of any activation, by the Hermite series of its Gaussian expectations (Mehler's formula)."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_DEGREES, _NODES = 128, 256
_CHUNK = 16  # terms of the series that one step of the loop adds, and that a gradient computes once more


class SeriesMoments(NamedTuple):
    """Moments of a layer's units at single inputs, with the coefficients of the series.

    Attributes:
        variance: variance of the preactivations u, (n, ...).
        product: E[φ(u)²], (n, ...).
        slope: E[φ'(u)²], (n, ...).
        error: largest share of a moment that the series leaves out, a number.
        coefficients: α_k by degree, (terms, n, ...).
        slope_at_zero: φ'(0), (n, ...).
    """

    variance: Array
    product: Array
    slope: Array
    error: Array
    coefficients: Array
    slope_at_zero: Array


class HermiteSeries:
    r"""Dual of an activation φ, as ``ClosedForm`` is of one whose expectations are known.

    With $\alpha_k(a) = E[\varphi(\sqrt a z) he_k(z)] / \sqrt{k!}$, z ~ N(0, 1), by Gauss-Hermite quadrature, and
    $\rho = c / \sqrt{ab}$ (Mathematics, :eq:`mehler`), $E[\varphi(u) \varphi(v)] = \sum_k \alpha_k(a) \alpha_k(b)
    \rho^k$, and $E[\varphi'(u) \varphi'(v)]$ is its derivative with respect to c. What the first 128 degrees leave out
    is largest at ρ = 1, where Parseval's identity tells it; at u = v the quadrature alone gives both.

    Args:
        function: function of arrays, elementwise.
    """

    def __init__(self, function: Callable[[Array], Array]):
        self._function = function
        # Odd and even functions have every other term alone.
        self._first, self._stride = _parity(function)

    def moments(self, variance: Array) -> SeriesMoments:
        """Return the moments at single inputs, of variances (n, ...)."""
        nodes, weights, basis = (jnp.asarray(part, variance.dtype) for part in _rule())
        basis = basis[self._first :: self._stride]
        alive = variance > 0
        # The root never sees 0, whose infinite derivative times the 0 of the other branch would be NaN.
        root = jnp.where(alive, jnp.sqrt(jnp.where(alive, variance, 1)), 0)
        values, slopes = self._with_slope(root[..., None] * jnp.expand_dims(nodes, range(root.ndim)))
        at_zero, slope_at_zero = self._with_slope(jnp.zeros((), variance.dtype))
        average = lambda numbers: jnp.matmul(numbers, weights, precision="highest")  # noqa: E731
        product, slope = average(values**2), average(slopes**2)
        # Without φ(0), for the coefficients of small variances are small, and so should their rounding be.
        coefficients = jnp.moveaxis(jnp.matmul(values - at_zero, basis.T, precision="highest"), -1, 0)
        if not self._first:
            coefficients = coefficients.at[0].add(at_zero)
        degrees = jnp.expand_dims(jnp.arange(self._first, _DEGREES, self._stride), range(1, coefficients.ndim))
        left_out = product - jnp.sum(coefficients**2, axis=0)
        slope_left_out = variance * slope - jnp.sum(degrees.astype(variance.dtype) * coefficients**2, axis=0)
        error = jnp.maximum(_share(left_out, product), _share(slope_left_out, variance * slope))
        slopes_at_zero = jnp.broadcast_to(slope_at_zero, root.shape)
        return SeriesMoments(variance, product, slope, jnp.max(error), coefficients, slopes_at_zero)

    def pairs(self, one: SeriesMoments, other: SeriesMoments, covariance: Array, _: Array) -> tuple[Array, Array]:
        """Return E[φ(u) φ(v)] and E[φ'(u) φ'(v)], for moments that broadcast against the covariance."""
        alive = (one.variance > 0) & (other.variance > 0)
        root = jnp.where(alive, _root(one.variance) * _root(other.variance), 1)
        cosine = covariance / root
        argument = cosine if self._stride == 1 else cosine**2
        value, derivative = _horner(one.coefficients, other.coefficients, argument)
        if self._stride == 2:
            derivative = 2 * cosine * derivative
        if self._first:
            value, derivative = cosine * value, value + cosine * derivative
        at_zero = self._mean_slope(one) * self._mean_slope(other)
        return value, jnp.where(alive, derivative / root, at_zero)

    def _with_slope(self, u: Array) -> tuple[Array, Array]:
        """Return φ and φ' at u."""
        values, slopes = jax.jvp(self._function, (u,), (jnp.ones_like(u),))
        return values.astype(u.dtype), slopes.astype(u.dtype)

    def _mean_slope(self, moments: SeriesMoments) -> Array:
        """Return E[φ'(u)], which is the coefficient of degree 1 over √a, for pairs with a variance of 0."""
        alive = moments.variance > 0
        of_degree_1 = jnp.zeros_like(moments.variance)
        if self._stride == 1 or self._first:
            of_degree_1 = moments.coefficients[1 - self._first]
        return jnp.where(alive, of_degree_1 / _root(moments.variance), moments.slope_at_zero)


def _horner(one: Array, other: Array, argument: Array) -> tuple[Array, Array]:
    """Return Σ_k one_k other_k t^k and its derivative, for t = ``argument`` and coefficients along the first axis."""

    def add(carried: tuple[Array, Array], coefficients: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        value, derivative = carried
        for left, right in zip(coefficients[0][::-1], coefficients[1][::-1], strict=True):
            derivative = derivative * argument + value
            value = value * argument + left * right
        return (value, derivative), None

    chunks = [leaf.reshape(-1, _CHUNK, *leaf.shape[1:]) for leaf in (one, other)]
    zeros = jnp.zeros_like(argument)
    # A gradient keeps what is carried from chunk to chunk, not from term to term.
    return jax.lax.scan(jax.checkpoint(add, prevent_cse=False), (zeros, zeros), chunks, reverse=True)[0]


@lru_cache(maxsize=1)
def _rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nodes, weights that add up to 1, and the weighted normalised Hermite polynomials, (degrees, nodes)."""
    from scipy.special import roots_hermitenorm  # which NumPyro has not loaded

    nodes, weights = roots_hermitenorm(_NODES)
    weights = weights / weights.sum()
    polynomials = [np.ones(_NODES), nodes]
    for k in range(1, _DEGREES - 1):
        polynomials.append((nodes * polynomials[k] - np.sqrt(k) * polynomials[k - 1]) / np.sqrt(k + 1))
    return nodes, weights, weights * np.stack(polynomials)


def _parity(function: Callable[[Array], Array]) -> tuple[int, int]:
    """Return the first degree with a coefficient, and the steps between those: (1, 2) for an odd function."""
    nodes = np.linspace(0.01, 7, 200)
    with jax.ensure_compile_time_eval():
        both = jax.jit(lambda u: jnp.stack([function(u), function(-u), function(0 * u)]))(jnp.asarray(nodes))
    positive, negative, zero = np.asarray(both)
    if np.array_equal(positive, -negative) and not zero.any():
        return 1, 2
    return (0, 2) if np.array_equal(positive, negative) else (0, 1)


def _root(variance: Array) -> Array:
    return jnp.sqrt(jnp.where(variance > 0, variance, 1))


def _share(part: Array, whole: Array) -> Array:
    """Return the size of a part in its whole, 0 of nothing, without a derivative."""
    part, whole = jax.lax.stop_gradient((part, whole))
    return jnp.where(whole > 0, jnp.abs(part) / jnp.where(whole > 0, whole, 1), 0)
