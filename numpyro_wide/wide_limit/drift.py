"""Drift of a network's tangent kernel while it trains."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats
from numpyro_wide.wide_limit._empirical import Network, empirical_ntk


class KernelDrift(NamedTuple):
    """Distance of a tangent kernel from the one at the start of training.

    Attributes:
        sup_norm: largest change over all pairs of grid points, a scalar; with several outputs, of the Frobenius norm.
        smallest_eigenvalue: smallest eigenvalue of the present kernel on the grid, a scalar.
    """

    sup_norm: Array
    smallest_eigenvalue: Array


def kernel_drift(kernel: ArrayLike, kernel0: ArrayLike) -> Array:
    """Return the largest change of a kernel over all pairs of inputs, sup ‖K − K₀‖ (McNamara 2025, Proposition 13).

    Args:
        kernel: kernel matrix (n1, n2), or (n1, n2, k, k) with several outputs, over which the norm is Frobenius'.
        kernel0: kernel to compare with, of the same shape.

    Returns:
        scalar; NaN where a kernel holds one.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> float(kernel_drift(jnp.eye(3), 3 * jnp.eye(3)))
        2.0
    """
    kernel, kernel0 = as_floats(kernel, kernel0, names=("kernel", "kernel0"))
    if kernel.shape != kernel0.shape or kernel.ndim not in (2, 4):
        raise ValueError(
            f"kernel and kernel0 must have the same shape, (n1, n2) or (n1, n2, k, k), "
            f"but got {kernel.shape} and {kernel0.shape}."
        )
    change = kernel - kernel0
    if change.ndim == 2:
        return jnp.max(jnp.abs(change))
    largest = jnp.max(jnp.sum(change**2, axis=(2, 3)))
    # The square root has no derivative at 0, where training starts. What is not above 0 is 0, or NaN, which stays.
    return jnp.where(largest > 0, jnp.sqrt(jnp.where(largest > 0, largest, 1)), largest)


def smallest_eigenvalue(kernel: ArrayLike) -> Array:
    """Return the smallest eigenvalue of a symmetric kernel matrix, the slowest rate at which gradient flow learns.

    Args:
        kernel: kernel matrix (n, n), or (n, n, k, k) with several outputs, read as one matrix of n · k rows.

    Returns:
        scalar; rounding can make it slightly negative.

    Raises:
        ValueError: if the kernel is not square.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(smallest_eigenvalue(jnp.diag(jnp.array([3.0, 2.0, 5.0])))), 5)
        2.0
    """
    (kernel,) = as_floats(kernel, names=("kernel",))
    if kernel.ndim not in (2, 4) or kernel.shape[0::2] != kernel.shape[1::2]:
        raise ValueError(f"kernel must have shape (n, n) or (n, n, k, k), but got {kernel.shape}.")
    if kernel.ndim == 4:
        num_rows = kernel.shape[0] * kernel.shape[2]
        kernel = jnp.moveaxis(kernel, 2, 1).reshape(num_rows, num_rows)
    return jnp.linalg.eigvalsh(kernel)[0]


def drift_monitor(
    f: Network, params0: Any, x: ArrayLike, *, block_size: int | None = None
) -> Callable[[Any], KernelDrift]:
    """Watch the tangent kernel on a grid of inputs while a network trains.

    In the limit of infinite width the kernel stays where it started (McNamara 2025, Prop. 13). The kernel at
    ``params0`` is computed once, here.

    Args:
        f: network, f(params, x) -> (n,) or (n, k), as for :func:`empirical_ntk`.
        params0: parameters at the start of training.
        x: inputs that the kernel is watched on, (n, ...).
        block_size: rows whose Jacobians are held at a time; None for all at once.

    Returns:
        ``monitor(params)``, which gives a :class:`~numpyro_wide.wide_limit.KernelDrift`; it can be called inside
        jit and scan.

    Raises:
        ValueError: for what :func:`empirical_ntk` refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> monitor = drift_monitor(lambda w, x: jnp.tanh(x @ w), jnp.ones(3), jnp.eye(3))
        >>> drift = monitor(2 * jnp.ones(3))
        >>> bool(drift.sup_norm > 0), drift.smallest_eigenvalue.shape
        (True, ())
    """
    ntk = jax.jit(lambda params: empirical_ntk(f, params, x, block_size=block_size))
    kernel0 = ntk(params0)

    @jax.jit
    def monitor(params: Any) -> KernelDrift:
        """Compare the kernel at ``params`` with the one at the start."""
        kernel = ntk(params)
        return KernelDrift(kernel_drift(kernel, kernel0), smallest_eigenvalue(kernel))

    return monitor
