"""Time from ``mcmc.run`` to the first draw, nearly all of it compilation: SplitHMC beside NUTS, the README's model."""

import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import sys, time
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro_wide import collapse_readout
from numpyro_wide.mcmc import SplitHMC

def bnn(x, y=None, width=200):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    inputs = jnp.stack([3 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", jnp.tanh(inputs @ hidden) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)

x = jnp.linspace(-1, 1, 20)
y, key = jax.block_until_ready((jnp.sin(4 * x), jax.random.key(0)))
model = collapse_readout(bnn, readout="readout", features="features", observed="y")
kernel = {"NUTS": NUTS, "SplitHMC": SplitHMC}[sys.argv[1]](model)
lengths = dict(zip(("num_warmup", "num_samples"), map(int, sys.argv[2:])))
mcmc = MCMC(kernel, num_chains=2, chain_method="vectorized", progress_bar=False, **lengths)
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *args, **kwargs: compiled.append(1) if name.endswith("backend_compile_duration") else None
)
seconds, cpu = time.perf_counter(), time.process_time()
mcmc.run(key, x, y)
jax.block_until_ready(mcmc.get_samples())
print(time.perf_counter() - seconds, time.process_time() - cpu, len(compiled))
"""
NUM_ROUNDS = 5
# The shortest warmup that compiles all that SplitHMC has, and the run of the README.
LENGTHS = {"the first draw after 20 steps": (20, 1), "the README's 200 after 200": (200, 200)}


def measured(kernel: str, lengths: tuple[int, int], **settings: str) -> list[float]:
    """Measure a fresh process, which keeps compiled programs only where these settings of the environment say so.

    Args:
        kernel: "NUTS" or "SplitHMC".
        lengths: steps of warmup, and draws.
        **settings: variables of the environment.

    Returns:
        Seconds, processor seconds, programs compiled, and lines of messages.
    """
    dropped = ("JAX_", "TF_CPP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = [sys.executable, "-W", "ignore", "-c", CODE, kernel, *map(str, lengths)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | settings)
    return [*map(float, finished.stdout.split()), float(finished.stderr.count("\n"))]


def tables() -> None:
    """Make every table of this file."""
    against_nuts()
    with_programs_kept()


def with_programs_kept() -> None:
    """Measure a second process that finds the programs of the first in JAX's persistent cache."""
    print("\n## The README's run in a first process and in a second, with JAX_COMPILATION_CACHE_DIR set\n")
    print("| programs kept | first process | second | second / first | of processor seconds | lines of messages |")
    print("|---|---|---|---|---|---|")
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    cases = {
        "from 1 s on, JAX's default": {},
        "all": every,
        "all, quiet": every | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    }
    for name, options in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            settings = options | {"JAX_COMPILATION_CACHE_DIR": folder}
            first, second = (measured("SplitHMC", (200, 200), **settings) for _ in range(2))
        wall, cpu = (after / before for before, after in zip(first[:2], second[:2], strict=True))
        cells = f"| {first[0]:.1f} s | {second[0]:.1f} s | {wall:.2f} | {cpu:.2f} | {second[3]:.0f} |"
        print(f"| {name} {cells}", flush=True)


def against_nuts() -> None:
    """Make one table: the two kernels take turns, and the ratios are medians over the rounds."""
    print("\n## From mcmc.run to the first draw: SplitHMC over NUTS, n = 20, width 200, collapsed, two chains\n")
    print("| run until | NUTS | SplitHMC | ratio | of processor seconds | programs | goal |")
    print("|---|---|---|---|---|---|---|")
    for name, lengths in LENGTHS.items():
        rounds = [(measured("NUTS", lengths), measured("SplitHMC", lengths)) for _ in range(NUM_ROUNDS)]
        nuts, split = (
            [statistics.median(column) for column in zip(*runs, strict=True)] for runs in zip(*rounds, strict=True)
        )
        wall, cpu = (statistics.median(b[i] / a[i] for a, b in rounds) for i in (0, 1))
        programs = f"{nuts[2]:.0f} and {split[2]:.0f}"
        print(
            f"| {name} | {nuts[0]:.2f} s | {split[0]:.2f} s | {wall:.2f} | {cpu:.2f} | {programs} | at most 1 |",
            flush=True,
        )
