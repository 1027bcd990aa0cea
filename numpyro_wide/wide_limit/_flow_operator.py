"""The matrix function Θ⁻¹ (I − exp(−tΘ)), with a derivative that repeated eigenvalues do not break."""

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_jvp
def flow_operator(ntk: Array, time: Array) -> Array:
    """Return Θ⁻¹ (I − exp(−tΘ)), the pseudo-inverse of Θ at t = ∞.

    Derivatives of eigenvectors divide by gaps between eigenvalues, which repeated inputs and symmetric
    designs close. The rule below uses the divided differences of the function itself (Daleckii and Krein
    1965), which stay finite. First derivatives only: a second differentiates the eigendecomposition, and is
    wrong where eigenvalues repeat.

    Args:
        ntk: kernel Θ, symmetric, (n, n).
        time: time t, a scalar of the same dtype, at least 0.
    """
    eigenvalues, vectors, time, unlearnable = _spectrum(ntk, time)
    gain = jnp.where(unlearnable, 0, _gain(eigenvalues, time))
    return _recompose(vectors, vectors.T, gain[:, None])


@flow_operator.defjvp
def _flow_operator_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    ntk_dot, time_dot = tangents
    eigenvalues, vectors, time, unlearnable = _spectrum(*primals)
    gain = jnp.where(unlearnable, 0, _gain(eigenvalues, time))
    value = _recompose(vectors, vectors.T, gain[:, None])
    rotated = _recompose(vectors.T, vectors, 0.5 * (ntk_dot + ntk_dot.T))
    slopes = _slopes(eigenvalues, time)
    # Between a direction that is learned and one that is not, the divided difference of the pseudo-inverse.
    positive = jnp.where(unlearnable, 1, eigenvalues)
    mixed = jnp.where(unlearnable, 0, gain / positive)
    one_sided = mixed[:, None] + mixed[None, :]
    slopes = jnp.where(unlearnable[:, None] | unlearnable[None, :], one_sided, slopes)
    slopes = jnp.where(unlearnable[:, None] & unlearnable[None, :], 0, slopes)
    decay = jnp.where(unlearnable, 0, jnp.exp(-eigenvalues * time))
    return value, _recompose(vectors, vectors.T, slopes * rotated + time_dot * jnp.diag(decay))


def _spectrum(ntk: Array, time: Array) -> tuple[Array, Array, Array, Array]:
    """Return eigenvalues, eigenvectors, a finite time, and which directions no finite precision can learn.

    An eigenvalue below n ε times the largest is 0 up to rounding. Its direction is given up once the time
    is so long that rounding would be learned; and beyond 100 of its time scales nothing changes any more.
    """
    eigenvalues, vectors = jnp.linalg.eigh(ntk)
    largest = eigenvalues[-1]
    rounding = ntk.shape[0] * jnp.finfo(ntk.dtype).eps * largest
    rounding = jnp.where(largest > 0, rounding, 1)
    time = jnp.minimum(time, 100 / rounding)
    unlearnable = (eigenvalues <= rounding) & (time * rounding >= 1)
    return jnp.maximum(eigenvalues, 0), vectors, time, unlearnable


def _gain(eigenvalues: Array, time: Array) -> Array:
    """Return (1 − exp(−λt)) / λ, which is t at λ = 0."""
    positive = jnp.where(eigenvalues > 0, eigenvalues, 1)
    return jnp.where(eigenvalues > 0, -jnp.expm1(-positive * time) / positive, time)


def _slopes(eigenvalues: Array, time: Array) -> Array:
    """Return the divided differences (g(λ) − g(μ)) / (λ − μ) of the gain g, (n, n), its derivative where λ = μ.

    Each of three forms is accurate where it is used, λ ≥ μ: with g(λ − μ) where μt is not small, for
    e^(−μt) − e^(−λt) = (λ − μ) e^(−μt) g(λ − μ); the plain quotient where only μt is small; Taylor's where
    both are.
    """
    small = (2 * jnp.finfo(eigenvalues.dtype).eps) ** 0.25  # where rounding and the series' remainder are equal
    high = jnp.maximum(eigenvalues[:, None], eigenvalues[None, :])
    low = jnp.minimum(eigenvalues[:, None], eigenvalues[None, :])
    gap = high - low
    decayed = low * time > small
    separate = ~decayed & (gap * time > small)
    closed = (jnp.exp(-low * time) * _gain(gap, time) - _gain(high, time)) / jnp.where(decayed, low, 1)
    quotient = (_gain(high, time) - _gain(low, time)) / jnp.where(separate, gap, 1)
    h, m = (jnp.where(decayed | separate, 0, z * time) for z in (high, low))
    scale = jnp.where(decayed | separate, 0, time)
    series = -(scale**2) * (1 / 2 - (h + m) / 6 + (h**2 + h * m + m**2) / 24)
    return jnp.where(decayed, closed, jnp.where(separate, quotient, series))


def _recompose(left: Array, right: Array, middle: Array) -> Array:
    """Return ``left @ middle @ right``, ``middle`` a matrix or a diagonal in the form of a column."""
    if middle.shape[1] == 1 and left.shape[1] != 1:
        return jnp.matmul(left, middle * right, precision="highest")
    return jnp.matmul(jnp.matmul(left, middle, precision="highest"), right, precision="highest")
