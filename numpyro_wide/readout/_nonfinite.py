"""Draws of the hidden weights whose results are not finite: refused, or left out in so many words."""

import warnings

import numpy as np
from jax import Array

from numpyro_wide._checks import is_known

CHOICES = ("raise", "drop")
_NUM_NAMED = 20


def check_on_nonfinite(choice: str) -> None:
    """One of the two.

    Raises:
        ValueError: for anything else.
    """
    if choice not in CHOICES:
        raise ValueError(f"on_nonfinite must be one of {', '.join(map(repr, CHOICES))}, but got {choice!r}.")


def kept_draws(what: str, is_finite: Array, on_nonfinite: str) -> np.ndarray | None:
    """Which draws to go on with.

    Args:
        what: is computed by draw, for messages.
        is_finite: (draws,).
        on_nonfinite: "raise" or "drop".

    Returns:
        Indices of the draws that are finite; None for all, as where the values are traced.

    Raises:
        FloatingPointError: if a draw is not finite and is not to be dropped, or none is finite.
        ValueError: if draws are to be dropped whose values are not known, as under ``jit``.

    Warns:
        RuntimeWarning: if draws are dropped.
    """
    if not is_known(is_finite):
        if on_nonfinite == "drop":
            raise ValueError(
                f"on_nonfinite='drop' must see which {what} are finite, but their values are not known here, as under "
                "jax.jit; call outside of JAX's transformations, or take on_nonfinite='raise', where NaN is passed on "
                "if values are not known."
            )
        return None
    lost = np.flatnonzero(~np.asarray(is_finite))
    if not lost.size:
        return None
    which = _which(lost, is_finite.size)
    if on_nonfinite == "raise" or lost.size == is_finite.size:
        if lost.size == is_finite.size:
            raise FloatingPointError(
                f"no {what} are finite, of any draw: look for NaN or infinity among the inputs, those of the fit and "
                "the new ones. If there is none, the noise is too small against the features for this precision; run "
                "in float64 (jax.config.update('jax_enable_x64', True))."
            )
        raise FloatingPointError(
            f"{what} of {which} are not finite: the noise is too small against the features for this precision, or a "
            "draw is not finite itself. Run in float64 (jax.config.update('jax_enable_x64', True)), or predict from "
            "the others with on_nonfinite='drop'."
        )
    warnings.warn(
        f"{what} of {which} are not finite and are left out: the noise is too small against the features for "
        "this precision, or a draw is not finite itself. What is left is biased towards the draws that float64 would "
        "not be needed for.",
        RuntimeWarning,
        stacklevel=3,  # whoever called a method of ReadoutPredictive
    )
    return np.flatnonzero(np.asarray(is_finite))


def _which(lost: np.ndarray, num_draws: int) -> str:
    if lost.size == 1:
        return f"draw {lost[0]} of {num_draws}"
    named = ", ".join(map(str, lost[:_NUM_NAMED])) + (", ..." if lost.size > _NUM_NAMED else "")
    return f"{lost.size} of {num_draws} draws ({named})"
