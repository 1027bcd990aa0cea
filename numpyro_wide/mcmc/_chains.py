"""Runs of a batch of chains as one program, which is kept."""

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.util import nested_attrgetter

from numpyro_wide._checks import is_known, is_tracing
from numpyro_wide._compile import over_chains, program_of, run_program

if TYPE_CHECKING:
    from numpyro_wide.mcmc._kernel import KernelState, MetropolisKernel


def run_chains(
    kernel: "MetropolisKernel", run: Any, rng_key: Array, state: "KernelState | None", init_params: object
) -> tuple[dict, "KernelState"]:
    """Run a batch of chains, or continue from a state: return fields by name, (chain, draw, …), and the last state.

    ``run`` is NumPyro's run of one chain, a ``functools.partial`` that holds the model's arguments and what to collect.
    """
    mcmc, args, kwargs = run.func.__self__, run.keywords["args"], run.keywords["kwargs"]
    if state is None or kernel._sample_fn is None:
        first_state = kernel.init(rng_key, mcmc.num_warmup, init_params, args, kwargs)
        state = first_state if state is None else state
    postprocess = mcmc.postprocess_fn or kernel.postprocess_fn(args, kwargs)
    field_names, removed_sites = run.keywords["collect_fields"], run.keywords["remove_sites"]
    bounds, thinning = mcmc._collection_params, mcmc.thinning
    lower, upper = bounds["lower"], bounds["upper"]
    num_kept = (upper - lower) // thinning
    size = num_kept if bounds["collection_size"] is None else bounds["collection_size"] // thinning
    begin = upper - num_kept * thinning

    def collect(state: "KernelState") -> dict[str, object]:
        fields = {name: nested_attrgetter(name)(state) for name in field_names}
        sites = over_chains(postprocess)(fields[field_names[0]])
        stored = {k: v for k, v in sites.items() if k not in removed_sites} if removed_sites else sites
        return fields | {field_names[0]: stored}

    def loop(state: "KernelState", begin: Array, upper: Array, thinning: Array) -> tuple[dict, "KernelState"]:
        def step(i: Array, carry: tuple["KernelState", dict]) -> tuple["KernelState", dict]:
            state, buffers = carry
            state = kernel.sample(state, args, kwargs)
            index, remainder = (i - begin) // thinning, (i - begin) % thinning

            def keep() -> dict:
                return jax.tree.map(lambda buffer, value: buffer.at[index].set(value), buffers, collect(state))

            return state, jax.lax.cond((i >= begin) & (remainder == thinning - 1), keep, lambda: buffers)

        buffers = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), jax.eval_shape(collect, state))
        state, buffers = jax.lax.fori_loop(0, upper, step, (state, buffers))
        return jax.tree.map(lambda draws: jnp.swapaxes(draws, 0, 1), buffers), state

    # Lengths are arguments: a warmup, and runs of other lengths that keep as many draws, are the same program.
    loop_arguments = state, *map(jnp.int32, (begin, upper, thinning))
    leaves, structure = jax.tree.flatten((args, kwargs))
    if is_tracing() or not all(isinstance(leaf, Array) and is_known(leaf) for leaf in leaves):
        return run_program(loop, *loop_arguments)  # other arguments than JAX's arrays may be changed in place
    types = [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding) for leaf in jax.tree.leaves(state)
    ]
    signature = structure, jax.tree.structure(state), types, size, field_names, removed_sites, mcmc.postprocess_fn
    # A run that goes on with the arguments of the one before needs no tracing, which would take longer than it does.
    if kernel._loop is None or kernel._loop.signature != signature or not all(map(is_, kernel._loop.leaves, leaves)):
        kernel._loop = Loop(signature, leaves, program_of(loop, *loop_arguments))
    return kernel._loop.program(*loop_arguments)


class Loop(NamedTuple):
    """Program of a kernel's latest run, with the arguments of the model that it holds."""

    signature: tuple
    leaves: list[Array]
    program: Callable
