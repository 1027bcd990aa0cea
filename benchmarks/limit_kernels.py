"""Kernels of a convolutional network of 21 layers on images of 32 x 32: processor seconds beside neural-tangents'.

NEURAL_TANGENTS_PYTHON=path/to/environment/bin/python python -m benchmarks limit_kernels

Its environment has what it was last released for: jax==0.4.23 jaxlib==0.4.23 neural-tangents==0.6.5 "numpy<2"
"scipy<1.13". Without the variable the table has our column alone.
"""

import os
from functools import partial

import jax
import numpy as np

from benchmarks.elsewhere import run_elsewhere
from benchmarks.timing import mean_seconds
from numpyro_wide import wide_limit
from numpyro_wide.machine import double_precision, set_blas_threads
from numpyro_wide.nn import CNN
from numpyro_wide.nn._additive_problem import AdditiveProblem, structured_network
from numpyro_wide.wide_limit._fit import Evidence

DEPTH, GOAL, SECONDS = 21, 3, 0.5
CASES = ("flatten_1", "flatten_16", "mean_1")  # pooling, and number of images on each side


def network(pooling: str) -> CNN:
    """Make the network of which both compute the kernels."""
    scales = {"w_std": 2.0**0.5, "b_std": 0.1, "readout_w_std": 2.0**0.5}
    return CNN(DEPTH, 1, "relu", **scales, padding="SAME", pooling=pooling)


def rival(images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what neural-tangents finds and takes, nothing without its environment."""
    python = os.environ.get("NEURAL_TANGENTS_PYTHON")
    if python is None:
        return {}
    return run_elsewhere(python, "_neural_tangents.py", images, DEPTH, SECONDS)


def tables() -> None:
    """Make one table."""
    rng = np.random.default_rng(0)
    images = {case: rng.normal(size=(2, int(case.split("_")[1]), 32, 32, 3)).astype("f") for case in CASES}
    theirs = rival(images)
    print("\n## Both kernels of 21 convolutional layers, images of 32 x 32 x 3, float32, processor seconds\n")
    print(
        "| pooling | pairs | compiled | called as it is | neural-tangents, compiled | ratio | goal | furthest apart |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case, (x1, x2) in images.items():
        kernel = wide_limit.kernel(network(case.split("_")[0]))
        compiled = jax.jit(kernel)
        seconds = [mean_seconds(partial(call, x1, x2), SECONDS) for call in (compiled, kernel)]
        cells = [case.split("_")[0], str(len(x1) ** 2), *(f"{1e3 * taken:.2f} ms" for taken in seconds)]
        if theirs:
            taken, expected = float(theirs[f"{case}_seconds"]), theirs[f"{case}_kernels"]
            apart = np.max(np.abs(np.stack(kernel(x1, x2)) / expected - 1))
            cells += [f"{1e3 * taken:.2f} ms", f"{seconds[0] / taken:.2f}", f"at most {GOAL}", f"{apart:.0e}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    evidence_table()


def evidence_table() -> None:
    """Make the table of one evaluation of an additive network's evidence with its gradient."""
    rng = np.random.default_rng(0)
    print("\n## Evidence of effects of up to two inputs and its gradient by all scales, float64, one core\n")
    print("| rows | columns | processor seconds | goal |")
    print("|---|---|---|---|")
    for rows, columns in ((400, 10), (800, 20)):
        x = rng.normal(size=(rows, columns))
        with double_precision(), set_blas_threads(1):
            network = structured_network("erf", 2, 0, x)
            problem = AdditiveProblem.of_network(network, x, 1.0, by_input=True, has_noise=True)
            call = partial(Evidence(problem, rng.normal(size=rows)), np.zeros(len(problem.spreads)))
            print(f"| {rows} | {columns} | {mean_seconds(call):.2f} | at most 1.5 |", flush=True)
