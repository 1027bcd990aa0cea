"""A function of every chain: of one after another on a processor, of all at once elsewhere."""

from collections.abc import Callable
from typing import Any

import jax


def is_one_by_one() -> bool:
    """Tell whether chains take their turns within a program, as they do on one processor.

    XLA's batched products of small matrices are slow there: a gradient of four chains took up to five times as long at
    once as one after another, on one core and on two. In turns, chains with trajectories of several lengths do not wait
    for each other either. Where there are several devices, chains may be spread over them.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def over_chains(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over the leading axis of all leaves of its arguments, as ``jax.vmap`` does."""
    if is_one_by_one():
        return lambda *chains: jax.lax.map(lambda chain: fn(*chain), chains)
    return jax.vmap(fn)
