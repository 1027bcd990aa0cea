"""The state of a chain, and what one step proposes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide._checks import listing
from numpyro_wide._over_chains import is_one_by_one, over_chains
from numpyro_wide.mcmc._adaptation import AdaptState
from numpyro_wide.mcmc._moves import Moves
from numpyro_wide.mcmc._point import Point, PyTree, all_finite


class KernelState(NamedTuple):
    """State of a chain; every field can be named in ``extra_fields`` of :meth:`numpyro.infer.MCMC.run`.

    Attributes:
        i: number of steps taken, warmup included.
        z: position in unconstrained space, a pytree.
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
        adapt_state: :class:`AdaptState`, what warmup has learnt.
        moves: :class:`Moves`, the number of draws that are new.
        rng_key: key for the next step.
    """

    i: Array
    z: PyTree
    z_grad: PyTree
    potential_energy: Array
    r: PyTree
    accept_prob: Array
    mean_accept_prob: Array
    energy_error: Array
    num_grad: Array
    num_nonfinite: Array
    step_size: Array
    adapt_state: AdaptState
    moves: Moves
    rng_key: Array

    def __getitem__(self, place: Any) -> Any:
        """Return a field by its place; NumPyro asks by name for an extra field that is no attribute.

        Raises:
            KeyError: for a name.
        """
        if isinstance(place, str):
            raise KeyError(f"extra_fields must be among {listing(self._fields)} for this kernel, but got {place!r}.")
        return tuple.__getitem__(self, place)


def over_states(fn: Callable[..., Any], state: KernelState, *others: Any) -> Any:
    """Map a function over the states of chains and what comes with each, as :func:`over_chains` does.

    Chains of a batch are equally far, and share their step number and schedule where they move at once. With one of
    each own, what a kernel does at the end of a window would be computed in every step of every chain, and thrown away.

    Args:
        fn: function of a state and the others.
        state: states of chains, with a leading axis for them throughout.
        *others: arrays with the same leading axis.
    """
    if is_one_by_one():
        return over_chains(fn)(state, *others)
    i, schedule = jax.tree.map(lambda of_chains: of_chains[0], (state.i, state.adapt_state.schedule))
    shared = state._replace(i=i, adapt_state=state.adapt_state._replace(schedule=schedule))
    return jax.vmap(fn, in_axes=(_chain_axes(), *(0 for _ in others)))(shared, *others)


def _chain_axes() -> Any:
    """Return the axes to map over, as ``jax.vmap`` wants them, of a state whose chains share their schedule."""
    adapted: dict[str, Any] = dict.fromkeys(AdaptState._fields, 0) | {"schedule": None}
    parts: dict[str, Any] = dict.fromkeys(KernelState._fields, 0) | {"i": None, "adapt_state": AdaptState(**adapted)}
    return KernelState(**parts)


class Move(NamedTuple):
    """Settings with which a kernel makes a proposal.

    Attributes:
        step_size: step size, a scalar.
        num_steps: number of steps of the integrator.
        preconditioner: the kernel's kind of preconditioner, or None.
        renewal: share in (0, 1] of the velocity, where it lives on from step to step, that is renewed.
    """

    step_size: Array
    num_steps: int | Array
    preconditioner: Any
    renewal: float | Array = 1.0


class Proposal(NamedTuple):
    """Proposal of a kernel, with what decides on it.

    Attributes:
        point: point to go to.
        energy_error: −log of the acceptance ratio.
        r_accepted: momentum to continue with if the point is taken.
        r_rejected: momentum to continue with if it is not.
        num_grad: number of evaluations that it took.
        square_error: mean square of the energy errors of the integrator's steps; None if there was one step.
    """

    point: Point
    energy_error: Array
    r_accepted: PyTree = None
    r_rejected: PyTree = None
    num_grad: int | Array = 1
    square_error: Array | None = None


def point_of(state: KernelState) -> Point:
    """Return the position of a chain with its potential energy and gradient."""
    return Point(state.z, state.potential_energy, state.z_grad)


def is_warming_up(state: KernelState) -> Array:
    """Tell whether the next step belongs to the warmup."""
    return state.i < state.adapt_state.schedule.num_warmup


def acceptance(proposal: Proposal) -> tuple[Array, Array, Array]:
    """Tell whether a proposal is finite, its acceptance probability and its energy error."""
    point = proposal.point
    # The gradient, too: a point with a finite energy and no gradient is one that the next step could not leave.
    finite = all_finite((point.potential_energy, point.z_grad, proposal.energy_error))
    # Infinite, so that the probability is exactly zero, and the step size adapts to the refusal.
    energy_error = jnp.where(finite, proposal.energy_error, jnp.inf)
    return finite, jnp.exp(-jnp.maximum(energy_error, 0.0)), energy_error
