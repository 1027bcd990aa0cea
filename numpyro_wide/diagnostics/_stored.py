"""Draws of several chains, on disk, run through a model a block at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_wide._mapped import blocks_of, is_mapped


def by_blocks(run: Callable[[dict[str, Any], int], Any], draws: Mapping[str, Any]) -> Any:
    """What ``run`` gives for draws (chain, draw, ...), these two axes in front: all at once, unless some are mapped.

    Of draws that are memory-mapped no more than a block is in memory at a time; results are on the host then.

    Args:
        run: of draws and the number of the first of them.
        draws: by site.
    """
    if not is_mapped(draws):
        return run(dict(draws), 0)
    found = [jax.tree.map(np.asarray, run(block, start)) for start, block in blocks_of(draws, axis=1)]
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)
