"""Draws in a folder, memory-mapped: a file a site, which grows by pieces."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_wide import _checkpoint

_INDEX, STATE = "draws.json", "state.npz"
Draws = dict[str, np.ndarray]


class StoredDraws:
    """Draws that :func:`run_in_pieces` has written; to be read as an ``MCMC`` after its run.

    Arrays are memory-mapped: they take memory where they are looked at, and the operating system may take it back.
    While several chains have fewer draws than were asked for, read them with ``group_by_chain=True``: to put chains end
    to end copies them into memory until the run is done. :func:`~numpyro_wide.diagnostics.to_arviz` takes this object
    in the place of an ``MCMC``, and :class:`~numpyro_wide.ReadoutPredictive` its draws, which it then reads in blocks.

    Args:
        folder: that of the run.
        sampler: the kernel, which ``to_arviz`` asks for its model.

    Attributes:
        num_samples: draws of each chain that there are.

    Raises:
        FileNotFoundError: if nothing is stored there yet.
    """

    def __init__(self, folder: str | os.PathLike, sampler: Any = None):
        self.folder, self.sampler = Path(folder), sampler
        path, self.num_samples = self.folder / STATE, 0
        if path.exists():
            self.num_samples = int(_checkpoint.read(path)["['num_samples']"])
        if not self.num_samples:
            raise FileNotFoundError(
                f"there are no draws in {self.folder}; run_in_pieces writes them, after warmup and its first piece."
            )

    def get_samples(self, group_by_chain: bool = False) -> Draws:
        """Draws by site, (chains, draws, ...), or with these two axes as one."""
        return self._read("samples", group_by_chain)

    def get_extra_fields(self, group_by_chain: bool = False) -> Draws:
        """Extra fields of the run, likewise."""
        return self._read("extra_fields", group_by_chain)

    def _read(self, group: str, group_by_chain: bool) -> Draws:
        found = {}
        for name, path in _paths(self.folder).get(group, {}).items():
            whole = np.load(self.folder / path, mmap_mode="r")[:, : self.num_samples]
            # A view where all draws that were asked for are there.
            found[name] = whole if group_by_chain else whole.reshape(-1, *whole.shape[2:])
        return found


class Writer:
    """Writes the pieces of a run.

    Args:
        folder: is made if it is missing.
        num_samples: draws of each chain in all.
    """

    def __init__(self, folder: Path, num_samples: int):
        self.folder, self.num_samples = folder, num_samples
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, start: int, groups: dict[str, dict[str, Any]]) -> None:
        """Put draws (chains, draws, ...) at ``start``; whoever reads learns of them from the state alone."""
        # What a run left whose state is gone is no beginning of this one.
        paths = _paths(self.folder) if start else self._index(groups)
        for group, arrays in groups.items():
            for name, array in arrays.items():
                values = np.asarray(array)
                file = self._open(self.folder / paths[group][name], values, is_new=start == 0)
                file[:, start : start + values.shape[1]] = values
                file.flush()

    def _index(self, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
        """Sites have names that no file may have, hence an index."""
        paths = {
            group: {name: f"{group}_{number}.npy" for number, name in enumerate(arrays)}
            for group, arrays in groups.items()
        }
        unfinished = self.folder / (_INDEX + ".unfinished")
        unfinished.write_text(json.dumps(paths))
        os.replace(unfinished, self.folder / _INDEX)
        return paths

    def _open(self, path: Path, values: np.ndarray, *, is_new: bool) -> np.memmap:
        """The file of a site, with room for all draws."""
        shape = (len(values), self.num_samples, *values.shape[2:])
        if not is_new:
            before = np.load(path, mmap_mode="r+")
            if before.shape[1] >= self.num_samples:
                return before
        unfinished = path.with_suffix(".unfinished")
        file = np.lib.format.open_memmap(unfinished, mode="w+", dtype=values.dtype, shape=shape)
        if not is_new:
            file[:, : before.shape[1]] = before
        os.replace(unfinished, path)
        return file


def _paths(folder: Path) -> dict[str, dict[str, str]]:
    index = folder / _INDEX
    return json.loads(index.read_text()) if index.exists() else {}
