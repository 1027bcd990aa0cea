"""Adaptation of step sizes in warmup."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._integrators import select

# An energy is a sum of rounded terms as large as itself: its last digits are none.
DIGITS_LOST = 2.0
# Energy error from which on a proposal is lost: it would have been accepted once in more than ten thousand times.
LOST_ERROR = 10.0
# Steps of a warmup with windows.
MIN_WARMUP = 20
# Percentage of warmup from which on the mixing of the energy is measured.
MIXING_FROM = 35
# More steps than any trajectory has.
MAX_STEPS = 2**20


def certain_error(energy_error: Array, *energies: Array) -> Array:
    """Return the part of an energy error that exceeds the rounding of the energies."""
    largest = jnp.max(jnp.abs(jnp.stack(energies)))
    lost = DIGITS_LOST * jnp.finfo(energy_error.dtype).eps * largest
    return jnp.sign(energy_error) * jnp.maximum(jnp.abs(energy_error) - lost, 0.0)


class Autocorrelation(NamedTuple):
    """Running sums of a number, from which its correlation from one step to the next is estimated."""

    anchor: Array  # the first of them, which is taken off, lest squares lose their digits
    latest: Array
    sums: Array  # of 1, the number, its square, and its product with the one before

    @classmethod
    def start(cls, dtype: jnp.dtype) -> "Autocorrelation":
        """Return empty sums."""
        return cls(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros(4, dtype))

    def add(self, value: Array) -> "Autocorrelation":
        """Add the number of the next step."""
        anchor = jnp.where(self.sums[0] == 0, value, self.anchor)
        x = value - anchor
        return Autocorrelation(anchor, x, self.sums + jnp.stack([jnp.ones_like(x), x, x**2, x * self.latest]))

    def moments(self) -> Array:
        """Return the variance, and the covariance of a number with the one before."""
        mean, square, product = self.sums[1:] / self.sums[0]
        return jnp.stack([square - mean**2, product - mean**2])

    def estimate(self) -> Array:
        """Return the correlation; NaN before there are numbers that differ."""
        variance, covariance = self.moments()
        return covariance / variance

    def pooled(self) -> "Autocorrelation":
        """Return sums for each of a batch of chains whose estimate is that of all."""
        variance, covariance = jax.vmap(Autocorrelation.moments)(self).mean(axis=0)
        sums = jnp.stack([jnp.ones_like(variance), jnp.zeros_like(variance), variance, covariance])
        return self._replace(sums=jnp.broadcast_to(sums, self.sums.shape))


class AdaptState(NamedTuple):
    """State of the adaptation."""

    num_warmup: Array  # in the state: a chain resumed by an ``MCMC`` with another one does not adapt again
    step_size_state: Any  # of the rule for the step size
    # Largest number of an integrator's steps in the next proposal. Far from the posterior long trajectories fall so
    # deep that no step size is small enough for them; many short ones lose what they fell by.
    max_steps: Array
    preconditioner: Any  # coordinates, or units, in which a kernel moves; None for N(0, I)
    mixing: Autocorrelation | None = None  # of the energy, by which a kernel chooses the number of proposals of a draw


def window_position(step: Array, num_warmup: Array, percentages: tuple[int, ...]) -> tuple[Array, Array]:
    """Whether a step's draw counts for the preconditioner, and whether it ends a window.

    The first window begins at the first of these percentages of warmup; at each of the others a window ends. Shorter
    warmups than MIN_WARMUP have none.
    """
    bounds = jnp.array(percentages) * num_warmup // 100
    is_long = num_warmup >= MIN_WARMUP
    return is_long & (step >= bounds[0]) & (step < bounds[-1]), is_long & jnp.any(step == bounds[1:] - 1)


# Hoffman & Gelman 2014 have 0.05. The acceptance of a split trajectory falls from 1 to 0 within a small factor of the
# step; at 0.05 the iterates then swing by factors of ten, and their average settles at a step that is too small.
GAMMA = 0.2
# Their stabilisation of the first iterations, and exponent of the averaging.
DELAY, DECAY = 10, 0.75
# Largest logit of a step over its bound, which itself lies at infinity.
MAX_LOGIT = math.log(99)


def to_real_line(step_size: Array, max_step_size: float | None) -> Array:
    """Map a step to its logarithm, or to the logit of its ratio to ``max_step_size``; far below that the two agree."""
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


def steps_along(length: Array | float, step_size: Array, max_steps: int = MAX_STEPS) -> Array:
    """Return the number of steps that come nearest to a length, at least one and at most ``max_steps``."""
    return jnp.clip(jnp.round(length / step_size), 1, max_steps).astype(jnp.result_type(int))


# While acceptance is below the target by SHORTFALL, every fourth step of warmup is a probe, with eight times the step
# size. An integrator of second order then makes 8² to 8³ times the energy error. So where probes err by less than 30,
# proposals at the step size itself are refused by rounding, however little of it the energy shows. A smaller step would
# not help: the step grows, as if acceptance were above the target by ROUNDING_LIFT.
SHORTFALL, PROBE_EVERY, PROBE_FACTOR, MAX_ROUNDING, ROUNDING_LIFT = 0.1, 4, 8, 30.0, 0.5
# Largest error that is counted of a probe, and weights of the latest step and of the latest probe in their means.
MAX_PROBE_ERROR, LATEST_WEIGHT, PROBE_WEIGHT = 100.0, 0.1, 0.4


class AcceptState(NamedTuple):
    """State of :class:`AcceptanceRule`; steps are on the real line, see :func:`to_real_line`."""

    step: Array
    average: Array  # of the steps, weighted towards the latest
    error: Array  # mean of target less acceptance
    number: Array  # of averaged steps
    center: Array  # to which the steps are drawn
    heading: Array  # of a search: 1 doubles, −1 halves, 0 is not known yet; SEARCH_ENDED after it
    accept_prob: Array  # mean of the latest steps
    probe_error: Array  # mean size of the energy errors of the latest probes


SEARCH_ENDED = 2.0


class AcceptanceRule(NamedTuple):
    """Steer the mean acceptance to a target: a search by factors of two, as in NUTS, then dual averaging."""

    target: float
    max_step_size: float | None
    is_second_order: bool  # whether energy errors grow like the square of the step or faster

    def start(self, step_size: Array, *, searches: bool) -> AcceptState:
        """Start at a step size."""
        zero = jnp.zeros_like(step_size)
        step = to_real_line(step_size, self.max_step_size)
        return self._initial_state(step, searches, zero + self.target, zero + MAX_PROBE_ERROR)

    def restart(self, state: AcceptState) -> AcceptState:
        """Start again in other units, in which the latest step size is a start and no more."""
        return self._initial_state(state.step, False, state.accept_prob, state.probe_error)

    def _initial_state(self, step: Array, searches: bool, accept_prob: Array, probe_error: Array) -> AcceptState:
        zero = jnp.zeros_like(step)
        heading = zero if searches else jnp.full_like(zero, SEARCH_ENDED)
        # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
        return AcceptState(step, step, zero, zero, step + math.log(2), heading, accept_prob, probe_error)

    def is_probe(self, state: AcceptState, step: Array) -> Array:
        """Whether a step of warmup is a probe."""
        return self.is_second_order & self._falls_short(state) & (step % PROBE_EVERY == 0)

    def probe_step_size(self, step_size: Array) -> Array:
        """Return the step size of a probe."""
        longer = PROBE_FACTOR * step_size
        return longer if self.max_step_size is None else jnp.minimum(longer, self.max_step_size)

    def update(self, state: AcceptState, energy_error: Array, square_error: Array, is_probe: Array) -> AcceptState:
        """Learn from one step of warmup, of this energy error and mean square error per dimension."""
        accept_prob = jnp.exp(-jnp.maximum(energy_error, 0.0))
        probe_error = jnp.minimum(jnp.abs(energy_error), MAX_PROBE_ERROR)
        if self.max_step_size is not None:  # a probe that the bound makes smaller shows nothing
            is_bounded = PROBE_FACTOR * from_real_line(state.step, self.max_step_size) > self.max_step_size
            probe_error = jnp.where(is_bounded, MAX_PROBE_ERROR, probe_error)
        probed = state._replace(probe_error=state.probe_error + PROBE_WEIGHT * (probe_error - state.probe_error))
        state = state._replace(accept_prob=state.accept_prob + LATEST_WEIGHT * (accept_prob - state.accept_prob))
        averaged = self._average(state, jnp.where(self._is_rounding(state), self.target + ROUNDING_LIFT, accept_prob))
        stepped = select(state.heading == SEARCH_ENDED, averaged, self._search(state, accept_prob))
        return select(is_probe, probed, stepped)

    def step_size(self, state: AcceptState, is_last: Array) -> Array:
        """Return the step size to continue with: the iterates explore; their average is what warmup leaves behind."""
        return from_real_line(jnp.where(is_last, state.average, state.step), self.max_step_size)

    def is_searching(self, state: AcceptState) -> Array:
        """Whether acceptance has not crossed the target yet, so that trajectories are to have one step."""
        return state.heading != SEARCH_ENDED

    def accepts(
        self, state: AcceptState, passes_metropolis: Array, energy_error: Array, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Whether a finite proposal becomes the next draw: by Metropolis; in warmup not refused by rounding alone."""
        return passes_metropolis | (is_adapting & self._is_rounding(state) & (energy_error < MAX_ROUNDING))

    def _falls_short(self, state: AcceptState) -> Array:
        return (state.heading == SEARCH_ENDED) & (state.accept_prob < self.target - SHORTFALL)

    def _is_rounding(self, state: AcceptState) -> Array:
        return self._falls_short(state) & (state.probe_error < MAX_ROUNDING)

    def _search(self, state: AcceptState, accept_prob: Array) -> AcceptState:
        direction = jnp.where(accept_prob > self.target, 1.0, -1.0)
        goes_on = state.heading * direction >= 0
        step = jnp.where(goes_on, state.step + direction * math.log(2), state.step)
        if self.max_step_size is not None:
            goes_on &= step < MAX_LOGIT
            step = jnp.minimum(step, MAX_LOGIT)
        heading = jnp.where(goes_on, direction, SEARCH_ENDED)
        return state._replace(step=step, average=step, center=step + math.log(2), heading=heading)

    def _average(self, state: AcceptState, accept_prob: Array) -> AcceptState:
        num_averaged = state.number + 1
        error = state.error + (self.target - accept_prob - state.error) / (num_averaged + DELAY)
        step = state.center - jnp.sqrt(num_averaged) / GAMMA * error
        average = state.average + num_averaged**-DECAY * (step - state.average)
        return state._replace(step=step, average=average, error=error, number=num_averaged)


# Energy errors have a heavy tail while the step is too large; one of them must not empty the memory.
MAX_RATIO = 1e3
MIN_MEMORY = 10.0
# Share of all steps that is remembered: on the way in steps were smaller than they need to be.
MEMORY = 0.5
# While the step size adapts, steps are refused whose energy error is above so many of the target's deviations.
GROSS_ERROR = 10.0


class EnergyState(NamedTuple):
    """State of :class:`EnergyRule`."""

    step_size: Array
    ratio: Array  # estimated mean square energy error at this step size, relative to the target
    weight: Array  # number of steps of which the ratio is a mean
    num_seen: Array


class EnergyRule(NamedTuple):
    """Bring the mean square of the energy error, per dimension, to a value.

    The error of an integrator of second order grows like ε³ from step to step, its square like ε⁶; so each step's
    gives its value at another ε. The mean of these forgets the first half of the steps.
    """

    square_error: float

    def start(self, step_size: Array, *, searches: bool) -> EnergyState:
        """Start at a step size."""
        zero = jnp.zeros_like(step_size)
        return EnergyState(step_size, zero, zero, zero)

    def restart(self, state: EnergyState) -> EnergyState:
        """Start at the latest step size."""
        return self.start(state.step_size, searches=False)

    def is_probe(self, state: EnergyState, step: Array) -> Array:
        """Return False: every step is informative about all step sizes."""
        return jnp.zeros((), bool)

    def probe_step_size(self, step_size: Array) -> Array:
        """Return the step size, as there are no probes."""
        return step_size

    def update(self, state: EnergyState, energy_error: Array, square_error: Array, is_probe: Array) -> EnergyState:
        """Learn from one step of warmup."""
        ratio = jnp.minimum(square_error / self.square_error, MAX_RATIO)
        weight = jnp.minimum(state.weight, jnp.maximum(MIN_MEMORY, MEMORY * state.num_seen)) + 1
        mean = state.ratio + (ratio - state.ratio) / weight
        factor = jnp.clip(jnp.maximum(mean, 1e-6) ** (-1 / 6), 0.5, 2.0)
        return EnergyState(factor * state.step_size, mean * factor**6, weight, state.num_seen + 1)

    def step_size(self, state: EnergyState, is_last: Array) -> Array:
        """Return the step size to continue with."""
        return state.step_size

    def is_searching(self, state: EnergyState) -> Array:
        """Return False: every step is informative about all step sizes."""
        return jnp.zeros((), bool)

    def accepts(
        self, state: EnergyState, passes_metropolis: Array, energy_error: Array, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Whether a finite proposal becomes the next draw: always, but for gross errors in warmup."""
        # A step that is still too large throws an uncorrected chain away before it can be adapted.
        gross = max(1.0, GROSS_ERROR * (self.square_error * num_dimensions) ** 0.5)
        return ~is_adapting | (energy_error < gross)
