"""Checks of what users pass to a kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.util import not_jax_tracer

from numpyro_wide.mcmc._state import KernelState
from numpyro_wide.mcmc._tree import PyTree, all_finite


def check_target(model: Callable[..., Any] | None, potential_fn: Callable[[PyTree], jax.Array] | None) -> None:
    """Refuse anything but exactly one function."""
    if (model is None) == (potential_fn is None):
        given = "neither" if model is None else "both"
        raise ValueError(f"Exactly one of model and potential_fn must be given, but got {given}.")
    name, value = ("model", model) if potential_fn is None else ("potential_fn", potential_fn)
    if not callable(value):
        raise TypeError(f"{name} must be a function, but got {type(value).__name__}.")


def check_start(state: KernelState) -> None:
    """Refuse a first state without a finite energy and gradient, unless they are being traced."""
    finite = all_finite((state.potential_energy, state.z_grad))
    if not_jax_tracer(finite) and not finite:
        raise ValueError(
            "The potential energy or its gradient is not finite at the first position; "
            "pass init_params inside the support, or another init_strategy."
        )


def check_number(
    name: str, value: float, low: float, high: float, *, include_low: bool = False, include_high: bool = False
) -> float:
    """Return ``value`` as a float if it lies between ``low`` and ``high``."""
    above = value >= low if include_low else value > low
    below = value <= high if include_high else value < high
    if not (above and below):
        interval = f"{'[' if include_low else '('}{low:g}, {high:g}{']' if include_high else ')'}"
        raise ValueError(f"{name} must lie in {interval}, but got {value!r}.")
    return float(value)


def check_scalar(potential_fn: Callable[[PyTree], jax.Array]) -> Callable[[PyTree], jax.Array]:
    """Wrap a potential so that a result that is not a scalar is refused."""

    def checked(z: PyTree) -> jax.Array:
        potential_energy = jnp.asarray(potential_fn(z), jnp.result_type(float))
        if potential_energy.shape != ():
            shape = potential_energy.shape
            raise ValueError(f"potential_fn must return a scalar, but returned shape {shape}; sum its terms.")
        return potential_energy

    return checked
