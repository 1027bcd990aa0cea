"""Chains in pieces: a file for each site, and one for the last state."""

import copy
import json
import operator
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.parse import quote
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_wide._checks import check_key, kind_of, progress, whole_number

_STATE = "state.npz"
_PLAIN = (str, bytes, bool, int, float, complex, np.generic, np.ndarray, Array)

T = TypeVar("T")
Draws = dict[str, np.ndarray]
Checksums = dict[str, list[int]]  # of the pieces, by file


class StoredDraws:
    """Draws of :func:`run_in_pieces`, memory-mapped, read as an ``MCMC`` after its run.

    Args:
        folder: the folder of the run.
        sampler: the kernel, for :func:`~numpyro_wide.diagnostics.to_arviz`.

    Attributes:
        num_samples: number of draws of each chain.
    """

    def __init__(self, folder: str | os.PathLike, sampler: MCMCKernel | None = None):
        self.folder, self.sampler = Path(folder), sampler
        path = self.folder / _STATE
        stored: Draws = read(path) if path.exists() else {"ends": np.zeros(1, int)}
        self._ends: list[int] = stored["ends"].tolist()
        self.num_samples: int = self._ends[-1]
        if not self.num_samples:
            raise FileNotFoundError(f"there are no draws in {self.folder}; run_in_pieces writes them.")
        self._checksums: Checksums = json.loads(str(_entry(path, stored, "checksums")))
        self._mapped: dict[str, Draws] = {}

    def get_samples(self, group_by_chain: bool = False) -> Draws:
        """Return the draws by site, (chain, draw, ...) or with these axes as one."""
        return self._get("samples/", group_by_chain)

    def get_extra_fields(self, group_by_chain: bool = False) -> Draws:
        """Return the extra fields by name, (chain, draw, ...) or with these axes as one."""
        return self._get("extra_fields/", group_by_chain)

    def _get(self, group: str, group_by_chain: bool) -> Draws:
        if group not in self._mapped:
            self._mapped[group] = {
                name.removeprefix(group): _from_stored(_mapped(self.folder, name, self._ends, checksums))
                for name, checksums in self._checksums.items()
                if name.startswith(group)
            }
        return {
            name: x if group_by_chain else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            for name, x in self._mapped[group].items()
        }


def run_in_pieces(
    mcmc: MCMC,
    folder: str | os.PathLike,
    rng_key: Array,
    *model_args: object,
    num_samples: int,
    extra_fields: tuple[str, ...] = (),
    init_params: object = None,
    progress_bar: bool = True,
    **model_kwargs: object,
) -> StoredDraws:
    """Run NumPyro's ``MCMC`` in pieces of ``mcmc.num_samples`` draws, kept in ``folder`` with the state.

    The same call continues an interrupted run, with the same draws, bit for bit; a larger ``num_samples`` extends it.

    Args:
        mcmc: the chains; ``num_samples`` is the size of a piece.
        folder: a folder of this run alone.
        rng_key: a PRNG key.
        *model_args: arguments of the model.
        num_samples: number of draws of each chain in all, before thinning, a multiple of the piece's size.
        extra_fields: names of fields of the state to store.
        init_params: first position.
        progress_bar: whether to show a bar.
        **model_kwargs: keyword arguments.

    Raises:
        ValueError: if a file is damaged, or the folder holds a run of another model, kernel, key or data. What
            functions in Python compute within JAX's programs, as in ``jax.pure_callback``, is not looked at.
        RuntimeError: if another process runs in the folder.
        OSError: if the disk is full; make room and call again.

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
    # One compiled program: pieces are of one size.
    if num_samples % mcmc.num_samples or mcmc.num_samples % mcmc.thinning:
        raise ValueError(
            f"num_samples must be a multiple of the piece's size, mcmc.num_samples={mcmc.num_samples}, and that of "
            f"thinning={mcmc.thinning}, but is {num_samples}."
        )
    folder, total, size = Path(folder), num_samples // mcmc.thinning, mcmc.num_samples // mcmc.thinning
    # Kernels with a potential function always ask for a position.
    options: dict[str, Any] = {"extra_fields": tuple(extra_fields), "init_params": init_params}
    shown = mcmc.progress_bar
    template, identity = _identify(mcmc, rng_key, model_args, model_kwargs, **options)
    with sole_use(folder), progress(total=total, desc="sample", shown=progress_bar) as bar:
        try:
            if (folder / _STATE).exists():
                state, ends, checksums = _resume(folder, template, identity)
                if ends[-1] < total and (total - ends[-1]) % size:
                    raise ValueError(f"pieces of {size} do not lead from the {ends[-1]} draws in {folder} to {total}.")
                bar.update(min(ends[-1], total))
            else:
                mcmc.warmup(rng_key, *model_args, **options, **model_kwargs)
                state, ends, checksums = mcmc.last_state, [0], {}
                _save(folder, state, ends, checksums, identity)
            mcmc.progress_bar = False  # one bar for all pieces
            while ends[-1] < total:
                mcmc.post_warmup_state = state  # without warmup
                mcmc.run(state.rng_key, *model_args, **options, **model_kwargs)
                state = mcmc.last_state
                groups = {"samples": mcmc.get_samples(True), "extra_fields": mcmc.get_extra_fields(True)}
                arrays = {f"{group}/{name}": x for group, fields in groups.items() for name, x in fields.items()}
                # Draws first: an uncounted piece is drawn again.
                for name, draws in arrays.items():
                    checksums.setdefault(name, []).append(_append(_path(folder, name), draws, ends[-1], total))
                ends.append(ends[-1] + size)
                _save(folder, state, ends, checksums, identity)
                bar.update(size)
        finally:
            mcmc.progress_bar = shown
            # Even after Ctrl-C: the next run needs its warmup.
            mcmc.post_warmup_state = None
    return StoredDraws(folder, mcmc.sampler)


def sole_use(folder: Path) -> AbstractContextManager:
    """Lock a folder, made if missing, until the context ends; refuse a folder in use."""
    from filelock import FileLock, Timeout  # optional

    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / "run.lock").acquire(timeout=0)
    except Timeout:
        raise RuntimeError(f"{folder} is in use by another run: wait for it, or pass another folder.") from None


def _path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='')}.npy"


def _append(path: Path, draws: ArrayLike, start: int, total: int) -> int:
    """Write draws, (chain, draw, ...), to their places in a file with room for ``total``; return their checksum."""
    array = _as_stored(draws)
    end = start + array.shape[1]
    with _without_unfinished(path):
        existing = np.load(path, mmap_mode="r") if start else array[:, :0]
        if not start or existing.shape[1] < end:
            unfinished = path.with_name(path.name + ".unfinished")
            shape = (array.shape[0], max(end, total), *array.shape[2:])
            mapped = np.lib.format.open_memmap(unfinished, "w+", array.dtype, shape)
            mapped[:, :start] = existing[:, :start]
            mapped.flush()
            os.replace(unfinished, path)
        mapped = np.load(path, mmap_mode="r")
        with path.open("r+b") as file:  # a map would end the process where the disk is full
            for chain, values in enumerate(array):
                file.seek(mapped.offset + (chain * mapped.shape[1] + start) * array[:1, :1].nbytes)
                file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())  # against a loss of power
    return crc32(array.tobytes())


def _mapped(folder: Path, name: str, ends: list[int], checksums: list[int]) -> np.ndarray:
    """Map the draws of a file, (chain, draw, ...), and refuse them unless their checksums are those written."""
    path = _path(folder, name)
    try:
        draws = np.load(path, mmap_mode="r")[:, : ends[-1]]
    except Exception as error:  # of files or arrays
        raise _damaged(path, type(error).__name__) from error
    for (start, end), checksum in zip(pairwise(ends), checksums, strict=True):
        if crc32(draws[:, start:end].tobytes()) != checksum:
            raise _damaged(path, f"draws {start} to {end} are others than were written")
    return draws


@contextmanager
def _without_unfinished(path: Path) -> Iterator[None]:
    """Remove the unfinished file where one cannot be written, and say what to do."""
    try:
        yield
    except OSError as error:
        path.with_name(path.name + ".unfinished").unlink(missing_ok=True)
        error.add_note(
            f"{path} cannot be written; make room and call again, or store functions of the draws "
            "(numpyro_wide.runs.reduced)."
        )
        raise


def write(path: Path, arrays: Mapping[str, ArrayLike | str]) -> None:
    """Write a file of arrays, as a whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    stored: Any = {name: _as_stored(array) for name, array in arrays.items()}
    with _without_unfinished(path):
        with unfinished.open("wb") as file:
            np.savez(file, **stored)
            file.flush()
            os.fsync(file.fileno())  # against a loss of power
        os.replace(unfinished, path)


def read(path: Path) -> Draws:
    """Read the arrays of a file."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            return {name: _from_stored(file[name]) for name in file}
    except Exception as error:  # of archives or arrays
        raise _damaged(path, type(error).__name__) from error


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is missing, damaged, or no file of run_in_pieces ({why}); restore the folder from a copy, or pass "
        "another folder."
    )


def _entry(path: Path, stored: Draws, name: str) -> np.ndarray:
    if name not in stored:
        raise _damaged(path, f"it has no {name}; another version of it may have written the folder")
    return stored[name]


def _as_stored(leaf: ArrayLike | str | bytes | np.generic) -> np.ndarray:
    """Return an array for NumPy's files; JAX's own types become a field."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return array.view([(array.dtype.name, f"u{array.dtype.itemsize}")]) if array.dtype.kind == "V" else array


def _from_stored(array: np.ndarray) -> np.ndarray:
    return array.view(jnp.dtype(array.dtype.names[0])) if array.dtype.names else array


def _is_key(leaf: object) -> TypeGuard[Array]:
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _save(folder: Path, state: object, ends: list[int], checksums: Checksums, identity: dict[str, str]) -> None:
    """Write the state of the chains, and the ends and checksums of the pieces before it."""
    leaves_with_path = jax.tree.leaves_with_path(state)
    leaves = {f"state{jax.tree_util.keystr(key_path)}": leaf for key_path, leaf in leaves_with_path}
    texts = {"identity": json.dumps(identity), "checksums": json.dumps(checksums)}
    write(folder / _STATE, {**texts, "ends": np.asarray(ends, np.int64), **leaves})


def _resume(folder: Path, template: T, identity: dict[str, str]) -> tuple[T, list[int], Checksums]:
    """Read the state, and the ends and checksums of the pieces, unless of another run."""
    path = folder / _STATE
    stored = read(path)
    stored_identity = json.loads(str(_entry(path, stored, "identity")))
    differing = [name for name in identity if stored_identity.get(name) != identity[name]]
    if differing:
        raise ValueError(
            f"the folder {folder} is of a run with another {differing[0]}, so that its draws would be a mixture; pass "
            "the same one, or another folder."
        )
    leaves_with_path, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves = [_as_leaf(leaf, stored[f"state{jax.tree_util.keystr(key_path)}"]) for key_path, leaf in leaves_with_path]
    ends, checksums = stored["ends"].tolist(), json.loads(str(_entry(path, stored, "checksums")))
    for name in checksums:
        _mapped(folder, name, ends, checksums[name])
    return jax.tree.unflatten(structure, leaves), ends, checksums


def _as_leaf(leaf: object, values: np.ndarray) -> Array:
    array = jnp.asarray(values)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array


def _identify(
    mcmc: MCMC, rng_key: Array, args: tuple, kwargs: dict, extra_fields: tuple[str, ...], init_params: object
) -> tuple[Any, dict[str, str]]:
    """Return a state like those of a run, and hashes of the run's settings."""
    # MCMC initialises its own kernel, once.
    sampler = copy.deepcopy(mcmc.sampler)
    num_chains, is_vectorised = mcmc.num_chains, mcmc.chain_method == "vectorized"
    keys = rng_key if num_chains == 1 else jax.random.split(rng_key, num_chains)
    if num_chains == 1 or is_vectorised:
        state = chain_state = sampler.init(keys, mcmc.num_warmup, init_params, args, kwargs)
    else:
        chain_params = jax.tree.map(lambda leaf: leaf[0], init_params)
        chain_state = sampler.init(keys[0], mcmc.num_warmup, chain_params, args, kwargs)
        state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_chains, *jnp.shape(leaf))), chain_state)
    position = operator.attrgetter(sampler.sample_field)(chain_state)
    if num_chains > 1 and is_vectorised:
        position = jax.tree.map(lambda leaf: leaf[0], position)
    # As text: sites of the same shape may be computed otherwise.
    stored = jax.jit(mcmc.postprocess_fn or sampler.postprocess_fn(args, kwargs)).lower(position)
    fields = {name: operator.attrgetter(name)(state) for name in extra_fields}
    for name, value in {**stored.out_info, **fields}.items():
        if not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(
                f"stored values must be arrays of numbers, but {name!r} is {kind_of(value)}; name a part of it, such "
                "as 'adapt_state.step_size', or store jax.random.key_data of a key."
            )
    # Data are known, as in MCMC: models may look at them.
    step = jax.jit(lambda state: sampler.sample(state, args, kwargs)).lower(chain_state)
    settings = mcmc.num_warmup, num_chains, mcmc.thinning, init_params
    return state, {
        "rng_key": _hash(rng_key),
        "num_warmup, num_chains, thinning or init_params": _hash(settings),
        "data or other arguments": _hash((args, kwargs)),
        "model or kernel, or another version of JAX": _hash(step.as_text()),
        "choice or computation of what is stored (a deterministic site, or one of the functions of reduced)": _hash(
            (stored.as_text(), extra_fields)
        ),
        "setting of the kernel": _hash(sampler),
    }


def _hash(value: object) -> str:
    """Hash the numbers, arrays, names and kernels in a tree; of anything else, the type."""
    return sha256(b"\n".join(_hashed_bytes(value))).hexdigest()


def _hashed_bytes(value: object) -> Iterator[bytes]:
    leaves, structure = jax.tree.flatten(value)
    yield re.sub(" at 0x[0-9a-f]+", "", str(structure)).encode()
    for leaf in leaves:
        if isinstance(leaf, MCMCKernel):
            yield from _hashed_bytes(vars(leaf))
        elif isinstance(leaf, _PLAIN):
            array = _as_stored(leaf)
            yield f"{array.dtype} {array.shape} ".encode() + array.tobytes()
        else:
            yield type(leaf).__name__.encode()
