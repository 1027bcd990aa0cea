"""Memory of one gradient at the paper's largest size: 40,960 rows of 3072 inputs, three hidden layers of 1024 units.

python -m benchmarks scale               (some minutes)
python -m benchmarks.scale collapsed auto
JAX_DEFAULT_MATMUL_PRECISION=highest python -m benchmarks scale   (on an accelerator whose float32 products are not)
"""

import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import log_density

from benchmarks.gradients import NOISE_SCALE, forms
from numpyro_wide.nn import FCN, bnn

NUM_ROWS, NUM_INPUTS, WIDTH, DEPTH, NUM_OUTPUTS = 40_960, 3072, 1024, 3, 10


def measure(form: str, block_size: str) -> None:
    """Print seconds of one gradient, gigabytes at the peak, data and compilation included, and the log density.

    Gigabytes are those of this process on a CPU, those of its memory on another device.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((NUM_ROWS, NUM_INPUTS), np.float32))
    y = jnp.asarray(rng.standard_normal((NUM_ROWS, NUM_OUTPUTS), np.float32))
    network = FCN(DEPTH, WIDTH)
    plain = bnn(network, NUM_OUTPUTS, NOISE_SCALE, block_size=None if block_size == "none" else block_size)
    model = forms(plain)[form]
    rows = [NUM_INPUTS, *[WIDTH] * (DEPTH - 1)]
    kernels = jnp.split(jax.random.normal(jax.random.key(0), (sum(rows), WIDTH)), np.cumsum(rows)[:-1])
    values = {f"hidden.hidden_{layer}.kernel": kernel for layer, kernel in enumerate(kernels)}
    site = {"plain": "readout", "repriorised": "readout_base"}.get(form)
    if site:
        values[site] = jax.random.normal(jax.random.key(1), (WIDTH, NUM_OUTPUTS))
    gradient = jax.jit(jax.value_and_grad(lambda values, x, y: log_density(model, (x, y), {}, values)[0]))
    compiled = gradient.lower(values, x, y).compile()
    start = time.perf_counter()
    value, _ = jax.block_until_ready(compiled(values, x, y))
    seconds = time.perf_counter() - start
    of_device = jax.devices()[0].memory_stats() or {}
    peak = of_device.get("peak_bytes_in_use", 1e3 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(seconds, peak / 1e9, float(value))


def tables() -> None:
    """Make one table, each row measured in a process of its own."""
    print("\n## One gradient, n = 40,960, 3072 inputs, three hidden layers of 1024 units, float32\n")
    print("| model | rows at a time | seconds | peak memory | goal | log density |")
    print("|---|---|---|---|---|---|")
    for form in ("plain", "collapsed", "repriorised"):
        for block_size in ("none", "auto"):
            command = [sys.executable, "-m", "benchmarks.scale", form, block_size]
            # This process may hold most of an accelerator's memory already.
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            seconds, gigabytes, value = map(float, finished.stdout.split())
            rows = "all" if block_size == "none" else block_size
            print(f"| {form} | {rows} | {seconds:.3g} | {gigabytes:.2f} GB | at most 6 GB | {value:.7g} |", flush=True)


if __name__ == "__main__":
    measure(*sys.argv[1:])
