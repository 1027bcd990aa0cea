"""Files of arrays (chain, draw, ...) that grow by pieces, on room that is reserved, with a checksum for each piece.

They are written by ordinary calls, not through memory maps: a disk that is full is then an error and not a signal that
ends the process.
"""

import errno
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

_ZEROS = bytes(2**20)
_REMEDY = "restore the folder from a copy, or pass another folder to start anew."


@dataclass(frozen=True)
class ArrayFile:
    """A file of NumPy's format that holds draws of one site, or one extra field.

    Attributes:
        path: the path of the file.
        dtype: the type of the numbers. NumPy's format does not know JAX's own, such as bfloat16: the file has their
            bits, as whole numbers.
        shape: (chain, ...), the shape of one draw of all chains.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, folder: Path, known: dict[str, Any]) -> "ArrayFile":
        """Return the file that :meth:`to_json` described."""
        return cls(folder / known["file"], jnp.dtype(known["dtype"]), tuple(known["shape"]))

    def to_json(self) -> dict[str, Any]:
        """Return the description of the file for the folder's index."""
        return {"file": self.path.name, "dtype": self.dtype.name, "shape": list(self.shape)}

    @property
    def _stored(self) -> np.dtype:
        return np.dtype(f"u{self.dtype.itemsize}") if self.dtype.kind == "V" else self.dtype

    @property
    def _row_bytes(self) -> int:
        """Bytes of one draw of one chain."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def create(self, capacity: int) -> None:
        """Make the file anew, with room for as many draws of each chain."""
        self._make(capacity, lambda file: None)

    def grow(self, capacity: int) -> None:
        """Make room for as many draws of each chain, if there is less."""
        before = self.open()
        if before.shape[1] >= capacity:
            return

        def copy(file: IO[bytes]) -> None:
            start = file.tell()
            for chain, draws in enumerate(before):
                file.seek(start + chain * capacity * self._row_bytes)
                file.write(np.ascontiguousarray(draws).view(self._stored).data)

        self._make(capacity, copy)

    def _make(self, capacity: int, fill: Any) -> None:
        """Write a new file and replace this one by it; this one stays as it is if the disk is full."""
        shape = (self.shape[0], capacity, *self.shape[1:])
        header = {"descr": np.lib.format.dtype_to_descr(self._stored), "fortran_order": False, "shape": shape}
        unfinished = self.path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                start = file.tell()
                _reserve(file, start, self.shape[0] * capacity * self._row_bytes)
                file.seek(start)
                fill(file)
            os.replace(unfinished, self.path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise no_room(error, self.path, f"{capacity} draws of shape {shape[2:]} and {shape[0]} chains") from error

    def open(self) -> np.memmap:
        """Return the draws that there is room for, (chain, capacity, ...), memory-mapped.

        Raises:
            ValueError: if the file is missing, has a damaged header, or another size than the header says.
        """
        try:
            found = np.lib.format.open_memmap(self.path, mode="r")
        except Exception as error:  # whatever the reader makes of a damaged file
            raise ValueError(f"{self.path} cannot be read as an array ({error}); {_REMEDY}") from error
        size, expected = self.path.stat().st_size, found.offset + found.nbytes
        if found.ndim < 2 or found.dtype != self._stored or (found.shape[0], *found.shape[2:]) != self.shape:
            came = f"an array of {found.dtype} and shape {found.shape}"
            raise ValueError(
                f"{self.path} must hold {self.dtype.name} draws, (chain, draw, ...), but is {came}; {_REMEDY}"
            )
        if size != expected:
            raise ValueError(f"{self.path} must have {expected} bytes, but has {size}; {_REMEDY}")
        viewed: Any = found.view(self.dtype)
        return viewed

    def write(self, start: int, draws: np.ndarray) -> int:
        """Write draws (chain, draw, ...) from ``start`` on; return their checksum."""
        room = self.open()
        values = np.ascontiguousarray(draws).view(self._stored)
        try:
            with self.path.open("r+b") as file:
                for chain, part in enumerate(values):
                    file.seek(room.offset + (chain * room.shape[1] + start) * self._row_bytes)
                    file.write(part.data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # file systems that copy on write reserve nothing
            raise no_room(error, self.path, f"{draws.shape[1]} more draws") from error
        return zlib.crc32(values.data)

    def check(self, ends: np.ndarray, checksums: np.ndarray) -> None:
        """Refuse a file whose draws are not those that were written.

        Args:
            ends: numbers of draws of each chain at the end of each piece, (piece,).
            checksums: what :meth:`write` returned for each piece, (piece,).

        Raises:
            ValueError: if a piece is missing or has another checksum.
        """
        found = self.open()
        if found.shape[1] < ends[-1]:
            raise ValueError(
                f"{self.path} must hold {ends[-1]} draws of each chain, but holds {found.shape[1]}; {_REMEDY}"
            )
        for start, end, checksum in zip([0, *ends[:-1]], ends, checksums, strict=True):
            if zlib.crc32(np.ascontiguousarray(found[:, start:end]).view(self._stored).data) != checksum:
                raise ValueError(
                    f"{self.path} is damaged: its draws {start} to {end - 1} are not those that were written there; "
                    f"{_REMEDY}"
                )


def _reserve(file: IO[bytes], start: int, size: int) -> None:
    """Take the room on the disk now: what is taken by writing alone may be missing later."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            if size:
                os.posix_fallocate(file.fileno(), start, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    for written in range(0, size, len(_ZEROS)):
        file.write(_ZEROS[: size - written])
    file.flush()


def no_room(error: OSError, path: Path, what: str) -> OSError:
    """Return the error of a disk that does not take what is to be written, with what to do about it."""
    why = os.strerror(error.errno) if error.errno else str(error)
    return OSError(
        error.errno,
        f"no room for {what} ({why}); make room there and call again, which continues after the last piece, or ask for "
        "fewer draws, thin them, or store functions of them (numpyro_wide.mcmc.reduced)",
        str(path),
    )


def check_free(folder: Path, size: int) -> None:
    """Refuse to begin what the disk has no room for.

    Args:
        folder: a folder on the disk.
        size: the number of bytes that will be written there.

    Raises:
        OSError: if fewer are free.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise no_room(OSError(errno.ENOSPC, ""), folder, f"all draws: they take {size} bytes, of which {free} are free")
