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
LOST = 10.0
# Steps of a warmup with windows.
MIN_WARMUP = 20
# More steps than any trajectory has.
FARTHEST = 2**20


def certain_error(energy_error: Array, *energies: Array) -> Array:
    """Return the part of an energy error that exceeds the rounding of the energies."""
    largest = jnp.max(jnp.abs(jnp.stack(energies)))
    lost = DIGITS_LOST * jnp.finfo(energy_error.dtype).eps * largest
    return jnp.sign(energy_error) * jnp.maximum(jnp.abs(energy_error) - lost, 0.0)


class AdaptState(NamedTuple):
    """State of the adaptation."""

    num_warmup: Array  # in the state: a chain resumed by an ``MCMC`` with another one does not adapt again
    learnt: Any  # by the rule for the step size
    # Largest number of an integrator's steps in the next proposal. Far from the posterior long trajectories fall so
    # deep that no step size is small enough for them; many short ones lose what they fell by.
    reach: Array
    preconditioner: Any  # coordinates, or units, in which a kernel moves; None for N(0, I)
    is_cut: Array  # whether draws are parts of trajectories


def window_position(step: Array, num_warmup: Array, percentages: tuple[int, ...]) -> tuple[Array, Array]:
    """Tell whether a step's draw counts for the preconditioner, and whether it is the last one of a window.

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
HIGHEST = math.log(99)


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


def steps_along(length: Array | float, step_size: Array, most: int = FARTHEST) -> Array:
    """Return the number of steps that come nearest to a length, at least one and at most ``most``."""
    return jnp.clip(jnp.round(length / step_size), 1, most).astype(jnp.result_type(int))


class Averaging(NamedTuple):
    """State of :class:`AcceptanceRule`; steps are on the real line, see :func:`to_real_line`."""

    step: Array
    average: Array  # of the steps, weighted towards the latest
    error: Array  # mean of target less acceptance
    number: Array  # of averaged steps
    center: Array  # to which the steps are drawn
    heading: Array  # of a search: 1 doubles, −1 halves, 0 is not known yet; FOUND after it


FOUND = 2.0


class AcceptanceRule(NamedTuple):
    """Steer the mean acceptance to a target: a search by factors of two, as in NUTS, then dual averaging."""

    target: float
    max_step_size: float | None

    def start(self, step_size: Array, *, searches: bool) -> Averaging:
        """Start at a step size."""
        return self._fresh(to_real_line(step_size, self.max_step_size), searches)

    def restart(self, learnt: Averaging) -> Averaging:
        """Start again in other units, in which the latest step size is a start and no more."""
        return self._fresh(learnt.step, searches=False)

    def _fresh(self, step: Array, searches: bool) -> Averaging:
        none = jnp.zeros_like(step)
        heading = none if searches else jnp.full_like(none, FOUND)
        # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
        return Averaging(step, step, none, none, step + math.log(2), heading)

    def update(self, learnt: Averaging, energy_error: Array, square_error: Array) -> Averaging:
        """Learn from one step of warmup, of this energy error and mean square error per dimension."""
        accept_prob = jnp.exp(-jnp.maximum(energy_error, 0.0))
        return select(learnt.heading == FOUND, self._average(learnt, accept_prob), self._search(learnt, accept_prob))

    def step_size(self, learnt: Averaging, is_last: Array) -> Array:
        """Return the step size to continue with: the iterates explore; their average is what warmup leaves behind."""
        return from_real_line(jnp.where(is_last, learnt.average, learnt.step), self.max_step_size)

    def is_searching(self, learnt: Averaging) -> Array:
        """Tell whether acceptance has not crossed the target yet, so that trajectories are to have one step."""
        return learnt.heading != FOUND

    def takes(self, is_drawn: Array, energy_error: Array, is_adapting: Array, num_dimensions: int) -> Array:
        """Tell whether a finite proposal becomes the next draw: by Metropolis."""
        return is_drawn

    def _search(self, learnt: Averaging, accept_prob: Array) -> Averaging:
        wanted = jnp.where(accept_prob > self.target, 1.0, -1.0)
        goes_on = learnt.heading * wanted >= 0
        step = jnp.where(goes_on, learnt.step + wanted * math.log(2), learnt.step)
        if self.max_step_size is not None:
            goes_on &= step < HIGHEST
            step = jnp.minimum(step, HIGHEST)
        heading = jnp.where(goes_on, wanted, FOUND)
        return learnt._replace(step=step, average=step, center=step + math.log(2), heading=heading)

    def _average(self, learnt: Averaging, accept_prob: Array) -> Averaging:
        number = learnt.number + 1
        error = learnt.error + (self.target - accept_prob - learnt.error) / (number + DELAY)
        step = learnt.center - jnp.sqrt(number) / GAMMA * error
        average = learnt.average + number**-DECAY * (step - learnt.average)
        return learnt._replace(step=step, average=average, error=error, number=number)


# The law of an energy error has the tail that a step too large gives it; one of them must not empty the memory.
MOST_OF_A_RATIO = 1e3
SHORTEST_MEMORY = 10.0
# Share of all steps that is remembered: on the way in steps were smaller than they need to be.
MEMORY = 0.5
# Steps are refused, while the step size is being found, whose energy error is so many of the deviations aimed at.
GROSS = 10.0


class Matching(NamedTuple):
    """State of :class:`EnergyRule`."""

    step_size: Array
    ratio: Array  # mean square error that this step size is thought to have, over the one aimed at
    weight: Array  # number of steps of which the ratio is a mean
    num_seen: Array


class EnergyRule(NamedTuple):
    """Bring the mean square of the energy error, per dimension, to a value.

    The error of an integrator of second order grows like ε³ from step to step, its square like ε⁶; so each step's tells
    what it would have been at another ε. The mean of these forgets the first half of what it has seen.
    """

    square_error: float

    def start(self, step_size: Array, *, searches: bool) -> Matching:
        """Start at a step size."""
        none = jnp.zeros_like(step_size)
        return Matching(step_size, none, none, none)

    def restart(self, learnt: Matching) -> Matching:
        """Start at the latest step size."""
        return self.start(learnt.step_size, searches=False)

    def update(self, learnt: Matching, energy_error: Array, square_error: Array) -> Matching:
        """Learn from one step of warmup."""
        ratio = jnp.minimum(square_error / self.square_error, MOST_OF_A_RATIO)
        weight = jnp.minimum(learnt.weight, jnp.maximum(SHORTEST_MEMORY, MEMORY * learnt.num_seen)) + 1
        mean = learnt.ratio + (ratio - learnt.ratio) / weight
        factor = jnp.clip(jnp.maximum(mean, 1e-6) ** (-1 / 6), 0.5, 2.0)
        return Matching(factor * learnt.step_size, mean * factor**6, weight, learnt.num_seen + 1)

    def step_size(self, learnt: Matching, is_last: Array) -> Array:
        """Return the step size to continue with."""
        return learnt.step_size

    def is_searching(self, learnt: Matching) -> Array:
        """Return False: every step tells of all step sizes."""
        return jnp.zeros((), bool)

    def takes(self, is_drawn: Array, energy_error: Array, is_adapting: Array, num_dimensions: int) -> Array:
        """Take every finite proposal; while the step size is still being found, none with a gross error."""
        # A step that is still too large throws an uncorrected chain away before it can be adapted.
        gross = max(1.0, GROSS * (self.square_error * num_dimensions) ** 0.5)
        return ~is_adapting | (energy_error < gross)
