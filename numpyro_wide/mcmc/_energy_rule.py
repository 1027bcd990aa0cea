"""The step size of a sampler without a Metropolis correction: as large as its bias may be.

What integrators leave behind of the energy tells of the bias that they put into the draws (Robnik, Cohn-Gordon, Seljak
2024): on Gaussian posteriors the mean square of the energy error per dimension bounds it (:eq:`bias`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._adaptation import Lesson
from numpyro_wide.mcmc._point import select
from numpyro_wide.mcmc._rounding import Rounding

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
