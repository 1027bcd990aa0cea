"""Warmup: a step size by dual averaging, and in some kernels a preconditioner that windows of it learn.

A preconditioner has three methods: ``start``, ``count_draw`` and ``close`` a window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_wide.mcmc._mass import Mass
from numpyro_wide.mcmc._point import Point
from numpyro_wide.mcmc._reference import Reference
from numpyro_wide.mcmc._step_size import Averaging, averaged_step_size, start_averaging, update_averaging

Preconditioner = Mass | Reference | None


class Schedule(NamedTuple):
    """When warmup learns what; the same for all chains.

    It is part of the state, so that a chain that is resumed by an ``MCMC`` with another ``num_warmup`` does not adapt
    again.

    Attributes:
        num_warmup: how many steps adapt.
        window_start: step at which the draws begin to count for the preconditioner.
        window_ends: steps at whose end the preconditioner is renewed; none if it is not learnt.
    """

    num_warmup: jax.Array
    window_start: jax.Array
    window_ends: jax.Array

    def counts(self, step: jax.Array) -> jax.Array:
        """Tell whether the draw after this step belongs to a window."""
        return (step >= self.window_start) & (step <= self.window_ends[-1])


class AdaptState(NamedTuple):
    """What warmup has learnt so far.

    Attributes:
        schedule: when it learns.
        averaging: state of the dual averaging, on the real line.
        preconditioner: a diagonal mass; the Gaussian in whose coordinates the kernel works; or None for N(0, I).
    """

    schedule: Schedule
    averaging: Averaging
    preconditioner: Preconditioner


def init_adaptation(
    step_size: jax.Array,
    max_step_size: float | None,
    num_warmup: int,
    preconditioner: Preconditioner = None,
    boundaries: list[int] | None = None,
) -> AdaptState:
    """Start the adaptation.

    Args:
        step_size: where the dual averaging starts.
        max_step_size: upper bound of the step size, or None.
        num_warmup: how many steps will adapt.
        preconditioner: what to start from.
        boundaries: the first step of every window, and the step after the last one; none if nothing is to be learnt.
    """
    start, *ends = boundaries or [num_warmup]
    whole = jnp.result_type(int)
    schedule = Schedule(
        num_warmup=jnp.asarray(num_warmup, whole),
        window_start=jnp.asarray(start, whole),
        window_ends=jnp.asarray(ends, whole) - 1,
    )
    return AdaptState(schedule, start_averaging(step_size, max_step_size), preconditioner)


def update_adaptation(
    state: AdaptState,
    step: jax.Array,
    accept_error: jax.Array,
    point: Point,
    step_size: jax.Array,
    max_step_size: float | None,
    adapt_step_size: bool,
) -> tuple[jax.Array, AdaptState]:
    """Learn from one step of warmup.

    Args:
        state: what was known before.
        step: number of the step, from 0.
        accept_error: target acceptance probability minus the one of this step.
        point: where the chain is after this step.
        step_size: step size of this step.
        max_step_size: upper bound of the step size, or None.
        adapt_step_size: whether to change the step size.

    Returns:
        The next step size and the next state.
    """
    if adapt_step_size:
        averaging = update_averaging(state.averaging, accept_error)
        step_size = averaged_step_size(averaging, step == state.schedule.num_warmup - 1, max_step_size)
        state = state._replace(averaging=averaging)
    return step_size, _update_preconditioner(state, step, point, step_size, max_step_size)


def _update_preconditioner(
    state: AdaptState, step: jax.Array, point: Point, step_size: jax.Array, max_step_size: float | None
) -> AdaptState:
    """Count a draw; at the end of a window, take what it measured and start afresh."""
    known, schedule = state.preconditioner, state.schedule
    if known is None or not schedule.window_ends.size:
        return state
    counts = schedule.counts(step)
    counted = jax.lax.cond(counts, lambda: known.count_draw(point), lambda: known)

    def renewed() -> AdaptState:
        averaging = start_averaging(step_size, max_step_size)
        return state._replace(averaging=averaging, preconditioner=counted.close())

    at_end = counts & jnp.any(step == schedule.window_ends)
    return jax.lax.cond(at_end, renewed, lambda: state._replace(preconditioner=counted))
