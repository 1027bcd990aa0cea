"""What many rows are fitted by elsewhere, beside random features: the same rows, machine and, of a budget, seconds.

Boosting is scikit-learn's by histograms, at its defaults and with as many trees as rows left out ask for; its noise is
the error on these. The sparse Gaussian process is gpytorch's; the last-layer Laplace approximation is a network's own
few lines in torch; both need an environment of their own. SVI is NumPyro's, a mean field of a network of 64 units with
the scales and the noise of the limit's fit. Seconds are those of the processor, over all threads, compilation included.

python -m benchmarks.rivals --rows 10000 100000 --seconds 60 --torch PYTHON
python -m benchmarks.rivals --rows --uci FOLDER --torch PYTHON       (tables of a folder, as studies._data reads them)
"""

import argparse
import functools
import resource
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import Messenger
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split

from benchmarks.elsewhere import run_elsewhere
from benchmarks.many_rows import NUM_TEST, data, truth
from numpyro_wide import set_blas_threads, wide_limit
from numpyro_wide.diagnostics import regression_scores
from numpyro_wide.machine import double_precision
from numpyro_wide.nn import FCN, bnn
from studies._data import Standardiser, uci

BATCH, STEPS = 1024, 500


class Table(NamedTuple):
    """Standardised rows, test rows, and what is known of them.

    Attributes:
        x: inputs, (n, d_in).
        y: targets, (n,).
        x_new: test inputs, (m, d_in).
        y_new: their targets, (m,).
        scale: unit of the targets.
        function: function without noise at the test inputs, (m,), or None.
    """

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray
    scale: float
    function: np.ndarray | None


class Prediction(NamedTuple):
    """A mixture of Gaussians.

    Attributes:
        mean: means, (draws, m).
        variance: variances of the function, (draws, m); NaN where none is known.
        noise_variance: variance of the noise.
    """

    mean: np.ndarray
    variance: np.ndarray
    noise_variance: float


def made(num_rows: int) -> Table:
    """Return rows of Friedman's function."""
    (x, y), (x_new, y_new) = data(num_rows), data(NUM_TEST, seed=1)
    return Table(x, y, x_new, y_new, 1.0, truth(x_new))


def real(folder: str, name: str) -> Table:
    """Return the first split of a real set."""
    train, test = uci(folder, name)
    of_x, of_y = Standardiser.fit(train.inputs), Standardiser.fit(train.targets)
    parts = (of_x(train.inputs), of_y(train.targets), of_x(test.inputs), of_y(test.targets))
    return Table(*(part.astype("f") for part in parts), float(np.squeeze(of_y.scale)), None)


def boosting(table: Table, budget: float, max_iter: int = 100) -> Prediction:
    """Boost trees, a hundred or as many as rows left out ask for."""
    # The noise is that of rows left out; the trees that are measured have seen all but these.
    x, x_out, y, y_out = train_test_split(table.x, table.y, test_size=0.1, random_state=0)
    stopped = {"early_stopping": True, "n_iter_no_change": 20, "learning_rate": 0.05} if max_iter > 100 else {}
    trees = HistGradientBoostingRegressor(max_iter=max_iter, random_state=0, **stopped).fit(x, y)
    mean = trees.predict(table.x_new)[None]
    return Prediction(mean, np.full(mean.shape, np.nan), float(np.mean((trees.predict(x_out) - y_out) ** 2)))


def random_features(table: Table, budget: float) -> Prediction:
    """Fit random features; the activation of Friedman's function, which the comparison would find, is given."""
    activation: Any = ("erf", "relu") if table.function is None else "erf"
    found = wide_limit.fit_random_features(table.x, table.y, activation=activation)
    with double_precision():
        moments = found.predictive(jax.random.key(0), np.asarray(table.x_new, float))
    return Prediction(np.asarray(moments["mean"]), np.asarray(moments["variance"]), found.fit.noise_scale**2)


class ScaledObservations(Messenger):
    """Multiplies the log densities of observations."""

    def __init__(self, fn: Any, factor: float):
        super().__init__(fn)
        self.factor = factor

    def process_message(self, msg: dict[str, Any]) -> None:
        """Scale an observed site."""
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = self.factor * (1 if msg["scale"] is None else msg["scale"])


def mean_field(table: Table, budget: float) -> Prediction:
    """Run SVI in minibatches on a plain network, until the budget is spent."""
    start = time.process_time()
    some = np.random.default_rng(0).choice(len(table.x), 1000, replace=False)
    fit = wide_limit.fit(table.x[some], table.y[some], input_scale=True)
    noise_variance = fit.noise_scale**2
    network = bnn(FCN(fit.depth, 64, fit.activation), None, fit.noise_scale, scales=fit.scales)
    model = ScaledObservations(network, len(table.x) / BATCH)
    guide = AutoNormal(model, init_scale=0.01)
    schedule = lambda step: 3e-3 / (1 + step / 5000)  # noqa: E731
    svi = SVI(model, guide, numpyro.optim.Adam(schedule), Trace_ELBO())
    x, y = jax.numpy.asarray(table.x), jax.numpy.asarray(table.y)
    state = svi.init(jax.random.key(0), x[:BATCH], y[:BATCH])

    @jax.jit
    def steps(state: Any, key: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            rows = jax.random.randint(key, (BATCH,), 0, len(x))
            return svi.update(state, x[rows], y[rows])

        return jax.lax.scan(step, state, jax.random.split(key, STEPS))[0]

    number = 0
    while time.process_time() - start < budget:
        number += 1
        state = jax.block_until_ready(steps(state, jax.random.fold_in(jax.random.key(1), number)))
    print(f"{number * STEPS} steps of SVI", file=sys.stderr)
    draws = guide.sample_posterior(jax.random.key(2), svi.get_params(state), sample_shape=(100,))
    features = Predictive(network, draws, return_sites=["features"])(jax.random.key(3), table.x_new)["features"]
    mean = np.einsum("dmi,di->dm", features, draws["readout"])
    return Prediction(mean, np.zeros_like(mean), noise_variance)


def in_torch(name: str, python: str, table: Table, budget: float) -> Prediction:
    """Run a rival of torch's in an environment that has it."""
    rows = {"x": table.x, "y": table.y, "x_new": table.x_new}
    found = run_elsewhere(python, "_torch_rivals.py", rows, name, budget)
    return Prediction(found["mean"][None], found["variance"][None], float(np.squeeze(found["noise_variance"])))


def cpu_seconds() -> float:
    """Return processor seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def row(name: str, table: Table, rival: str, fit: Any, budget: float) -> str:
    """Return a row of the table of scores."""
    start = cpu_seconds()
    mean, variance, noise_variance = fit(table, budget)
    seconds = cpu_seconds() - start
    total = np.nan_to_num(variance) + noise_variance
    scores = regression_scores(table.y_new, mean, total, scale=table.scale)
    error, held = scores["rmse"], float("nan")
    if table.function is not None:
        center = mean.mean(axis=0)
        spread = np.sqrt(variance.mean(axis=0) + mean.var(axis=0))
        error = np.sqrt(np.mean((center - table.function) ** 2))
        held = np.nan if np.isnan(spread).any() else np.mean(np.abs(center - table.function) < 1.645 * spread)
    cells = (name, f"{len(table.x):,}", rival, f"{seconds:.0f}", f"{error:.4g}")
    cells += (f"{scores['log_predictive_density']:.3f}", f"{scores['coverage_90']:.2f}")
    return f"| {' | '.join(cells)} | {'' if np.isnan(held) else format(held, '.2f')} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000], help="rows of the made function")
    parser.add_argument("--uci", help="folder of the real sets")
    parser.add_argument("--sets", nargs="*", default=["bike", "protein"], help="their names")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor seconds of what has a budget")
    parser.add_argument("--torch", help="Python of an environment that has gpytorch")
    parser.add_argument("--rivals", nargs="*", help="some of the rivals, by words of their names")
    options = parser.parse_args()
    rivals: dict[str, Any] = {
        "random features": random_features,
        "boosting": boosting,
        "boosting, stopped early": functools.partial(boosting, max_iter=2000),
        "SVI, mean field": mean_field,
    }
    if options.torch:
        for label, name in (("sparse GP", "sparse_gp"), ("last-layer Laplace", "last_layer")):
            rivals[label] = functools.partial(in_torch, name, options.torch)
    chosen = {name: fit for name, fit in rivals.items() if not options.rivals or name in options.rivals}
    print("| set | rows | | seconds | error | log density | 90 % of rows | 90 % of the function |")
    print("|---|---|---|---|---|---|---|---|")
    tables = {f"made {number}": made(number) for number in options.rows}
    tables |= {name: real(options.uci, name) for name in options.sets} if options.uci else {}
    for name, table in tables.items():
        for rival, fit in chosen.items():
            print(row(name.split()[0], table, rival, fit, options.seconds), flush=True)


if __name__ == "__main__":
    with set_blas_threads(1):
        main()
