"""Warmup: a step size by a rule, and in some kernels a preconditioner that windows of draws teach.

Rules and preconditioners are classes of their own, one kind a file; the kernels and this file know of them what
:class:`StepSizeRule` and :class:`Preconditioner` say.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._point import Point, select
from numpyro_wide.mcmc._rounding import LEAST, Rounding, is_faint, is_probe

# Longest trajectory of a warmup, in steps: far more than any kernel takes.
_FARTHEST = 2**20


class StepSizeRule(Protocol):
    """Adaptation of a step size by what the proposals of a warmup did to the energy.

    What a rule has learnt is a pytree of its own making, in ``learnt``.
    """

    @property
    def probes(self) -> bool:
        """True if a chain may go where a probe, a step of warmup with a larger step size, leads it."""

    def start(self, step_size: Array) -> Any:
        """Return what is known at the start, or at a fresh one, from a step size."""

    def update(self, learnt: Any, lesson: "Lesson", rounding: Rounding, is_hidden: Array) -> Any:
        """Return what is known after one more step of warmup, whose error is the step's or, hidden, rounding's."""

    def step_size(self, learnt: Any, is_last: Array) -> Array:
        """Return the step size to continue with; the last one stays."""

    def takes(
        self, is_drawn: Array, energy_error: Array, rounding: Rounding, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Tell whether a finite proposal becomes the next draw."""


class Preconditioner(Protocol):
    """Coordinates, or units, in which a kernel moves, and what a window of warmup has seen of better ones.

    How a kernel uses it is between the two: each kernel has one kind of its own, or None.
    """

    def count_draw(self, point: Point) -> Self:
        """Return the same with one draw more in the window."""

    def close(self, draw_length: Array) -> Self:
        """Return what the window measured, with nothing seen since."""


class Schedule(NamedTuple):
    """Steps at which a warmup learns, the same for all chains.

    It is part of the state, so that a chain that is resumed by an ``MCMC`` with another ``num_warmup`` does not adapt
    again.

    Attributes:
        num_warmup: number of steps that adapt.
        window_start: step at which draws begin to count for the preconditioner.
        window_ends: steps at whose end the preconditioner is renewed, (windows,); none if it is not learnt.
    """

    num_warmup: Array
    window_start: Array
    window_ends: Array

    def counts(self, step: Array) -> Array:
        """Tell whether the draw after this step belongs to a window."""
        return (step >= self.window_start) & (step <= self.window_ends[-1])


class AdaptState(NamedTuple):
    """Knowledge that warmup has gained so far.

    Attributes:
        schedule: steps at which it learns.
        learnt: what the rule for the step size has learnt.
        rounding: what rounding does to the energy.
        reach: largest number of an integrator's steps in the next proposal. Far from the posterior long trajectories
            fall so deep that no step size is small enough for them; many short ones lose what they fell by.
        preconditioner: the kernel's kind of :class:`Preconditioner`, or None for N(0, I).
        is_cut: whether draws are parts of trajectories, by a kernel that can tell which are quicker.
    """

    schedule: Schedule
    learnt: Any
    rounding: Rounding
    reach: Array
    preconditioner: Any
    is_cut: Array


class Lesson(NamedTuple):
    """Teaching of one step of warmup.

    Attributes:
        accept_prob: acceptance probability of its proposal, but for what rounding alone refuses.
        is_lost: whether its proposal was far from being accepted.
        square_error: mean square of the energy error of its integrator's steps, per dimension.
        raw_square_error: the same, rounding and all.
        is_probed: whether a probe may have the whole of its larger step size.
        point: place of the chain after it.
        step_size: its step size.
        draw_length: its step size times the number of its integrator's steps.
    """

    accept_prob: Array
    is_lost: Array
    square_error: Array
    raw_square_error: Array
    is_probed: Array
    point: Point
    step_size: Array
    draw_length: Array


def init_adaptation(
    step_size: Array,
    rule: StepSizeRule,
    num_warmup: int,
    preconditioner: Preconditioner | None = None,
    boundaries: list[int] | None = None,
) -> AdaptState:
    """Start the adaptation.

    Args:
        step_size: step size to start from.
        rule: adaptation of the step size.
        num_warmup: number of steps that will adapt.
        preconditioner: preconditioner to start from, or None for N(0, I).
        boundaries: first step of every window, and the step after the last one; none if nothing is to be learnt.

    Returns:
        What is known before the first step.
    """
    start, *ends = boundaries or [num_warmup]
    whole = jnp.result_type(int)
    schedule = Schedule(
        num_warmup=jnp.asarray(num_warmup, whole),
        window_start=jnp.asarray(start, whole),
        window_ends=jnp.asarray(ends, whole) - 1,
    )
    return AdaptState(
        schedule=schedule,
        learnt=rule.start(step_size),
        rounding=Rounding.start(),
        reach=jnp.ones((), whole),
        preconditioner=preconditioner,
        is_cut=jnp.zeros((), bool),
    )


def update_adaptation(
    state: AdaptState,
    step: Array,
    lesson: Lesson,
    rule: StepSizeRule,
    adapt_step_size: bool,
    measures_rounding: bool = False,
) -> tuple[Array, AdaptState]:
    """Learn from one step of warmup: of a probe or a faint one, what rounding does, of another step, the step size.

    Args:
        state: what was known before.
        step: number of the step, from 0.
        lesson: what the step has to teach.
        rule: adaptation of the step size.
        adapt_step_size: whether to change the step size.
        measures_rounding: whether some steps are faint ones.

    Returns:
        The next step size and the next state.
    """
    if adapt_step_size:
        faint = state._replace(rounding=state.rounding.count_faint(lesson.accept_prob))
        probed = state._replace(rounding=state.rounding.count_probe(lesson.accept_prob, lesson.raw_square_error))
        rounding = state.rounding.count_step(lesson.accept_prob, lesson.raw_square_error)
        reach = jnp.where(lesson.is_lost, 1, jnp.minimum(2 * state.reach, _FARTHEST))
        # Where faint steps fare better, it is the step that loses.
        is_too_large = lesson.is_lost & (rounding.accept_prob_of_faint > LEAST)
        is_hidden = lesson.is_probed & ~is_too_large & rounding.hides_the_step(measures_rounding)
        taught = state._replace(
            learnt=rule.update(state.learnt, lesson, rounding, is_hidden), rounding=rounding, reach=reach
        )
        state = select(is_probe(step), probed, taught) if rule.probes or measures_rounding else taught
        if measures_rounding:
            state = select(is_faint(step), faint, state)
        step_size = rule.step_size(state.learnt, step == state.schedule.num_warmup - 1)
        lesson = lesson._replace(step_size=step_size)
    return lesson.step_size, _update_preconditioner(state, step, lesson, rule)


def _update_preconditioner(state: AdaptState, step: Array, lesson: Lesson, rule: StepSizeRule) -> AdaptState:
    """Count a draw; at the end of a window, take what it measured and start afresh."""
    known, schedule = state.preconditioner, state.schedule
    if known is None or not schedule.window_ends.size:
        return state
    counts = schedule.counts(step)
    counted = jax.lax.cond(counts, lambda: known.count_draw(lesson.point), lambda: known)

    def renewed() -> AdaptState:
        closed = counted.close(lesson.draw_length)
        # In other units another step size is right: what was learnt of it serves as a start, and no more.
        return state._replace(learnt=rule.start(lesson.step_size), preconditioner=closed)

    at_end = counts & jnp.any(step == schedule.window_ends)
    return jax.lax.cond(at_end, renewed, lambda: state._replace(preconditioner=counted))
