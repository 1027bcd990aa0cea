"""Checkpoints of a run: one file of plain arrays, written at once or not at all."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(path: Path, tree: Any) -> None:
    """Write the leaves of a tree under the names of their places.

    Args:
        path: the file; its folder is made if it is missing.
        tree: a pytree of arrays, PRNG keys among them.
    """
    leaves: dict[str, Any] = {
        jax.tree_util.keystr(place): _plain(leaf) for place, leaf in jax.tree.leaves_with_path(tree)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **leaves)
    os.replace(unfinished, path)


def load(path: Path, template: Any) -> Any:
    """Read a tree that :func:`save` wrote.

    Args:
        path: the file.
        template: a tree of the same structure, shapes and types; leaves of shape (0,) take arrays of any length.

    Returns:
        The tree.

    Raises:
        ValueError: if the file holds another tree.
    """
    places, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(place) for place, _ in places]
    with np.load(path, allow_pickle=False) as file:
        stored = dict(file)
    differing = sorted(set(names) ^ set(stored))
    if differing:
        raise ValueError(
            f"the checkpoint {path} is of another run: it and this one differ in {differing[:5]}. Pass the same guide, "
            "optimiser and held-out options as before, or another path."
        )
    leaves = [_restored(path, name, stored[name], leaf) for name, (_, leaf) in zip(names, places, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _restored(path: Path, name: str, array: np.ndarray, leaf: Any) -> jax.Array:
    expected = _plain(leaf)
    if array.dtype.kind == "V":  # NumPy's files do not know JAX's own types, such as bfloat16
        array = array.view(expected.dtype)
    grows = expected.shape == (0,) and array.ndim == 1
    if array.dtype != expected.dtype or not (grows or array.shape == expected.shape):
        raise ValueError(
            f"the checkpoint {path} is of another run: its {name} has shape {array.shape} and type {array.dtype}, but "
            f"this run's {expected.shape} and {expected.dtype}. Pass the same arguments, or another path."
        )
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)
