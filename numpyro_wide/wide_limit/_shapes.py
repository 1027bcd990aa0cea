"""Checks of kernel matrices and targets, and of whether they fit together."""

import numpy as np
from jax import Array

from numpyro_wide._checks import check_no_nan, is_known

# Of the largest entry: rounding in single precision leaves less between a kernel and its transpose, a mistake more.
_SYMMETRY = 1e-4


def check_shape(name: str, array: Array, expected: tuple[int, ...], meaning: str) -> None:
    """Raise ``ValueError`` unless ``array`` has the shape ``expected``, called ``meaning`` in the message."""
    if array.shape != expected:
        hint = " Transpose it." if array.shape == expected[::-1] else ""
        raise ValueError(f"{name} must have shape {meaning} = {expected}, but got {array.shape}.{hint}")


def check_symmetric(name: str, kernel: Array) -> int:
    """Return the number of rows of the symmetric matrix ``kernel``; raise ``ValueError`` for anything else."""
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(
            f"{name} must be a square matrix, the kernel of the inputs with themselves, but got shape {kernel.shape}."
        )
    if is_known(kernel) and kernel.size:
        values = np.asarray(kernel)
        asymmetry = np.abs(values - values.T).max()
        if asymmetry > _SYMMETRY * np.abs(values).max():
            raise ValueError(
                f"{name} must be symmetric, the kernel of the inputs with themselves, but differs from its transpose "
                f"by up to {asymmetry:.3g}, its largest entry being {np.abs(values).max():.3g}; a kernel of training "
                "and test inputs goes elsewhere."
            )
    return kernel.shape[0]


def check_matrix(name: str, x: Array | np.ndarray) -> None:
    """Raise ``ValueError`` unless ``x`` is a matrix with rows and columns."""
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(
            f"{name} must be a matrix (n, d_in) with at least one row and one column, but got shape {x.shape}. Flatten "
            "images, and write a single input as x[None, :], a single column as x[:, None]."
        )


def check_targets(targets: Array, num_train: int) -> None:
    """Raise ``ValueError`` unless ``targets`` is (num_train,) or (num_train, k), without NaN."""
    if targets.ndim not in (1, 2) or targets.shape[0] != num_train:
        raise ValueError(
            f"targets must have shape (n_train,) or (n_train, k) with n_train = {num_train}, "
            f"the number of rows of the training kernel, but got {targets.shape}."
        )
    check_no_nan("targets", targets)
