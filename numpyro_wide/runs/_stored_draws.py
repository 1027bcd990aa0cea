"""Draws in a folder, memory-mapped: one file for each site and extra field, and an index of them."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from numpyro_wide import _resume
from numpyro_wide.runs._files import ArrayFile

_INDEX, STATE = "draws.json", "state.npz"
Draws = dict[str, np.ndarray]
Groups = Mapping[str, Mapping[str, Any]]


class Pieces(NamedTuple):
    """Record of the pieces that are on the disk.

    Attributes:
        ends: numbers of draws of each chain at the end of each piece, (piece,).
        checksums: checksums of each piece of each file, piece by piece, (piece * file,).
        index_checksum: checksum of the index, (1,); none before there is one.
    """

    ends: np.ndarray
    checksums: np.ndarray
    index_checksum: np.ndarray

    @classmethod
    def none(cls) -> Self:
        """Return the record of a run that has no draws yet."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint32))

    @classmethod
    def read(cls, path: Path, stored: _resume.Stored) -> Self:
        """Return the record in the arrays of a state's file.

        Raises:
            ValueError: if there is none.
        """
        try:
            return cls(*(stored[f"['pieces'].{name}"] for name in cls._fields))
        except KeyError as missing:
            raise ValueError(
                f"{path} has no {missing}: it was not written by this version of run_in_pieces. Pass another folder to "
                "start anew."
            ) from None

    @property
    def num_samples(self) -> int:
        """Number of draws of each chain."""
        return int(self.ends[-1]) if self.ends.size else 0

    def followed_by(self, num_draws: int, checksums: list[int]) -> Self:
        """Return the record with one more piece."""
        ends = np.append(self.ends, self.num_samples + num_draws)
        return self._replace(ends=ends, checksums=np.append(self.checksums, np.asarray(checksums, np.uint32)))

    def of_files(self, num_files: int) -> np.ndarray:
        """Return the checksums by file, (file, piece)."""
        return self.checksums.reshape(self.ends.size, num_files).T


class StoredDraws:
    """Draws that :func:`run_in_pieces` has written; to be read as an ``MCMC`` after its run.

    Arrays are memory-mapped: they take memory where they are looked at, and the operating system may take it back.
    Each file is read through once, when its draws are first asked for, and refused if they are not those that were
    written. While several chains have fewer draws than were asked for, read them with ``group_by_chain=True``: to put
    chains end to end copies them into memory until the run is done. :func:`~numpyro_wide.diagnostics.to_arviz` takes
    this object instead of an ``MCMC``, and :class:`~numpyro_wide.ReadoutPredictive` its draws, which it then reads
    in blocks.

    Args:
        folder: the folder of the run.
        sampler: the kernel, which ``to_arviz`` asks for its model.

    Attributes:
        num_samples: number of draws of each chain that there are.

    Raises:
        FileNotFoundError: if nothing is stored there yet.
        ValueError: if a file of the folder is damaged.
    """

    def __init__(self, folder: str | os.PathLike, sampler: Any = None):
        self.folder, self.sampler = Path(folder), sampler
        path, self._pieces = self.folder / STATE, Pieces.none()
        if path.exists():
            self._pieces = Pieces.read(path, _resume.read(path))
        self.num_samples = self._pieces.num_samples
        if not self.num_samples:
            raise FileNotFoundError(
                f"there are no draws in {self.folder}; run_in_pieces writes them, after warmup and its first piece."
            )
        self._index = read_index(self.folder, self._pieces)
        self._checked: set[str] = set()

    def get_samples(self, group_by_chain: bool = False) -> Draws:
        """Return the draws by site.

        Args:
            group_by_chain: whether arrays are (chain, draw, ...), and not with these two axes as one.
        """
        return self._read("samples", group_by_chain)

    def get_extra_fields(self, group_by_chain: bool = False) -> Draws:
        """Return the extra fields of the run by name.

        Args:
            group_by_chain: whether arrays are (chain, draw, ...), and not with these two axes as one.
        """
        return self._read("extra_fields", group_by_chain)

    def _read(self, group: str, group_by_chain: bool) -> Draws:
        if group not in self._checked:
            check_files(self._index, self._pieces, [group])
            self._checked.add(group)
        found = {}
        for name, file in self._index[group].items():
            whole = file.open()[:, : self.num_samples]
            # A view where all draws that were asked for are there.
            found[name] = whole if group_by_chain else whole.reshape(-1, *whole.shape[2:])
        return found


class Writer:
    """Writer of the pieces of a run.

    Args:
        folder: the folder of the run, which exists.
        num_samples: number of draws of each chain in all.
        pieces: the record of those that are there.

    Raises:
        ValueError: if one of those is damaged.
        OSError: if the disk has no room for the rest.
    """

    def __init__(self, folder: Path, num_samples: int, pieces: Pieces):
        self.folder, self.num_samples, self.pieces = folder, num_samples, pieces
        self._index: Mapping[str, Mapping[str, ArrayFile]] = {}
        if not pieces.num_samples:
            return  # what a run left whose state is gone is no beginning of this one
        self._index = read_index(folder, pieces)
        check_files(self._index, pieces, self._index)
        if pieces.num_samples < num_samples:
            for group, name in _names(self._index):
                self._index[group][name].grow(num_samples)

    def write(self, groups: Groups) -> None:
        """Append draws (chain, draw, ...); whoever reads learns of them from the record alone, once it is saved."""
        arrays = {group: {name: np.asarray(array) for name, array in of.items()} for group, of in groups.items()}
        if not self.pieces.num_samples:
            self._index = self._create(arrays)
        start = self.pieces.num_samples
        places = _names(self._index)
        checksums = [self._index[group][name].write(start, arrays[group][name]) for group, name in places]
        group, name = places[0]
        self.pieces = self.pieces.followed_by(arrays[group][name].shape[1], checksums)

    def _create(self, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, ArrayFile]]:
        """Make the files, and an index of them, since sites have names that no file may have."""
        index = {
            group: {
                name: ArrayFile(self.folder / f"{group}_{number}.npy", values.dtype, _without_draws(values.shape))
                for number, (name, values) in enumerate(of.items())
            }
            for group, of in arrays.items()
        }
        for group, name in _names(index):
            index[group][name].create(self.num_samples)
        text = json.dumps({group: {name: file.to_json() for name, file in of.items()} for group, of in index.items()})
        unfinished = self.folder / (_INDEX + ".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, self.folder / _INDEX)
        self.pieces = self.pieces._replace(index_checksum=np.asarray([zlib.crc32(text.encode())], np.uint32))
        return index


def _without_draws(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:])


def _names(index: Mapping[str, Mapping[str, ArrayFile]]) -> list[tuple[str, str]]:
    """Return group and name of each file, in the order of their checksums."""
    return [(group, name) for group in sorted(index) for name in index[group]]


def read_index(folder: Path, pieces: Pieces) -> dict[str, dict[str, ArrayFile]]:
    """Return the files of a folder, by group and by name.

    Args:
        folder: the folder of a run.
        pieces: the record of what was written there.

    Raises:
        ValueError: if the index is missing or damaged.
    """
    path = folder / _INDEX
    try:
        text = path.read_bytes()
        if zlib.crc32(text) != pieces.index_checksum:
            raise ValueError("another checksum than when it was written")
        return {
            group: {name: ArrayFile.from_json(folder, known) for name, known in files.items()}
            for group, files in json.loads(text).items()
        }
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}, which says what the files of draws hold, is missing or damaged ({error}); restore it from "
            "a copy, or pass another folder to start anew."
        ) from error


def check_files(index: Mapping[str, Mapping[str, ArrayFile]], pieces: Pieces, groups: Iterable[str]) -> None:
    """Refuse files whose draws are not those that were written.

    Args:
        index: the files of a folder.
        pieces: the record of what was written.
        groups: the groups of files to look at.

    Raises:
        ValueError: if a file is missing, damaged, or of another size.
    """
    places = _names(index)
    for (group, name), checksums in zip(places, pieces.of_files(len(places)), strict=True):
        if group in groups:
            index[group][name].check(pieces.ends, checksums)
