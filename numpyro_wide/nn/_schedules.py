"""Learning rates that fall with the steps."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_positive


def inverse_time_schedule(init_value: float, *, slowdown: float = 10.0) -> Callable[[ArrayLike], Array]:
    r"""Make the learning rate 1 / (1/r₀ + t / slowdown) at step t, an optax schedule (McNamara 2025, Appendix E).

    It falls like 1/t from step ``slowdown`` / r₀ on: sums of steps diverge while sums of their squares
    converge (Robbins and Monro 1951).

    Args:
        init_value: rate r₀ at step 0, positive.
        slowdown: number of steps in which the inverse of the rate grows by 1, positive.

    Returns:
        A function of the step count, for any optax optimiser: ``optax.adam(inverse_time_schedule(1e-4))``.

    Raises:
        ValueError: unless both numbers are positive.

    Example:
        >>> from numpyro_wide import nn
        >>> rate = nn.inverse_time_schedule(1e-4)
        >>> 1e4 * float(rate(0)), 1e4 * float(rate(100_000))
        (1.0, 0.5)
    """
    for name, value in {"init_value": init_value, "slowdown": slowdown}.items():
        check_positive(name, value)

    def schedule(count: ArrayLike) -> Array:
        """Return the rate at step ``count``."""
        return init_value / (1 + jnp.asarray(count, float) * (init_value / slowdown))

    return schedule
