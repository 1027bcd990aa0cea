"""What a stand-in is fitted to, checked: the likelihood's parameters, observations, and the kernel."""

from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_no_nan, check_positive, listing, whole_number
from numpyro_wide.readout._surrogate import check_range

# What each likelihood must be told.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "bernoulli": (),
    "binomial": ("total_count",),
    "categorical": ("num_classes",),
    "negative_binomial": ("concentration",),
    "poisson": (),
    "student_t": ("df", "scale"),
}
# Of the trace: what rounding leaves in a kernel in single precision.
_ROUNDING = 1e-5


def checked_parameters(likelihood: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the likelihood has, of those given, None where they are not.

    Raises:
        ValueError: for an unknown likelihood, or one given too few or too many.
    """
    if not callable(likelihood) and likelihood not in _PARAMETERS:
        raise ValueError(
            f"likelihood must be one of {listing(_PARAMETERS)}, or a function of an observation and its function value "
            f"that gives the log density, but got {likelihood!r}."
        )
    needed = () if callable(likelihood) else _PARAMETERS[likelihood]
    found = {name: value for name, value in given.items() if value is not None}
    missing, foreign = [name for name in needed if name not in found], [name for name in found if name not in needed]
    called = "given as a function" if callable(likelihood) else repr(likelihood)
    if missing:
        raise ValueError(f"the likelihood {called} needs {listing(missing)}, which must be a number or an array.")
    if foreign:
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {called}; drop it.")
    for name, value in found.items():
        if name == "num_classes":
            whole_number(name, value, 2)
        else:
            check_no_nan(name, value)
            check_positive(name, value)
    return found


def checked_observations(observations: ArrayLike, likelihood: Any, parameters: dict[str, Any]) -> np.ndarray:
    """The observations in float64.

    Raises:
        ValueError: for a shape other than (n,) or (n, k), NaN, or what the likelihood cannot give.
    """
    check_no_nan("observations", observations)
    values = np.asarray(observations, float)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"observations must have shape (n,) or (n, k), with entries, but got {values.shape}.")
    if not np.isfinite(values).all():
        raise ValueError("observations must be finite, but some are infinite; drop or correct them.")
    if callable(likelihood) or likelihood == "student_t":
        return values
    largest: Any = {"bernoulli": 1, "categorical": parameters.get("num_classes", 1) - 1}.get(likelihood, np.inf)
    if likelihood == "binomial":
        largest = broadcast("total_count", parameters["total_count"], values.shape)
        if np.any(largest != np.round(largest)):
            raise ValueError(f"total_count must hold whole numbers, but got {parameters['total_count']}.")
    check_range(values, likelihood, largest)
    return values


def checked_kernel(kernel: ArrayLike, num_rows: int) -> np.ndarray:
    """The kernel in float64, exactly symmetric.

    Raises:
        ValueError: if it is not (n, n), symmetric, finite and positive semidefinite, up to single precision's rounding.
    """
    as_floats(kernel)  # refuses what is no array of numbers
    matrix = np.asarray(kernel, float)
    if matrix.shape != (num_rows, num_rows):
        raise ValueError(
            f"kernel must have shape {(num_rows, num_rows)}, a row and a column for each of the observations, but got "
            f"{matrix.shape}; take it at the inputs of the observations."
        )
    check_no_nan("kernel", matrix)
    if not np.isfinite(matrix).all():
        raise ValueError("kernel must be finite, but some entries are not; standardise the inputs.")
    size = np.max(np.abs(matrix))
    if not size > 0:
        raise ValueError("kernel must not be zero everywhere; its diagonal holds the variances of function values.")
    asymmetry = np.max(np.abs(matrix - matrix.T))
    if asymmetry > _ROUNDING * size:
        raise ValueError(f"kernel must be symmetric, but differs from its transpose by up to {asymmetry:.3g}.")
    matrix = (matrix + matrix.T) / 2
    jittered = matrix + _ROUNDING * np.trace(matrix) * np.eye(num_rows)
    try:
        np.linalg.cholesky(jittered)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite, a matrix of covariances, but has clearly negative eigenvalues; take "
            "mean_kernel, or the first result of wide_limit.fcn_kernel(...)(x)."
        ) from error
    # Rounding in single precision may leave negative eigenvalues, which large weights would bring out.
    is_single = np.asarray(kernel).dtype.itemsize < 8
    return matrix + is_single * np.finfo(np.float32).eps * np.trace(matrix) * np.eye(num_rows)


def broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """The value in float64 and of the shape.

    Raises:
        ValueError: if it does not broadcast against the shape, or holds NaN.
    """
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None
