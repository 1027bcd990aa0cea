"""The state of a chain, and what one step proposes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_wide.mcmc._adaptation import AdaptState
from numpyro_wide.mcmc._point import Point, PyTree, all_finite


class KernelState(NamedTuple):
    """State of a chain; every field can be named in ``extra_fields`` of :meth:`numpyro.infer.MCMC.run`.

    Attributes:
        i: number of steps taken, warmup included.
        z: position in unconstrained space.
        z_grad: gradient of the potential energy at ``z``; None for a kernel without gradients.
        potential_energy: potential energy U at ``z``.
        r: momentum, N(0, I) distributed; None for a kernel that draws it afresh. To the microcanonical kernel only its
            direction matters.
        accept_prob: acceptance probability of the last proposal, whether or not the kernel obeys it.
        mean_accept_prob: its mean over the warmup, or over the steps after it.
        energy_error: −log of the last acceptance ratio, for the Hamiltonian kernels the error in the
            energy; inf if the proposal was not finite.
        num_grad: evaluations of the gradient (without gradients: of the potential) in the last step.
        num_nonfinite: proposals so far that were rejected because their energy or gradient was not finite.
        step_size: step size that the next step will use.
        adapt_state: what warmup has learnt.
        rng_key: key for the next step.
    """

    i: jax.Array
    z: PyTree
    z_grad: PyTree
    potential_energy: jax.Array
    r: PyTree
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    energy_error: jax.Array
    num_grad: jax.Array
    num_nonfinite: jax.Array
    step_size: jax.Array
    adapt_state: AdaptState
    rng_key: jax.Array

    def without_schedule(self, others: Any = None) -> Any:
        """The state, or ``others`` in the place of what it holds, without the step number and the schedule."""
        parts, adapted = (
            part._asdict() if others is None else dict.fromkeys(part._fields, others)
            for part in (self, self.adapt_state)
        )
        return KernelState(**{**parts, "i": None, "adapt_state": AdaptState(**{**adapted, "schedule": None})})

    def with_schedule_of(self, known: "KernelState") -> "KernelState":
        """Undo :meth:`without_schedule`."""
        return self._replace(i=known.i, adapt_state=self.adapt_state._replace(schedule=known.adapt_state.schedule))


def share_schedule(state: KernelState) -> tuple[KernelState, Any]:
    """Take what all chains of a batch have in common out of the batch.

    Chains of a batch are equally far. With a step number of its own each, what a kernel does at the end of a window
    would be computed in every step of every chain, and thrown away.

    Returns:
        The state with one step number and one schedule for all, and the axes to map over.
    """
    schedule = jax.tree.map(lambda of_chains: of_chains[0], state.adapt_state.schedule)
    shared = state._replace(i=state.i[0], adapt_state=state.adapt_state._replace(schedule=schedule))
    return shared, state.without_schedule(0)


class Proposal(NamedTuple):
    """What a kernel proposes: the new point, −log of its acceptance ratio, both momenta, the cost.

    With several steps of an integrator, ``square_error`` is the mean square of their energy errors.
    """

    point: Point
    energy_error: jax.Array
    r_accepted: PyTree = None
    r_rejected: PyTree = None
    num_grad: int | jax.Array = 1
    square_error: jax.Array | None = None


def point_of(state: KernelState) -> Point:
    """Return the position of a chain with its potential energy and gradient."""
    return Point(state.z, state.potential_energy, state.z_grad)


def is_warming_up(state: KernelState) -> jax.Array:
    """Tell whether the next step belongs to the warmup."""
    return state.i < state.adapt_state.schedule.num_warmup


def acceptance(proposal: Proposal) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tell whether a proposal is finite, its acceptance probability and its energy error."""
    point = proposal.point
    finite = all_finite((point.potential_energy, point.z_grad, proposal.energy_error))
    energy_error = jnp.where(finite, proposal.energy_error, jnp.inf)
    return finite, jnp.exp(-jnp.maximum(energy_error, 0.0)), energy_error
