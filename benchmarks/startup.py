"""From ``mcmc.run`` to the README's first 400 draws, nearly all of it compilation: our kernels beside NUTS and HMC.

Then the same in a second process that finds the programs of the first in JAX's cache on disk.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CODE = """
import sys, time
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, NUTS
from numpyro_wide import collapse_readout
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC

def bnn(x, y=None, width=200):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    inputs = jnp.stack([3 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", jnp.tanh(inputs @ hidden) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)

x = jnp.linspace(-1, 1, 20)
y, other, key = jax.block_until_ready((jnp.sin(4 * x), jnp.cos(4 * x), jax.random.key(0)))
sites = {"readout": "readout", "features": "features", "observed": "y"}
model = bnn if sys.argv[2] == "unwrapped" else collapse_readout(bnn, **sites)
kinds = {kind.__name__: kind for kind in (NUTS, HMC, SplitHMC, MicrocanonicalLangevin)}
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kwargs: compiled.append(seconds) if name.endswith("backend_compile_duration") else None
)
for targets in (y, other):
    kernel = kinds[sys.argv[1]](model)
    form = {"num_chains": 2, "chain_method": kernel.compiled_once} if sys.argv[3] == "kept" else {}
    mcmc = MCMC(kernel, num_warmup=200, num_samples=400, progress_bar=False, **form)
    compiled.clear()
    seconds, cpu = time.perf_counter(), time.process_time()
    mcmc.run(key, x, targets)
    jax.block_until_ready(mcmc.get_samples())
    print(time.perf_counter() - seconds, time.process_time() - cpu, len(compiled), sum(compiled))
"""
NUM_ROUNDS = 3
CASES = {
    "NUTS, unwrapped": ("NUTS", "unwrapped", "loop"),
    "HMC, unwrapped": ("HMC", "unwrapped", "loop"),
    "SplitHMC, unwrapped": ("SplitHMC", "unwrapped", "loop"),
    "MicrocanonicalLangevin, unwrapped": ("MicrocanonicalLangevin", "unwrapped", "loop"),
    "NUTS, collapsed": ("NUTS", "collapsed", "loop"),
    "SplitHMC, collapsed": ("SplitHMC", "collapsed", "loop"),
    "SplitHMC, collapsed, two chains, `compiled_once`": ("SplitHMC", "collapsed", "kept"),
}


class Run(NamedTuple):
    """A run: seconds, processor seconds, programs compiled, and seconds of their compilation."""

    seconds: float
    cpu: float
    programs: float
    compiling: float


class Process(NamedTuple):
    """A fresh process: its two runs, on two sets of targets, and the lines of its messages."""

    runs: list[Run]
    lines: int


def measured(case: tuple[str, str, str], **settings: str) -> Process:
    """Measure a fresh process, which keeps compiled programs on disk only where the environment says so."""
    dropped = ("JAX_", "TF_CPP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = [sys.executable, "-W", "ignore", "-c", CODE, *case]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | settings)
    found = [Run(*map(float, line.split())) for line in finished.stdout.splitlines()]
    return Process(found, finished.stderr.count("\n"))


def sizes(case: tuple[str, str, str]) -> list[int]:
    """Return the instructions of the two largest programs: the loop and, of our kernels, the start."""
    with tempfile.TemporaryDirectory() as folder:
        measured(case, XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_hlo_as_text")
        programs = Path(folder).glob("*after_optimizations.txt")
        # Half of the lines of such a file may be a table of source locations.
        return sorted({path.read_text().count(" = ") for path in programs}, reverse=True)[:2]


def tables() -> None:
    """Make every table of this file."""
    first_draws()
    with_programs_kept()


def first_draws() -> None:
    """Measure the README's run, and another on other targets in the same process; kernels take turns."""
    print("\n## The README's 400 draws after 200, then on other targets in the same process, medians of three\n")
    print("| run | processor seconds | over NUTS, unwrapped | compiling | programs | then | instructions |")
    print("|---|---|---|---|---|---|---|")
    rounds = [{name: measured(case).runs for name, case in CASES.items()} for _ in range(NUM_ROUNDS)]
    nuts, *_ = CASES
    for name, case in CASES.items():
        first, then = (Run(*map(statistics.median, zip(*(r[name][i] for r in rounds), strict=True))) for i in (0, 1))
        ratio = statistics.median(found[name][0].cpu / found[nuts][0].cpu for found in rounds)
        instructions = " and ".join(map(str, sizes(case)))
        cells = (
            f"{first.cpu:.1f} | {ratio:.2f} | {first.compiling:.1f} | {first.programs:.0f} | {then.cpu:.1f} "
            f"| {instructions}"
        )
        print(f"| {name} | {cells} |", flush=True)


def with_programs_kept() -> None:
    """Measure a second process that finds the programs of the first in JAX's persistent cache."""
    print("\n## The README's run in a first process and in a second, with JAX_COMPILATION_CACHE_DIR set\n")
    print("| programs kept | first process | second | second / first | of processor seconds | lines of messages |")
    print("|---|---|---|---|---|---|")
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept: dict[str, dict[str, str]] = {
        "from 1 s on, JAX's default": {},
        "all": every,
        "all, quiet": every | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    }
    for name, options in kept.items():
        with tempfile.TemporaryDirectory() as folder:
            settings = options | {"JAX_COMPILATION_CACHE_DIR": folder}
            first, second = (measured(CASES["SplitHMC, collapsed"], **settings) for _ in range(2))
        before, after = first.runs[0], second.runs[0]
        wall, cpu = after.seconds / before.seconds, after.cpu / before.cpu
        cells = f"| {before.seconds:.1f} s | {after.seconds:.1f} s | {wall:.2f} | {cpu:.2f} | {second.lines} |"
        print(f"| {name} {cells}", flush=True)
