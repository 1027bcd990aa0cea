"""Many rows: a gradient by blocks beside all rows at once, and draws of the limit beside histogram boosting.

The function is Friedman's first with eight inputs, scaled to about unit variance, and the noise is 0.1: both known, so
that errors are those of the function and coverage is that of its true values.

python -m benchmarks many_rows               (some minutes)
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import log_density
from sklearn.ensemble import HistGradientBoostingRegressor

from numpyro_wide import ReadoutPredictive, collapse_readout, wide_limit_draws
from numpyro_wide.nn import FCN, bnn

NUM_INPUTS, WIDTH, NOISE, NUM_DRAWS, BLOCK_SIZE, NUM_TEST = 8, 256, 0.1, 8, 4096, 2000
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


def limit(num_rows: int) -> tuple[float, float, float]:
    """Return seconds of draws and predictions, compilation included, error of the function, and 90 % coverage."""
    (x, y), (x_new, _) = data(num_rows), data(NUM_TEST, seed=1)
    start = time.perf_counter()
    model = collapsed(BLOCK_SIZE)
    draws = wide_limit_draws(jax.random.key(0), model, NUM_DRAWS, x, y)
    found = ReadoutPredictive(model, draws, (x, y))(jax.random.key(1), x_new)
    mean = np.asarray(found["mean"]).mean(0)
    seconds = time.perf_counter() - start
    spread = np.sqrt(np.asarray(found["variance"]).mean(0) + np.asarray(found["mean"]).var(0))
    error = mean - truth(x_new)
    return seconds, float(np.sqrt(np.mean(error**2))), float(np.mean(np.abs(error) < 1.645 * spread))


def boosting(num_rows: int) -> tuple[float, float]:
    """Return seconds of scikit-learn's histogram boosting at its defaults, and the error of its function."""
    (x, y), (x_new, _) = data(num_rows), data(NUM_TEST, seed=1)
    start = time.perf_counter()
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(x_new)
    seconds = time.perf_counter() - start
    return seconds, float(np.sqrt(np.mean((mean - truth(x_new)) ** 2)))


def tables() -> None:
    """Print both tables."""
    print(f"\n## One gradient of a collapsed network, {NUM_INPUTS} inputs, {WIDTH} units, float32\n")
    print("| rows | rows at a time | seconds | temporaries (MB) |\n|---|---|---|---|")
    for num_rows, block_size in ((10_000, None), (10_000, BLOCK_SIZE), (100_000, None), (100_000, BLOCK_SIZE)):
        print("| {:,} | {} | {:.2f} | {:.0f} |".format(num_rows, block_size or "all", *gradient(num_rows, block_size)))
    print("| {:,} | {} | {:.2f} | {:.0f} |".format(1_000_000, BLOCK_SIZE, *gradient(1_000_000, BLOCK_SIZE)))
    print(f"\n## {NUM_DRAWS} draws of the limit, scales not fitted, beside histogram boosting at its defaults\n")
    print("| rows | draws and predictions (s) | error | coverage of 90 % | boosting (s) | its error |")
    print("|---|---|---|---|---|---|")
    for num_rows in (10_000, 100_000):
        cells = (*limit(num_rows), *boosting(num_rows))
        print("| {:,} | {:.0f} | {:.3f} | {:.2f} | {:.1f} | {:.3f} |".format(num_rows, *cells), flush=True)
