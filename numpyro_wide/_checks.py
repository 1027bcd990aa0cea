"""Argument checks, messages and progress bars of all rooms."""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Number
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from tqdm.auto import tqdm

FELT_ERROR = 0.1  # nats of rounding that a sampler feels
# Phrases of several messages.
IN_FLOAT64 = "in float64 (jax.config.update('jax_enable_x64', True))"
NOISE_TOO_SMALL = "the noise is too small against the features for this precision"


def column_deviations(values: np.ndarray) -> np.ndarray:
    """Return the standard deviations of columns, 0 for one that is constant but for rounding."""
    deviations = values.std(axis=0)
    return np.where(deviations > 1e-12 * np.abs(values).max(axis=0), deviations, 0.0)


def kind_of(value: object) -> str:
    """Return a type's name with its article: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' or name.startswith(('ndarray', 'MCMC', 'SVI')) else 'a'} {name}"


def named_arguments(arguments: tuple, keywords: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call by their names in messages."""
    return {**{f"argument {position}": value for position, value in enumerate(arguments)}, **keywords}


def refuse_frames(arguments: tuple, keywords: Mapping[str, object]) -> None:
    """Refuse tables or columns of pandas or polars as arguments of a model."""
    for name, value in named_arguments(arguments, keywords).items():
        if hasattr(value, "to_numpy"):
            raise TypeError(
                f"the model's arguments must be arrays, but {name} is {kind_of(value)}; pass its numbers, "
                ".to_numpy(), with columns in the same order."
            )


def is_known(value: object) -> bool:
    """Whether a value is readable now: neither traced nor partly on another process."""
    return not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)


def are_known(tree: object) -> bool:
    """Whether nothing is traced, and all of a tree's leaves are known."""
    return not is_tracing() and all(map(is_known, jax.tree.leaves(tree)))


def is_tracing() -> bool:
    """Whether JAX is tracing."""
    return isinstance(jnp.zeros(()) + 0, jax.core.Tracer)


def check_known(reason: str, *values: object, remedy: str = "call it outside") -> None:
    """Refuse values whose numbers are not known yet; ``reason`` begins the message."""
    if not are_known(values):
        raise TypeError(f"{reason}, which are not known under jit, grad or vmap; {remedy}.")


def whole_number(name: str, value: Any, least: int = 1, *, order: str = "") -> int:
    """Return the value as a Python integer; no booleans."""
    try:
        integer = None if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        integer = None
    if integer is not None and integer >= least:
        return integer
    if isinstance(value, Number | np.generic | str):
        raise ValueError(f"{name} must be a whole number of at least {least}, but got {value!r}.")
    message = f"{name} must be a whole number, but is {kind_of(value)}"
    raise TypeError(f"{message}; the order is {order}." if order else f"{message}.")


def check_one_of(name: str, value: object, choices: Collection[str], *, also: str = "") -> None:
    """Refuse a value outside the named choices."""
    if not isinstance(value, str) or value not in choices:
        allowed = f"{listing(choices)} {also}".rstrip()
        raise ValueError(f"{name} must be one of {allowed}, but got {value!r}.")


def check_level(level: float) -> None:
    """Refuse anything but a number between 0 and 1."""
    if not _is_real(level):
        raise TypeError(f"level must be a number, such as 0.9 for 90 %, but got {level!r}.")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 0.9 for 90 %, but got {level}.")


def levels_of(name: str, value: object) -> tuple[float, ...]:
    """Return one level or several as numbers; refuse others than those between 0 and 1."""
    levels = np.ravel(np.asarray(value, object)).tolist()
    if not levels or not all(map(_is_real, levels)):
        raise TypeError(f"{name} must be numbers, such as (0.05, 0.95), but got {value!r}.")
    if not all(0 < level < 1 for level in levels):
        raise ValueError(f"{name} must lie between 0 and 1, but got {value}.")
    return tuple(levels)


def _is_real(value: ArrayLike) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"


def check_names_known(
    role: str, names: str | Iterable[str], existing: Iterable[str], *, kind: str = "site", remedy: str = ""
) -> None:
    """Refuse names that a model does not have."""
    existing = list(existing)
    unknown = [name for name in as_list(names) if name not in existing]
    if unknown:
        message = f"{role} names the {kind} {listing(unknown)}, which the model does not have; its {kind}s are "
        raise ValueError(f"{message}{listing(existing)}. {remedy}".rstrip())


def check_positive(name: str, value: object) -> None:
    """Refuse known numbers that are not all positive."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number or an array, but got {value!r}.")
    # NumPy, since JAX would trace it under jit.
    if is_known(value) and not np.all(np.asarray(value) > 0):
        raise ValueError(f"{name} must be positive everywhere, but got {value}.")


def check_not_negative(name: str, value: object) -> None:
    """Refuse known negative numbers and NaN."""
    if is_known(value) and not np.all(np.asarray(value) >= 0):
        raise ValueError(
            f"{name} must not be negative or NaN, but got {value}. If {name} is learnt, give it a positive support."
        )


def as_not_negative(name: str, value: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """Return floats, refused where negative or NaN; NaN where negative under jit."""
    check_not_negative(name, value)
    (array,) = as_floats(value, dtype=dtype, names=(name,))
    return array if is_known(value) else jnp.where(array >= 0, array, jnp.nan)


def check_input_scale(scale: ArrayLike, num_columns: int) -> None:
    """Refuse a scale that is neither a number nor one by column."""
    if np.shape(scale) not in ((), (num_columns,)):
        raise ValueError(
            f"input_scale must be a number or have shape (d_in,) = {(num_columns,)}, one for each column, but got "
            f"shape {np.shape(scale)}."
        )


def check_no_nan(name: str, value: Any) -> None:
    """Refuse known NaN."""
    if isinstance(value, jax.core.Tracer):
        return
    # Each process can read its own shards.
    shards = [np.asarray(value)] if is_known(value) else [np.asarray(shard.data) for shard in value.addressable_shards]
    for shard in shards:
        refuse_other_than_numbers(name, shard)
    num_nan = sum(int(np.isnan(shard).sum()) for shard in shards)
    if num_nan:
        raise ValueError(
            f"{name} must not contain NaN, but {num_nan} of its entries do{_first_row(shards, np.isnan)}; drop or "
            "impute the missing ones."
        )


def _first_row(shards: list[np.ndarray], is_bad: Callable[[np.ndarray], np.ndarray]) -> str:
    """Return in words the row of the first bad number; nothing for several shards."""
    if len(shards) > 1 or not shards[0].ndim:
        return ""
    by_row = is_bad(shards[0]).reshape(len(shards[0]), -1).any(axis=1)
    return f", the first in row {int(by_row.argmax())}"


def check_finite(name: str, value: object) -> None:
    """Refuse known values that are not finite real numbers."""
    check_no_nan(name, value)
    if is_known(value) and (num_infinite := int(np.isinf(array := np.asarray(value)).sum())):
        raise ValueError(
            f"{name} must be finite, but {num_infinite} of its entries are infinite{_first_row([array], np.isinf)}; "
            "drop or correct their rows."
        )


def check_ranks(name: str, ranks: np.ndarray, num_draws: int) -> None:
    """Refuse anything but an array (num_simulations, ...) of ranks among ``num_draws`` draws."""
    if ranks.ndim == 0 or len(ranks) == 0:
        raise ValueError(f"{name} must be an array (num_simulations, ...), but the shape is {ranks.shape}.")
    is_rank = (ranks >= 0) & (ranks <= num_draws) & (ranks == np.rint(ranks))
    if not is_rank.all():
        raise ValueError(
            f"{name} must be whole numbers from 0 to num_draws = {num_draws}, but {int((~is_rank).sum())} of "
            f"{ranks.size} are not, such as {ranks[~is_rank][0]}."
        )


def as_floats(*values: ArrayLike, dtype: DTypeLike | None = None, names: Sequence[str] = ()) -> tuple[Array, ...]:
    """Convert arrays to their common floating-point type, at least single precision."""
    arrays = [x if isinstance(x, Array) else np.asarray(x) for x in values]
    for i, x in enumerate(arrays):
        refuse_other_than_numbers(names[i] if i < len(names) else "an array", x)
    if dtype is None:
        # The one promotion of types, also in JAX's strict mode. LAPACK has no half precision.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(jnp.result_type(*arrays, float), jnp.float32)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def refuse_other_than_numbers(name: str, x: Array | np.ndarray) -> None:
    """Refuse an array of anything but real numbers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or not (
        x.dtype == bool or jnp.isdtype(x.dtype, ("real floating", "integral"))
    ):
        raise TypeError(
            f"{name} must hold real numbers, but it has the type {x.dtype} and the shape {x.shape}; encode words."
        )


def num_draws_of(name: str, draws: Mapping[str, ArrayLike]) -> int:
    """Return the length of the leading axis of all draws."""
    lengths = {site: np.shape(values)[0] if np.ndim(values) else 0 for site, values in draws.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            f"{name} must hold arrays with a leading axis of at least one draw, of the same length, but the lengths "
            f"are {lengths}."
        )
    return next(iter(lengths.values()))


def check_key(name: str, value: Any, order: str, *, several: bool = False) -> None:
    """Refuse a value other than one PRNG key."""
    is_typed = isinstance(value, Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not is_typed and not (isinstance(value, Array | np.ndarray) and value.dtype == np.uint32):
        raise TypeError(
            f"{name} must be a PRNG key, such as jax.random.key(0), but is {kind_of(value)}; the order is {order}."
        )
    shape = value.shape if is_typed else value.shape[:-1]  # an older key is a vector
    if shape and not several:
        raise ValueError(
            f"{name} must be one PRNG key, but is an array of them, of shape {shape}; take jax.vmap over the keys."
        )


def as_list(names: str | Iterable[str]) -> list[str]:
    """Return one name, or several, as a list."""
    return [names] if isinstance(names, str) else list(names)


def listing(names: Iterable[str]) -> str:
    """List names for a message."""
    return ", ".join(repr(name) for name in names) or "none"


def progress(iterable: Iterable | None = None, *, shown: bool = True, **options: object) -> tqdm:
    """Return a bar of ``tqdm``'s, silent where the environment variable ``CI`` is set."""
    return tqdm(iterable, disable=not shown or "CI" in os.environ, **options)


_PATIENCE = 5.0  # seconds


def late_progress(iterable: Iterable, *, desc: str, shown: bool = True) -> tqdm:
    """Return a bar over work that seldom takes long: it shows after five seconds, and leaves nothing behind."""
    return progress(iterable, shown=shown, desc=desc, delay=_PATIENCE, leave=False)


def warn_if_stuck(draws: Mapping[str, ArrayLike], *, by_chain: bool) -> None:
    """Warn where under a fifth of the draws are distinct; (chain, draw, ...) by site, or (draw, ...) of one chain."""
    is_moved: Any = False
    for values in draws.values():
        if not is_known(values):
            return
        chains = np.asarray(values) if by_chain else np.asarray(values)[None]
        if chains.shape[1] < 50:
            return
        first_entry = chains.reshape(*chains.shape[:2], -1)[..., :1]
        is_moved = is_moved | np.any(first_entry[:, 1:] != first_entry[:, :-1], axis=2)
        num_distinct = 1 + is_moved.sum(axis=1)
        is_stuck = num_distinct < 0.2 * chains.shape[1]
        if not is_stuck.any():
            return
    if draws:
        warnings.warn(
            f"{is_stuck.sum()} of {len(is_stuck)} chains hardly move: distinct draws by chain {num_distinct.tolist()}, "
            f"of {chains.shape[1]}. Standardise inputs and targets, run {IN_FLOAT64}, run a longer warmup, or start "
            "elsewhere (init_strategy).",
            RuntimeWarning,
            stacklevel=3,
        )
