"""Arrays with many rows, computed a block of rows at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (start, size) -> pytree of arrays whose leading axis holds the rows start, ..., start + size - 1.
Rows = Callable[[jax.Array | int, int], Any]


def in_row_blocks(rows: Rows, num_rows: int, block_size: int | None) -> Any:
    """Compute all rows, ``block_size`` of them at a time, so that temporaries stay of the size of a block.

    The last block starts earlier where ``block_size`` does not divide ``num_rows``, and rewrites rows that
    are there already: nothing is padded and no second copy of the result is made. Reverse-mode gradients
    recompute a block instead of storing its temporaries.

    Args:
        rows: computes a block from its first row (traced) and its number of rows (static).
        num_rows: number of rows in all.
        block_size: rows per block; None for all at once.

    Returns:
        What ``rows(0, num_rows)`` returns.
    """
    if block_size is None or block_size >= num_rows:
        return rows(0, num_rows)
    last_start = num_rows - block_size
    starts = jnp.minimum(jnp.arange(0, num_rows, block_size), last_start)
    block = jax.checkpoint(lambda start: rows(start, block_size))
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), jax.eval_shape(block, starts[0])
    )

    def write(filled: Any, start: jax.Array) -> tuple[Any, None]:
        put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)  # noqa: E731
        return jax.tree.map(put, filled, block(start)), None

    return jax.lax.scan(write, empty, starts)[0]


def take_rows(array: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Return ``size`` rows of ``array`` from ``start``, which may be traced."""
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=0)
