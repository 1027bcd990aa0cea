"""Draws that predictions are made from: in memory or on disk, and those whose results are not finite."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from numpyro_wide._blocks import blocks_of
from numpyro_wide._checks import is_known

CHOICES = ("raise", "drop")
_NUM_NAMED = 20


def kept_draws(what: str, is_finite: Array, on_nonfinite: str, *, stacklevel: int = 3) -> np.ndarray | None:
    """Return which draws to go on with; refuse the others, or leave them out in so many words.

    Args:
        what: name of what is computed by draw, for messages.
        is_finite: whether the results of each draw are finite, (draws,).
        on_nonfinite: what to do about the others, "raise" or "drop".
        stacklevel: number of calls up to whoever called a method of ``ReadoutPredictive``, for the warning.

    Returns:
        Indices of the draws that are finite; None for all, as where the values are traced.

    Raises:
        FloatingPointError: if a draw is not finite and is not to be dropped, or none is finite.
        ValueError: if draws are to be dropped whose values are not known, as under ``jit``.

    Warns:
        RuntimeWarning: if draws are dropped.
    """
    if not is_known(is_finite):
        if on_nonfinite == "drop":
            raise ValueError(
                f"on_nonfinite='drop' must see which {what} are finite, but their values are not known here, as under "
                "jax.jit; call outside of JAX's transformations, or take on_nonfinite='raise', where NaN is passed on "
                "if values are not known."
            )
        return None
    lost = np.flatnonzero(~np.asarray(is_finite))
    if not lost.size:
        return None
    which = _which(lost, is_finite.size)
    if on_nonfinite == "raise" or lost.size == is_finite.size:
        if lost.size == is_finite.size:
            raise FloatingPointError(
                f"no {what} are finite, of any draw: look for NaN or infinity among the inputs, those of the fit and "
                "the new ones. If there is none, the noise is too small against the features for this precision; run "
                "in float64 (jax.config.update('jax_enable_x64', True))."
            )
        raise FloatingPointError(
            f"{what} of {which} are not finite: the noise is too small against the features for this precision, or a "
            "draw is not finite itself. Run in float64 (jax.config.update('jax_enable_x64', True)), or predict from "
            "the others with on_nonfinite='drop'."
        )
    warnings.warn(
        f"{what} of {which} are not finite and are left out: the noise is too small against the features for "
        "this precision, or a draw is not finite itself. What is left is biased towards the draws that float64 would "
        "not be needed for.",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
    return np.flatnonzero(np.asarray(is_finite))


def _which(lost: np.ndarray, num_draws: int) -> str:
    if lost.size == 1:
        return f"draw {lost[0]} of {num_draws}"
    named = ", ".join(map(str, lost[:_NUM_NAMED])) + (", ..." if lost.size > _NUM_NAMED else "")
    return f"{lost.size} of {num_draws} draws ({named})"


def as_draws(draws: Any) -> Any:
    """Return a copy as an array of JAX, which nobody can change; what is memory-mapped as it is."""
    return draws if isinstance(draws, np.memmap) else jnp.array(draws)


def in_blocks(
    run: Callable[[Array | None, dict[str, Any], int], tuple[Any, Array]],
    rng_key: Array | None,
    draws: dict[str, Any],
    *,
    is_average: bool,
) -> tuple[Any, np.ndarray]:
    """Run a function of draws for all of them, a block at a time, with results on the host.

    Args:
        run: function of a key, a block of draws and their number, which returns results and which draws are finite.
        rng_key: a PRNG key, from which each block gets its own.
        draws: all draws.
        is_average: whether results are log densities under the average over a block's finite draws, to be averaged in
            turn, rather than one for each draw.

    Returns:
        Results, and by draw whether they are finite.
    """
    found, is_finite = [], []
    for start, block in blocks_of(draws, axis=0):
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
