"""Convolutions of covariances, averages over the filters of a convolution: the same offset in both of two pixels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import check_one_of


def mean_over_filter(
    covariances: Array, kernel_size: tuple[int, int], strides: tuple[int, int], padding: str, *, num_pixels: int
) -> Array:
    """Return the mean over a filter's offsets δ of the covariances at s p + δ, or at s p + δ and s q + δ.

    Height and width are averaged over one after the other. Zeros beyond the border count, as in "SAME".

    Args:
        covariances: (..., h, w), or (..., h, w, h, w) for all pairs of pixels.
        kernel_size: height and width of the filter.
        strides: steps along height and width.
        padding: "CIRCULAR", "SAME" or "VALID", as in :class:`~numpyro_wide.nn.NTKConv`.
        num_pixels: 1 where the covariances are those of a pixel with itself, 2 for all pairs.

    Returns:
        means, (..., h', w') or (..., h', w', h', w').
    """
    from numpyro_wide.nn.internal import PADDINGS  # with flax, which is not loaded with the package

    check_one_of("padding", padding, PADDINGS)
    for direction in (0, 1):
        # Of (..., h, w, h, w): -4 and -2 for the height.
        axes = [direction - 2 * pixel for pixel in range(1, num_pixels + 1)]
        covariances = _mean_along(covariances, axes, kernel_size[direction], strides[direction], padding)
    return covariances


def _mean_along(covariances: Array, axes: Sequence[int], size: int, stride: int, padding: str) -> Array:
    """Return the mean over offsets along one direction, which all of these axes are."""
    length = covariances.shape[axes[0]]
    around, num_steps = _steps(length, size, stride, padding)
    if around != (0, 0):
        widths = [(0, 0)] * covariances.ndim
        for axis in axes:
            widths[axis] = around
        covariances = jnp.pad(covariances, widths, mode="wrap" if padding == "CIRCULAR" else "constant")
    if num_steps < 1:
        raise ValueError(f"a filter of {size} pixels does not fit into {length} with the padding {padding!r}.")
    if len(axes) == 1:
        # A compiler computes slices' operands anew for each of them, all layers before included.
        shape, strides = ([1] * covariances.ndim for _ in range(2))
        shape[axes[0]], strides[axes[0]] = size, stride
        zero = np.zeros((), covariances.dtype)
        # The tangent kernel of the inputs is a constant, whose sums a compiler would take, for seconds.
        covariances = jax.lax.optimization_barrier(covariances)
        return jax.lax.reduce_window(covariances, zero, jax.lax.add, shape, strides, "VALID") / size
    terms = []
    for offset in range(size):
        places = [slice(None)] * covariances.ndim
        for axis in axes:
            places[axis] = slice(offset, offset + (num_steps - 1) * stride + 1, stride)
        terms.append(covariances[tuple(places)])
    return sum(terms[1:], terms[0]) / size


def _steps(length: int, size: int, stride: int, padding: str) -> tuple[tuple[int, int], int]:
    """Return the pixels that are added before and after, and the number of places of the filter."""
    if padding == "VALID":
        return (0, 0), (length - size) // stride + 1
    num_steps = -(-length // stride)
    if padding == "CIRCULAR":  # begins at the same offset, whatever the stride
        return ((size - 1) // 2, size // 2), num_steps
    missing = max((num_steps - 1) * stride + size - length, 0)
    return (missing // 2, missing - missing // 2), num_steps
