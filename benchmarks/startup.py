"""Time from ``mcmc.run`` to the first draw, nearly all of it compilation: SplitHMC beside NUTS, the README's model.

Then that of a second run of the process, with other targets: by NumPyro's loop, and by a program that is kept.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

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
y, other, key = jax.block_until_ready((jnp.sin(4 * x), jnp.cos(4 * x), jax.random.key(0)))
model = collapse_readout(bnn, readout="readout", features="features", observed="y")
lengths = dict(zip(("num_warmup", "num_samples"), map(int, sys.argv[3:])))
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kwargs: compiled.append(seconds) if name.endswith("backend_compile_duration") else None
)
for targets in (y, other)[: 1 if sys.argv[2] == "first" else 2]:
    kernel = {"NUTS": NUTS, "SplitHMC": SplitHMC}[sys.argv[1]](model)
    method = kernel.compiled_once if sys.argv[2] == "kept" else "vectorized"
    mcmc = MCMC(kernel, num_chains=2, chain_method=method, progress_bar=False, **lengths)
    compiled.clear()
    seconds, cpu = time.perf_counter(), time.process_time()
    mcmc.run(key, x, targets)
    jax.block_until_ready(mcmc.get_samples())
    print(time.perf_counter() - seconds, time.process_time() - cpu, len(compiled), sum(compiled))
"""
NUM_ROUNDS = 3
# The shortest warmup that compiles all that SplitHMC has, and the run of the README.
LENGTHS = {"the first draw after 20 steps": (20, 1), "the README's 200 after 200": (200, 200)}


class Run(NamedTuple):
    """A run: seconds, processor seconds, programs compiled, and seconds of their compilation."""

    seconds: float
    cpu: float
    programs: float
    compiling: float


class Process(NamedTuple):
    """A fresh process: its runs, and the lines of its messages."""

    runs: list[Run]
    lines: int


def measured(kernel: str, lengths: tuple[int, int], runs: str = "first", **settings: str) -> Process:
    """Measure a fresh process, which keeps compiled programs on disk only where the environment says so.

    Args:
        kernel: "NUTS" or "SplitHMC".
        lengths: steps of warmup, and draws.
        runs: "first" for one run; "both" and "kept" for a second on other targets, by NumPyro's loop and by
            ``compiled_once``.
        **settings: variables of the environment.
    """
    dropped = ("JAX_", "TF_CPP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = [sys.executable, "-W", "ignore", "-c", CODE, kernel, runs, *map(str, lengths)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | settings)
    found = [Run(*map(float, line.split())) for line in finished.stdout.splitlines()]
    return Process(found, finished.stderr.count("\n"))


def tables() -> None:
    """Make every table of this file."""
    against_nuts()
    on_other_data()
    with_programs_kept()


def on_other_data() -> None:
    """Measure the README's run, and another on other targets of the same shape in the same process."""
    print("\n## The README's run, then one on other targets in the same process, two chains, medians of three\n")
    print("| run | processor seconds, first | then | programs | compiling (s), first | then |")
    print("|---|---|---|---|---|---|")
    cases = {
        "NUTS": ("NUTS", "both"),
        "SplitHMC": ("SplitHMC", "both"),
        "SplitHMC, `compiled_once`": ("SplitHMC", "kept"),
    }
    processes: dict[str, list[Process]] = {name: [] for name in cases}
    for _ in range(NUM_ROUNDS):
        for name, (kernel, runs) in cases.items():
            processes[name].append(measured(kernel, (200, 200), runs))
    for name, found in processes.items():
        first, then = (Run(*map(statistics.median, zip(*(p.runs[i] for p in found), strict=True))) for i in (0, 1))
        cells = f"{first.cpu:.1f} | {then.cpu:.1f} | {first.programs:.0f}, then {then.programs:.0f}"
        print(f"| {name} | {cells} | {first.compiling:.1f} | {then.compiling:.1f} |", flush=True)


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
        before, after = first.runs[0], second.runs[0]
        wall, cpu = after.seconds / before.seconds, after.cpu / before.cpu
        cells = f"| {before.seconds:.1f} s | {after.seconds:.1f} s | {wall:.2f} | {cpu:.2f} | {second.lines} |"
        print(f"| {name} {cells}", flush=True)


def against_nuts() -> None:
    """Make one table: the two kernels take turns, and the ratios are medians over the rounds."""
    print("\n## From mcmc.run to the first draw: SplitHMC over NUTS, n = 20, width 200, collapsed, two chains\n")
    print("| run until | NUTS | SplitHMC | ratio | of processor seconds | programs | goal |")
    print("|---|---|---|---|---|---|---|")
    for name, lengths in LENGTHS.items():
        rounds = [[measured(kernel, lengths).runs[0] for kernel in ("NUTS", "SplitHMC")] for _ in range(NUM_ROUNDS)]
        nuts, split = (Run(*map(statistics.median, zip(*runs, strict=True))) for runs in zip(*rounds, strict=True))
        wall, cpu = (statistics.median(b[i] / a[i] for a, b in rounds) for i in (0, 1))
        cells = f"{nuts.seconds:.2f} s | {split.seconds:.2f} s | {wall:.2f} | {cpu:.2f}"
        print(f"| {name} | {cells} | {nuts.programs:.0f} and {split.programs:.0f} | at most 1 |", flush=True)
