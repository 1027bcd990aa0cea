"""Chains as one program that is compiled once, instead of NumPyro's loop, which is compiled at every run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.util import nested_attrgetter

from numpyro_wide._over_chains import over_chains
from numpyro_wide._programs import TracedProgram


def run_chains(kernel: Any, run: Any, rng_key: Array, state: Any, init_params: Any) -> tuple[dict, Any]:
    """Run a batch of chains.

    Args:
        kernel: the kernel, a :class:`~numpyro.infer.mcmc.MCMCKernel` of ours.
        run: what NumPyro hands to a ``chain_method``: its run of one chain, a ``functools.partial`` that holds the
            arguments of the model and what is to be collected.
        rng_key: keys, one a chain.
        state: state of the chains to continue from, or None.
        init_params: first positions, or None.

    Returns:
        What was collected, by field, with leading axes (chain, draw), and the last state.
    """
    mcmc, args, kwargs = run.func.__self__, run.keywords["args"], run.keywords["kwargs"]
    if state is None or kernel._sample_fn is None:
        first = kernel.init(rng_key, mcmc.num_warmup, init_params, args, kwargs)
        state = first if state is None else state
    postprocess = mcmc.postprocess_fn or kernel.postprocess_fn(args, kwargs)
    names, left_out = run.keywords["collect_fields"], run.keywords["remove_sites"]
    bounds, thinning = mcmc._collection_params, mcmc.thinning
    lower, upper = bounds["lower"], bounds["upper"]
    num_kept = (upper - lower) // thinning
    size = num_kept if bounds["collection_size"] is None else bounds["collection_size"] // thinning
    begin = upper - num_kept * thinning

    def collected(state: Any) -> dict[str, Any]:
        found = {name: nested_attrgetter(name)(state) for name in names}
        sites = over_chains(postprocess)(found[names[0]])
        return found | {names[0]: {k: v for k, v in sites.items() if k not in left_out} if left_out else sites}

    def loop(state: Any, begin: Array, upper: Array, thinning: Array) -> tuple[dict, Any]:
        def step(i: Array, carry: tuple[Any, dict]) -> tuple[Any, dict]:
            state, kept = carry
            state = kernel.sample(state, args, kwargs)
            place, rest = (i - begin) // thinning, (i - begin) % thinning

            def keep() -> dict:
                return jax.tree.map(lambda all_, one: all_.at[place].set(one), kept, collected(state))

            return state, jax.lax.cond((i >= begin) & (rest == thinning - 1), keep, lambda: kept)

        kept = jax.tree.map(lambda one: jnp.zeros((size, *one.shape), one.dtype), jax.eval_shape(collected, state))
        state, kept = jax.lax.fori_loop(0, upper, step, (state, kept))
        return jax.tree.map(lambda draws: jnp.swapaxes(draws, 0, 1), kept), state

    # Arguments: a warmup, and runs of other lengths that keep as many draws, are the same program.
    lengths = tuple(map(jnp.int32, (begin, upper, thinning)))
    return TracedProgram(loop, state, *lengths)(state, *lengths)
