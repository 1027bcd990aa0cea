"""Adaptation of step sizes and mass matrices."""

import math
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc_util import build_adaptation_schedule, dual_averaging, welford_covariance

from numpyro_wide.mcmc._integrators import Point, PyTree, select

PROBE_EVERY = 10
PROBE_FACTOR = 8
# A second-order integrator makes 8² to 8³ times the error in a probe, a random walk 8 times.
NO_LESS, LEAST = 0.6, 0.3
# The probe's errors are those of steps if they are so many times as large; those of rounding grow 8 times at most.
LEAST_GROWTH = 20.0
# Errors that are larger are no rounding: the chain falls.
MOST_ROUNDING = 1e3
# Logarithm of the errors of probes before the first one, and the range in which logarithms of errors are counted.
UNKNOWN = 10.0
SMALLEST, LARGEST = 1e-20, 1e20
# Weights of the latest step and of the latest probe: rounding changes on the way from the first position.
LATEST, LATEST_PROBE = 0.1, 0.25
# An energy is a sum of rounded terms as large as itself: its last two digits are none.
DIGITS_LOST = 2.0


class Rounding(NamedTuple):
    """Acceptance of a warmup's proposals at the step size, at one that is several times as large, and at a faint one.

    Attributes:
        accept_prob: mean acceptance probability of the latest steps.
        accept_prob_of_probes: mean acceptance probability of the latest probes.
        accept_prob_of_faint: mean acceptance probability of the latest faint steps: 1 without rounding.
        log_error: mean logarithm of the energy errors of the latest steps.
        log_error_of_probes: mean logarithm of the energy errors of the latest probes.
    """

    accept_prob: Array
    accept_prob_of_probes: Array
    accept_prob_of_faint: Array
    log_error: Array
    log_error_of_probes: Array

    @classmethod
    def start(cls) -> Self:
        """Return what is known before the first step."""
        none = jnp.zeros((), jnp.result_type(float))
        return cls(none, none, jnp.ones_like(none), none, jnp.full_like(none, UNKNOWN))

    def count_step(self, accept_prob: Array, square_error: Array) -> Self:
        """Learn from a step that is no probe."""
        return self._replace(
            accept_prob=self.accept_prob + LATEST * (accept_prob - self.accept_prob),
            log_error=self.log_error + LATEST * (_log_root(square_error) - self.log_error),
        )

    def count_probe(self, accept_prob: Array, square_error: Array) -> Self:
        """Learn from a probe."""
        accepted, log_error = self.accept_prob_of_probes, self.log_error_of_probes
        return self._replace(
            accept_prob_of_probes=accepted + LATEST_PROBE * (accept_prob - accepted),
            log_error_of_probes=log_error + LATEST_PROBE * (_log_root(square_error) - log_error),
        )

    def count_faint(self, accept_prob: Array) -> Self:
        """Learn from a faint step."""
        mean = self.accept_prob_of_faint
        return self._replace(accept_prob_of_faint=mean + LATEST_PROBE * (accept_prob - mean))

    def hides_the_step(self, is_second_order: bool) -> Array:
        """Tell whether the errors of the steps that are taken are not theirs, so that no step is too large.

        Args:
            is_second_order: whether the errors of steps grow like their squares, or faster.
        """
        is_hidden = self.accept_prob_of_probes >= jnp.maximum(NO_LESS * self.accept_prob, LEAST)
        grows = self.log_error_of_probes - self.log_error > math.log(LEAST_GROWTH)
        return is_hidden | (is_second_order & ~grows & (self.log_error < math.log(MOST_ROUNDING)))


def is_probe(step: Array) -> Array:
    """Tell whether a step of warmup is a probe."""
    return step % PROBE_EVERY == 1


def is_faint(step: Array) -> Array:
    """Tell whether a step of warmup is a faint one."""
    return step % PROBE_EVERY == PROBE_EVERY // 2


def certain_error(energy_error: Array, *energies: Array) -> Array:
    """Return how much of an energy error there is for certain: what is more than the last digits of the energies."""
    largest = jnp.max(jnp.abs(jnp.stack(energies)))
    lost = DIGITS_LOST * jnp.finfo(energy_error.dtype).eps * largest
    return jnp.sign(energy_error) * jnp.maximum(jnp.abs(energy_error) - lost, 0.0)


def _log_root(square_error: Array) -> Array:
    """Return the logarithm of the root of a mean square, kept in a range so that none of them outweighs all others."""
    return 0.5 * jnp.log(jnp.clip(square_error, SMALLEST, LARGEST))


class Mass(NamedTuple):
    """A diagonal mass, and what a window of warmup has seen of the one that will follow it.

    Attributes:
        scale: square root of the inverse of the mass, a pytree like the position.
        variance: state of NumPyro's form of Welford's recursion.
    """

    scale: PyTree
    variance: tuple[Any, ...]

    @classmethod
    def start(cls, z: PyTree, scale: PyTree = None) -> Self:
        """Return the mass that ``scale`` stands for, or else the identity, with nothing seen."""
        scale = jax.tree.map(jnp.ones_like, z) if scale is None else scale
        return cls(scale, welford_covariance()[0](ravel_pytree(z)[0].size))

    def count_draw(self, point: Point) -> Self:
        """Add one draw."""
        return self._replace(variance=welford_covariance()[1](point.z, self.variance))

    def close(self, draw_length: Array) -> Self:
        """Return the mass that the window measured, with nothing seen."""
        start, _, finish = welford_covariance()
        inverse_root = finish(self.variance, regularize=True)[2]
        return type(self)(ravel_pytree(self.scale)[1](inverse_root), start(inverse_root.size))


def mass_windows(num_warmup: int) -> list[int]:
    """Return the boundaries of the windows in which a warmup learns the mass: NumPyro's, that is Stan's."""
    windows = build_adaptation_schedule(num_warmup)[1:-1]
    return [window.start for window in windows[:1]] + [window.end + 1 for window in windows]


def given_scale(z: PyTree, inverse_mass_matrix: Array | None) -> PyTree:
    """Return the square root of a diagonal of the inverse mass as a pytree like ``z``; None for None."""
    if inverse_mass_matrix is None:
        return None
    flat, unravel = ravel_pytree(z)
    variances = jnp.asarray(inverse_mass_matrix, flat.dtype)
    if variances.shape != flat.shape:
        raise ValueError(
            f"inverse_mass_matrix must be a diagonal of shape {flat.shape}, one number a latent, "
            f"but has shape {variances.shape}."
        )
    return unravel(jnp.sqrt(variances))


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


# Hoffman & Gelman 2014 have 0.05. The acceptance of a split trajectory falls from 1 to 0 within a small factor of the
# step; at 0.05 the iterates then swing by factors of ten, and their average settles at a step that is too small.
GAMMA = 0.2
MAX_TRIALS = 60
# More steps than any trajectory has.
ENDLESS = 2**20
# Where acceptance does not fall with the step, the step grows as if acceptance were so far above its target.
LIFT = 0.5

Averaging = tuple[Array, ...]


def start_averaging(step_size: Array, max_step_size: float | None) -> Averaging:
    """Start the dual averaging, on the real line, at ``step_size``."""
    # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
    return dual_averaging(gamma=GAMMA)[0](to_real_line(step_size, max_step_size) + jnp.log(2.0))


def update_averaging(averaging: Averaging, accept_error: Array) -> Averaging:
    """Learn from one step of warmup, whose acceptance fell short of its target by ``accept_error``."""
    return dual_averaging(gamma=GAMMA)[1](accept_error, averaging)


def averaged_step_size(averaging: Averaging, is_last: Array, max_step_size: float | None) -> Array:
    """Return the step size to continue with: the iterates explore; their average is what warmup leaves behind."""
    return from_real_line(jnp.where(is_last, averaging[1], averaging[0]), max_step_size)


def to_real_line(step_size: Array, max_step_size: float | None) -> Array:
    """Map a step to the real line: its logarithm, or the logit of its ratio to ``max_step_size``.

    Far below the bound the two agree. With the bound, a target at which every proposal is accepted takes
    the step to the bound and no further.
    """
    if max_step_size is None:
        return jnp.log(step_size)
    ratio = jnp.clip(step_size / max_step_size, None, 0.99)  # the bound itself lies at infinity
    return jnp.log(ratio) - jnp.log1p(-ratio)


def from_real_line(real: Array, max_step_size: float | None) -> Array:
    """Invert :func:`to_real_line`."""
    limits = jnp.finfo(jnp.result_type(real))
    if max_step_size is None:
        return jnp.clip(jnp.exp(real), limits.tiny, limits.max)
    return jnp.clip(max_step_size * jax.nn.sigmoid(real), limits.tiny, max_step_size)


def steps_along(length: Array | float, step_size: Array, most: int = ENDLESS) -> Array:
    """Return the number of steps that come nearest to a length, at least one and at most ``most``."""
    return jnp.clip(jnp.round(length / step_size), 1, most).astype(jnp.result_type(int))


class AcceptanceRule(NamedTuple):
    """Rule that steers the mean acceptance probability to a target, by dual averaging.

    Attributes:
        target: mean acceptance probability to reach, in (0, 1).
        max_step_size: upper bound of the step size, or None.
    """

    target: float
    max_step_size: float | None

    @property
    def probes(self) -> bool:
        """True: acceptance alone does not tell the errors of steps from those of rounding."""
        return True

    def start(self, step_size: Array) -> Averaging:
        """Start at a step size."""
        return start_averaging(step_size, self.max_step_size)

    def update(self, averaging: Averaging, lesson: Lesson, rounding: Rounding, is_hidden: Array) -> Averaging:
        """Learn from one step of warmup."""
        # More than what faint steps have of it, no step size reaches.
        target = self.target * jnp.maximum(rounding.accept_prob_of_faint, LEAST)
        return update_averaging(averaging, jnp.where(is_hidden, -LIFT, target - lesson.accept_prob))

    def step_size(self, averaging: Averaging, is_last: Array) -> Array:
        """Return the step size to continue with."""
        return averaged_step_size(averaging, is_last, self.max_step_size)

    def takes(
        self, is_drawn: Array, energy_error: Array, rounding: Rounding, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Obey the Metropolis correction."""
        return is_drawn


class Search(NamedTuple):
    """State of the search for a first step size.

    Attributes:
        step_size: step size of the latest trial.
        heading: 1 to double, −1 to halve; 0 before the first trial, which is made where the search starts.
        latest: heading that the latest trial asks for.
        num_trials: number of trials so far.
        rng_key: key of the trials to come.
    """

    step_size: Array
    heading: Array
    latest: Array
    num_trials: Array
    rng_key: Array


def find_step_size(
    accept_prob_fn: Any,
    step_size: Array,
    threshold: float,
    max_step_size: float | None,
    rng_key: Array,
) -> Array:
    """Double or halve a step size until the acceptance of a single trial crosses ``threshold``.

    Args:
        accept_prob_fn: function from a key and a step size to the acceptance probability of one trial.
        step_size: step size at which the search starts.
        threshold: acceptance probability to cross.
        max_step_size: upper bound of the step size, or None.
        rng_key: key of the trials.

    Returns:
        The first step size on the other side of the threshold, at most ``max_step_size``.
    """
    bound = jnp.inf if max_step_size is None else max_step_size

    def go_on(search: Search) -> Array:
        has_space = (search.step_size < bound) | (search.heading <= 0)
        return (search.latest == search.heading) & has_space & (search.num_trials <= MAX_TRIALS)

    # The trial that finds the heading is one of the loop's: a trial holds a gradient of the model, and what is written
    # twice is compiled twice.
    def trial(search: Search) -> Search:
        rng_key, key_trial = jax.random.split(search.rng_key)
        factor = jnp.where(search.heading == 0, 1.0, jnp.where(search.heading > 0, 2.0, 0.5))
        tried = jnp.minimum(search.step_size * factor, bound)
        latest = jnp.where(accept_prob_fn(key_trial, tried) > threshold, 1, -1)
        heading = jnp.where(search.heading == 0, latest, search.heading)
        return Search(tried, heading, latest, search.num_trials + 1, rng_key)

    none = jnp.array(0)
    return jax.lax.while_loop(go_on, trial, Search(step_size, none, none, none, rng_key)).step_size


# The law of an energy error has the tail that a step too large gives it; one of them must not empty the memory.
MOST_OF_A_RATIO = 1e3
SHORTEST_MEMORY = 10.0
# Share of all steps that is remembered: on the way in steps were smaller than they need to be.
MEMORY = 0.5
# Steps are refused, while the step size is being found, whose energy error is so many of the deviations aimed at.
GROSS = 10.0
# Where rounding hides them, such a deviation is no measure: errors of so many nats are refused.
GROSS_IF_HIDDEN = 20.0
# Factor by which a hidden step grows.
GROWTH = 1.1


class Matching(NamedTuple):
    """Knowledge of the rule so far.

    Attributes:
        step_size: step size to take.
        ratio: mean square error that this step size is thought to have, over the one aimed at.
        weight: number of steps of which the ratio is a mean.
        num_seen: number of steps so far.
    """

    step_size: Array
    ratio: Array
    weight: Array
    num_seen: Array


class EnergyRule(NamedTuple):
    """Rule that brings the mean square of the energy error, per dimension, to a value.

    The error of an integrator of second order grows like ε³ from step to step, its square like ε⁶; so each step's tells
    what it would have been at another ε. The mean of these forgets the first half of what it has seen.

    Attributes:
        square_error: mean square of the energy error of a step over the number of dimensions that is to be reached.
    """

    square_error: float

    @property
    def probes(self) -> bool:
        """False: an uncorrected chain would go where a probe leads it, so that none is taken."""
        return False

    def start(self, step_size: Array) -> Matching:
        """Start at a step size."""
        none = jnp.zeros_like(step_size)
        return Matching(step_size, none, none, none)

    def update(self, matching: Matching, lesson: Lesson, rounding: Rounding, is_hidden: Array) -> Matching:
        """Learn from one step of warmup."""
        ratio = jnp.minimum(lesson.square_error / self.square_error, MOST_OF_A_RATIO)
        weight = jnp.minimum(matching.weight, jnp.maximum(SHORTEST_MEMORY, MEMORY * matching.num_seen)) + 1
        mean = matching.ratio + (ratio - matching.ratio) / weight
        factor = jnp.clip(jnp.maximum(mean, 1e-6) ** (-1 / 6), 0.5, 2.0)
        seen = Matching(factor * matching.step_size, mean * factor**6, weight, matching.num_seen + 1)
        # What rounding makes of an error tells nothing of the step, but that it may grow.
        hidden = Matching(GROWTH * matching.step_size, jnp.zeros_like(mean), jnp.zeros_like(weight), seen.num_seen)
        return select(is_hidden, hidden, seen)

    def step_size(self, matching: Matching, is_last: Array) -> Array:
        """Return the step size to continue with."""
        return matching.step_size

    def takes(
        self, is_drawn: Array, energy_error: Array, rounding: Rounding, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Take every finite proposal; while the step size is still being found, none with a gross error."""
        # A step that is still too large throws an uncorrected chain away before it can be adapted.
        gross = max(1.0, GROSS * (self.square_error * num_dimensions) ** 0.5)
        gross = jnp.where(rounding.hides_the_step(True), max(gross, GROSS_IF_HIDDEN), gross)
        return ~is_adapting | (energy_error < gross)


def square_error_of(bias_tolerance: float) -> float:
    """Turn a share of the variances into a mean square of the energy error per dimension (:eq:`bias`)."""
    return 4 * bias_tolerance**3
