"""Brings what users pass into the one form that the linear algebra works on, and says what does not fit."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

VARIANTS = ("auto", "feature", "data", "data-cholesky")

# Core routines map (features (n, d), targets (n, k), regulariser (), *columns (d, k)) to a pair: arrays with a
# trailing axis for the outputs, and anything that is the same for all outputs.
Core: TypeAlias = Callable[..., tuple[Any, Any]]


class Problem(NamedTuple):
    """A readout with a standard normal prior, and noise that is the same in every row.

    Attributes:
        features: (n, d), or (k, n, d) where each output has its own.
        targets: (n, k).
        regulariser: scalar, or (k,) where each output has its own.
        log_scale: sum over the elements of the targets of the log of what each was divided by.
    """

    features: Array
    targets: Array
    regulariser: Array
    log_scale: Array

    @property
    def is_shared(self) -> bool:
        """Whether one factorisation serves all outputs."""
        return self.features.ndim == 2 and self.regulariser.ndim == 0


def check_variant(variant: str) -> None:
    """One of the known variants."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, but got {variant!r}.")


def resolve_variant(variant: str, num_rows: int, num_features: int) -> str:
    """The variant that is meant: "auto" takes the smaller of the two Gram matrices."""
    check_variant(variant)
    if variant == "auto":
        return "feature" if num_features <= num_rows else "data-cholesky"
    return variant


def standardise(
    features: ArrayLike,
    targets: ArrayLike,
    variance: ArrayLike,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Problem:
    """Moves the prior's loc and scale, and noise that varies over rows (:eq:`rows`), into features and targets."""
    features, targets = as_float(features, targets)
    check_data(features, targets)
    readout_shape = (features.shape[1], *targets.shape[1:])
    variance = _as_matrix("noise_scale", variance, targets.shape, targets.dtype)
    loc = _as_matrix("prior_loc", prior_loc, readout_shape, targets.dtype)
    scale = _as_matrix("prior_scale", prior_scale, readout_shape, targets.dtype)

    targets = as_matrix(targets)
    _num_rows, num_outputs = targets.shape
    if not _is_known_zero(prior_loc):
        targets = targets - features @ jnp.broadcast_to(loc, (features.shape[1], num_outputs))
    features = features * scale.T if scale.shape[1] == 1 else features[None] * scale.T[:, None]

    if variance.shape[0] == 1:
        regulariser = variance[0, 0] if variance.shape[1] == 1 else variance[0]
        return Problem(features, targets, regulariser, jnp.zeros((), targets.dtype))
    row_scale = jnp.sqrt(variance)
    if variance.shape[1] == 1:
        features = features / row_scale if features.ndim == 2 else features / row_scale[None]
    else:
        features = (features if features.ndim == 3 else features[None]) / row_scale.T[:, :, None]
    log_scale = jnp.log(row_scale).sum() * (num_outputs // variance.shape[1])
    return Problem(features, targets / row_scale, jnp.ones((), targets.dtype), log_scale)


def solve(core: Core, problem: Problem, *columns: Array) -> tuple[Any, Any]:
    """Runs ``core`` once for all outputs, or once for each where they do not share a factorisation.

    Returns what ``core`` returns; the second part with a leading axis, of length 1 or k.
    """
    features, targets, regulariser, _ = problem
    if problem.is_shared:
        by_output, common = core(features, targets, regulariser, *columns)
        return by_output, jax.tree.map(lambda x: x[None], common)
    in_axes = (0 if features.ndim == 3 else None, 0, 0 if regulariser.ndim else None, *(0 for _ in columns))
    split = [x.T[:, :, None] for x in (targets, *columns)]
    by_output, common = jax.vmap(core, in_axes)(features, split[0], regulariser, *split[1:])
    return jax.tree.map(lambda x: x[:, :, 0].T, by_output), common


def as_float(*arrays: ArrayLike) -> list[Array]:
    """The arrays in their common floating-point type."""
    dtype = jnp.result_type(*arrays, float)
    return [jnp.asarray(x, dtype) for x in arrays]


def like(value: ArrayLike, x: Array) -> Array:
    """``value`` with the shape and type of ``x``."""
    return jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape)


def as_matrix(x: Array) -> Array:
    """A vector becomes a single column."""
    return x[:, None] if x.ndim == 1 else x


def check_data(features: Array, targets: Array) -> None:
    """Features (n, d) and targets (n,) or (n, k)."""
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape (n, d), but got {features.shape}; flatten trailing axes, or use vmap."
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != features.shape[0]:
        raise ValueError(
            f"targets must have shape ({features.shape[0]},) or ({features.shape[0]}, k), one row for each row of "
            f"features {features.shape}, but got {targets.shape}."
        )


def check_readout(name: str, readout: Array, features: Array, targets: Array) -> None:
    """A readout (d,) or (d, k) that goes with the features and targets."""
    expected = (features.shape[1], *targets.shape[1:])
    if readout.shape != expected:
        raise ValueError(
            f"{name} must have shape {expected} to go with features {features.shape} and targets {targets.shape}, "
            f"but got {readout.shape}."
        )


def check_positive(name: str, value: ArrayLike) -> None:
    """Positive, where the value is known already."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number or an array, but got {value!r}.")
    # NumPy, since under jit even a known number would be traced by JAX. It cannot read what other processes hold.
    is_known = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if is_known and not np.all(np.asarray(value) > 0):
        raise ValueError(f"{name} must be positive everywhere, but got {value}.")


def _is_known_zero(value: ArrayLike) -> bool:
    return not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))


def _as_matrix(name: str, value: ArrayLike, shape: tuple[int, ...], dtype: Any) -> Array:
    """``value``, which broadcasts against ``shape``, as a matrix (1 or m, 1 or k) that does so too."""
    value = jnp.asarray(value, dtype)
    try:
        fits = jnp.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast against shape {shape}, but got {value.shape}.")
    if len(shape) == 1:
        return value.reshape(-1, 1)
    return value.reshape((1,) * (2 - value.ndim) + value.shape)
