"""Checks of what a surrogate is fitted to: the likelihood's parameters, the observations and the kernel."""

from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_finite, check_no_nan, check_one_of, listing
from numpyro_wide.surrogates._likelihoods import LIKELIHOODS, Categorical

# Of the trace: what rounding leaves in a kernel in single precision.
_ROUNDING = 1e-5


def checked_parameters(likelihood: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that were given, those that are None left out.

    Args:
        likelihood: name of the likelihood, or a function.
        given: all parameters that any likelihood has, by name; None where there is none.

    Raises:
        ValueError: for an unknown likelihood, or parameters that it lacks, does not have, or cannot have.
    """
    if not callable(likelihood):
        also = (
            "or a function of function values to a NumPyro distribution, or a function of an observation and its "
            "function value to the log density"
        )
        check_one_of("likelihood", likelihood, LIKELIHOODS, also=also)
    needed = () if callable(likelihood) else LIKELIHOODS[likelihood].parameters
    found = {name: value for name, value in given.items() if value is not None}
    missing = [name for name in needed if name not in found]
    called = "given as a function" if callable(likelihood) else repr(likelihood)
    if missing:
        raise ValueError(f"the likelihood {called} needs {listing(missing)}, which must be a number or an array.")
    # A function may have several function values a row, as a categorical has.
    allowed = (*needed, "num_classes") if callable(likelihood) else needed
    foreign = [name for name in found if name not in allowed]
    if foreign:
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {called}; drop it.")
    if "num_classes" in found:
        Categorical.check_parameters(found)
    elif found:
        LIKELIHOODS[likelihood].check_parameters(found)
    return found


def checked_observations(observations: ArrayLike, likelihood: Any, parameters: dict[str, Any]) -> np.ndarray:
    """Return the observations in float64.

    Args:
        observations: outcomes, counts, labels or numbers, (n,) or (n, k).
        likelihood: name of the likelihood, or a function.
        parameters: those of the likelihood, checked.

    Raises:
        TypeError: for what does not hold real numbers.
        ValueError: for a shape other than (n,) or (n, k), NaN, infinity, or what the likelihood cannot give.
    """
    check_no_nan("observations", observations)
    values = np.array(observations, float)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"observations must have shape (n,) or (n, k), with entries, but got {values.shape}.")
    check_finite("observations", values)
    if not callable(likelihood):
        broadcasted = {
            name: broadcast(name, value, values.shape) if np.ndim(value) else value
            for name, value in parameters.items()
        }
        LIKELIHOODS[likelihood].check_observed(values, broadcasted)
    return values


def checked_kernel(kernel: ArrayLike, num_rows: int) -> np.ndarray:
    """Return the kernel in float64, exactly symmetric.

    Args:
        kernel: covariance of the function values, (n, n).
        num_rows: n, the number of observations.

    Raises:
        ValueError: if it is not (n, n), symmetric, finite and positive semidefinite, up to single precision's rounding.
    """
    as_floats(kernel, names=("kernel",))  # refuses what is not an array of numbers
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
    """Return the value in float64, of the shape.

    Args:
        name: name of the argument.
        value: number or array.
        shape: the shape.

    Raises:
        ValueError: if it does not broadcast against the shape, or holds NaN.
    """
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None
