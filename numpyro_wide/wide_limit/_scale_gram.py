"""Kernel of a problem of scales, and its derivative by them, in tiles: one program for any number of rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide.wide_limit._scale_problem import ScaleProblem

_TILE = 128  # rows and columns: the derivative is elementwise, and stays in the cache so


def gram(problem: ScaleProblem, logarithms: np.ndarray) -> np.ndarray:
    """Return the limit's kernel of the inputs with themselves, (n, n).

    Args:
        problem: architecture and inputs.
        logarithms: logarithms of the scales over their medians.
    """
    vector = jnp.asarray(logarithms)
    if problem.network is not None:
        return np.array(_whole(vector, problem))
    tiles = [(rows, columns, _tile(vector, *args)) for rows, columns, args in _tiles(problem)]
    size = len(problem.inputs)
    found = np.empty((size, size))
    for rows, columns, tile in tiles:  # which JAX has computed meanwhile
        values = np.asarray(tile)[: rows.stop - rows.start, : columns.stop - columns.start]
        found[rows, columns], found[columns, rows] = values, values.T
    return found


def pull_back(problem: ScaleProblem, logarithms: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Differentiate by the logarithms a function that has this derivative by the kernel.

    Args:
        problem: architecture and inputs.
        logarithms: logarithms of the scales over their medians.
        slope: derivative by the kernel, (n, n), symmetric.
    """
    vector = jnp.asarray(logarithms)
    if problem.network is not None:
        return np.array(_whole_slope(vector, problem, jnp.asarray(slope)))
    found = []
    for rows, columns, args in _tiles(problem):
        weights = np.zeros((_TILE, _TILE))
        times = 1 if rows == columns else 2  # a tile below the diagonal stands for the one above, too
        weights[: rows.stop - rows.start, : columns.stop - columns.start] = times * slope[rows, columns]
        found.append(_tile_slope(vector, *args, weights))
    return np.sum([np.asarray(part) for part in found], axis=0)


def _tiles(problem: ScaleProblem) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
    """Yield the rows and columns of tiles on and below the diagonal, and what a tile is computed from."""
    size = len(problem.inputs)
    filled = np.arange(-(-size // _TILE) * _TILE)
    filled[size:] = 0  # the last tile is filled up by the first row
    parts = problem.inputs[filled].reshape(-1, _TILE, problem.inputs.shape[1])
    bare = replace(problem, inputs=None)
    slices = [slice(start, min(start + _TILE, size)) for start in range(0, size, _TILE)]
    for i, rows in enumerate(slices):
        for j, columns in enumerate(slices[: i + 1]):
            yield rows, columns, (bare, parts[i], parts[j], i == j)


# Of the module, so that a fit to other data compiles nothing.
@jax.jit
def _tile(logarithms: Array, problem: ScaleProblem, x1: Array, x2: Array, is_on_diagonal: Array) -> Array:
    same = is_on_diagonal & jnp.eye(_TILE, dtype=bool)
    return problem.kernel(problem.scales(logarithms), x1, x2, same)


@jax.jit
@jax.grad
def _tile_slope(
    logarithms: Array, problem: ScaleProblem, x1: Array, x2: Array, is_on_diagonal: Array, slope: Array
) -> Array:
    return jnp.sum(slope * _tile(logarithms, problem, x1, x2, is_on_diagonal))


@jax.jit
def _whole(logarithms: Array, problem: ScaleProblem) -> Array:
    return problem.network_kernel(problem.scales(logarithms))


@jax.jit
@jax.grad
def _whole_slope(logarithms: Array, problem: ScaleProblem, slope: Array) -> Array:
    return jnp.sum(slope * _whole(logarithms, problem))
