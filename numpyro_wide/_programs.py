"""Compiled once: programs that are kept for as long as the model that they run."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np

# By model, by what is run and its static arguments. A program refers to its model weakly, so that it does not keep it.
_PROGRAMS: WeakKeyDictionary[Any, dict[Hashable, Callable]] = WeakKeyDictionary()


def run_compiled(body: Callable, model: Callable, static: Hashable, *arrays: Any) -> Any:
    """``body(model, static, *arrays)``, compiled; a second call with arrays of the same shapes compiles nothing.

    Args:
        body: a function of a module, not made anew at every call.
        model: a model, a guide, or whatever the program belongs to; its attributes must not change.
        static: what the program depends on besides.
        *arrays: trees of arrays.
    """
    try:
        hash(static)
        programs = _PROGRAMS.setdefault(model, {})
    except TypeError:  # something has no hash, or no weak reference can be made to the model
        return jax.jit(lambda *arrays: body(model, static, *arrays))(*arrays)
    if (body, static) not in programs:
        known = ref(model)
        programs[body, static] = jax.jit(lambda *arrays: body(known(), static, *arrays))
    return programs[body, static](*arrays)


class Static:
    """A tree without its arrays; equal if a program compiled for one serves for the other."""

    def __init__(self, leaves: tuple, structure: Any):
        self.leaves, self.structure = leaves, structure

    def __hash__(self) -> int:
        return hash((self.structure, tuple(type(leaf) for leaf in self.leaves)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self.structure == other.structure
            and all(map(_same, self.leaves, other.leaves))
        )


def partition(tree: Any, array_types: Any = (jax.Array, np.ndarray)) -> tuple[list[Any], Static]:
    """The arrays of a tree, and what stays as it is: numbers that serve as sizes, names, switches."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, array_types)]
    return arrays, Static(tuple(_HOLE if isinstance(leaf, array_types) else leaf for leaf in leaves), structure)


def combine(arrays: list[Any], static: Static) -> Any:
    """Undo :func:`partition`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is _HOLE else leaf for leaf in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


_HOLE = type("_Hole", (), {})


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    try:
        return bool(left == right)
    except (TypeError, ValueError):  # a table compares entry by entry
        return False
