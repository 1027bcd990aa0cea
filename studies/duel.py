"""A duel on one table: microcanonical ensembles, boosted trees and Gaussian processes, beside published rivals.

Airfoil self-noise or bike sharing by the splits of sklearn-contrib-bde's benchmark, or another table by its first
split, inputs and targets standardised and nothing else; errors are in standard deviations of the targets. Ours is a
collapsed network with latent scales and noise, one for all rows or by row, a microcanonical chain from each of several
runs of Adam, and 600,000 gradients in all; of the cube roots of the targets as well, if asked for. The estimator is at
its defaults. Rows are written to duel.csv as they are done, and a study that was interrupted goes on where it stopped.
Without --folder it runs on scikit-learn's diabetes patients; without --bde-python, the Python of an environment that
has sklearn-contrib-bde, that package's row is left out.

    python studies/duel.py --folder path/to/uci --bde-python path/to/environment/bin/python --seeds 3

Three lines beside their rivals at about equal core seconds, on seven tables; bde's 140 took 300 on a slow core:

    python studies/duel.py --folder path/to/uci --bde-python path/to/environment/bin/python --stem minutes \
        --sets airfoil concrete kin8nm bike energy yacht power --rows 4000 --time-budget 300 --bde-seconds 140 \
        --models estimator "bde, run here" "gradient boosting" GP
"""

import os
import subprocess
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
import pandas

import _chains
import _common
import _data
from numpyro_wide import nn, wide_limit
from numpyro_wide.diagnostics import pooling, regression_scores

OURS, BY_ROW, ESTIMATOR, BDE = "ours", "ours, noise by row", "estimator", "bde, run here"
CUBE_ROOT = f"{BY_ROW}, cube roots"
MODELS = [OURS, BY_ROW, CUBE_ROOT, ESTIMATOR, BDE, "gradient boosting", "NNGP", "GP"]
_MOST_OPTIMISED = 1500  # rows of the evidence of a Gaussian process, which then knows all
# RMSE, NLL and seconds by the benchmark of sklearn-contrib-bde, five seeds, ten cores; NLL where the noise is by row.
PUBLISHED = {
    "airfoil": {
        "bde, published": (0.1215, -0.9126, 240),
        "TabPFN v2, published": (0.1359, -0.9338, 9),
        "XGBoost, published": (0.2025, np.nan, 1.2),
        "CatBoost, published": (0.2393, 0.1479, 0.8),
        "deep ensemble, published": (0.3650, 0.1760, 20),
    },
    "bike": {
        "bde, published": (0.2261, -0.7315, 2550),
        "TabPFN v2, published": (0.2103, -0.6856, 1245),
        "XGBoost, published": (0.2143, np.nan, 1.9),
        "CatBoost, published": (0.2652, -0.3737, np.nan),
        "deep ensemble, published": (0.2880, -0.4550, 40),
    },
}


class Cell(NamedTuple):
    """A fit."""

    set: str
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


@cache
def tables_of(folder, name, most):
    """Return training rows, at most so many of them, and test rows, as they are."""
    if folder is None:
        return _data.split(_data.diabetes(), 354, 88, seed=0)
    train, test = _data.uci(folder, name)
    some = np.random.default_rng(1).permutation(len(train.targets))[:most]
    return (_data.Dataset(*(part[some] for part in train)) if most < len(train.targets) else train), test


def rows_of(tables, *, in_cube_roots):
    """Return training and test rows, inputs and targets or their cube roots standardised by the former."""
    if in_cube_roots:
        tables = [part._replace(targets=np.cbrt(part.targets)) for part in tables]
    return _common.standardised_by(*tables, np.float32)[:2]


def network(num_inputs, options, *, by_row):
    """Make the collapsed network: scales of inputs, biases, readout and noise are latent, and vague."""
    scales = {
        "input_scale": dist.LogNormal(np.zeros(num_inputs), 1.0),
        "b_std": dist.LogNormal(np.zeros(options.depth), 0.5),
        "readout_w_std": dist.LogNormal(0.5, 0.5),
        "w_std": np.full(options.depth, 2**0.5),
    }
    level = dist.LogNormal(np.log(options.noise), 0.5)
    noise = nn.NoiseNetwork(level) if by_row else level
    return _chains.collapsed(
        nn.bnn(nn.FCN(options.depth, options.width, options.activation), None, noise, scales=scales)
    )


def ours(seed, rows, options, *, by_row=False):
    """Run chains from where Adam gets at the medians of scales and noise; their predictions, and gradients."""
    (x, y), (x_test, _) = rows
    model, chains = network(x.shape[1], options, by_row=by_row), options.num_chains
    keys = jax.random.split(jax.random.key(seed), 3)
    # A step is two gradients.
    num_steps = max(4, (options.gradients // chains - options.num_adam) // 2)
    num_warmup = int(options.warmup_share * num_steps)
    form = {"bias_tolerance": options.tolerance, "chain_method": options.chain_method}
    mcmc = _chains.chains_of(model, chains, num_warmup, num_steps - num_warmup, **form)
    draws = _chains.draws_of(keys[:2], mcmc, x, y, num_adam=options.num_adam)
    mean, variance = _chains.moments(keys[2], model, draws, (x, y), (x_test,), chains)
    return mean, variance, chains * (options.num_adam + 2 * num_steps)


def estimator(seed, tables, options):
    """Fit the estimator at its defaults, to the table as it is; its scores, and gradients."""
    from numpyro_wide.estimators import WideBNNRegressor

    train, test = tables
    model = WideBNNRegressor(time_budget=options.time_budget, random_state=seed).fit(*train)
    print(f"\n{model.report_}", flush=True)
    scale = train.targets.std()
    lower, upper = model.predict_interval(test.inputs, 0.9).T
    gradients = np.nan if model.mcmc_ is None else 2 * model.num_chains * model.n_iter_
    return {
        "rmse": _common.rms(model.predict(test.inputs) - test.targets) / scale,
        "log_predictive_density": np.mean(model.log_density(*test)) + np.log(scale),
        "coverage_90": np.mean((lower < test.targets) & (test.targets < upper)),
    }, gradients


def bde_steps(num_rows, options):
    """Return the steps of warmup, for about so many core seconds if these are given."""
    if not options.bde_seconds:
        return options.bde_steps
    start, step = 25, 1e-4 + 4.7e-7 * num_rows  # seconds of compiling and training, and of a step: measured
    return max(100, int((options.bde_seconds - start) / (options.bde_members * step)) - 1000)


def bde(seed, rows, options):
    """Run sklearn-contrib-bde's ensemble, in an environment of its own; noise by row, as its authors have it."""
    (x, y), (x_test, _) = rows
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("rows.npz", "predictions.npz")]
        np.savez(paths[0], x=x, y=y, x_test=x_test)
        script = Path(__file__).with_name("_bde.py")
        num_steps = bde_steps(len(x), options)
        sizes = map(str, (seed, options.bde_members, num_steps))
        subprocess.run([options.bde_python, script, *paths, *sizes], check=True, stdout=subprocess.DEVNULL)
        raw = np.load(paths[1])["raw"].astype(float)
    spread = np.logaddexp(0, raw[..., 1]) + 1e-6
    return raw[..., 0], spread**2, 2 * options.bde_members * (num_steps + 1000)


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
    """Fit scikit-learn's Gaussian process, Matérn 5/2 with a length for each input, by the evidence of some rows."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    (x, y), (x_test, _) = rows
    kernel = ConstantKernel(1.0) * Matern(np.ones(x.shape[1]), (1e-2, 1e3), nu=2.5) + WhiteKernel(0.01)
    some = slice(_MOST_OPTIMISED)
    found = GaussianProcessRegressor(kernel, n_restarts_optimizer=1, random_state=seed).fit(
        x[some].astype(float), y[some]
    )
    process = GaussianProcessRegressor(found.kernel_, optimizer=None).fit(x.astype(float), y)
    mean, sd = process.predict(x_test.astype(float), return_std=True)
    return mean[None, None], sd[None, None] ** 2, np.nan


def of_targets(scores, tables, mean, variance):
    """Return the scores in terms of the targets, of those of their standardised cube roots.

    An interval holds a target if the roots' interval holds its root. The mean of a cube is closed, E z³ = m³ + 3 m v,
    and the log density gains the logarithm of the map's derivative.
    """
    roots = _data.Standardiser.fit(np.cbrt(tables[0].targets))
    scale, y = tables[0].targets.std(), tables[1].targets
    mean, variance = roots.loc + roots.scale * mean, roots.scale**2 * variance
    error = np.mean(mean**3 + 3 * mean * variance, axis=(0, 1)) - y
    gain = np.mean(np.log(scale / (3 * np.cbrt(y) ** 2 * roots.scale)))
    return scores | {
        "rmse": _common.rms(error) / scale,
        "log_predictive_density": scores["log_predictive_density"] + gain,
    }


def run(cell, options):
    """Fit, predict, score."""
    tables, in_cube_roots = tables_of(options.folder, cell.set, options.rows), cell.model == CUBE_ROOT
    rows = rows_of(tables, in_cube_roots=in_cube_roots)
    with_noise_by_row = partial(ours, by_row=True)
    functions = (ours, with_noise_by_row, with_noise_by_row, None, bde, boosted_trees, nngp, gaussian_process)
    fits = dict(zip(MODELS, functions, strict=True))
    start, core_start = time.perf_counter(), sum(os.times()[:4])
    if cell.model == ESTIMATOR:
        scores, gradients = estimator(cell.seed, tables, options)
    else:
        mean, variance, gradients = fits[cell.model](cell.seed, rows, options)
    seconds, core_seconds = time.perf_counter() - start, sum(os.times()[:4]) - core_start
    y_test, found = rows[1][1], {}
    if cell.model != ESTIMATOR:
        scores = regression_scores(y_test, *(part.reshape(-1, part.shape[-1]) for part in (mean, variance)))
    if in_cube_roots:
        scores = of_targets(scores, tables, mean, variance)
    if cell.model != ESTIMATOR and len(mean) > 1:
        report = pooling(y_test, mean, variance)
        projections = _chains.projected({"mean": mean}, jax.random.key(0))
        ess = float(_chains.bulk_ess(projections).mean())
        found = {"rhat_within": float(np.median(report.within)), "rhat_between": report.between, "ess": ess}
        print(f"\n{cell.set}, {cell.model}, seed {cell.seed}\n{report}", flush=True)
    return Row(
        rmse=scores["rmse"],
        nll=-scores["log_predictive_density"],
        coverage_90=scores["coverage_90"],
        gradients=gradients,
        seconds=seconds,
        core_seconds=core_seconds,
        **found,
    )


def summary_of(name, model, table):
    """Return means over seeds, as text under the names of a page."""
    found = pandas.DataFrame([row for cell, row in table.items() if cell[:2] == (name, model)])
    mean, spread = found.mean(), found.std(ddof=0)
    with_spread = [
        f"{mean[name]:.4f}" + (f" ± {spread[name]:.4f}" if len(found) > 1 else "") for name in ("rmse", "nll")
    ]
    return {
        "set": name,
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


def published_in(name):
    """Return what others have published of a set, as text under the same names."""
    return [
        {
            "set": name,
            "model": model,
            "seeds": 5,
            **{
                title: "" if np.isnan(number) else f"{number:{form}}"
                for title, number, form in zip(("RMSE", "NLL", "seconds"), found, (".4f", ".4f", "g"), strict=True)
            },
        }
        for model, found in PUBLISHED.get(name, {}).items()
    ]


def groups_of(table):
    """Return the sets and models of a table, in the order of the lists above."""
    found = {cell[:2] for cell in table}
    return [
        (name, model)
        for name in dict.fromkeys(cell.set for cell in table)
        for model in MODELS
        if (name, model) in found
    ]


def draw(table, options):
    """Draw errors and negative log-likelihoods, a line of panels for each set, hollow those that are published."""
    names = list(dict.fromkeys(name for name, _ in groups_of(table)))
    others = PUBLISHED if options.stem == "duel" else {}
    published = {name: {model: found[:2] for model, found in others.get(name, {}).items()} for name in names}
    points = {
        name: {
            model: np.mean([(row.rmse, row.nll) for cell, row in table.items() if cell[:2] == (name, model)], axis=0)
            for model in (model for one, model in groups_of(table) if one == name)
        }
        | published[name]
        for name in names
    }
    form = {"layout": "constrained", "squeeze": False, "height_ratios": [len(found) + 2 for found in points.values()]}
    size = (8, sum(0.3 * len(found) + 0.8 for found in points.values()))
    figure, axes = plt.subplots(len(names), 2, figsize=size, sharey="row", **form)
    for line, (name, found) in zip(axes, points.items(), strict=True):
        for place, (model, scores) in enumerate(reversed(found.items())):
            face = "none" if model in published[name] else "C0"
            for panel, score in zip(line, scores, strict=True):
                panel.plot(score, place, "o", color="C0", markerfacecolor=face)
        line[0].set(yticks=range(len(found)), title=name)
        line[0].set_yticklabels(list(found)[::-1])
        for panel in line:
            panel.grid(alpha=0.3)
    axes[-1, 0].set(xlabel="RMSE, standard deviations of the targets")
    axes[-1, 1].set(xlabel="NLL, noise learnt")
    _common.save(figure, options, f"{options.stem}.png")


def main(options):
    """Run the study."""
    models = [model for model in options.models if model != BDE or options.bde_python is not None]
    if len(models) < len(options.models):
        print(f"without --bde-python there is no row of {BDE}")
    sets = options.sets if options.folder is not None else ["diabetes"]
    cells = [Cell(name, model, seed) for name in sets for seed in range(options.seeds) for model in models]
    table = _common.resumed(
        options.output / f"{options.stem}.csv",
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="fit",
        name=lambda cell: f"{cell.set}, {cell.model}, seed {cell.seed}",
    )
    summary = [summary_of(*group, table) for group in groups_of(table)]
    if options.stem == "duel":  # published are all rows
        summary += [row for name in dict.fromkeys(name for name, _ in groups_of(table)) for row in published_in(name)]
    _common.write_table(summary, options.output / f"{options.stem}_summary.csv")
    draw(table, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with <set>.npz; diabetes without it"},
            sets=(["airfoil"], "the sets"),
            rows=(100_000, "to learn from at most, drawn at random"),
            stem=("duel", "of the names of the files"),
            bde_python={"type": Path, "help": "Python of an environment that has sklearn-contrib-bde"},
            seeds=(1, "of each model, from 0"),
            models={
                "type": str,
                "nargs": "+",
                "default": [model for model in MODELS if model != CUBE_ROOT],
                "choices": MODELS,
            },
            depth=3,
            width=32,
            activation=("gelu", "of our networks"),
            noise=(0.08, "median of its level a priori, in standard deviations of the targets"),
            time_budget=(600.0, "seconds that the estimator may take, compilation included"),
            num_chains=8,
            num_adam=(1500, "steps of Adam, for each chain"),
            gradients=(600_000, "of all chains, Adam's included"),
            warmup_share=(0.25, "of each chain's steps"),
            tolerance=0.3,
            chain_method="vectorized",
            bde_members=10,
            bde_steps=(29_000, "of warmup, of each member, as many gradients as ours; its authors take 50,000"),
            bde_seconds=(0.0, "of a core, about, in place of bde's steps"),
            num_trees=1000,
        )
    )
