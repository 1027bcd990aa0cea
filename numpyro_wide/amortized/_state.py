"""States and results of a training."""

from typing import Any, NamedTuple

from jax import Array


class HeldOut(NamedTuple):
    """Losses on a fixed set of simulations that is never trained on, and the best parameters so far.

    Attributes:
        steps: numbers of the steps after which the set was evaluated, (evaluations,).
        losses: losses on the set, in nats, (evaluations,).
        best_params: values of the guide's param and mutable sites where the loss was smallest.
        best_loss: smallest loss, a scalar.
        best_step: number of the step after which it was reached, a scalar.
    """

    steps: Array
    losses: Array
    best_params: dict[str, Any]
    best_loss: Array
    best_step: Array


class AmortizedState(NamedTuple):
    """State of :class:`~numpyro_wide.AmortizedForwardKL`, a pytree.

    Attributes:
        optim_state: state of the optimiser, which holds the unconstrained parameters.
        mutable_state: values of the guide's mutable sites; None if there is none.
        rng_key: a PRNG key of the whole run: the simulations of a step depend on it and on the number of the step
            alone.
        step: number of steps taken, those that were skipped included.
        num_skipped: number of steps that were not taken because the loss or its gradient was not finite.
        held_out: losses on held-out simulations, if ``run`` was asked to evaluate them.
    """

    optim_state: Any
    mutable_state: dict[str, Any] | None
    rng_key: Array
    step: Array
    num_skipped: Array
    held_out: HeldOut | None = None


class AmortizedRunResult(NamedTuple):
    """Result of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`.

    Attributes:
        params: values of the guide's param and mutable sites: the last ones, or the best ones on held-out simulations.
        state: last state, from which training can continue.
        losses: loss of each step in nats, NaN where the step was skipped, (steps,).
    """

    params: dict[str, Any]
    state: AmortizedState
    losses: Array
