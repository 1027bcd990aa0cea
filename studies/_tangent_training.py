"""Training in the tangent space: gradient flow under a fixed kernel, and the drift of a network's own kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.wide_limit import empirical_ntk


def gradient_flow(
    ntk_train: ArrayLike,
    ntk_cross: ArrayLike,
    targets: ArrayLike,
    time: ArrayLike = jnp.inf,
    *,
    initial_train: ArrayLike = 0.0,
    initial_test: ArrayLike = 0.0,
) -> Array:
    """Predict with a linearised network after gradient flow on ½ Σ (f(x) − y)² for some time.

    f_t(x) = f₀(x) + Θ(x, X) Θ⁻¹ (I − exp(−tΘ)) (Y − f₀(X)) (Lee 2019, eqs. 10 and 11), Θ = Θ(X, X). Exact for a
    linearised network with the empirical tangent kernel of its parameters; for a network in the limit of infinite width
    with the kernel of ``fcn_kernel``. A learning rate η is the time ηt, and the *mean* of the squared errors over n
    rows the time t/n. First derivatives are exact for any kernel, second ones where no eigenvalues of Θ repeat.

    Args:
        ntk_train: kernel Θ(X, X) of the training inputs, (n, n), symmetric.
        ntk_cross: kernel Θ(x, X) of test with training inputs, (n_test, n).
        targets: Y, (n,), or (n, k) for k outputs with independent kernels.
        time: duration of the flow, at least 0. At infinity the training data are interpolated; directions
            in which Θ is zero up to rounding (repeated inputs) are not learned.
        initial_train: f₀(X), a number or of the shape of the targets.
        initial_test: f₀(x), a number or (n_test,) or (n_test, k).

    Returns:
        f_t(x), (n_test,) or (n_test, k).
    """
    ntk_train, ntk_cross, targets = map(jnp.asarray, (ntk_train, ntk_cross, targets))
    flow = flow_operator(ntk_train, jnp.asarray(time, ntk_train.dtype))
    smoother = jnp.matmul(ntk_cross, flow, precision="highest")
    return initial_test + jnp.matmul(smoother, targets - initial_train, precision="highest")


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


class KernelDrift(NamedTuple):
    """Distance of a tangent kernel from the one at the start of training."""

    sup_norm: Array  # largest change over all pairs of inputs; with several outputs, of the Frobenius norm
    smallest_eigenvalue: Array  # of the present kernel, the slowest rate at which gradient flow learns


def drift_monitor(
    f: Callable[[Any, Array], Array], params0: Any, x: ArrayLike, *, block_size: int | None = None
) -> Callable[[Any], KernelDrift]:
    """Watch the tangent kernel on a grid of inputs while a network trains.

    In the limit of infinite width the kernel stays where it started (McNamara 2025, Prop. 13).

    Args:
        f: network, f(params, x) -> (n,) or (n, k), as for ``empirical_ntk``.
        params0: parameters at the start of training.
        x: inputs that the kernel is watched on, (n, ...).
        block_size: rows whose Jacobians are held at a time; None for all at once.

    Returns:
        ``monitor(params)``, which gives a ``KernelDrift``; it can be called inside jit and scan.
    """
    ntk = jax.jit(lambda params: empirical_ntk(f, params, x, block_size=block_size))
    kernel0 = ntk(params0)

    @jax.jit
    def monitor(params: Any) -> KernelDrift:
        kernel = ntk(params)
        return KernelDrift(_largest_change(kernel - kernel0), _smallest_eigenvalue(kernel))

    return monitor


def _largest_change(change: Array) -> Array:
    """Return the sup norm of a change of the kernel, (n, n) or (n, n, k, k)."""
    if change.ndim == 2:
        return jnp.max(jnp.abs(change))
    return jnp.sqrt(jnp.max(jnp.sum(change**2, axis=(2, 3))))


def _smallest_eigenvalue(kernel: Array) -> Array:
    """Return the smallest eigenvalue of a kernel (n, n), or (n, n, k, k) as one matrix of n k rows."""
    if kernel.ndim == 4:
        num_rows = kernel.shape[0] * kernel.shape[2]
        kernel = jnp.moveaxis(kernel, 2, 1).reshape(num_rows, num_rows)
    return jnp.linalg.eigvalsh(kernel)[0]
