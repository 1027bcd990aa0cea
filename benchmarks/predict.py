"""Predictions: the first call of a model and later ones, beside NumPyro's Predictive and a Gaussian process."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import Predictive
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise, wide_limit_draws

NUM_DRAWS, WIDTH, NOISE_SCALE = 400, 200, 0.1
X = jnp.linspace(-1, 1, 20)
Y = jnp.sin(4 * X)
X_NEW = jnp.linspace(-1.5, 1.5, 50)


def network(x: Array, y: Array | None = None) -> None:
    """Sample a tanh layer, as in the README."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, WIDTH]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * jnp.outer(x, hidden[0]) + hidden[1]) / WIDTH**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([WIDTH]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE), obs=y)


def seconds_of(call: Callable[[int], Any], num_calls: int = 8) -> tuple[float, float]:
    """Measure the seconds of the first call, and the median of the others."""
    spent = []
    for index in range(num_calls):
        start = time.perf_counter()
        jax.block_until_ready(call(index))
        spent.append(time.perf_counter() - start)
    return spent[0], statistics.median(spent[1:])


def tables() -> None:
    """Make every table of this file."""
    print(
        f"\n## {NUM_DRAWS} draws, width {WIDTH}, 20 rows fitted, 50 predicted: first call, and the median of others\n"
    )
    print("| call | first | later | later / NumPyro's Predictive |")
    print("|---|---|---|---|")
    hidden = jax.random.normal(jax.random.key(0), (NUM_DRAWS, 2, WIDTH))
    collapsed = collapse_readout(network, readout="readout", features="features", observed="y")
    mapped = repriorise(network, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE)
    exact = ReadoutPredictive(collapsed, {"hidden": hidden}, (X, Y))
    draws = {"hidden": hidden, "readout": exact.readout(jax.random.key(1))}
    plain = Predictive(network, draws)
    process = GaussianProcessRegressor(RBF(0.5), alpha=NOISE_SCALE**2, optimizer=None)
    process.fit(np.asarray(X)[:, None], np.asarray(Y))
    calls = {
        "numpyro.infer.Predictive, plain model": lambda index: plain(jax.random.key(index), X_NEW),
        "ReadoutPredictive(...)(key, x_new)": lambda index: exact(jax.random.key(index), X_NEW),
        "the same, a new object with other draws": lambda index: ReadoutPredictive(
            collapsed, {"hidden": hidden + 0.01 * index}, (X, Y)
        )(jax.random.key(index), X_NEW),
        "ReadoutPredictive(...).readout(key)": lambda index: exact.readout(jax.random.key(index)),
        "wide_limit_draws(key, ...)": lambda index: wide_limit_draws(jax.random.key(index), mapped, NUM_DRAWS, X, Y),
        "GaussianProcessRegressor.predict": lambda _: process.predict(np.asarray(X_NEW)[:, None], return_std=True),
    }
    found = {name: seconds_of(call) for name, call in calls.items()}
    reference = found["numpyro.infer.Predictive, plain model"][1]
    for name, (first, later) in found.items():
        print(f"| {name} | {first:.2f} s | {1e3 * later:.1f} ms | {later / reference:.2f} |")
