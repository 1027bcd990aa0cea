"""Argument casts and checks for a readout's problem."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_one_of, check_positive, is_known
from numpyro_wide.linear_gaussian._roots import ROOTS

VARIANTS = ("auto", *ROOTS)


def check_variant(variant: str) -> None:
    """Refuse what is not among the known variants."""
    check_one_of("variant", variant, VARIANTS)


def check_data(features: Array, targets: Array) -> None:
    """Refuse features and targets whose shapes do not go together."""
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape (n, d), but got {features.shape}; flatten trailing axes, or use vmap."
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != features.shape[0]:
        raise ValueError(
            f"targets must have shape ({features.shape[0]},) or ({features.shape[0]}, k), one row for each row of the "
            f"features {features.shape}, but got {targets.shape}."
        )


def as_scale(name: str, value: ArrayLike, shape: tuple[int, ...], dtype: Any, hint: str = "") -> Array | np.ndarray:
    """Return a positive number or array; what is not positive is refused where it is known, and NaN under jit."""
    check_positive(name, value)
    array = as_number(name, value, shape, dtype, hint)
    # Squared, a negative one would pass for its mirror image.
    return array if is_known(value) else jnp.where(array > 0, array, jnp.nan)


def as_number(name: str, value: ArrayLike, shape: tuple[int, ...], dtype: Any, hint: str = "") -> Array | np.ndarray:
    """Return a number or array that broadcasts against a shape, NumPy's where it is known.

    Args:
        name: name of the argument.
        value: number or array of real numbers.
        shape: shape that it must broadcast against.
        dtype: floating-point type of the problem.
        hint: where that shape comes from, to be added to the message.

    Returns:
        The numbers, in that type.
    """
    # What is known stays NumPy's: under jit JAX would trace it, and nobody could tell a prior mean of zero.
    is_plain = isinstance(value, int | float | np.ndarray | np.generic)
    array = np.asarray(value, dtype) if is_plain else as_floats(value, dtype=dtype, names=(name,))[0]
    try:
        fits = jnp.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast against shape {shape}, but got {array.shape}{hint}.")
    return array


def as_test_features(test_features: ArrayLike, features: Array) -> Array:
    """Return new rows of features in the type of those of the problem; their shape is checked."""
    (test_features,) = as_floats(test_features, dtype=features.dtype, names=("test_features",))
    if test_features.ndim != 2 or test_features.shape[1] != features.shape[1]:
        raise ValueError(
            f"test_features must have shape (m, {features.shape[1]}), one column for each of features "
            f"{features.shape}, but got {test_features.shape}."
        )
    return test_features


def as_residuals(residuals: ArrayLike | None, targets: Array) -> Array:
    """Return standard normal numbers of the targets' shape and type, zeros where none are given."""
    if residuals is None:
        return jnp.zeros_like(targets)
    if np.shape(residuals) != targets.shape:
        raise ValueError(f"residuals must have the targets' shape {targets.shape}, but got {np.shape(residuals)}.")
    return as_floats(residuals, dtype=targets.dtype, names=("residuals",))[0]
