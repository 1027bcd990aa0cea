"""Warmup: a step size by a rule, and in some kernels a preconditioner that windows of it learn.

A preconditioner has three methods: ``start``, ``count_draw`` and ``close`` a window, which is told how far apart two
draws are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_wide.mcmc._energy_rule import EnergyRule, Matching
from numpyro_wide.mcmc._mass import Mass
from numpyro_wide.mcmc._point import Point
from numpyro_wide.mcmc._reference import Reference
from numpyro_wide.mcmc._step_size import AcceptanceRule, Averaging
from numpyro_wide.mcmc._whitening import Whitening

Preconditioner = Mass | Reference | Whitening | None
StepSizeRule = AcceptanceRule | EnergyRule


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
        averaging: what the rule for the step size has learnt; of dual averaging, on the real line.
        preconditioner: a diagonal mass; the same with a momentum length; the Gaussian in whose coordinates the kernel
            works; or None for N(0, I).
    """

    schedule: Schedule
    averaging: Averaging | Matching
    preconditioner: Preconditioner


class Lesson(NamedTuple):
    """What one step of warmup has to teach.

    Attributes:
        accept_prob: acceptance probability of its proposal.
        square_error: mean square of the energy error of its integrator's steps, per dimension.
        point: where the chain is after it.
        step_size: its step size.
        draw_length: its step size times the number of its integrator's steps.
    """

    accept_prob: jax.Array
    square_error: jax.Array
    point: Point
    step_size: jax.Array
    draw_length: jax.Array


def init_adaptation(
    step_size: jax.Array,
    rule: StepSizeRule,
    num_warmup: int,
    preconditioner: Preconditioner = None,
    boundaries: list[int] | None = None,
) -> AdaptState:
    """Start the adaptation.

    Args:
        step_size: where it starts.
        rule: how the step size is adapted.
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
    return AdaptState(schedule, rule.start(step_size), preconditioner)


def update_adaptation(
    state: AdaptState, step: jax.Array, lesson: Lesson, rule: StepSizeRule, adapt_step_size: bool
) -> tuple[jax.Array, AdaptState]:
    """Learn from one step of warmup.

    Args:
        state: what was known before.
        step: number of the step, from 0.
        lesson: what it has to teach.
        rule: how the step size is adapted.
        adapt_step_size: whether to change the step size.

    Returns:
        The next step size and the next state.
    """
    if adapt_step_size:
        averaging = rule.update(state.averaging, lesson.accept_prob, lesson.square_error)  # type: ignore[arg-type]
        step_size = rule.step_size(averaging, step == state.schedule.num_warmup - 1)  # type: ignore[arg-type]
        lesson, state = lesson._replace(step_size=step_size), state._replace(averaging=averaging)
    return lesson.step_size, _update_preconditioner(state, step, lesson, rule)


def _update_preconditioner(state: AdaptState, step: jax.Array, lesson: Lesson, rule: StepSizeRule) -> AdaptState:
    """Count a draw; at the end of a window, take what it measured and start afresh."""
    known, schedule = state.preconditioner, state.schedule
    if known is None or not schedule.window_ends.size:
        return state
    counts = schedule.counts(step)
    counted = jax.lax.cond(counts, lambda: known.count_draw(lesson.point), lambda: known)

    def renewed() -> AdaptState:
        closed = counted.close(lesson.draw_length)
        return state._replace(averaging=rule.start(lesson.step_size), preconditioner=closed)

    at_end = counts & jnp.any(step == schedule.window_ends)
    return jax.lax.cond(at_end, renewed, lambda: state._replace(preconditioner=counted))
