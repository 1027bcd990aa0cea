"""Blocks of rows and of draws, computed or read one at a time where all at once are too large for the memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

T = TypeVar("T")
R = TypeVar("R")
# (start, size) -> pytree of arrays whose leading axis holds the rows start, ..., start + size - 1.
Rows = Callable[[Array | int, int], T]


def in_row_blocks(rows: Rows[T], num_rows: int, block_size: int | None) -> T:
    """Return ``rows(0, num_rows)``, computed ``block_size`` rows at a time (None: all at once).

    The last block starts earlier where ``block_size`` does not divide ``num_rows``, and rewrites rows that are there
    already: nothing is padded. Reverse-mode gradients recompute a block instead of storing its temporaries.
    """
    if block_size is None or block_size >= num_rows:
        return rows(0, num_rows)
    last_start = num_rows - block_size
    starts = jnp.minimum(jnp.arange(0, num_rows, block_size), last_start)
    block = jax.checkpoint(lambda start: rows(start, block_size))
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), jax.eval_shape(block, starts[0])
    )

    def write(filled: T, start: Array) -> tuple[T, None]:
        put = lambda operand, update: jax.lax.dynamic_update_slice_in_dim(operand, update, start, axis=0)  # noqa: E731
        return jax.tree.map(put, filled, block(start)), None

    return jax.lax.scan(write, empty, starts)[0]


def take_rows(array: Array, start: Array | int, size: int) -> Array:
    """Return ``size`` rows of ``array`` from ``start``, which may be traced."""
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=0)


def map_draws(function: Callable[[T], R], draws: T, batch_size: int) -> R:
    """Compute ``jax.lax.map(function, draws, batch_size=batch_size)``, quicker on the CPU.

    There a slice of the draws is computed within whatever reads it, index by index, and its activations are not
    vectorised; so each step of the loop is handed the batch that the step before has sliced. All batches have one size,
    at most ``batch_size``, and are one program to compile.
    """
    num_draws = jax.tree.leaves(draws)[0].shape[0]
    num_batches = -(-num_draws // batch_size)
    size = -(-num_draws // num_batches)

    def batch(index: Array | int) -> T:  # the last begins earlier, where sizes do not divide
        return jax.tree.map(lambda leaf: take_rows(leaf, index * size, size), draws)

    def step(current: T, index: Array) -> tuple[T, R]:
        return batch(index + 1), jax.vmap(function)(current)

    def concatenate(batches: Array) -> Array:
        flat = batches.reshape(num_batches * size, *batches.shape[2:])
        repeated = len(flat) - num_draws
        return jnp.concatenate([flat[:-size], flat[repeated - size :]]) if repeated else flat

    _, results = jax.lax.scan(step, batch(0), jnp.arange(num_batches))
    return jax.tree.map(concatenate, results)


BLOCK_BYTES = 2**26


def is_mapped(draws: Mapping[str, object]) -> bool:
    """Whether any draws are memory-mapped, to be read in blocks."""
    return any(isinstance(values, np.memmap) for values in draws.values())


def blocks_of(
    draws: Mapping[str, Array | np.ndarray], axis: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the index at which each block of draws begins, and its draws as JAX arrays, sliced along ``axis``."""
    num_draws = np.shape(next(iter(draws.values())))[axis]
    size = max(1, num_draws * block_bytes // max(1, sum(values.nbytes for values in draws.values())))
    for start in range(0, num_draws, size):
        block = (slice(None),) * axis + (slice(start, start + size),)
        yield start, {name: jnp.asarray(values[block]) for name, values in draws.items()}
