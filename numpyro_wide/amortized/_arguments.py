"""Arguments of model and guide under compilation: JAX arrays are traced, all else is part of the program."""

from typing import Any

import jax
import numpy as np


class Fixed:
    """Arguments without their JAX arrays; equal if a program compiled for one serves for the other."""

    def __init__(self, leaves: tuple, structure: Any):
        self.leaves, self.structure = leaves, structure

    def __hash__(self) -> int:
        return hash((self.structure, tuple(type(leaf) for leaf in self.leaves)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fixed)
            and self.structure == other.structure
            and all(map(_same, self.leaves, other.leaves))
        )


def split_arguments(args: tuple, kwargs: dict) -> tuple[list[jax.Array], Fixed]:
    """Separate the JAX arrays from what stays as it is: numbers that serve as sizes, names, NumPy arrays."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return arrays, Fixed(tuple(_HOLE if isinstance(leaf, jax.Array) else leaf for leaf in leaves), structure)


def join_arguments(arrays: list[jax.Array], fixed: Fixed) -> tuple[tuple, dict]:
    """Undo :func:`split_arguments`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is _HOLE else leaf for leaf in fixed.leaves]
    return jax.tree.unflatten(fixed.structure, leaves)


_HOLE = type("_Hole", (), {})


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)
