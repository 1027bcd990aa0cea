"""Draws on disk, read a block at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from numpyro_wide._mapped import blocks_of


def as_draws(draws: Any) -> Any:
    """An array of JAX, or what is memory-mapped, as it is."""
    return draws if isinstance(draws, np.memmap) else jnp.asarray(draws)


def in_blocks(
    run: Callable[[Array | None, dict[str, Any], int], tuple[Any, Array]],
    rng_key: Array | None,
    samples: dict[str, Any],
    *,
    is_average: bool,
) -> tuple[Any, np.ndarray]:
    """What ``run`` gives for all draws, on the host, from blocks of them.

    Args:
        run: of a key, a block of draws and their number; gives results, and which draws are finite.
        rng_key: split by block.
        samples: all draws.
        is_average: whether results are log densities under the average over a block's finite draws, to be averaged in
            turn, rather than one for each draw.

    Returns:
        Results, and by draw whether they are finite.
    """
    found, is_finite = [], []
    for start, block in blocks_of(samples, axis=0):
        key = None if rng_key is None else jax.random.fold_in(rng_key, start)
        results, finite = run(key, block, len(next(iter(block.values()))))
        found.append(jax.tree.map(np.asarray, results))
        is_finite.append(np.asarray(finite))
    if is_average:
        counts = np.array([finite.sum() for finite in is_finite])[:, None]
        # A block without a finite draw has the weight zero, whatever its density.
        parts = np.where(counts > 0, np.array(found), -np.inf)
        return logsumexp(parts, b=counts / max(1, counts.sum()), axis=0), np.concatenate(is_finite)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found), np.concatenate(is_finite)
