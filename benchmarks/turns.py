"""Steps of several chains in one program on a processor: in turns, as kernels take them there, over all at once."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import interleaved, median_ratio, milliseconds
from numpyro_wide import collapse_readout, nn
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.mcmc import _kernel as _state

CASES = [(20, 1, 1, 50, 4), (20, 1, 1, 200, 4), (100, 5, 1, 64, 4), (200, 5, 1, 256, 2), (455, 13, 2, 64, 4)]
NUM_DRAWS, FIXED = 20, {"step_size": 0.05, "adapt_step_size": False}
KERNELS = {
    "SplitHMC, 4 rotations": partial(SplitHMC, num_steps=4, persistence=0.8, **FIXED),
    "MicrocanonicalLangevin": partial(MicrocanonicalLangevin, adjusted=False, **FIXED),
}


def stretch(kernel: Any, args: tuple, num_chains: int, in_turns: bool) -> Callable:
    """Compile draws of chains after warmup, without arguments."""
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), 100, None, args, {})
    state = state._replace(i=jnp.full(num_chains, 100))  # warmup is over
    run = jax.jit(lambda state: jax.lax.fori_loop(0, NUM_DRAWS, lambda _, state: kernel.sample(state, args, {}), state))
    with mock.patch.object(_state, "is_sequential", lambda: in_turns):
        jax.block_until_ready(run(state))
    return partial(run, state)


def tables() -> None:
    """Make every table of this file."""
    print("\n## A draw of several chains: all at once over in turns, float32, processor seconds\n")
    print("| rows | network | chains | kernel | form | in turns | at once / in turns |")
    print("|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for num_rows, num_inputs, depth, width, num_chains in CASES:
        x = jnp.asarray(rng.normal(size=(num_rows, num_inputs)), jnp.float32)
        plain = nn.bnn(nn.FCN(depth, width, "gelu"), None, 0.1)
        collapsed = collapse_readout(plain, readout="readout", features="features", observed="y")
        for name, kernel in KERNELS.items():
            for form, model in (("unwrapped", plain), ("collapsed", collapsed)):
                args = x, jnp.sin(x[:, 0])
                ways = {way: stretch(kernel(model), args, num_chains, way == "turns") for way in ("turns", "once")}
                seconds = interleaved(ways, num_rounds=7, clock=time.process_time)
                each = milliseconds([run / NUM_DRAWS for run in seconds["turns"]])
                cells = f"{depth} x {width} | {num_chains} | {name} | {form} | {each}"
                print(f"| {num_rows} | {cells} | {median_ratio(seconds, 'once', 'turns'):.2f} |", flush=True)
