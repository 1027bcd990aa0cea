"""What the trainer carries from step to step, and what it returns."""

from typing import Any, NamedTuple

import jax


class HeldOut(NamedTuple):
    """Losses on a fixed set of simulations that is never trained on, and the best parameters so far."""

    steps: jax.Array
    """Numbers of steps after which the set was evaluated, (evaluations,)."""
    losses: jax.Array
    """Its losses, (evaluations,)."""
    best_params: dict[str, Any]
    """Values at the guide's param and mutable sites where the loss was smallest."""
    best_loss: jax.Array
    """The smallest loss, a scalar."""
    best_step: jax.Array
    """The step after which it was reached, a scalar."""


class AmortizedState(NamedTuple):
    """State of :class:`~numpyro_wide.AmortizedForwardKL`, a pytree."""

    optim_state: Any
    """The optimiser's state, which holds the unconstrained parameters."""
    mutable_state: dict[str, Any] | None
    """Values at the guide's mutable sites; None if there is none."""
    rng_key: jax.Array
    """Key of the whole run: the simulations of a step depend on it and on the number of the step alone."""
    step: jax.Array
    """Number of steps taken, those that were skipped included."""
    num_skipped: jax.Array
    """Number of steps that were not taken because the loss or its gradient was not finite."""
    held_out: HeldOut | None = None
    """What was seen on held-out simulations, if ``run`` was asked to evaluate them."""


class AmortizedRunResult(NamedTuple):
    """Result of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`."""

    params: dict[str, Any]
    """Values at the guide's param and mutable sites: the last ones, or the best ones on held-out simulations."""
    state: AmortizedState
    """The last state, from which training can go on."""
    losses: jax.Array
    """Loss of each step, NaN where it was skipped, (steps,)."""
