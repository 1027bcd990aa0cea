"""Runs of a model at draws of several chains, a block at a time where the draws are on disk."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_wide._blocks import blocks_of, is_mapped


def by_blocks(run: Callable[[dict[str, Any], int], Any], draws: Mapping[str, Any]) -> Any:
    """Run a function at draws (chain, draw, ...): at all of them at once, unless some are memory-mapped.

    Of draws that are memory-mapped no more than a block is in memory at a time; results are on the host then.

    Args:
        run: function of draws by site and the number of the first of them, whose results have the axes of chains and
            draws in front.
        draws: draws by site, each (chain, draw, ...).

    Returns:
        What ``run`` gives for all draws.
    """
    if not is_mapped(draws):
        return run(dict(draws), 0)
    found = [jax.tree.map(np.asarray, run(block, start)) for start, block in blocks_of(draws, axis=1)]
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)
