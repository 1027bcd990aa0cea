"""Expectations of an activation: its closed form where there is one, else its Hermite series."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_wide._checks import is_known
from numpyro_wide.wide_limit._dual import DUALS, ClosedForm
from numpyro_wide.wide_limit._hermite import HermiteSeries

Activation = str | Callable[[Array], Array]

# From here on the truncation of a series is told.
_TOLERANCE = 1e-5


def activation_dual(activation: Activation) -> ClosedForm | HermiteSeries:
    """Return the expectations of an activation, by its name or as a function of arrays.

    Raises:
        ValueError: for an unknown name.
    """
    from numpyro_wide.nn.internal import activation_function  # with flax, which is not loaded with the package

    function = activation_function(activation)
    # JAX's functions instead of their names: a kink's series converges slowly.
    known = (jax.nn.relu, "relu"), (jax.lax.erf, "erf"), (jax.scipy.special.erf, "erf")
    name = activation if isinstance(activation, str) else next((n for f, n in known if f is function), "")
    return ClosedForm(DUALS[name]) if name in DUALS else HermiteSeries(function)


def activation_name(activation: Activation) -> str:
    """Return the name of an activation."""
    return activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))


def warn_of_truncation(error: Any, stacklevel: int = 3) -> None:
    """Warn of a series that leaves out more than a hundred-thousandth, where that is known.

    Args:
        error: the largest share of a moment that is left out.
        stacklevel: of ``warnings.warn``, as seen from the caller.
    """
    if not is_known(error) or not np.max(error) > _TOLERANCE:
        return
    warnings.warn(
        f"the activation's Hermite series leaves out up to {np.max(error):.1e} of the kernels, relatively, most where "
        "inputs are equal: its terms fall off slowly for an activation with kinks, and for a smooth one where the "
        "variance of its units is large. Scale inputs and weights down, take an activation with a closed form ('erf', "
        "'gelu', 'identity', 'relu'), or continue if that is accurate enough.",
        UserWarning,
        stacklevel=stacklevel,
    )
