"""The step size of a sampler without a Metropolis correction: as large as its bias may be.

What integrators leave behind of the energy tells of the bias that they put into the draws (Robnik, Cohn-Gordon, Seljak
2024): on Gaussian posteriors the mean square of the energy error per dimension bounds it (:eq:`bias`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The law of an energy error has the tail that a step too large gives it; one of them must not empty the memory.
MOST_OF_A_RATIO = 1e3
SHORTEST_MEMORY = 10.0
# Steps are refused, while the step size is being found, whose energy error is so many of the deviations aimed at.
GROSS = 10.0


class Matching(NamedTuple):
    """What the rule has learnt.

    Attributes:
        step_size: the step to take.
        ratio: of the mean square error that this step is thought to have to the one aimed at.
        weight: of how many steps that is the mean.
        num_seen: steps so far.
    """

    step_size: jax.Array
    ratio: jax.Array
    weight: jax.Array
    num_seen: jax.Array


class EnergyRule(NamedTuple):
    """Bring the mean square of the energy error, per dimension, to a value.

    The error of an integrator of second order grows like ε³ from step to step, its square like ε⁶; so each step's tells
    what it would have been at another ε. The mean of these forgets the first half of what it has seen.

    Attributes:
        square_error: mean square of the energy error of a step over the number of dimensions, to be reached.
    """

    square_error: float

    def start(self, step_size: jax.Array) -> Matching:
        """Start at a step size."""
        none = jnp.zeros_like(step_size)
        return Matching(step_size, none, none, none)

    def update(self, matching: Matching, accept_prob: jax.Array, square_error: jax.Array) -> Matching:
        """Learn from one step of warmup."""
        ratio = jnp.minimum(square_error / self.square_error, MOST_OF_A_RATIO)
        weight = jnp.minimum(matching.weight, jnp.maximum(SHORTEST_MEMORY, 0.5 * matching.num_seen)) + 1
        mean = matching.ratio + (ratio - matching.ratio) / weight
        factor = jnp.clip(jnp.maximum(mean, 1e-6) ** (-1 / 6), 0.5, 2.0)
        return Matching(factor * matching.step_size, mean * factor**6, weight, matching.num_seen + 1)

    def step_size(self, matching: Matching, is_last: jax.Array) -> jax.Array:
        """Return the step size to go on with."""
        return matching.step_size

    def largest_error(self, num_dimensions: int) -> float:
        """Return the energy error from which on a step is taken for one that throws the chain away."""
        return max(1.0, GROSS * (self.square_error * num_dimensions) ** 0.5)


def square_error_of(bias_tolerance: float) -> float:
    """Turn a share of the variances into a mean square of the energy error per dimension (:eq:`bias`)."""
    return 4 * bias_tolerance**3
