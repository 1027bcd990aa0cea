"""Chains that are run in pieces and stored in a folder."""

import copy
import errno
import functools
import json
import operator
import os
import shutil
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from tqdm.auto import tqdm

from numpyro_wide import _resume
from numpyro_wide._checks import check_key, kind_of, whole_number
from numpyro_wide._compile import digest, partition, program_digest

# The operating system holds the lock, and takes it back from a process that is killed. Who holds it stands in a file
# beside it, since some systems let nobody else read a locked file.
_LOCK, _HOLDER = "run.lock", "run.holder.json"


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; make the folder if it is missing.

    Args:
        folder: the folder of a run.

    Raises:
        RuntimeError: if another process, or another thread, holds the lock.
    """
    from filelock import FileLock, Timeout  # needed by long runs alone

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RuntimeError(
            f"the folder {folder} is in use by {_holder(folder)}. Two runs in one folder would write over one another: "
            "wait for that one or end it, or pass another folder. StoredDraws reads the draws while the run continues."
        ) from None
    try:
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        with suppress(OSError):  # a full disk is told of when the draws do not fit
            (folder / _HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    """Describe who holds the lock, as far as is known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    return "another process, which is just beginning or ending"


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


# Entries of the identity that are digests of programs, which other versions of libraries write in other ways.
PROGRAMS = ("model or kernel", "choice of what is stored")
_PLAIN = (str, bytes, bool, int, float, complex, np.generic, np.ndarray, Array)


class Call(NamedTuple):
    """Arguments of a run, as ``MCMC.run`` takes them.

    Attributes:
        rng_key: the PRNG key of the whole run.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        extra_fields: names of fields of the state that are stored with the draws.
        init_params: first position, or None.
    """

    rng_key: Array
    args: tuple
    kwargs: dict[str, Any]
    extra_fields: tuple[str, ...]
    init_params: Any


class Identity(NamedTuple):
    """Knowledge of a run before its first step.

    Attributes:
        state: a state like those of the run.
        text: digests of what decides where the run goes, in JSON.
        num_bytes: bytes of what is stored of one draw of all chains.
    """

    state: Any
    text: str
    num_bytes: int


def identify(mcmc: MCMC, call: Call) -> Identity:
    """Look at a run before it is begun or taken up.

    Args:
        mcmc: the chains.
        call: the arguments of the run.

    Raises:
        TypeError: if what is to be stored is not an array of numbers.
        ValueError: if positions are not a dictionary of sites.
    """
    # NumPyro's kernels may be initialised once for vectorised chains, and MCMC does that to its own.
    sampler = copy.deepcopy(mcmc.sampler)
    state = _first_state(mcmc, sampler, call)
    is_batched = mcmc.num_chains > 1 and mcmc.chain_method != "vectorized"
    one = jax.tree.map(lambda leaf: leaf[0], state) if is_batched else state
    position = operator.attrgetter(sampler.sample_field)(state)
    if mcmc.num_chains > 1:
        position = jax.tree.map(lambda leaf: leaf[0], position)
    to_sites = mcmc.postprocess_fn or sampler.postprocess_fn(call.args, call.kwargs)
    sites = jax.eval_shape(to_sites, position)
    num_bytes = mcmc.num_chains * _bytes_of_sites(sites) + _bytes_of_fields(sampler, state, call.extra_fields)

    def step(state: Any) -> Any:
        # Data are known, as in MCMC: models may look at them for example to know how many groups there are.
        return sampler.sample(state, call.args, call.kwargs)

    arrays, rest = partition((call.args, call.kwargs))
    model_or_kernel, stored = PROGRAMS
    text = json.dumps(
        {
            "rng_key": digest(call.rng_key),
            "num_warmup, num_chains, thinning or init_params": digest(
                mcmc.num_warmup, mcmc.num_chains, mcmc.thinning, jax.tree.leaves(call.init_params)
            ),
            "data or other arguments": digest(rest.leaves, str(rest.structure), arrays),
            model_or_kernel: program_digest(step, one),
            stored: program_digest(to_sites, position) + digest(sorted(sites), call.extra_fields),
            "setting of the kernel": digest(_settings(sampler)),
            "versions": _resume.versions(),
        }
    )
    return Identity(state, text, num_bytes)


def _first_state(mcmc: MCMC, sampler: MCMCKernel, call: Call) -> Any:
    """Return a state like those of the run."""
    is_single, is_vectorised = mcmc.num_chains == 1, mcmc.chain_method == "vectorized"
    keys = call.rng_key if is_single else jax.random.split(call.rng_key, mcmc.num_chains)
    if is_single or is_vectorised:
        return sampler.init(keys, mcmc.num_warmup, call.init_params, call.args, call.kwargs)
    first = jax.tree.map(lambda leaf: leaf[0], call.init_params)
    state = sampler.init(keys[0], mcmc.num_warmup, first, call.args, call.kwargs)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mcmc.num_chains, *jnp.shape(leaf))), state)


def _settings(kernel: MCMCKernel) -> dict[str, Any]:
    """Return what a kernel keeps of its arguments, functions apart.

    A step size or a mass that is not adapted is a number of the state, and so not seen in the program of a step.
    """
    found: dict[str, Any] = {}
    for name, value in vars(kernel).items():
        kept = (value.args, value.keywords) if isinstance(value, functools.partial) else value
        leaves, structure = jax.tree.flatten(kept)
        if all(isinstance(leaf, (*_PLAIN, MCMCKernel)) for leaf in leaves):
            # Kernels within a kernel, such as the blocks of Gibbs, have settings themselves.
            own = [_settings(leaf) if isinstance(leaf, MCMCKernel) else leaf for leaf in leaves]
            found[name] = own, str(structure)
    return found


def _bytes_of_sites(sites: Any) -> int:
    """Return the bytes of one draw of one chain."""
    if not isinstance(sites, dict):
        raise ValueError(f"positions must be a dictionary of sites, but are {kind_of(sites)}.")
    return sum(_bytes_of_array(f"site {name!r}", leaf) for name, leaf in sites.items())


def _bytes_of_fields(sampler: MCMCKernel, state: Any, extra_fields: tuple[str, ...]) -> int:
    """Return the bytes of the fields of one draw of all chains."""
    size = 0
    for name in {*sampler.default_fields, *extra_fields}:
        if name.lstrip("~").split(".")[0] == sampler.sample_field:
            continue
        value = operator.attrgetter(name)(state)
        if not isinstance(value, Array):
            raise TypeError(
                f"extra fields must be arrays, but {name!r} is {kind_of(value)}; name one of its parts, "
                f"such as '{name}.step_size'."
            )
        size += _bytes_of_array(f"extra field {name!r}", value)
    return size


def _bytes_of_array(what: str, array: Any) -> int:
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{what} has the type {array.dtype}, which no file of numbers holds; leave it out, or store "
            "jax.random.key_data of it."
        )
    return array.size * array.dtype.itemsize


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


def run_in_pieces(
    mcmc: MCMC,
    folder: str | os.PathLike,
    rng_key: Array,
    *model_args: Any,
    num_samples: int,
    extra_fields: tuple[str, ...] = (),
    init_params: Any = None,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> StoredDraws:
    """Run NumPyro's ``MCMC``, with any kernel, for longer than memory or patience would allow.

    ``mcmc.num_samples`` draws at a time are written to ``folder``, with the state after them: memory does not grow with
    the number of draws. A process that is killed, at whatever moment, loses the piece that it was at; called again with
    the same arguments, this continues from there, and ends with the same draws, bit for bit, as a run that was never
    stopped. Warmup is done once, and its end is the first state that is written. Called with a larger ``num_samples``,
    a finished run continues.

    One process at a time runs in a folder; a second one is refused. What is there already is read through; the run
    continues only if it is what was written. Room on the disk is taken before it is used: where there is none, nothing
    is lost.

    Args:
        mcmc: the chains; its ``num_samples`` is the size of a piece, and its warmup, chains and chain method those of
            the run.
        folder: a folder of this run alone, on a disk with room for all draws.
        rng_key: a PRNG key.
        *model_args: positional arguments of the model, as ``MCMC.run`` takes them.
        num_samples: number of draws of each chain in all, a multiple of the piece's size; before thinning, as NumPyro
            counts. Where there are more already, they stay.
        extra_fields: names of fields of the state to store beside the draws, as ``MCMC.run`` takes them; arrays all.
        init_params: first position in unconstrained coordinates, as ``MCMC.run`` takes it.
        progress_bar: whether to show a bar over the whole.
        **model_kwargs: keyword arguments of the model.

    Returns:
        The draws, memory-mapped, to be read as an ``MCMC`` after its run.

    Raises:
        TypeError: if ``mcmc`` is not an ``MCMC``, ``rng_key`` not a PRNG key, or a site or an extra field not an array
            of numbers.
        ValueError: if ``num_samples`` is no multiple of the piece's size, the positions are not a dictionary of sites,
            a file of the folder is damaged, or the folder holds a run of another model, kernel, key or data.
        RuntimeError: if another process runs in the folder.
        OSError: if the disk is full; once there is room, the same call continues from the last piece.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, tempfile, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.runs import run_in_pieces
        >>> def model(y=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", 3):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=20, progress_bar=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draws = run_in_pieces(mcmc, folder, jax.random.key(0), y=jnp.ones(3), num_samples=60)
        ...     draws.get_samples()["mean"].shape
        (60,)
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(f"mcmc must be a numpyro.infer.MCMC, but is {kind_of(mcmc)}.")
    check_key("rng_key", rng_key, "run_in_pieces(mcmc, folder, rng_key, x, y, num_samples=...)", several=True)
    whole_number("num_samples", num_samples)
    # Every piece is a run of the same compiled program, so that all are of one size.
    if num_samples % mcmc.num_samples or mcmc.num_samples % mcmc.thinning:
        raise ValueError(
            f"num_samples must be a multiple of the piece's size, mcmc.num_samples={mcmc.num_samples}, and that one of "
            f"thinning={mcmc.thinning}, but is {num_samples}."
        )
    folder, total = Path(folder), num_samples // mcmc.thinning
    run = _Run(mcmc, folder, Call(rng_key, model_args, model_kwargs, tuple(extra_fields), init_params))
    with sole_use(folder), tqdm(total=total, desc="sample", disable=not progress_bar) as bar:
        try:
            run.go_on(total, bar)
        finally:
            # However it ends, for example by Ctrl-C: its next run, of other data perhaps, would be without warmup.
            mcmc.post_warmup_state = None
    return StoredDraws(folder, mcmc.sampler)


class _Run:
    """Chains, and the folder that holds their latest state.

    Args:
        mcmc: the chains.
        folder: the folder of the run.
        call: the arguments of the run.
    """

    def __init__(self, mcmc: MCMC, folder: Path, call: Call):
        self.mcmc, self.folder, self.call = mcmc, folder, call
        self.identity = identify(mcmc, call)
        self.state: Any = None

    def go_on(self, total: int, bar: tqdm) -> None:
        """Append pieces until there are as many draws of each chain."""
        path, pieces = self.folder / STATE, Pieces.none()
        is_new = not path.exists()
        if not is_new:
            pieces = self._take_up(path)
        done, piece = pieces.num_samples, self.mcmc.num_samples // self.mcmc.thinning
        if done < total and (total - done) % piece:
            raise ValueError(
                f"there are {done} draws in {self.folder}, and pieces of {piece} do not lead from there to {total}; "
                "choose mcmc.num_samples and num_samples so that they do."
            )
        writer = Writer(self.folder, total, pieces)
        if is_new:
            # Before the warmup: a disk that will not do is to be told of at once, not after hours.
            check_free(self.folder, total * self.identity.num_bytes)
            self._warm_up()
            self._save(writer.pieces)
        bar.update(min(done, total))
        while writer.pieces.num_samples < total:
            # Draws first, then the state: a piece on disk that no state counts is drawn again, and overwritten. The
            # other way round an interruption would lose draws.
            writer.write(self._next_piece())
            self._save(writer.pieces)
            bar.update(piece)

    def _take_up(self, path: Path) -> Pieces:
        """Take up the latest state; return the record of the pieces before it."""
        stored = _resume.read(path)
        pieces = Pieces.read(path, stored)
        _resume.refuse_another_run(
            f"the folder {self.folder}", str(stored["['run']"]), self.identity.text, kind="folder", programs=PROGRAMS
        )
        self.state = _resume.restore(path, stored, self._record(self.identity.state, pieces))["state"]
        return pieces

    def _warm_up(self) -> None:
        call = self.call
        options = {"extra_fields": call.extra_fields, "init_params": call.init_params}
        self.mcmc.warmup(call.rng_key, *call.args, **options, **call.kwargs)
        self.state = self.mcmc.last_state

    def _save(self, pieces: Pieces) -> None:
        path = self.folder / STATE
        try:
            _resume.save(path, self._record(self.state, pieces))
        except OSError as error:
            raise no_room(error, path, "the state of the chains") from error

    def _record(self, state: Any, pieces: Pieces) -> dict[str, Any]:
        return {"run": self.identity.text, "pieces": pieces, "state": state}

    def _next_piece(self) -> dict[str, dict[str, Any]]:
        """Draw the next piece: draws (chain, draw, ...) by site, and extra fields."""
        mcmc, call, shown = self.mcmc, self.call, self.mcmc.progress_bar
        # NumPyro continues from this state without warmup. The bar of the whole run takes the place of one a piece.
        mcmc.post_warmup_state, mcmc.progress_bar = self.state, False
        try:
            # A kernel with a potential function asks for a position before it looks at the state.
            options = {"extra_fields": call.extra_fields, "init_params": call.init_params}
            mcmc.run(self.state.rng_key, *call.args, **options, **call.kwargs)
        finally:
            mcmc.progress_bar = shown
        self.state = mcmc.last_state
        samples, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
        return {"samples": samples, "extra_fields": fields}
