"""Twelve models as users write them, at defaults: SplitHMC and NUTS, each of the wrapped and the unwrapped model.

Two chains of 400 steps of warmup and 400 draws, each run in a process of its own. All are judged by ``summary`` with
the wrapped model: the mean function with the readout integrated out, and every site that is not of hidden units. Core
seconds are those of the process, all threads together; those after compilation leave out what JAX traces, lowers and
compiles. A run that would take more than the limit of core seconds ends there, and has a row without draws.

python -m benchmarks as_users                                             (without the sets of UCI)
python -m benchmarks.as_users --uci FOLDER --csv as_users.csv             (all; a folder as studies._data reads it)
python -m benchmarks.as_users --models newcomer steps --samplers SplitHMC
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
from jax import Array
from jax._src import dispatch
from jax.scipy.special import erf
from numpyro.infer import MCMC, NUTS

from numpyro_wide import SplitHMC, collapse_readout, set_blas_threads
from numpyro_wide.diagnostics import summary
from studies._data import Standardiser, uci

NUM_WARMUP, NUM_DRAWS, NUM_CHAINS = 400, 400, 2
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": jax.nn.relu, "erf": erf}
SAMPLERS = ("SplitHMC", "SplitHMC, unwrapped", "NUTS", "NUTS, unwrapped")


class User(NamedTuple):
    """A model: its data, its layers, and its priors."""

    data: str
    num_rows: int
    layers: tuple[int, ...]
    activation: str
    noise: float | dist.Distribution | str  # a number, a prior, or "by row"
    weights: tuple[float, ...] = (1.0, 1.0)  # prior scales by layer, those of biases alike
    readout: float = 1.0
    is_scale_latent: bool = False
    has_output_bias: bool = True


HALF, LOG = dist.HalfNormal(1.0), dist.LogNormal(-1.0, 0.5)
USERS = {
    "newcomer": User("damped", 150, (24, 24), "tanh", LOG, (3.0, 1.5), 2.0),
    "few rows": User("sine", 20, (50,), "tanh", 0.1, (3.0,), has_output_bias=False),
    "400 units": User("sine", 30, (400,), "erf", HALF, (3.0,)),
    "ReLU": User("sine", 60, (100,), "relu", HALF, (1.5,)),
    "steps": User("steps", 60, (32, 32), "relu", LOG, (2.0, 1.0), 2.0),
    "noise by row": User("damped", 100, (64,), "tanh", "by row", (2.0,)),
    "latent scale": User("friedman", 80, (64,), "tanh", HALF, (0.7,), is_scale_latent=True),
    "two layers": User("friedman", 100, (32, 32), "erf", LOG, (0.7, 1.0), is_scale_latent=True),
    "500 rows": User("friedman", 500, (24,), "tanh", HALF, (0.7,)),
    "yacht": User("yacht", 150, (50,), "erf", HALF, (0.7,), is_scale_latent=True),
    "boston": User("boston", 120, (24, 24), "tanh", LOG, (0.5, 1.0)),
    "airfoil": User("airfoil", 200, (64,), "tanh", HALF, (1.0,)),
}
UCI = ("yacht", "boston", "airfoil")


def data(user: User, folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return standardised inputs, (n, d), and targets, (n,)."""
    rng = np.random.default_rng(0)
    if user.data in UCI:
        train, _ = uci(folder or ".", user.data)
        rows = rng.permutation(len(train.targets))[: user.num_rows]
        x, y = train.inputs[rows], train.targets[rows]
    elif user.data == "friedman":
        x = rng.uniform(size=(user.num_rows, 5))
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        y = y + rng.normal(size=user.num_rows)
    else:
        x = np.sort(rng.uniform(-2, 2, (user.num_rows, 1)), axis=0)
        t = x[:, 0]
        functions = {"sine": np.sin(3 * t), "steps": np.sign(t) + np.sign(t - 1)}
        damped = 3 * np.exp(-0.7 * (t + 2)) * np.sin(5 * t) + t
        y = functions.get(user.data, damped) + (0.8 if user.data == "damped" else 0.1) * rng.normal(size=user.num_rows)
    return Standardiser.fit(x)(x), Standardiser.fit(y)(y)


def written(user: User) -> Callable[..., None]:
    """Return the model, as its user would write it."""

    def model(x: Array, y: Array | None = None) -> None:
        def normal(name: str, scale: Any, *shape: int) -> Array:
            return numpyro.sample(name, dist.Normal(0, scale).expand(shape).to_event(len(shape)))

        hidden, activation = x, ACTIVATIONS[user.activation]
        for layer, (width, scale) in enumerate(zip(user.layers, user.weights, strict=False)):
            if user.is_scale_latent:
                scale = scale * numpyro.sample(f"scale{layer}", dist.LogNormal(0.0, 0.5))
            num_inputs = hidden.shape[1]
            # Not centred where the scale is latent.
            weights = normal(f"w{layer}", 1.0, num_inputs, width) * scale / (num_inputs**0.5 if layer else 1.0)
            hidden = activation(hidden @ weights + scale * normal(f"b{layer}", 1.0, width))
        features = numpyro.deterministic("features", hidden / user.layers[-1] ** 0.5)
        mean = features @ normal("readout", user.readout, user.layers[-1])
        if user.has_output_bias:
            mean = mean + numpyro.sample("bias", dist.Normal(0, 1))
        noise = user.noise
        if noise == "by row":
            level, slope = numpyro.sample("level", dist.Normal(-1, 1)), numpyro.sample("slope", dist.Normal(0, 0.5))
            noise = jnp.exp(level + slope * x[:, 0])
        elif isinstance(noise, dist.Distribution):
            noise = numpyro.sample("noise", noise)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


@contextmanager
def compilation_timed() -> Iterator[list[float]]:
    """Collect the core seconds in which programs are traced, lowered and compiled, one inside of another once."""
    seconds: list[float] = []
    depth = 0

    @contextmanager
    def timed(*_: Any, **__: Any) -> Iterator[None]:
        nonlocal depth
        start, depth = time.process_time(), depth + 1
        try:
            yield
        finally:
            depth -= 1
            if depth == 0:
                seconds.append(time.process_time() - start)

    with mock.patch.object(dispatch, "log_elapsed_time", timed):
        yield seconds


def measure(name: str, sampler: str, folder: str | None) -> dict[str, Any]:
    """Run a sampler on a model in this process, and judge it."""
    user = USERS[name]
    x, y = data(user, folder)
    model = written(user)
    wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
    kernel_type, _, form = sampler.partition(", ")
    kernel = {"SplitHMC": SplitHMC, "NUTS": NUTS}[kernel_type](model if form else wrapped)
    options = {"num_chains": NUM_CHAINS, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=NUM_WARMUP, num_samples=NUM_DRAWS, **options)
    cost = "num_grad" if kernel_type == "SplitHMC" else "num_steps"
    start = time.process_time()
    with compilation_timed() as compiling:
        mcmc.run(jax.random.key(0), x, y, extra_fields=(cost,))
        jax.block_until_ready(mcmc.last_state)
    seconds = time.process_time() - start
    judged = summary(mcmc, wrapped, x, y)
    sites = [site for site in judged.sites.values() if not site.is_exchangeable]
    num_draws, least = NUM_CHAINS * NUM_DRAWS, float(np.min(judged.function.ess))
    return {
        "ESS / draw": least / num_draws,
        "of sites": min((site.ess for site in sites), default=np.nan) / num_draws,
        "R-hat": max(float(np.max(judged.function.rhat)), *(site.rhat for site in sites), 0.0),
        "gradients": judged.num_gradients / num_draws,
        "core s": seconds,
        "after compiling": seconds - sum(compiling),
        "ESS / core s": least / (seconds - sum(compiling)),
        "summary, core s": time.process_time() - start - seconds,
    }


def in_process(name: str, sampler: str, folder: str | None, limit: int) -> dict[str, Any]:
    """Measure in a new process, which ends after ``limit`` core seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.as_users", "--one", name, sampler]
    finished = subprocess.run(
        command + (["--uci", folder] if folder else []),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
    )
    if finished.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"model": name, "sampler": sampler, "core s": np.inf}
    finished.check_returncode()
    return {"model": name, "sampler": sampler, **json.loads(finished.stdout.splitlines()[-1])}


def side_by_side(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a line a model, of which a cell has the values of all samplers in their order."""

    def cell(values: pandas.Series) -> str:
        return " / ".join(f"{value:.3g}" if np.isfinite(value) else "–" for value in values)

    lines = []
    for name in rows["model"].unique():
        user, runs = USERS[name], rows[rows["model"] == name].set_index("sampler").reindex(list(SAMPLERS))
        lines.append(
            {
                "model": f"{name}: {user.num_rows} rows, {' + '.join(map(str, user.layers))} {user.activation}",
                "core s": cell(runs["core s"]),
                "ESS / core s": cell(runs["ESS / core s"]),
                "gradients": cell(runs["gradients"]),
                "ESS / draw": cell(runs["ESS / draw"]),
                "of sites": cell(runs["of sites"]),
                "R-hat": cell(runs["R-hat"]),
            }
        )
    return pandas.DataFrame(lines)


def table(names: list[str], samplers: Sequence[str], folder: str | None, limit: int, csv: Path | None) -> None:
    """Measure, print a row as soon as it is known, and write all."""
    print(f"\n## Twelve models as users write them, 2 x ({NUM_WARMUP} + {NUM_DRAWS}), one function for all\n")
    rows: list[dict[str, Any]] = []
    for name in names:
        for sampler in samplers:
            rows.append(in_process(name, sampler, folder, limit))
            if len(rows) == 1:
                print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}", flush=True)
            cells = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in rows[-1].values())
            print(f"| {' | '.join(cells)} |", flush=True)
            if csv is not None:
                pandas.DataFrame(rows).to_csv(csv, index=False, float_format="%.4g")
    if csv is not None:
        side_by_side(pandas.read_csv(csv)).to_csv(csv.with_stem(f"{csv.stem}_summary"), index=False)


def tables() -> None:
    """Make the table of all models but those of UCI."""
    table([name for name in USERS if name not in UCI], SAMPLERS, None, 120, None)


def main() -> None:
    """Make the table of what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=USERS, help="all by default, those of UCI with --uci only")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--uci", help="folder of the real sets")
    parser.add_argument("--limit", type=int, default=120, help="core seconds of a run")
    parser.add_argument("--csv", type=Path, help="file to write the rows to, and side by side to FILE_summary")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SAMPLER"), help="measure one run in this process")
    options = parser.parse_args()
    with set_blas_threads(1):
        if options.one:
            print(json.dumps(measure(*options.one, options.uci)))
            return
        names = options.models or [name for name in USERS if options.uci or name not in UCI]
        table(names, options.samplers, options.uci, options.limit, options.csv)


if __name__ == "__main__":
    main()
