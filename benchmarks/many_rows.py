"""Many rows: a gradient by blocks beside all rows at once, and random features beside histogram boosting.

The function is Friedman's first with eight inputs, scaled to about unit variance, and the noise is 0.1: both known, so
that errors are those of the function and coverage is that of its true values. Seconds are those of the processor, over
all threads, compilation included.

python -m benchmarks many_rows              (gradients, in 6 GB; random features of 10,000 and 100,000 rows)
python -m benchmarks.many_rows --rows 1000000    (random features at as many rows: nine minutes of a core)
python -m benchmarks.many_rows --uci FOLDER --sets protein bike    (tables of a folder, as studies._data reads them)
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import log_density
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingRegressor

from numpyro_wide import collapse_readout, set_blas_threads
from numpyro_wide.diagnostics import regression_scores
from numpyro_wide.nn import FCN, bnn
from numpyro_wide.wide_limit import fit_random_features
from studies._data import Standardiser, uci

NUM_INPUTS, WIDTH, NOISE, BLOCK_SIZE, NUM_TEST = 8, 256, 0.1, 4096, 2000
NETWORK = FCN(depth=1, width=WIDTH, activation="erf", w_std=1.5, b_std=1.0)


def truth(x: np.ndarray) -> np.ndarray:
    """Return Friedman's function of inputs (n, 8), centred and scaled."""
    u = (x / np.sqrt(3) + 1) / 2  # uniform on [0, 1]
    found = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    return ((found - 14.4) / 4.9).astype("f")


def data(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of unit variance, (n, 8), and targets, (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-np.sqrt(3), np.sqrt(3), (num_rows, NUM_INPUTS)).astype("f")
    return x, (truth(x) + NOISE * rng.standard_normal(num_rows)).astype("f")


def collapsed(block_size: int | None):
    """Return the collapsed network."""
    model = bnn(NETWORK, None, NOISE, block_size=block_size)
    return collapse_readout(model, readout="readout", features="features", observed="y")


def gradient(num_rows: int, block_size: int | None) -> tuple[float, float]:
    """Return seconds of a gradient, the best of three, and megabytes of the compiled program's temporaries."""
    x, y = (jnp.asarray(part) for part in data(num_rows))
    model = collapsed(block_size)
    params = NETWORK.init(jax.random.key(0), x[:1])["params"]
    values = {f"hidden.{layer}.{name}": value for layer, part in params.items() for name, value in part.items()}
    compiled = (
        jax.jit(jax.value_and_grad(lambda values, x, y: log_density(model, (x, y), {}, values)[0]))
        .lower(values, x, y)
        .compile()
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(values, x, y))
        seconds.append(time.perf_counter() - start)
    return min(seconds), compiled.memory_analysis().temp_size_in_bytes / 1e6


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds of the processor that a call takes, and what it returns."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def friedman_row(num_rows: int) -> str:
    """Return a row of the table: seconds, error of the function, coverages and log density beside boosting's error."""
    (x, y), (x_new, y_new) = data(num_rows), data(NUM_TEST, seed=1)
    # The activation that the comparison of both finds.
    seconds, found = clocked(lambda: fit_random_features(x, y, activation="erf"))
    mean, variance = found.predict(x_new)
    error = mean - truth(x_new)
    by_function = float(np.mean(np.abs(error) < 1.645 * np.sqrt(variance)))
    scores = regression_scores(y_new, mean[None], variance[None] + found.fit.noise_scale**2)
    rival, boosting = clocked(lambda: HistGradientBoostingRegressor(random_state=0).fit(x, y))
    cells = (
        f"{num_rows:,}",
        f"{seconds:.0f}",
        f"{np.sqrt(np.mean(error**2)):.4f}",
        f"{by_function:.2f}",
        f"{scores['coverage_90']:.2f}",
        f"{found.log_density(x_new, y_new).mean():.3f}",
        f"{rival:.1f}",
        f"{np.sqrt(np.mean((boosting.predict(x_new) - truth(x_new)) ** 2)):.4f}",
    )
    return f"| {' | '.join(cells)} |"


def uci_row(folder: str, name: str) -> str:
    """Return a row of the table of real sets, first split, in the units of their targets."""
    train, test = uci(folder, name)
    by_column, by_target = Standardiser.fit(train.inputs), Standardiser.fit(train.targets)
    x, x_new, y = by_column(train.inputs), by_column(test.inputs), by_target(train.targets)
    seconds, found = clocked(lambda: fit_random_features(x, y))
    mean, variance = found.predict(x_new, with_noise=True)
    scores = regression_scores(by_target(test.targets), mean[None], variance[None], scale=by_target.scale)
    density = found.log_density(x_new, by_target(test.targets)).mean() - np.log(by_target.scale)
    rival, boosting = clocked(lambda: HistGradientBoostingRegressor(random_state=0).fit(train.inputs, train.targets))
    error = float(np.sqrt(np.mean((boosting.predict(test.inputs) - test.targets) ** 2)))
    architecture = f"{found.fit.activation}, noise {found.fit.noise_scale:.2g}"
    cells = (name, f"{len(y):,}", architecture, f"{seconds:.0f}", f"{scores['rmse']:.3f}", f"{density:.3f}")
    cells += (f"{scores['coverage_90']:.2f}", f"{rival:.1f}", f"{error:.3f}")
    return f"| {' | '.join(cells)} |"


def friedman_table(sizes: list[int]) -> None:
    """Print the table of the made function."""
    print("\n## 16 draws of 512 random features, scales of 1000 rows, beside histogram boosting at its defaults\n")
    print("| rows | seconds | error | 90 % of function | 90 % of rows | log density | boosting (s) | its error |")
    print("|---|---|---|---|---|---|---|---|")
    for num_rows in sizes:
        print(friedman_row(num_rows), flush=True)


def uci_table(folder: str, names: list[str]) -> None:
    """Print the table of real sets."""
    print("\n## The same on real tables, first split, in the targets' units\n")
    print("| set | rows | chosen | seconds | RMSE | log density | 90 % of rows | boosting (s) | its RMSE |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        print(uci_row(folder, name), flush=True)


def noise_table(num_rows: int) -> None:
    """Print the table of a noise that varies with two of the inputs, by a factor of thirteen."""

    def noise(x: np.ndarray) -> np.ndarray:
        return np.exp(-1.3 + 0.46 * x[:, 0] + 0.29 * x[:, 3])

    rng = np.random.default_rng(0)
    (x, y), (x_new, y_new) = (
        (x, truth(x) + noise(x) * rng.standard_normal(len(x))) for x, _ in (data(num_rows), data(4000, seed=1))
    )
    quarter = np.digitize(noise(x_new), np.quantile(noise(x_new), [0.25, 0.5, 0.75]))
    known = norm(truth(x_new), noise(x_new)).logpdf(y_new).mean()
    print(f"\n## {num_rows:,} rows with noise that varies, 16 draws of 512 random features\n")
    print(f"The log density of the law itself is {known:.3f}.\n")
    print("| noise | seconds | error | log density | 90 % of rows, by quarter of the noise |\n|---|---|---|---|---|")
    for form in ("constant", "by_row"):
        seconds, found = clocked(lambda form=form: fit_random_features(x, y, activation="erf", noise=form))
        mean, variance = found.predict(x_new, with_noise=True)
        is_inside = np.abs(y_new - mean) < 1.645 * np.sqrt(variance)
        coverage = ", ".join(f"{is_inside[quarter == index].mean():.2f}" for index in range(4))
        error, density = np.sqrt(np.mean((mean - truth(x_new)) ** 2)), found.log_density(x_new, y_new).mean()
        print(f"| {form} | {seconds:.0f} | {error:.4f} | {density:.3f} | {coverage} |", flush=True)


def tables() -> None:
    """Print the tables of gradients and of the made function."""
    print(f"\n## One gradient of a collapsed network, {NUM_INPUTS} inputs, {WIDTH} units, float32\n")
    print("| rows | rows at a time | seconds | temporaries (MB) |\n|---|---|---|---|")
    for num_rows in (10_000, 100_000, 1_000_000):
        for block_size in (None, BLOCK_SIZE):
            cells = num_rows, block_size or "all", *gradient(num_rows, block_size)
            print("| {:,} | {} | {:.2f} | {:.0f} |".format(*cells))
    friedman_table([10_000, 100_000])
    noise_table(20_000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="numbers of rows of the made function")
    parser.add_argument("--uci", help="folder of the real sets")
    parser.add_argument("--sets", nargs="*", default=["bike", "protein"], help="their names")
    options = parser.parse_args()
    with set_blas_threads(1):
        if options.rows:
            friedman_table(options.rows)
        if options.uci:
            uci_table(options.uci, options.sets)
