"""Two ways to reparametrise a Bayesian neural network, compared as in Figure 10 of Hron et al. 2022 at small size.

T, the map of the readout that numpyro_wide is built on, against R, one Levenberg-Marquardt step of *all* weights with
the network's tangent kernel, whose log-determinant is only approximate. Underdamped Langevin dynamics samples both for
several numbers of data and regularisers, and the network as it is. Prints effective sample sizes per step, and how far
the predictions are from those of the same posterior by T, and draws the figure.

    python studies/ntk_reparam.py
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC

import _chains
import _common
import _data
from _ntk_reparam import ntk_map
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.linear_gaussian import readout_map
from numpyro_wide.mcmc import UnderdampedLangevin

NOISE_SCALE = 0.3
NUM_CHAINS = 2
NUM_TEST = 50
STATISTICS = ("ESS/step (projections)", "ESS/step (norm)", "accept", "step")


def features(weights, x):
    """Return scaled embeddings (n, width) of one hidden layer of error functions, NTK parametrisation."""
    preactivations = 1.5 / np.sqrt(x.shape[1]) * x @ weights["hidden"] + 0.5 * weights["bias"]
    return jax.lax.erf(preactivations) / np.sqrt(preactivations.shape[1])


def network(weights, x):
    """Return outputs (n,)."""
    return features(weights, x) @ weights["readout"]


def potential_energy(weights, x, y):
    """Return negative log joint density up to a constant: all weights N(0, 1), Gaussian noise."""
    prior = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))
    return 0.5 * (prior + jnp.sum((y - network(weights, x)) ** 2) / NOISE_SCALE**2)


def map_t(phi, x, y, regulariser):
    """Map the readout, with its exact log-determinant."""
    readout, log_det = readout_map(features(phi, x), y, phi["readout"], NOISE_SCALE, regulariser=regulariser)
    return {**phi, "readout": readout}, log_det


def map_r(phi, x, y, regulariser):
    """Map all weights; the random vectors of the log-determinant are the same throughout."""
    return ntk_map(network, phi, x, y, regulariser, rng_key=jax.random.key(0), num_probes=4, order=2)


MAPS = {"T, readout": (map_t, "-o"), "R, NTK": (map_r, "--s"), "none": (lambda phi, **_: (phi, jnp.zeros(())), ":^")}


def make_sampler(reparametrise, num_train, options):
    """Compile one chain with the map, from (key, regulariser) to draws, for a batch of both."""
    rows, _ = _data.split(_data.diabetes(), 442, 0, seed=0)
    inputs, targets = _common.standardised(rows)
    x, y, x_test = jnp.asarray(inputs[:num_train]), jnp.asarray(targets[:num_train]), jnp.asarray(inputs[-NUM_TEST:])
    thinning = max(1, options.num_steps // 500)  # enough of them for the effective sample size, few enough to hold
    sizes = {"num_warmup": options.num_warmup, "num_samples": options.num_steps, "thinning": thinning}

    def chain(rng_key, regulariser):
        to_weights = partial(reparametrise, x=x, y=y, regulariser=regulariser)

        def potential_fn(phi):
            weights, log_det = to_weights(phi)
            return potential_energy(weights, x, y) - log_det

        start_key, run_key = jax.random.split(rng_key)
        shapes = {"hidden": (x.shape[1], options.width), "bias": (options.width,), "readout": (options.width,)}
        keys = jax.random.split(start_key, len(shapes))
        start = {name: jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
        mcmc = MCMC(UnderdampedLangevin(potential_fn=potential_fn, step_size=0.1), **sizes, progress_bar=False)
        mcmc.run(run_key, init_params=start, extra_fields=("accept_prob", "step_size"))
        weights = jax.lax.map(lambda phi: to_weights(phi)[0], mcmc.get_samples())
        predictions = jax.lax.map(lambda draw: network(draw, x_test), weights).mean(0)
        return weights, predictions, *(mcmc.get_extra_fields()[name].mean() for name in ("accept_prob", "step_size"))

    return jax.jit(jax.vmap(jax.vmap(chain, in_axes=(0, None)), in_axes=(None, 0)))


def compare(num_train, options):
    """Sample for one number of data: results by map and regulariser."""
    results = {}
    total = NUM_CHAINS * options.num_steps
    for name, (reparametrise, _) in MAPS.items():
        start = time.perf_counter()
        multiples = options.regularisers if name != "none" else options.regularisers[:1]
        sampler = make_sampler(reparametrise, num_train, options)
        keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
        draws, predictions, *extra = jax.device_get(sampler(keys, NOISE_SCALE**2 * jnp.asarray(multiples)))
        for index, multiple in enumerate(multiples):
            weights = {site: values[index] for site, values in draws.items()}
            norm = sum(np.sum(values**2, axis=tuple(range(2, values.ndim))) for values in weights.values())
            projected = projected_ess(weights, jax.random.key(0))["mean"]
            ess = projected / total, float(_chains.bulk_ess(norm)) / total
            means = (float(values[index].mean()) for values in extra)
            statistics = dict(zip(STATISTICS, (*ess, *means), strict=True))
            results[name, multiple] = statistics, predictions[index].mean(0)
        print(f"n = {num_train:4d}  {name:10s}  {time.perf_counter() - start:5.1f} s", flush=True)
    return results


def draw(results, options):
    """Draw effective draws per step against the number of data, colours for λ, line styles for the maps."""
    figure, both_axes = plt.subplots(1, 2, figsize=(8.5, 3.8), sharex=True, layout="constrained")
    cases = next(iter(results.values())).keys()
    multiples = sorted({multiple for _, multiple in cases})
    titles = ("random projections of θ", "squared norm of θ")
    for axes, statistic, title in zip(both_axes, STATISTICS, titles, strict=False):
        for name, multiple in cases:
            colour = "0.4" if name == "none" else f"C{multiples.index(multiple)}"
            label = "no map" if name == "none" else f"{name}, λ = {multiple:g} σ²"
            values = [by_case[name, multiple][0][statistic] for by_case in results.values()]
            axes.loglog(list(results), values, MAPS[name][1], color=colour, markersize=5, label=label)
        _common.number_ticks(axes, results)
        axes.set(xlabel="number of data", ylabel="ESS per step", title=title)
    figure.legend(*both_axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    _common.save(figure, options, "ntk_reparam.png")


def main(options):
    """Run the study."""
    results = {num_train: compare(num_train, options) for num_train in options.num_train}
    rows = []
    for num_train, by_case in results.items():
        _, reference = next(iter(by_case.values()))  # of T with λ = σ²
        for (name, multiple), (statistics, predictions) in by_case.items():
            row = {"n": num_train, "map": name, "λ/σ²": None if name == "none" else multiple}
            rows.append({**row, **statistics, "RMSE to T's predictions": _common.rms(predictions - reference)})
    _common.print_table(rows)
    draw(results, options)


if __name__ == "__main__":
    multiples = ([1.0, 10.0, 100.0], "multiples of σ²")
    sizes = {"num_train": ([8, 32, 128], "numbers of data"), "num_warmup": 500, "num_steps": 2000}
    main(_common.arguments(__doc__, width=128, regularisers=multiples, **sizes))
