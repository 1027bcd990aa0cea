"""Checks of the arguments of kernels."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import as_floats, is_known
from numpyro_wide.mcmc._point import Point, PyTree


def check_target(model: Callable[..., Any] | None, potential_fn: Callable[[PyTree], Array] | None) -> None:
    """Refuse anything but exactly one function."""
    if (model is None) == (potential_fn is None):
        given = "neither" if model is None else "both"
        raise ValueError(f"Exactly one of model and potential_fn must be given, but got {given}.")
    name, value = ("model", model) if potential_fn is None else ("potential_fn", potential_fn)
    if not callable(value):
        raise TypeError(f"{name} must be a function, but got {type(value).__name__}.")


def check_start(point: Point) -> None:
    """Refuse a first point without a finite energy and gradient, unless it is being traced."""
    if not is_good_start(point):
        raise ValueError(
            "The potential energy or its gradient is not finite at the first position; "
            "pass init_params inside the support, or another init_strategy."
        )


def is_good_start(point: Point, passes: Array | bool = True) -> bool:
    """Tell whether energy and gradient are finite at a point that passes, or are being traced."""
    leaves = jax.tree.leaves((point.potential_energy, point.z_grad))
    # NumPy, since every operation of JAX on numbers that are known would be compiled first.
    is_finite = not all(map(is_known, leaves)) or all(np.all(np.isfinite(leaf)) for leaf in leaves)
    return is_finite and (not is_known(passes) or bool(passes))


def check_given_start(init_params: PyTree, expected: PyTree | None, num_chains: int | None) -> None:
    """Refuse a given first position that is not of real numbers or, for a model, does not fit its sites.

    Args:
        init_params: first position in unconstrained space, of every chain.
        expected: first position of one chain, as NumPyro found it, or None for a potential function.
        num_chains: length of the leading axis of the given one, or None for a single chain without that axis.
    """
    for place, leaf in jax.tree.leaves_with_path(init_params):
        as_floats(leaf, names=(f"init_params{jax.tree_util.keystr(place)}",))
    if expected is None:
        return
    leading = () if num_chains is None else (num_chains,)
    shapes = {name: (*leading, *np.shape(value)) for name, value in expected.items()}
    if not isinstance(init_params, Mapping):
        raise TypeError(
            "init_params of a model must be a dictionary of unconstrained values by site, but is a "
            f"{type(init_params).__name__}."
        )
    given = {name: np.shape(value) for name, value in init_params.items()}
    if given != shapes:
        raise ValueError(
            f"init_params must hold an unconstrained value of every latent site, of the shapes {shapes}, but holds "
            f"{given}. With several chains every value has their axis in front."
        )


def check_number(
    name: str, value: float, low: float, high: float, *, include_low: bool = False, include_high: bool = False
) -> float:
    """Return ``value`` as a float if it lies between ``low`` and ``high``."""
    if value is None or isinstance(value, str | complex | np.complexfloating):
        raise TypeError(f"{name} must be a number, but got {value!r}.")
    above = value >= low if include_low else value > low
    below = value <= high if include_high else value < high
    if not (above and below):
        interval = f"{'[' if include_low else '('}{low:g}, {high:g}{']' if include_high else ')'}"
        raise ValueError(f"{name} must lie in {interval}, but got {value!r}.")
    return float(value)


def check_tolerance(bias_tolerance: float, adjusted: bool, target_accept_prob: float | None) -> float:
    """Return the tolerance as a float; refuse an acceptance probability for a sampler that obeys none."""
    tolerance = check_number("bias_tolerance", bias_tolerance, 0.0, 1.0)
    if not adjusted and target_accept_prob is not None:
        raise ValueError(
            f"target_accept_prob is for adjusted=True, but got {target_accept_prob!r} with adjusted=False; the step of "
            "an unadjusted sampler is set by bias_tolerance."
        )
    return tolerance


def check_scalar(potential_fn: Callable[[PyTree], Array]) -> Callable[[PyTree], Array]:
    """Wrap a potential so that a result that is not a scalar is refused."""

    def checked(z: PyTree) -> Array:
        potential_energy = jnp.asarray(potential_fn(z), jnp.result_type(float))
        if potential_energy.shape != ():
            shape = potential_energy.shape
            raise ValueError(f"potential_fn must return a scalar, but returned shape {shape}; sum its terms.")
        return potential_energy

    return checked
