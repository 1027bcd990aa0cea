"""Fingerprints of runs, by which a checkpoint refuses every run but its own."""

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide import _resume
from numpyro_wide._programs import Static, combine, digest, program_digest
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._state import AmortizedState

# Entries of the fingerprint that are digests of programs, which other versions of libraries write in other ways.
PROGRAMS = ("model", "guide", "optimiser")


def fingerprint(
    objective: Objective, state: AmortizedState, arrays: list[Array], static: Static, num_held_out: int
) -> str:
    """Write as one line of text all that decides where a run goes.

    Args:
        objective: loss and optimiser.
        state: state before the first step.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide.
        num_held_out: number of held-out simulations.

    Returns:
        A JSON object with numbers, digests of programs, and versions of libraries.
    """
    return json.dumps(
        {
            # The key and the batch size come with every call, and are easily mistaken for one another's effect.
            "rng_key or batch_size": digest(state.rng_key, objective.batch_size),
            "arguments": digest(static.leaves, str(static.structure), arrays),
            **_program_digests(objective, state, arrays, static),
            "held_out": num_held_out,
            "versions": _resume.versions(),
        }
    )


def _program_digests(
    objective: Objective, state: AmortizedState, arrays: list[Array], static: Static
) -> dict[str, str]:
    pair, optim = objective.pair, objective.optim
    params = optim.get_params(state.optim_state)
    keys = state.rng_key[None]

    def simulate(keys: Array, arrays: list[Array]) -> Any:
        return pair.simulate(keys, *combine(arrays, static))

    def score(params: Any, mutable: Any, batch: tuple, arrays: list[Array]) -> Any:
        # With its gradient, for a function may have a derivative of its own making.
        args, kwargs = combine(arrays, static)
        return jax.value_and_grad(objective.loss, has_aux=True)(params, mutable, batch, args, kwargs)

    def follow(gradient: Any, optim_state: Any, loss: Array) -> Any:
        return optim.update(gradient, optim_state, value=loss)

    draws = jax.eval_shape(simulate, keys, arrays)
    batch = {name: draws[name] for name in (*objective.latents, *pair.observed)}, keys
    return {
        "model": program_digest(simulate, keys, arrays),
        "guide": program_digest(score, params, state.mutable_state, batch, arrays),
        "optimiser": program_digest(follow, params, state.optim_state, jnp.zeros(()))
        + program_digest(optim.init, params),
    }
