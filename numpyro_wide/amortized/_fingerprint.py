"""What a checkpoint notes of its run, so that no other run goes on from it in silence."""

import json
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide._digests import digest, program_digest
from numpyro_wide._programs import Static, combine
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._state import AmortizedState

# In the order in which they depend on one another: where one differs, so may all that come after it.
_PROGRAMS = ("model", "guide", "optimiser")
_ORDER = ("rng_key", "batch_size", "arguments", *_PROGRAMS, "held_out")
_LIBRARIES = ("numpyro_wide", "jax", "numpyro", "flax", "optax")


def fingerprint(
    objective: Objective, state: AmortizedState, arrays: list[Array], static: Static, num_held_out: int
) -> str:
    """What decides where a run goes, as one line of text: numbers, digests of programs, versions of libraries."""
    return json.dumps(
        {
            "rng_key": digest(state.rng_key),
            "batch_size": objective.batch_size,
            "arguments": digest(static.leaves, str(static.structure), arrays),
            **_program_digests(objective, state, arrays, static),
            "held_out": num_held_out,
            "versions": {name: _version(name) for name in _LIBRARIES},
        }
    )


def refuse_other_runs(path: Path, stored: str, own: str) -> None:
    """Compare the fingerprint in a checkpoint with that of the run that would go on from it.

    Raises:
        ValueError: if they differ. If only programs do, and versions of libraries as well, which write the same program
            in other ways, there is a warning.
    """
    before, now = json.loads(stored), json.loads(own)
    differing = [name for name in _ORDER if before.get(name) != now[name]]
    if not differing:
        return
    if before.get("versions") != now["versions"] and set(differing) <= set(_PROGRAMS):
        warnings.warn(
            f"the checkpoint {path} was written with other versions of libraries ({before.get('versions')}, now "
            f"{now['versions']}), so that its {differing[0]} cannot be compared with this run's: make sure that it is "
            "the same.",
            stacklevel=6,
        )
        return
    # The key and the batch size come with every call, and are easily mistaken for one another's effect.
    what = "rng_key or batch_size" if differing[0] in _ORDER[:2] else differing[0]
    raise ValueError(
        f"the checkpoint {path} is of a run with another {what}; pass the same one to resume it, or another path to "
        "start anew."
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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
