"""Kernel matrices tile by tile: in memory, or in files from which a later call continues."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._programs import digest, program_digest
from numpyro_wide._resume import read, refuse_another_run, save, versions

_PATIENCE = 10  # seconds of work before a progress bar shows


@dataclass(frozen=True)
class Tiles:
    """Division of a matrix into tiles of one size, the last of a row or column shifted back to fit in.

    Attributes:
        row_starts: first rows.
        column_starts: first columns.
        size: number of rows and columns of a tile at most; None for all.
        is_symmetric: whether tiles below the diagonal are those above it.
    """

    row_starts: tuple[int, ...]
    column_starts: tuple[int, ...]
    size: int | None
    is_symmetric: bool

    @classmethod
    def of(cls, inputs: Sequence[Array], size: int | None) -> "Tiles":
        """Divide the kernel of inputs (x1,) or (x1, x2)."""
        return cls(_starts(len(inputs[0]), size), _starts(len(inputs[-1]), size), size, len(inputs) == 1)

    @property
    def is_one(self) -> bool:
        """Whether the matrix is one tile."""
        return len(self.row_starts) == len(self.column_starts) == 1

    def arguments(self, inputs: Sequence[Array], row: int, column: int) -> tuple[Array, Array, Array, Array]:
        """Return the inputs of a tile and their places, by the indices of the tile."""
        x1, x2 = inputs[0], inputs[-1]
        rows = _places(self.row_starts[row], len(x1), self.size)
        columns = _places(self.column_starts[column], len(x2), self.size)
        return x1[rows], x2[columns], jnp.arange(rows.start, rows.stop), jnp.arange(columns.start, columns.stop)

    def rows(self, first: int, progress_bar: bool) -> Iterator[int]:
        """Yield the indices of rows of tiles from ``first`` on, with a bar if that takes long."""
        from tqdm.auto import tqdm  # shows nothing of short work

        is_off = not progress_bar or "CI" in os.environ
        indices = range(first, len(self.row_starts))
        yield from tqdm(indices, "rows of blocks", len(self.row_starts), initial=first, delay=_PATIENCE, disable=is_off)

    def fill_row(
        self,
        program: Callable,
        inputs: Sequence[Array],
        row: int,
        matrices: Sequence[np.ndarray],
        devices: Sequence = (),
    ) -> float:
        """Compute a row of tiles, write it, and return the largest error.

        Args:
            program: function from the arguments of a tile to its numbers and their error.
            inputs: (x1,) or (x1, x2).
            row: index of the row of tiles.
            matrices: where the numbers go.
            devices: devices that take a tile each, again and again; none for JAX's default.
        """
        error = 0.0
        columns, at_once = range(row if self.is_symmetric else 0, len(self.column_starts)), max(1, len(devices))
        for start in range(0, len(columns), at_once):
            arguments = [self.arguments(inputs, row, column) for column in columns[start : start + at_once]]
            # All are started before the first is waited for; more than one a device would take the memory of them all.
            placed = list(map(jax.device_put, arguments, devices)) if devices else arguments
            found = [program(*values) for values in placed]
            for (_, _, *places), (*parts, share) in zip(arguments, found, strict=True):
                self._write([slice(int(at[0]), int(at[-1]) + 1) for at in places], parts, matrices)
                error = max(error, float(share))
        return error

    def _write(self, place: list[slice], parts: Sequence[Array], matrices: Sequence[np.ndarray]) -> None:
        """Write a tile, and its mirror image."""
        rows, columns = place
        for matrix, part in zip(matrices, parts, strict=True):
            matrix[rows, columns] = part
            if self.is_symmetric:
                matrix[columns, rows] = np.asarray(part).T


class MatrixFiles:
    """Two matrices in files, and how many rows of tiles they hold so far.

    Args:
        path: folder.
        shape: of each matrix.
        dtype: of their numbers.

    Raises:
        ValueError: if the path is a file.
    """

    def __init__(self, path: Any, shape: tuple[int, int], dtype: Any):
        self.folder = Path(path)
        if self.folder.is_file():
            raise ValueError(f"the path of a folder is needed, but {self.folder} is a file.")
        self.matrices: list[np.ndarray] = []
        self._shape, self._dtype, self._identity = shape, np.dtype(dtype), ""
        self._checksums: list[list[int]] = []

    def begin(self, tiles: Tiles, identity: dict[str, Any]) -> int:
        """Open the files, and return the first row of tiles that is missing.

        Raises:
            ValueError: if the folder holds other kernels.
        """
        # In the order of blame: the size of the blocks is in the program, too.
        self._identity, self._tiles = json.dumps({"block size": repr(tiles)} | identity), tiles
        first, sums = 0, None
        if self._progress.exists():
            stored = read(self._progress)
            own = self._identity
            refuse_another_run(
                f"the folder {self.folder}", str(stored["['run']"]), own, kind="folder", programs=["network"]
            )
            first, sums = int(stored["['num_rows']"]), stored["['checksums']"]
        mode = "w+" if sums is None else "r+"
        for path in self._paths:
            if sums is not None:
                self._refuse_other_file(path)
            shape = self._shape if sums is None else None
            self.matrices.append(np.lib.format.open_memmap(path, mode, dtype=self._dtype, shape=shape))
        if sums is not None:
            self._checksums = sums.tolist()
            if self._checksums != [self._checksum(row) for row in range(first)]:
                self._refuse("the numbers in its files are not those that were written")
        return first

    def finish(self, row: int) -> None:
        """Note that a row of tiles is in the files."""
        for matrix in self.matrices:
            matrix.flush()  # type: ignore[attr-defined]
        # The last tiles are shifted back, over rows of those before.
        again = max(0, row - 1)
        self._checksums[again:] = [self._checksum(index) for index in range(again, row + 1)]
        done = {"num_rows": np.array(row + 1), "checksums": np.array(self._checksums, np.int64)}
        save(self._progress, {"run": self._identity, **done})

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Map both matrices, read-only."""
        first, second = (np.load(path, mmap_mode="r") for path in self._paths)
        return first, second

    def _refuse_other_file(self, path: Path) -> None:
        """Refuse a file that is not of the matrix' shape and type, or not as long."""
        try:
            matrix = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            self._refuse(f"{path.name} cannot be read", error)
        if matrix.shape != self._shape or matrix.dtype != self._dtype:
            self._refuse(f"{path.name} holds {matrix.dtype} {matrix.shape}, not {self._dtype} {self._shape}")

    def _refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        remedy = "remove the folder, and run again"
        raise ValueError(f"the folder {self.folder} is damaged: {what}; {remedy}.") from error

    def _checksum(self, index: int) -> list[int]:
        """Return a checksum of a row of tiles, and of the column that mirrors it, of each matrix."""
        size = self._tiles.size or max(self._shape)
        rows = slice(index * size, (index + 1) * size)
        found = []
        for matrix in self.matrices:
            is_mirrored = self._tiles.is_symmetric
            parts = (matrix[rows, rows.start :], matrix[rows.start :, rows].T) if is_mirrored else (matrix[rows],)
            checksum = 0
            for part in parts:
                checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
            found.append(checksum)
        return found

    @property
    def _progress(self) -> Path:
        return self.folder / "progress.npz"

    @property
    def _paths(self) -> list[Path]:
        return [self.folder / "nngp.npy", self.folder / "ntk.npy"]


def identity_of_run(tile: Callable, arguments: Sequence[Array], inputs: Sequence[Array]) -> dict[str, Any]:
    """Return what tells one run from another: the inputs, and what the network computes of them."""
    network = program_digest(tile, *arguments)
    return {"set of inputs": digest(*map(np.asarray, inputs)), "network": network, "versions": versions()}


def _starts(num: int, size: int | None) -> tuple[int, ...]:
    if size is None or size >= num:
        return (0,)
    return tuple(min(start, num - size) for start in range(0, num, size))


def _places(start: int, num: int, size: int | None) -> slice:
    return slice(start, num if size is None else min(start + size, num))
