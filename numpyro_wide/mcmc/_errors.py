"""Errors of a proposal in the energy, as warmup learns them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._point import Point, size_of
from numpyro_wide.mcmc._rounding import certain_error
from numpyro_wide.mcmc._state import Proposal

# Energy error from which on a proposal is lost: it would have been accepted once in more than ten thousand times.
LOST = 10.0


class Errors(NamedTuple):
    """Energy errors of a proposal, inf if it is not finite.

    Attributes:
        certain: what is more of its error than the last digits of the energies.
        square: mean square of the errors of its integrator's steps, per dimension.
        raw_square: mean square of these errors, or the square of the error of the whole, with what rounding made.
    """

    certain: Array
    square: Array
    raw_square: Array

    @classmethod
    def of(cls, proposal: Proposal, current: Point, energy_error: Array, finite: Array) -> "Errors":
        """Return the errors of a proposal.

        Args:
            proposal: what a kernel proposed.
            current: point that it came from.
            energy_error: −log of the acceptance ratio, inf if the proposal is not finite.
            finite: whether it is.
        """
        certain = certain_error(energy_error, current.potential_energy, proposal.point.potential_energy)
        if proposal.square_error is None:
            square, raw = jnp.square(certain), jnp.square(energy_error)
        else:
            square = raw = proposal.square_error
        per_dimension = jnp.where(finite, square, jnp.inf) / max(1, size_of(current.z))
        return cls(jnp.where(finite, certain, jnp.inf), per_dimension, jnp.where(finite, raw, jnp.inf))

    def is_lost(self) -> Array:
        """Tell whether the proposal had no chance."""
        return self.certain > LOST
