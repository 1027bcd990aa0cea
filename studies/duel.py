"""A duel on one table: microcanonical ensembles, boosted trees and Gaussian processes, beside published rivals.

Airfoil self-noise by the split of sklearn-contrib-bde's benchmark, inputs and targets standardised and nothing else;
errors are in standard deviations of the targets. Ours is a collapsed network with latent scales and noise, a
microcanonical chain from each of several runs of Adam, and 600,000 gradients in all. Rows are written to duel.csv as
they are done, and a study that was interrupted goes on where it stopped. Without --folder it runs on scikit-learn's
diabetes patients; without --bde-python, the Python of an environment that has sklearn-contrib-bde, that package's row
is left out.

    python studies/duel.py --folder path/to/uci --bde-python path/to/environment/bin/python --seeds 3
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
import pandas

import _chains
import _common
from numpyro_wide import datasets, nn, wide_limit
from numpyro_wide.diagnostics import pooling, project, regression_scores

OURS, BDE = "ours", "bde, run here"
MODELS = [OURS, BDE, "gradient boosting", "NNGP", "GP"]
# RMSE and NLL by the benchmark of sklearn-contrib-bde, five seeds, ten cores; NLL where the noise is learnt.
PUBLISHED = {
    "bde, published": (0.1215, -0.9126),
    "TabPFN v2, published": (0.1359, -0.9338),
    "XGBoost, published": (0.2025, np.nan),
    "CatBoost, published": (0.2393, 0.1479),
    "deep ensemble, published": (0.3650, 0.1760),
}


class Cell(NamedTuple):
    """A fit."""

    model: str
    seed: int


class Row(NamedTuple):
    """Scores in standard deviations of the targets; of chains, R-hat and effective draws of the predictions.

    ``core_seconds`` are those that processors spent on the fit, those of a program that it started included; beside
    other work they say more than ``seconds``. ``rhat_within`` is between the halves of a chain, the median over chains,
    and ``rhat_between`` between chains: what nine tenths of the predictions are below. ``ess`` is ArviZ's bulk one of
    100 random projections, on average.
    """

    rmse: float
    nll: float
    coverage_90: float
    rhat_within: float = np.nan
    rhat_between: float = np.nan
    ess: float = np.nan
    gradients: float = np.nan
    seconds: float = np.nan
    core_seconds: float = np.nan


def rows_of(folder):
    """Return training and test rows, inputs and targets standardised by the former."""
    if folder is None:
        train, test = datasets.split(datasets.diabetes(), 354, 88, seed=0)
    else:
        train, test = datasets.uci(folder, "airfoil")
    return _common.standardised_by(train, test, np.float32)[:2]


def network(num_inputs, options):
    """Make the collapsed network: scales of inputs, biases, readout and noise are latent, and vague."""
    scales = {
        "input_scale": dist.LogNormal(np.zeros(num_inputs), 1.0),
        "b_std": dist.LogNormal(np.zeros(options.depth), 0.5),
        "readout_w_std": dist.LogNormal(0.5, 0.5),
        "w_std": np.full(options.depth, 2**0.5),
    }
    noise = dist.LogNormal(np.log(0.08), 0.5)
    return _chains.collapsed(nn.bnn(nn.FCN(options.depth, options.width, "gelu"), None, noise, scales=scales))


def ours(seed, rows, options):
    """Run chains from where Adam gets at the medians of scales and noise; their predictions, and gradients."""
    (x, y), (x_test, _) = rows
    model, chains = network(x.shape[1], options), options.num_chains
    keys = jax.random.split(jax.random.key(seed), 3)
    # A step is two gradients.
    num_steps = max(4, (options.gradients // chains - options.num_adam) // 2)
    num_warmup = num_steps // 4
    form = {"bias_tolerance": options.tolerance, "chain_method": options.chain_method}
    mcmc = _chains.chains_of(model, chains, num_warmup, num_steps - num_warmup, **form)
    draws = _chains.draws_of(keys[:2], mcmc, x, y, num_adam=options.num_adam)
    mean, variance = _chains.moments(keys[2], model, draws, (x, y), (x_test,), chains)
    return mean, variance, chains * (options.num_adam + 2 * num_steps)


def bde(seed, rows, options):
    """Run sklearn-contrib-bde's ensemble, in an environment of its own; noise by row, as its authors have it."""
    (x, y), (x_test, _) = rows
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("rows.npz", "predictions.npz")]
        np.savez(paths[0], x=x, y=y, x_test=x_test)
        script = Path(__file__).with_name("_bde.py")
        sizes = map(str, (seed, options.bde_members, options.bde_steps))
        subprocess.run([options.bde_python, script, *paths, *sizes], check=True, stdout=subprocess.DEVNULL)
        raw = np.load(paths[1])["raw"].astype(float)
    spread = np.logaddexp(0, raw[..., 1]) + 1e-6
    return raw[..., 0], spread**2, 2 * options.bde_members * (options.bde_steps + 1000)


def boosted_trees(seed, rows, options):
    """Fit trees of a depth chosen by cross-validation, whose errors are the noise."""
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.model_selection import KFold, cross_val_predict

    (x, y), (x_test, _) = rows
    folds = KFold(5, shuffle=True, random_state=seed)
    errors = {}
    for depth in (4, 6, 8):
        trees = GradientBoostingRegressor(
            n_estimators=options.num_trees, learning_rate=0.05, subsample=0.8, max_depth=depth, random_state=seed
        )
        errors[_common.rms(cross_val_predict(trees, x, y, cv=folds) - y)] = trees
    noise, trees = min(errors.items(), key=lambda item: item[0])
    mean = trees.fit(x, y).predict(x_test)
    return mean[None, None], np.full((1, 1, len(mean)), noise**2), np.nan


def nngp(seed, rows, options):
    """Fit the infinitely wide network of one hidden layer, its activation, scales and noise by the evidence."""
    (x, y), (x_test, _) = rows
    fit = wide_limit.fit(x, y, activation=("erf", "relu"), depth=1, input_scale=True, num_restarts=1)
    mean, variance = (np.asarray(part, float) for part in fit.predict(x_test, with_noise=True))
    return mean[None, None], variance[None, None], np.nan


def gaussian_process(seed, rows, options):
    """Fit scikit-learn's Gaussian process, Matérn 5/2 with a length for each input, by the evidence."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    (x, y), (x_test, _) = rows
    kernel = ConstantKernel(1.0) * Matern(np.ones(x.shape[1]), (1e-2, 1e3), nu=2.5) + WhiteKernel(0.01)
    process = GaussianProcessRegressor(kernel, n_restarts_optimizer=1, random_state=seed).fit(x.astype(float), y)
    mean, sd = process.predict(x_test.astype(float), return_std=True)
    return mean[None, None], sd[None, None] ** 2, np.nan


def run(cell, rows, options):
    """Fit, predict, score."""
    fits = dict(zip(MODELS, (ours, bde, boosted_trees, nngp, gaussian_process), strict=True))
    start, core_start = time.perf_counter(), sum(os.times()[:4])
    mean, variance, gradients = fits[cell.model](cell.seed, rows, options)
    seconds, core_seconds = time.perf_counter() - start, sum(os.times()[:4]) - core_start
    y_test = rows[1][1]
    scores = regression_scores(y_test, *(part.reshape(-1, part.shape[-1]) for part in (mean, variance)))
    found = {}
    if len(mean) > 1:
        report = pooling(y_test, mean, variance)
        projections = np.asarray(project({"mean": mean}, jax.random.key(0)))
        ess = float(_chains.bulk_ess(projections).mean())
        found = {"rhat_within": float(np.median(report.within)), "rhat_between": report.between, "ess": ess}
        print(f"\n{cell.model}, seed {cell.seed}\n{report}", flush=True)
    return Row(
        rmse=scores["rmse"],
        nll=-scores["log_predictive_density"],
        coverage_90=scores["coverage_90"],
        gradients=gradients,
        seconds=seconds,
        core_seconds=core_seconds,
        **found,
    )


def summary_of(model, table):
    """Return means over seeds, as text under the names of a page."""
    found = pandas.DataFrame([row for cell, row in table.items() if cell.model == model])
    mean, spread = found.mean(), found.std(ddof=0)
    with_spread = [
        f"{mean[name]:.4f}" + (f" ± {spread[name]:.4f}" if len(found) > 1 else "") for name in ("rmse", "nll")
    ]
    return {
        "model": model,
        "seeds": len(found),
        "RMSE": with_spread[0],
        "NLL": with_spread[1],
        "90 % interval holds": f"{mean['coverage_90']:.2f}",
        **{
            title: "" if np.isnan(mean[name]) else f"{mean[name]:{form}}"
            for title, name, form in (
                ("R-hat within chains", "rhat_within", ".2f"),
                ("between chains", "rhat_between", ".2f"),
                ("ESS", "ess", ".0f"),
                ("gradients", "gradients", ",.0f"),
            )
        },
        "seconds": f"{mean['seconds']:.0f}",
        "core seconds": f"{mean['core_seconds']:.0f}",
    }


def draw(table, options):
    """Draw errors and negative log-likelihoods, hollow those that are published."""
    points = {
        model: tuple(np.mean([(row.rmse, row.nll) for cell, row in table.items() if cell.model == model], axis=0))
        for model in MODELS
        if any(cell.model == model for cell in table)
    }
    if options.folder is not None:
        points |= PUBLISHED
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for place, (model, scores) in enumerate(reversed(points.items())):
        face = "none" if model in PUBLISHED else "C0"
        for panel, score in zip(axes, scores, strict=True):
            panel.plot(score, place, "o", color="C0", markerfacecolor=face)
    axes[0].set(xlabel="RMSE, standard deviations of the targets", yticks=range(len(points)))
    axes[0].set_yticklabels(list(points)[::-1])
    axes[1].set(xlabel="NLL, noise learnt")
    for panel in axes:
        panel.grid(alpha=0.3)
    _common.save(figure, options, "duel.png")


def main(options):
    """Run the study."""
    models = [model for model in options.models if model != BDE or options.bde_python is not None]
    if len(models) < len(options.models):
        print(f"without --bde-python there is no row of {BDE}")
    rows = rows_of(options.folder)
    cells = [Cell(model, seed) for seed in range(options.seeds) for model in models]
    table = _common.resumed(
        options.output / "duel.csv",
        cells,
        Row,
        lambda cell: run(cell, rows, options),
        unit="fit",
        name=lambda cell: f"{cell.model}, seed {cell.seed}",
    )
    summary = [summary_of(model, table) for model in MODELS if any(cell.model == model for cell in table)]
    _common.print_table(summary)
    pandas.DataFrame(summary).to_csv(options.output / "duel_summary.csv", index=False)
    draw(table, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with airfoil.npz; diabetes without it"},
            bde_python={"type": Path, "help": "Python of an environment that has sklearn-contrib-bde"},
            seeds=(1, "of each model, from 0"),
            models={"type": str, "nargs": "+", "default": MODELS, "choices": MODELS},
            depth=3,
            width=32,
            num_chains=8,
            num_adam=(1500, "steps of Adam, for each chain"),
            gradients=(600_000, "of all chains, Adam's included"),
            tolerance=0.3,
            chain_method="vectorized",
            bde_members=10,
            bde_steps=(29_000, "of warmup, of each member, as many gradients as ours; its authors take 50,000"),
            num_trees=1000,
        )
    )
