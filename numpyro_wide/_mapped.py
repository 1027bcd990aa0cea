"""Draws on disk, memory-mapped: blocks of them that fit into memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_BLOCK_BYTES = 2**26


def is_mapped(draws: Mapping[str, Any]) -> bool:
    """Whether some draws are to be read in blocks."""
    return any(isinstance(values, np.memmap) for values in draws.values())


def blocks_of(
    draws: Mapping[str, Any], axis: int, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where a block begins, and its draws, as JAX's; ``axis`` is that of the draws."""
    num_draws = np.shape(next(iter(draws.values())))[axis]
    size = max(1, num_draws * block_bytes // max(1, sum(values.nbytes for values in draws.values())))
    for start in range(0, num_draws, size):
        block = (slice(None),) * axis + (slice(start, start + size),)
        yield start, {name: jnp.asarray(values[block]) for name, values in draws.items()}
