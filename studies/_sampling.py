"""Chains that are told how many gradients they can afford, as measured, and draw a stretch at a time."""

import time

import jax
from numpyro.infer.util import initialize_model


def clock() -> float:
    """Return the processor's seconds, where other work does not count, or the clock's with an accelerator."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def gradient_seconds(model, args, num_chains):
    """Measure the seconds of one gradient of every chain, at draws of their start."""
    info = initialize_model(jax.random.split(jax.random.key(0), num_chains), model, model_args=args)
    slope = jax.jit(jax.vmap(jax.grad(info.potential_fn)))
    jax.block_until_ready(slope(info.param_info.z))
    start, count = clock(), 0
    while count < 3 or clock() - start < 0.1:
        jax.block_until_ready(slope(info.param_info.z))
        count += 1
    return (clock() - start) / count


def stretch_of(kernel, args, length, thinning=1):
    """Compile a function of the state: so many draws on, their positions, and of every step its cost and acceptance.

    Returns:
        The state; then positions (length, chains, ...), and gradients and acceptance (length, thinning, chains).
    """

    def step(state, _):
        state = kernel.sample(state, args, {})
        gradients = state.num_grad if hasattr(state, "num_grad") else state.num_steps  # of this package, and of NUTS
        return state, (gradients, state.accept_prob)

    def draw(state, _):
        state, told = jax.lax.scan(step, state, length=thinning)
        return state, (getattr(state, kernel.sample_field), told)

    return jax.jit(lambda state: jax.lax.scan(draw, state, length=length))
