"""Draws on disk, run through a model a block at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK_BYTES = 2**26


def by_blocks(run: Callable[[dict[str, Any], int], Any], draws: Mapping[str, Any]) -> Any:
    """What ``run`` gives for draws (chain, draw, ...), these two axes in front: all at once, unless some are mapped.

    Of draws that are memory-mapped no more than a block is in memory at a time; results are on the host then.

    Args:
        run: of draws and the number of the first of them.
        draws: by site.
    """
    if not any(isinstance(values, np.memmap) for values in draws.values()):
        return run(dict(draws), 0)
    num_draws = np.shape(next(iter(draws.values())))[1]
    size = max(1, num_draws * _BLOCK_BYTES // max(1, sum(values.nbytes for values in draws.values())))
    found = []
    for start in range(0, num_draws, size):
        block = {name: jnp.asarray(values[:, start : start + size]) for name, values in draws.items()}
        found.append(jax.tree.map(np.asarray, run(block, start)))
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)
