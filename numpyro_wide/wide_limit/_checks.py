"""Checks of what the user hands in, shared by the modules of this room."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def known_true(condition: ArrayLike) -> bool:
    """Whether any entry of ``condition`` is true; False where its value is not known yet, as under jit."""
    try:
        return bool(jnp.any(condition))
    except jax.errors.ConcretizationTypeError:
        return False


def check_no_nan(**arrays: ArrayLike) -> None:
    """Raise ``ValueError`` if one of the named arrays holds a NaN."""
    for name, array in arrays.items():
        if known_true(jnp.isnan(jnp.asarray(array))):
            raise ValueError(f"{name} contains NaN. Drop or impute the missing entries before this call.")


def check_not_negative(**numbers: ArrayLike) -> None:
    """Raise ``ValueError`` if one of the named numbers is negative or NaN."""
    for name, number in numbers.items():
        if known_true(~(jnp.asarray(number) >= 0)):
            raise ValueError(
                f"{name} must not be negative or NaN, but got {number}. "
                f"If {name} is learned, give it a positive support, for example by exp or softplus."
            )


def as_integer(number: Any) -> int | None:
    """Return an integer of any kind, NumPy's included, as Python's; None for anything else, booleans included."""
    try:
        return None if isinstance(number, bool | np.bool_) else operator.index(number)
    except TypeError:
        return None


def check_block_size(block_size: int | None) -> int | None:
    """Return ``block_size`` as Python's integer, or None; raise ``ValueError`` unless it is None or positive."""
    number = as_integer(block_size)
    if block_size is not None and (number is None or number < 1):
        raise ValueError(f"block_size must be None (everything at once) or a positive integer, but got {block_size!r}.")
    return number


def check_shape(name: str, array: jax.Array, expected: tuple[int, ...], meaning: str) -> None:
    """Raise ``ValueError`` unless ``array`` has the shape ``expected``, called ``meaning`` in the message."""
    if array.shape != expected:
        hint = " Transpose it." if array.shape == expected[::-1] else ""
        raise ValueError(f"{name} must have shape {meaning} = {expected}, but got {array.shape}.{hint}")


def check_square(name: str, kernel: jax.Array) -> int:
    """Return the number of rows of the square matrix ``kernel``; raise ``ValueError`` for anything else."""
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(
            f"{name} must be a square matrix, the kernel of the inputs with themselves, but got shape {kernel.shape}."
        )
    return kernel.shape[0]


def check_targets(targets: jax.Array, num_train: int) -> None:
    """Raise ``ValueError`` unless ``targets`` is (num_train,) or (num_train, k), without NaN."""
    if targets.ndim not in (1, 2) or targets.shape[0] != num_train:
        raise ValueError(
            f"targets must have shape (n_train,) or (n_train, k) with n_train = {num_train}, "
            f"the number of rows of the training kernel, but got {targets.shape}."
        )
    check_no_nan(targets=targets)


def as_floats(*arrays: ArrayLike) -> tuple[jax.Array, ...]:
    """Return the arrays in their common floating dtype."""
    dtype = jnp.result_type(*arrays)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return tuple(jnp.asarray(array, dtype) for array in arrays)
