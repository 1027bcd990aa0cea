"""Many steps in one compiled loop, and the loss on held-out simulations."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_wide._programs import Static, combine
from numpyro_wide.amortized._state import AmortizedState

if TYPE_CHECKING:
    from numpyro_wide.amortized._objective import Objective

# Numbers that the simulations of a block of steps may hold; and the longest block.
_BLOCK_NUMBERS = 2**20
_LONGEST_BLOCK = 64


def train(
    objective: "Objective",
    state: AmortizedState,
    num_steps: Array,
    arrays: list[Array],
    *,
    static: Static,
    capacity: int,
    stable: bool,
) -> tuple[AmortizedState, Array]:
    """Take many steps.

    The simulations of a whole block of steps are drawn at once, which is much cheaper than step by step. A block starts
    at a multiple of its length, and is drawn whole though a run may start or end inside it, so that the numbers do not
    depend, to the last bit, on how a training is cut into runs.

    Args:
        objective: loss and optimiser.
        state: state before the steps.
        num_steps: number of steps, a scalar.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide, part of the program.
        capacity: largest number of steps that the program can take.
        stable: whether to skip steps whose loss or gradient is not finite.

    Returns:
        The state after the steps, and the losses, (capacity,), of which the first ``num_steps`` count.
    """
    args, kwargs = combine(arrays, static)
    key = state.rng_key
    length = _block_length(objective, key, args, kwargs)

    def simulate(step: Array) -> tuple:
        return objective.simulate_step(key, step, args, kwargs)

    offset = state.step % length
    last = offset + num_steps

    def run_block(carry: tuple) -> tuple:
        state, losses, first = carry
        batches = jax.vmap(simulate)(state.step - state.step % length + jnp.arange(length))

        def take_step(i: Array, carry: tuple) -> tuple:
            state, losses = carry
            batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), batches)
            state, loss = objective.step(state, batch, args, kwargs, stable=stable)
            return state, lax.dynamic_update_index_in_dim(losses, loss.astype(losses.dtype), i, 0)

        # The losses of the block are gathered by themselves: a long array would be copied at every step.
        begin, end = state.step % length, jnp.minimum(length, last - first)
        state, block = lax.fori_loop(begin, end, take_step, (state, jnp.full(length, jnp.nan)))
        return state, lax.dynamic_update_slice_in_dim(losses, block, first, 0), first + length

    num_blocks = (capacity + length - 1) // length + 1
    carry = state, jnp.full(num_blocks * length, jnp.nan), jnp.zeros_like(state.step)
    state, losses, _ = lax.while_loop(lambda carry: carry[2] < last, run_block, carry)
    return state, lax.dynamic_slice_in_dim(losses, offset, capacity)


def held_out_loss(
    objective: "Objective", params: dict, rng_key: Array, arrays: list[Array], *, static: Static, num_simulations: int
) -> Array:
    """Average the negative log density over simulations that no step is trained on.

    Args:
        objective: loss and optimiser.
        params: values of the guide's param and mutable sites, by name.
        rng_key: a PRNG key of the whole run.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide, part of the program.
        num_simulations: number of simulations that are held out.
    """
    args, kwargs = combine(arrays, static)
    draws, keys = objective.pair.held_out(rng_key, num_simulations, args, kwargs)
    log_q, _ = objective.pair.log_prob(params, draws, keys, args, kwargs)
    return -jnp.mean(log_q)


def _block_length(objective: "Objective", rng_key: Array, args: tuple, kwargs: dict) -> int:
    """Choose the number of steps whose simulations are drawn at once, by the largest array that a step's make."""
    step = jnp.zeros((), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda: objective.simulate_step(rng_key, step, args, kwargs))()
    largest = max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars)
    return int(max(1, min(_LONGEST_BLOCK, _BLOCK_NUMBERS // largest)))
