"""Rounding of the energy, told apart from the errors of steps by proposals with far larger ones.

What a step does wrong to the energy falls with its size; what rounding does to it does not. Where the energy is a sum
of large terms, rounding alone may refuse more than the acceptance that is aimed at, and a step size that is adapted to
acceptance then falls until no step moves the energy at all. So now and then a step of warmup is a probe, a proposal
with a step size that is several times as large: if it is accepted as often as others, their errors are not the step's.
And now and then it is a faint one, whose own error is far below one nat: what refuses it is rounding, and more
acceptance than it has, no step size reaches.
"""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

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
