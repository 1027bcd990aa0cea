"""Activations, paddings and the rounding of layer normalisation, of layers and of their kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide._checks import check_one_of

PADDINGS = ("CIRCULAR", "SAME", "VALID")
# Added to the variance, zero for black images without biases.
LAYER_NORM_EPSILON = 1e-12

Activation = str | Callable[[Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "erf": jax.lax.erf,
    "gelu": lambda u: jax.nn.gelu(u, approximate=False),
    "identity": lambda u: u,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def activation_function(activation: Activation) -> Callable[[Array], Array]:
    """Return the activation of a name; a function is itself."""
    if callable(activation):
        return activation
    check_one_of("activation", activation, ACTIVATIONS, also="or a function")
    return ACTIVATIONS[activation]
