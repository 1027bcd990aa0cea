"""How many gradients a study can afford, as measured."""

import time

import jax
from numpyro.infer.util import initialize_model


def clock() -> float:
    """Seconds of the processor, where other work on the machine does not count, or of the clock with an accelerator."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def gradient_seconds(model, args, num_chains):
    """Seconds of one gradient of every chain, at draws of their start."""
    info = initialize_model(jax.random.split(jax.random.key(0), num_chains), model, model_args=args)
    slope = jax.jit(jax.vmap(jax.grad(info.potential_fn)))
    jax.block_until_ready(slope(info.param_info.z))
    start, count = clock(), 0
    while count < 3 or clock() - start < 0.1:
        jax.block_until_ready(slope(info.param_info.z))
        count += 1
    return (clock() - start) / count
