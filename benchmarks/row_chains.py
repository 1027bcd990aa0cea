"""Chains of a narrow network on many rows: what they give for the seconds that they take.

Friedman's function as in ``many_rows``, a collapsed network of one layer, its scales and noise fitted to a thousand
rows. Two chains begin on a tenth of the rows and go on with all, in pieces on disk. Double precision: in single the
noise of these rows is lost. Every draw takes as many gradients, so that a run costs what it says. Effective draws and
R-hat are those of the mean function at fifty test rows. Seconds are those of the processor.

python -m benchmarks.row_chains --rows 100000 --warmup 60 --draws 80
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC

from benchmarks.many_rows import NUM_TEST, clocked, data, truth
from numpyro_wide import ReadoutPredictive, collapse_readout, set_blas_threads, wide_limit
from numpyro_wide.diagnostics import regression_scores
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.nn import FCN, bnn
from numpyro_wide.runs import run_in_pieces

WIDTH, CHAINS, GRADIENTS, NUM_POINTS = 64, 2, 8, 50
KERNELS: dict[str, Callable[..., Any]] = {
    "MicrocanonicalLangevin": partial(MicrocanonicalLangevin, adjusted=False, num_steps=GRADIENTS // 2),
    "SplitHMC": partial(SplitHMC, num_steps=GRADIENTS),
}


def collapsed(num_rows: int, block_size: int) -> tuple[Any, float]:
    """Return the collapsed network, with scales of a thousand rows, and the noise."""
    x, y = data(num_rows)
    some = np.random.default_rng(0).choice(num_rows, 1000, replace=False)
    fit = wide_limit.fit(x[some], y[some], input_scale=True)
    plain = bnn(FCN(1, WIDTH, "erf"), None, fit.noise_scale, scales=fit.scales, block_size=block_size)
    return collapse_readout(plain, readout="readout", features="features", observed="y"), fit.noise_scale


def chains(kernel: Any, warmup: int, draws: int, start: Any, x: Any, y: Any, piece: int, folder: str) -> Any:
    """Run chains in pieces; return the draws and the gradients, each by chain."""
    options = {"num_chains": CHAINS, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=piece, **options)
    fields: Any = {"init_params": start, "extra_fields": ("num_grad",), "progress_bar": False}
    run = run_in_pieces(mcmc, folder, jax.random.key(1), x, y, num_samples=draws, **fields)
    return {name: jnp.asarray(values) for name, values in run.get_samples(group_by_chain=True).items()}


def row(name: str, model: Any, noise: float, start: Any, options: argparse.Namespace) -> str:
    """Return a row of the table."""
    (x, y), (x_new, y_new) = data(options.rows), data(NUM_TEST, seed=1)
    x, y, x_new = (jnp.asarray(part, float) for part in (x, y, x_new))
    with tempfile.TemporaryDirectory() as folder:
        kernel = KERNELS[name](model)
        piece = options.draws // options.pieces
        seconds, draws = clocked(lambda: chains(kernel, options.warmup, options.draws, start, x, y, piece, folder))
    flat = {site: values.reshape(-1, *values.shape[2:]) for site, values in draws.items()}
    found = ReadoutPredictive(model, flat, (x, y))(jax.random.key(2), x_new)
    mean, variance = np.asarray(found["mean"]), np.asarray(found["variance"])
    by_chain = mean[:, :NUM_POINTS].reshape(CHAINS, options.draws, NUM_POINTS)
    function, center = truth(np.asarray(x_new)), mean.mean(axis=0)
    spread = np.sqrt(variance.mean(axis=0) + mean.var(axis=0))
    scores = regression_scores(y_new, mean, variance + noise**2)
    gradients = GRADIENTS * (options.warmup + options.draws)
    cells = (f"{options.rows:,}", name, f"{CHAINS} x {gradients:,}", f"{seconds:.0f}")
    cells += (f"{np.median(effective_sample_size(by_chain)):.1f}", f"{np.median(split_gelman_rubin(by_chain)):.2f}")
    cells += (f"{np.sqrt(np.mean((center - function) ** 2)):.4f}", f"{scores['log_predictive_density']:.3f}")
    cells += (f"{np.mean(np.abs(center - function) < 1.645 * spread):.2f}", f"{scores['coverage_90']:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--first", type=int, default=300, help="draws on a tenth of the rows, half of them warmup")
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--draws", type=int, default=80)
    parser.add_argument("--pieces", type=int, default=4)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    model, noise = collapsed(options.rows, options.block_size)
    x, y = (jnp.asarray(part[: options.rows // 10], float) for part in data(options.rows))
    half = options.first // 2
    with tempfile.TemporaryDirectory() as folder:
        first = SplitHMC(model, num_steps=GRADIENTS)
        seconds, begun = clocked(lambda: chains(first, half, half, None, x, y, half, folder))
    start = {site: values[:, -1] for site, values in begun.items()}
    print(f"{CHAINS} x {GRADIENTS * options.first:,} gradients on {len(x):,} rows: {seconds:.0f} s\n")
    print("| rows | kernel | gradients | seconds | effective draws | R-hat | error | log density | function | rows |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.kernels:
        print(row(name, model, noise, start, options), flush=True)


if __name__ == "__main__":
    with set_blas_threads(1):
        main()
