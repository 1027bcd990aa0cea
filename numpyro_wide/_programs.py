"""Programs that are traced once and called often, and the arrays among the arguments of a model."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import Array

_MOST = 128
# Compiled programs by their text, the last ones: functions that compute the same share them.
_COMPILED: dict[str, Callable] = {}


def shared_program(fn: Callable, *args: Any) -> Callable:
    """Trace a function of trees of arrays, and compile it unless there is a program of the same text.

    The program takes arrays of the shapes and types of ``args``. All else that ``fn`` closes over is part of it.
    """
    structure, results = jax.tree.structure(args), None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal results
        found, results = jax.tree.flatten(fn(*jax.tree.unflatten(structure, leaves)))
        return found

    # Unused arguments are kept, since two programs may differ in nothing but which they use.
    lowered = jax.jit(flat, keep_unused=True).lower(*jax.tree.leaves(args))
    key = sha256(f"{lowered.in_avals} {lowered.as_text()}".encode()).hexdigest()
    if key not in _COMPILED:
        while len(_COMPILED) >= _MOST:
            del _COMPILED[next(iter(_COMPILED))]
        _COMPILED[key] = lowered.compile()
    program = _COMPILED[key]
    return lambda *args: jax.tree.unflatten(results, program(*jax.tree.leaves(args)))


def arrays_apart(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays of a tree, and the function that builds the tree from arrays in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Array | np.ndarray)]

    def rebuild(arrays: list[Any]) -> Any:
        own = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [own.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], rebuild
