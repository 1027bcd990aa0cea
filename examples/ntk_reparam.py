"""Two ways to reparametrise a Bayesian neural network, compared as in Figure 10 of Hron et al. 2022 at small size.

T, the map of the readout that numpyro_wide is built on, against R, one Levenberg-Marquardt step of all weights with the
network's tangent kernel, whose log-determinant is only approximate. Underdamped Langevin dynamics samples both for
several numbers of data and regularisers, and the network as it is. Prints effective sample sizes per step, and how far
the predictions are from those of the same posterior by T, and draws the figure.

    python examples/ntk_reparam.py
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from numpyro.infer import MCMC
from sklearn.datasets import load_diabetes

import numpyro_wide
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.linear_gaussian import readout_map
from numpyro_wide.mcmc import UnderdampedLangevin
from numpyro_wide.wide_limit import ntk_map

matplotlib.use("Agg")
import matplotlib.pyplot as plt

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces its next generation
    import arviz as az

NOISE_SCALE = 0.3
NUM_CHAINS = 2
NUM_TEST = 50
Weights = dict[str, jax.Array]


def features(weights: Weights, x: jax.Array) -> jax.Array:
    """Scaled embeddings (n, width) of one hidden layer of error functions, NTK parametrisation."""
    preactivations = 1.5 / np.sqrt(x.shape[1]) * x @ weights["hidden"] + 0.5 * weights["bias"]
    return jax.lax.erf(preactivations) / np.sqrt(preactivations.shape[1])


def network(weights: Weights, x: jax.Array) -> jax.Array:
    """Outputs (n,)."""
    return features(weights, x) @ weights["readout"]


def potential_energy(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """Negative log joint density up to a constant: all weights N(0, 1), Gaussian noise."""
    prior = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))
    return 0.5 * (prior + jnp.sum((y - network(weights, x)) ** 2) / NOISE_SCALE**2)


def identity(phi: Weights, x: jax.Array, y: jax.Array, regulariser: jax.Array) -> tuple[Weights, jax.Array]:
    """No reparametrisation."""
    return phi, jnp.zeros(())


def map_t(phi: Weights, x: jax.Array, y: jax.Array, regulariser: jax.Array) -> tuple[Weights, jax.Array]:
    """The readout mapped, with its exact log-determinant."""
    readout, log_det = readout_map(features(phi, x), y, phi["readout"], NOISE_SCALE, regulariser=regulariser)
    return {**phi, "readout": readout}, log_det


def map_r(phi: Weights, x: jax.Array, y: jax.Array, regulariser: jax.Array) -> tuple[Weights, jax.Array]:
    """All weights mapped; the random vectors of the log-determinant are the same throughout."""
    return ntk_map(network, phi, x, y, regulariser, rng_key=jax.random.key(0), num_probes=4, order=2)


MAPS = {"T, readout": map_t, "R, NTK": map_r, "none": identity}


class Result(NamedTuple):
    """Of one method, number of data and regulariser, for the weights θ."""

    ess_projected: float  # per step
    ess_norm: float  # of the squared norm, per step
    accept_prob: float
    step_size: float
    predictions: np.ndarray  # posterior mean at the test inputs


def load_data(num_train: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standardised inputs (n, 10), targets (n,) and test inputs of the diabetes data."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = ((a - a.mean(0)) / a.std(0) for a in (x[order], y[order]))
    return x[:num_train].astype(np.float32), y[:num_train].astype(np.float32), x[-NUM_TEST:].astype(np.float32)


def make_sampler(reparametrise: Callable, num_train: int, options: argparse.Namespace) -> Callable:
    """Compile one chain with the map, from (key, regulariser) to draws, for a batch of both."""
    x, y, x_test = (jnp.asarray(array) for array in load_data(num_train))
    # enough of them for the effective sample size, few enough to hold
    thinning = max(1, options.num_steps // 500)

    def chain(rng_key: jax.Array, regulariser: jax.Array) -> tuple[Weights, ...]:
        to_weights = partial(reparametrise, x=x, y=y, regulariser=regulariser)

        def potential_fn(phi: Weights) -> jax.Array:
            weights, log_det = to_weights(phi)
            return potential_energy(weights, x, y) - log_det

        start_key, run_key = jax.random.split(rng_key)
        shapes = {"hidden": (x.shape[1], options.width), "bias": (options.width,), "readout": (options.width,)}
        keys = jax.random.split(start_key, len(shapes))
        start = {name: jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
        kernel = UnderdampedLangevin(potential_fn=potential_fn, step_size=0.1)
        mcmc = MCMC(
            kernel,
            num_warmup=options.num_warmup,
            num_samples=options.num_steps,
            thinning=thinning,
            progress_bar=False,
        )
        mcmc.run(run_key, init_params=start, extra_fields=("accept_prob", "step_size"))
        weights = jax.lax.map(lambda phi: to_weights(phi)[0], mcmc.get_samples())
        extra = mcmc.get_extra_fields()
        predictions = jax.lax.map(lambda draw: network(draw, x_test), weights).mean(0)
        return weights, predictions, extra["accept_prob"].mean(), extra["step_size"].mean()

    return jax.jit(jax.vmap(jax.vmap(chain, in_axes=(0, None)), in_axes=(None, 0)))


def compare(num_train: int, options: argparse.Namespace) -> dict[tuple[str, float], Result]:
    """Sample with every map and regulariser for one number of data."""
    results = {}
    for name, reparametrise in MAPS.items():
        start = time.perf_counter()
        multiples = options.regularisers if name != "none" else options.regularisers[:1]
        regularisers = NOISE_SCALE**2 * jnp.asarray(multiples)
        keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
        draws, predictions, accept_probs, step_sizes = jax.device_get(
            make_sampler(reparametrise, num_train, options)(keys, regularisers)
        )
        for index, multiple in enumerate(multiples):
            weights = {site: values[index] for site, values in draws.items()}
            norm = sum(np.sum(values**2, axis=tuple(range(2, values.ndim))) for values in weights.values())
            total = NUM_CHAINS * options.num_steps
            results[name, multiple] = Result(
                projected_ess(weights, jax.random.key(0))["mean"] / total,
                float(az.ess({"norm": norm})["norm"]) / total,
                float(accept_probs[index].mean()),
                float(step_sizes[index].mean()),
                predictions[index].mean(0),
            )
        print(f"n = {num_train:4d}  {name:10s}  {time.perf_counter() - start:5.1f} s", flush=True)
    return results


def print_table(results: dict[int, dict[tuple[str, float], Result]]) -> None:
    """One row for each run; the last column is the distance of its predictions to those of T with λ = σ²."""
    print("\n   n  map         λ/σ²  ESS/step (projections)  ESS/step (norm)  accept   step  RMSE to T's predictions")
    for num_train, by_case in results.items():
        reference = next(iter(by_case.values())).predictions
        for (name, multiple), result in by_case.items():
            distance = np.sqrt(np.mean((result.predictions - reference) ** 2))
            print(
                f"{num_train:4d}  {name:10s}  {multiple if name != 'none' else '':>4}  {result.ess_projected:22.5f}  "
                f"{result.ess_norm:15.5f}  {result.accept_prob:6.3f}  {result.step_size:5.3f}  {distance:23.3f}"
            )


def plot(results: dict[int, dict[tuple[str, float], Result]], path: Path) -> None:
    """Effective sample sizes per step against the number of data, colours for λ, line styles for the maps."""
    figure, both_axes = plt.subplots(1, 2, figsize=(8.5, 3.8), sharex=True, layout="constrained")
    styles = {"T, readout": "-o", "R, NTK": "--s", "none": ":^"}
    cases = next(iter(results.values())).keys()
    multiples = sorted({multiple for _, multiple in cases})
    for axes, statistic, title in zip(
        both_axes, ("ess_projected", "ess_norm"), ("random projections of θ", "squared norm of θ"), strict=True
    ):
        for name, multiple in cases:
            colour = "0.4" if name == "none" else f"C{multiples.index(multiple)}"
            label = "no map" if name == "none" else f"{name}, λ = {multiple:g} σ²"
            values = [getattr(by_case[name, multiple], statistic) for by_case in results.values()]
            axes.loglog(list(results), values, styles[name], color=colour, markersize=5, label=label)
        axes.set_xticks(list(results), [str(num_train) for num_train in results])
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set(xlabel="number of data", ylabel="ESS per step", title=title)
    figure.legend(*both_axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--num-train", type=int, nargs="+", default=[8, 32, 128], help="numbers of data")
    parser.add_argument("--regularisers", type=float, nargs="+", default=[1, 10, 100], help="multiples of σ²")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Sample, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    results = {num_train: compare(num_train, options) for num_train in options.num_train}
    print_table(results)
    options.output.mkdir(parents=True, exist_ok=True)
    plot(results, options.output / "ntk_reparam.png")
    print(f"\nFigure in {options.output}: ntk_reparam.png")


if __name__ == "__main__":
    main()
