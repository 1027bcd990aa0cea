"""Chains that are told how many gradients they can afford, as measured, and draw a stretch at a time.

On a processor chains are run one after another, whatever the kernel: quicker there than all at once.
"""

import time

import jax
import jax.numpy as jnp
from numpyro.infer.util import initialize_model


def clock() -> float:
    """Return the processor's seconds, where other work does not count, or the clock's with an accelerator."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def gradient_seconds(model, args, num_chains):
    """Measure the seconds of one gradient of every chain, at draws of their start."""
    info = initialize_model(jax.random.split(jax.random.key(0), num_chains), model, model_args=args)
    slope = jax.jit(lambda z: _of_each(jax.grad(info.potential_fn), z))
    jax.block_until_ready(slope(info.param_info.z))
    start, count = clock(), 0
    while count < 3 or clock() - start < 0.1:
        jax.block_until_ready(slope(info.param_info.z))
        count += 1
    return (clock() - start) / count


def first_states(kernel, args, num_chains, num_warmup):
    """Set chains up: their states, each leaf with a leading axis for the chains."""
    states = [kernel.init(key, num_warmup, None, args, {}) for key in jax.random.split(jax.random.key(0), num_chains)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def stretch_of(kernel, args, length, thinning=1):
    """Compile a function of states of chains: so many draws on, their positions, and each step's cost and acceptance.

    Returns:
        The states; then positions (chains, length, ...), and gradients and acceptance (chains, length, thinning), those
        of the first block where the kernel is NumPyro's Gibbs, which evaluates it once more when the others have moved.
    """

    def step(state, _):
        state = kernel.sample(state, args, {})
        first, again = (state.block_states[0], 1) if hasattr(state, "block_states") else (state, 0)
        gradients = first.num_grad if hasattr(first, "num_grad") else first.num_steps  # of this package, and of NUTS
        return state, (gradients + again, first.accept_prob)

    def draw(state, _):
        state, told = jax.lax.scan(step, state, length=thinning)
        return state, (getattr(state, kernel.sample_field), told)

    return jax.jit(lambda states: _of_each(lambda state: jax.lax.scan(draw, state, length=length), states))


def _of_each(fn, chains):
    return jax.lax.map(fn, chains) if jax.default_backend() == "cpu" else jax.vmap(fn)(chains)
