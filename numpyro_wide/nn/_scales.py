"""Activations by name, scales that keep the variance of a network's units at one, and the checks of scales."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_wide._checks import check_not_negative, check_one_of, is_known

Activation = str | Callable[[Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "erf": jax.lax.erf,
    "gelu": lambda u: jax.nn.gelu(u, approximate=False),
    "identity": lambda u: u,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def activation_function(activation: Activation) -> Callable[[Array], Array]:
    """Return the function of that name, as in :func:`~numpyro_wide.wide_limit.fcn_kernel`; a function is itself."""
    if callable(activation):
        return activation
    check_one_of("activation", activation, ACTIVATIONS, also="or a function")
    return ACTIVATIONS[activation]


def unit_scale(activation: Activation, b_std: float = 0.0) -> float:
    r"""Compute the scale of weights behind an activation that keeps the variance at one.

    $\sigma_w$ with $\sigma_w^2 E[\varphi(u)^2] + \sigma_b^2 = 1$, u ~ N(0, 1): units of variance one give units of
    variance one in the next layer, at any depth. √2 for the rectifier, 1.534 for the GELU.

    Args:
        activation: "erf", "gelu" (the exact one), "identity", "relu", "tanh", or a function of arrays.
        b_std: $\sigma_b$, at least 0 and below 1.

    Returns:
        $\sigma_w$.

    Raises:
        ValueError: for an unknown activation, one that vanishes everywhere, or a ``b_std`` out of range.

    Example:
        >>> from numpyro_wide.nn.internal import unit_scale
        >>> round(unit_scale("relu"), 4)
        1.4142
    """
    if not 0 <= b_std < 1:
        raise ValueError(f"b_std must be at least 0 and below 1 for units of variance one, but got {b_std}.")
    # The trapezoidal rule: exact to rounding for smooth functions, and 1e-6 off for one with kinks.
    u = np.linspace(-9, 9, 6001)
    with jax.ensure_compile_time_eval():
        # Compiled, for a derivative of the activation's own, such as the rectifier's, would be traced under vmap.
        values = np.asarray(jax.jit(activation_function(activation))(jnp.asarray(u)), float)
    second_moment = np.trapezoid(values**2 * np.exp(-(u**2) / 2), u) / np.sqrt(2 * np.pi)
    if not second_moment > 0:
        raise ValueError(f"activation must have a positive second moment under N(0, 1), but it is {second_moment}.")
    return float(np.sqrt((1 - b_std**2) / second_moment))


def scale_or_unit(given: Any, activation: Activation, b_std: Any) -> Any:
    """Return the given scale of a layer's weights; in place of None, the one that keeps the variance at one."""
    if given is not None:
        return given
    if not is_known(b_std):
        raise ValueError(
            "w_std=None and readout_w_std=None keep the variance at one for biases of a known scale, but theirs is "
            "traced; give w_std and readout_w_std too."
        )
    return unit_scale(activation, float(b_std))


def is_zero(scale: Any) -> bool:
    """Tell whether a scale is the number 0 and known to be: what it multiplies is left out.

    A traced scale is not: the structure of a network may not depend on a number that is learnt.
    """
    return is_known(scale) and np.ndim(scale) == 0 and not np.asarray(scale).any()


def check_scale(name: str, value: Any, *, is_number: bool = False) -> None:
    """Refuse a scale that is negative or not finite, where it is known, and one that is a prior or no number at all.

    Args:
        name: name of the scale, for messages.
        value: scale, a number or an array, which may be traced.
        is_number: whether an array is refused.

    Raises:
        TypeError: for a prior, and for what does not hold real numbers, such as text.
        ValueError: for a negative or infinite number, NaN, or an array where a number is expected.
    """
    if isinstance(value, dist.Distribution):
        raise TypeError(f"{name} is a distribution; give its prior to bnn(..., scales={{{name!r}: ...}}).")
    check_real(name, value)
    if is_number and np.shape(value) != ():
        raise ValueError(f"{name} must be a number, but has shape {np.shape(value)}.")
    check_not_negative(name, value)


def check_real(name: str, value: Any) -> None:
    """Refuse what does not hold finite real numbers, where they are known.

    Args:
        name: name of the argument, for messages.
        value: a number or an array, which may be traced.

    Raises:
        TypeError: for text, complex numbers, None, or other objects.
        ValueError: for NaN or an infinite number.
    """
    if not is_known(value):
        return
    numbers = np.asarray(value)
    if not any(jnp.issubdtype(numbers.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{name} must be a real number or an array of them, but got {value!r}.")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be finite, but got {value}.")
