"""Checkpoints of a run: one file of plain arrays, written at once or not at all, from which no other run continues."""

import json
import os
import sys
import warnings
import zipfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Stored = dict[str, np.ndarray]
_LIBRARIES = ("numpyro_wide", "jax", "numpyro", "flax", "optax")


def save(path: Path, tree: Any) -> None:
    """Write the leaves of a tree under the names of their places."""
    leaves: dict[str, Any] = {
        jax.tree_util.keystr(place): plain(leaf) for place, leaf in jax.tree.leaves_with_path(tree)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **leaves)
        file.flush()
        os.fsync(file.fileno())  # or a machine that loses its power could find the name and nothing behind it
    os.replace(unfinished, path)


def read(path: Path) -> Stored:
    """Read the arrays of a file, by the names of their places."""
    if path.is_dir():
        raise ValueError(f"the checkpoint {path} is a folder; pass the path of a file, such as {path / 'run.npz'}.")
    with path.open("rb") as file:
        try:
            # The archive is looked at first: NumPy takes whatever is none for a pickle, and says how to unpickle it.
            if zipfile.ZipFile(file).testzip() is None:
                file.seek(0)
                stored = dict(np.load(file, allow_pickle=False))
                if all(isinstance(array, np.ndarray) for array in stored.values()) and "['run']" in stored:
                    return stored
            why = "is no checkpoint, or a damaged one"
        except Exception as error:  # whatever the readers of archives and arrays make of damaged files
            why = f"is no checkpoint, or a damaged one ({type(error).__name__})"
    raise ValueError(
        f"the checkpoint {path} {why}. A run writes its file as a whole or not at all: restore the file from a copy; "
        "to start anew, delete it, or pass another path."
    )


def restore(path: Path, stored: Stored, template: Any) -> Any:
    """Return the tree that :func:`save` wrote."""
    places, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(place) for place, _ in places]
    differing = sorted(set(names) ^ set(stored))
    if differing:
        raise _of_another_run(path, f"it and this one differ in {differing[:5]}")
    leaves = [_restored(path, name, stored[name], leaf) for name, (_, leaf) in zip(names, places, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _restored(path: Path, name: str, array: np.ndarray, leaf: Any) -> Any:
    expected = plain(leaf)
    if isinstance(leaf, str):
        return str(array)
    if array.dtype.kind == "V":  # NumPy's files do not know JAX's own types, such as bfloat16
        array = array.view(expected.dtype)
    grows = expected.shape == (0,) and array.ndim == 1
    if array.dtype != expected.dtype or not (grows or array.shape == expected.shape):
        held = f"its {name} has shape {array.shape} and type {array.dtype}"
        raise _of_another_run(path, f"{held}, but this run's {expected.shape} and {expected.dtype}")
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)


def _of_another_run(path: Path, why: str) -> ValueError:
    return ValueError(
        f"the checkpoint {path} is of another run: {why}. Pass what it was started with, or another path."
    )


def plain(leaf: Any) -> np.ndarray:
    """Return text, the numbers of an array, or those of PRNG keys, as an array."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _is_key(leaf: Any) -> bool:
    return not isinstance(leaf, str) and jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that decide how a program is written."""
    return {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def refuse_another_run(place: str, stored: str, own: str, *, kind: str, programs: Collection[str]) -> None:
    """Refuse to continue with a run that is not this one."""
    before, now = json.loads(stored), json.loads(own)
    was, are = before.pop("versions", None), now.pop("versions")
    differing = [name for name in now if before.get(name) != now[name]]
    if not differing:
        return
    if was != are and set(differing) <= set(programs):
        warnings.warn(
            f"{place} was written with other versions of libraries ({was}, now {are}), so that its {differing[0]} "
            "cannot be compared with this run's: make sure that it is the same.",
            stacklevel=_frames_of_package() + 1,
        )
        return
    raise ValueError(
        f"{place} is of a run with another {differing[0]}; pass the same one to continue with it, or another {kind} to "
        "start anew."
    )


def _frames_of_package() -> int:
    """Return the number of frames from the caller up to the first one outside of the package."""
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("numpyro_wide."):
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count
