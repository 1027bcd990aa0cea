"""Arguments of a model, with their arrays apart from names, sizes and switches."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array


def arrays_apart(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays of a tree, and the function that builds the tree from arrays in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Array | np.ndarray)]

    def rebuild(arrays: list[Any]) -> Any:
        own = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [own.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], rebuild
