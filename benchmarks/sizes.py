"""The cost of a problem by its size: seconds of a gradient, of a prediction and of warmup, and how they grow.

taskset -c 0 python -m benchmarks sizes      (one core, three quarters of an hour)
"""

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from benchmarks.gradients import NOISE_SCALE, forms, potential_gradient
from benchmarks.timing import quickest
from numpyro_wide import ReadoutPredictive
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, bnn

NUM_INPUTS, NUM_TEST, NUM_DRAWS = 8, 100, 4
HELD = 512
SWEEPS = {
    f"rows, at width {HELD}": [(n, HELD) for n in (256, 512, 1024, 2048, 4096, 8192)],
    f"width, at {HELD} rows": [(HELD, width) for width in (128, 256, 512, 1024, 2048, 4096)],
    "rows and width": [(size, size) for size in (256, 512, 1024, 2048)],
}
NUM_WARMUP = 50
COLUMNS = ("plain", "collapsed", "repriorised", "prediction, a draw", "warmup")


def data(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw normal inputs (n, 8), and a smooth function of them with noise (n,)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, NUM_INPUTS))
    y = np.sin(x[:, 0]) * x[:, 1] + NOISE_SCALE * rng.standard_normal(num_rows)
    return x.astype("f"), y.astype("f")


def wrapped(width: int) -> dict[str, Callable]:
    """Make one GELU layer with a single output: the network as it stands, and wrapped."""
    return forms(bnn(FCN(1, width), None, NOISE_SCALE))


def prediction(model: Callable, width: int, x: np.ndarray, y: np.ndarray) -> Callable:
    """Make a call that predicts the test rows by a few draws."""
    hidden = jax.random.normal(jax.random.key(0), (NUM_DRAWS, NUM_INPUTS, width))
    predictive = ReadoutPredictive(model, {"hidden.hidden_0.kernel": hidden}, (x, y))
    return partial(predictive, jax.random.key(1), data(NUM_TEST)[0])


def warmup(model: Callable, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Measure the processor's seconds of SplitHMC's warmup, compilation left out, and its gradients a step."""
    kernel = SplitHMC(model)
    state = kernel.init(jax.random.key(0), NUM_WARMUP, None, (x, y), {})
    step = jax.jit(lambda state: kernel.sample(state, (x, y), {}))
    jax.block_until_ready(step(state))
    gradients, start = 0, time.process_time()
    for _ in range(NUM_WARMUP):
        state = step(state)
        gradients += int(state.num_grad)
    return time.process_time() - start, gradients / NUM_WARMUP


def measured(num_rows: int, width: int) -> dict[str, float]:
    """Measure the seconds of each column, and the gradients a step of the warmup."""
    x, y = data(num_rows)
    models = wrapped(width)
    calls = {name: potential_gradient(model, x, y) for name, model in models.items()}
    seconds = {name: quickest(call) for name, call in calls.items()}
    seconds["prediction, a draw"] = quickest(prediction(models["collapsed"], width, x, y)) / NUM_DRAWS
    seconds["warmup"], gradients = warmup(models["collapsed"], x, y)
    return {**seconds, "gradients a step": gradients}


def products(num_rows: int, width: int, column: str) -> int:
    """Count the leading term: n d for the network itself, n d² or n² d where a Gram matrix is made, the smaller one.

    Of warmup, that of as many gradients at every size.
    """
    return num_rows * width * (1 if column == "plain" else min(num_rows, width))


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Fit the slope of the logarithms by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def tables() -> None:
    """Make a table for each sweep, with the exponents over its upper half, measured and by theory."""
    for name, cells in SWEEPS.items():
        print(f"\n## Seconds by {name}: one hidden layer, one output, {NUM_INPUTS} inputs, float32\n")
        print("| n | width | " + " | ".join(COLUMNS) + " | its gradients a step | collapsed / (n d min(n, d)) |")
        print("|" + "---|" * (4 + len(COLUMNS)))
        rows = []
        for cell in cells:
            row = measured(*cell)
            shown = (f"{1e3 * row[column]:.3g} ms" for column in COLUMNS[:-1])
            rate = 1e12 * row["collapsed"] / products(*cell, "collapsed")
            spent = f"{row['warmup']:.3g} s | {row['gradients a step']:.1f}"
            print(f"| {cell[0]} | {cell[1]} | {' | '.join(shown)} | {spent} | {rate:.0f} ps |", flush=True)
            rows.append(row)
        upper = slice(-(len(cells) // 2 + 1), None)
        sizes = [max(cell) for cell in cells[upper]]
        fitted = (exponent(sizes, [row[column] for row in rows[upper]]) for column in COLUMNS)
        theory = (exponent(sizes, [products(*cell, column) for cell in cells[upper]]) for column in COLUMNS)
        over = f"from {sizes[0]} on"
        print(f"| exponent | {over} | " + " | ".join(f"{slope:.2f}" for slope in fitted) + " | | |")
        print(f"| by theory | {over} | " + " | ".join(f"{slope:.2f}" for slope in theory) + " | | |")
