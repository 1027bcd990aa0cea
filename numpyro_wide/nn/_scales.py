"""Activations by name, and the scales of weights that keep the variance of a network's units at one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_wide._checks import is_known

Activation = str | Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "erf": jax.lax.erf,
    "gelu": lambda u: jax.nn.gelu(u, approximate=False),
    "identity": lambda u: u,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def activation_function(activation: Activation) -> Callable[[jax.Array], jax.Array]:
    """The function of that name, as in :func:`~numpyro_wide.wide_limit.fcn_kernel`; a function is itself."""
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(map(repr, ACTIVATIONS))} or a function, but got {activation!r}."
        )
    return ACTIVATIONS[activation]


def unit_scale(activation: Activation, b_std: float = 0.0) -> float:
    r"""The scale of weights behind an activation that keeps the variance at one.

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
        >>> from numpyro_wide.nn import unit_scale
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
    """The given scale of a layer's weights; in place of None, that which keeps the variance at one."""
    if given is not None:
        return given
    if not is_known(b_std):
        raise ValueError(
            "w_std=None and readout_w_std=None keep the variance at one for biases of a known scale, but theirs is "
            "traced; give w_std and readout_w_std too."
        )
    return unit_scale(activation, float(b_std))
