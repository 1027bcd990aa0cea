"""Many steps in one compiled loop."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_wide._programs import Static, combine
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._state import AmortizedState


class Programs(NamedTuple):
    """An objective and its compiled functions, compiled anew where a static argument of model or guide changes."""

    objective: Objective
    train: Callable
    """(state, num_steps, arrays, *, static, capacity, stable) -> (state, losses)"""
    held_out_loss: Callable
    """(params, rng_key, arrays, *, static, num_simulations) -> loss"""


def compile_programs(objective: Objective) -> Programs:
    """Make the functions; nothing is traced before they are called."""
    return Programs(
        objective,
        jax.jit(partial(_train, objective), static_argnames=("static", "capacity", "stable")),
        jax.jit(partial(_held_out_loss, objective), static_argnames=("static", "num_simulations")),
    )


def _train(
    objective: Objective,
    state: AmortizedState,
    num_steps: Array,
    arrays: list[Array],
    *,
    static: Static,
    capacity: int,
    stable: bool,
) -> tuple[AmortizedState, Array]:
    """Take ``num_steps`` <= ``capacity`` steps; the losses have shape (capacity,).

    The simulations of a whole block of steps are drawn at once, which is much cheaper than step by step. A block starts
    at a multiple of its length, and is drawn whole though a run may start or end inside it, so that the numbers do not
    depend, to the last bit, on how a training is cut into runs.
    """
    args, kwargs = combine(arrays, static)
    key = state.rng_key
    length = objective.block_length(key, args, kwargs)

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


def _held_out_loss(
    objective: Objective, params: dict, rng_key: Array, arrays: list[Array], *, static: Static, num_simulations: int
) -> Array:
    """Negative mean log density of simulations that no step is trained on."""
    args, kwargs = combine(arrays, static)
    draws, keys = objective.pair.held_out(rng_key, num_simulations, args, kwargs)
    log_q, _ = objective.pair.log_prob(params, draws, keys, args, kwargs)
    return -jnp.mean(log_q)
