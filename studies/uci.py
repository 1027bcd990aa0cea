"""Regression on tables, by the protocol of Hernández-Lobato & Adams (2015): every set, split and model is a row.

Scales and noise are latent, with log-normal priors around what the infinitely wide network's evidence finds on the
training rows; its prediction is the model "NNGP". The limit with integrated scales chooses by the evidence between
dense units alone, and with effects of one and two columns beside them. Rows are written to uci.csv as they are done,
and a study that was interrupted goes on where it stopped. Without --folder, scikit-learn's diabetes patients are split
at random. Of a small set's fit most seconds are compilation: with JAX_COMPILATION_CACHE_DIR=<a folder> it is done once
for all splits.

    python studies/uci.py --folder path/to/uci --sets yacht energy --splits 20
"""

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import _chains
import _common
import _data
from numpyro_wide import nn, wide_limit
from numpyro_wide.diagnostics import regression_scores

# Depth, width and share of the chains' length of each network: the wider, the fewer steps it needs, and the more each
# costs.
NETWORKS = {"1 x 50": (1, 50, 1.0), "wide": (1, 200, 0.3), "deep": (3, 50, 0.5)}
PROTEIN_WIDTH = 100  # of "1 x 50" there: the protocol's
LIMIT = "limit, scales integrated"
MODELS = [
    "NNGP",
    LIMIT,
    *(f"{name}, collapsed" for name in NETWORKS),
    "1 x 50, mean field, collapsed",
    "1 x 50, mean field",
]
REFERENCE = "1 x 50, collapsed"  # that others are set beside: the protocol's network
MOST_ROWS = 1000  # that scales are fitted to
MOST_KNOWN = 3000  # that the infinitely wide network predicts from
NUM_MIXED = 200  # predictions of equal weight: each draw of the scales as often as it weighs
SPREAD = 0.5  # of the logarithms of scales and noise a priori, around what the evidence finds
# A noise, of targets of unit variance, from which on networks run in single precision, in a third of the time. At 0.14,
# with airfoil's readout scale of 24, it is lost in rounding.
SINGLE_FROM = 0.15


class Cell(NamedTuple):
    """A fit."""

    name: str
    split: int
    model: str


class Row(NamedTuple):
    """Scores in the units of the targets; R-hat of the predictions at the test rows, the largest and the median."""

    rmse: float
    log_density: float
    crps: float
    coverage_90: float
    rhat: float
    median_rhat: float
    seconds: float


@cache
def rows_of(folder, name, split):
    """Return training and test rows of a split, standardised by the former, and the targets' scale."""
    if folder is None:
        train, test = _data.split(_data.diabetes(), 400, 42, seed=split)
    else:
        train, test = _data.uci(folder, name, split)
    # In double precision, for the noise of yacht is a hundredth of the targets.
    return _common.standardised_by(train, test, float)


def some_rows(x, y):
    """Return rows that scales are fitted to."""
    order = np.random.default_rng(0).permutation(len(x))
    # Once each: the copies among wine's rows pass for measurements without noise.
    _, first = np.unique(np.column_stack([x, y])[order], axis=0, return_index=True)
    chosen = order[np.sort(first)][:MOST_ROWS]
    return x[chosen], y[chosen]


@cache
def fitted(folder, name, split, depth):
    """Fit the infinitely wide network, erf or ReLU, to some training rows by the evidence; with the seconds it took."""
    start = time.perf_counter()
    some = some_rows(*rows_of(folder, name, split)[0])
    # The activation is chosen with one hidden layer.
    activation = ("erf", "relu") if depth == 1 else fitted(folder, name, split, 1)[0].activation
    fit = wide_limit.fit(*some, activation=activation, depth=depth, input_scale=True, num_restarts=1)
    return fit, time.perf_counter() - start


def mixture(data):
    """Return mean and variance, noise included, of the limit by draws of its scales, each (1, NUM_MIXED, m)."""
    known, (x_test, _), _ = data
    fit = wide_limit.fit(
        *some_rows(*known),
        structure=("dense", "both"),
        input_scale=True,
        num_restarts=1,
        scales="integrated",
        progress_bar=False,
    )
    print(f"\n{fit}", flush=True)
    moments = [draw.predict(x_test, with_noise=True) for draw in fit.draws]
    counts = np.rint(NUM_MIXED * fit.weights).astype(int)
    return tuple(np.repeat(part, counts, axis=0)[None] for part in map(np.stack, zip(*moments, strict=True)))


@cache
def models_of(depth, width, activation, is_double):
    """Make a network with latent scales and noise around given medians, as it is and collapsed, for each precision.

    The medians are arguments, as the data are: what is compiled for a split serves all others of as many rows.
    """

    def plain(medians, x, y=None):
        scales = {name: dist.LogNormal(jnp.log(medians[name]), SPREAD) for name in medians if name != "w_std"}
        noise = scales.pop("noise")
        # Those of the inputs are the first layer's.
        model = nn.bnn(nn.FCN(depth, width, activation), None, noise, scales={**scales, "w_std": medians["w_std"]})
        return model(x, y)

    return plain, _chains.collapsed(plain)


def moments(cell, fit, data, options):
    """Return mean and variance, noise included, of every draw at the test rows, (chains, draws, m)."""
    (x, y), (x_test, _), _ = data
    if cell.model == "NNGP":
        mean, variance = replace(fit, inputs=x[:MOST_KNOWN], targets=y[:MOST_KNOWN]).predict(x_test, with_noise=True)
        return mean[None, None], variance[None, None]
    depth, width, share = NETWORKS[cell.model.split(",")[0]]
    width = PROTEIN_WIDTH if cell.name == "protein" and width == 50 else width
    is_double = bool(fit.noise_scale < SINGLE_FROM)
    numpyro.enable_x64(is_double)
    plain, collapsed = models_of(depth, width, fit.activation, is_double)
    medians = {name: jnp.asarray(scale) for name, scale in {**fit.scales, "noise": fit.noise_scale}.items()}
    known, new = (medians, jnp.asarray(x), jnp.asarray(y)), (medians, jnp.asarray(x_test))
    if "mean field" in cell.model:
        model = collapsed if "collapsed" in cell.model else plain
        draws = guide_of(model, options.num_steps, options.num_chains * _chains.NUM_KEPT)(known)
        if model is plain:
            sites = Predictive(plain, draws)(jax.random.key(2), *new)
            features, readout = (np.asarray(found, float) for found in (sites["features"], draws["readout"]))
            mean = np.einsum("snd,sd->sn", features, readout)
            noise = np.asarray(sites["noise"], float)[:, None]
            return mean[None], np.broadcast_to(noise**2, mean.shape)[None]
        chains = 1
    else:
        chains = options.num_chains
        mcmc = chains_of(collapsed, chains, int(share * options.num_warmup), int(share * options.num_samples))
        draws = _chains.draws_of((jax.random.key(0), jax.random.key(1)), mcmc, *known, num_adam=500)
    # In double precision, whatever the chains' was: among hundreds of draws a few are at the edge of single.
    numpyro.enable_x64()
    collapsed = models_of(depth, width, fit.activation, is_double=True)[1]
    draws, known, new = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (draws, known, new))
    return _chains.moments(jax.random.key(3), collapsed, draws, known, new, chains)


@cache
def guide_of(model, num_steps, num_draws):
    """Return a function to draws of a mean-field guide to the data of any split."""
    guide = AutoNormal(model, init_scale=0.05)
    svi = SVI(model, guide, numpyro.optim.Adam(0.005), Trace_ELBO())

    @jax.jit  # with the data as arguments: one program for all splits
    def draws_from(state, known):
        run = svi.run(jax.random.key(0), num_steps, *known, progress_bar=False, init_state=state)
        return guide.sample_posterior(jax.random.key(1), run.params, sample_shape=(num_draws,))

    return lambda known: draws_from(svi.init(jax.random.key(0), *known), known)


@cache
def chains_of(model, num_chains, num_warmup, num_samples):
    """Make chains for the data of any split."""
    form = {"chain_method": "vectorized", "jit_model_args": True}
    return _chains.chains_of(model, num_chains, num_warmup, num_samples, bias_tolerance=0.15, **form)


def run(cell, options):
    """Fit, predict, score."""
    numpyro.enable_x64()
    data = rows_of(options.folder, cell.name, cell.split)
    if cell.model == LIMIT:
        seconds, start = 0.0, time.perf_counter()
        mean, variance = mixture(data)
    else:
        depth = NETWORKS.get(cell.model.split(",")[0], (1,))[0]
        fit, seconds = fitted(options.folder, cell.name, cell.split, depth)
        start = time.perf_counter()
        mean, variance = moments(cell, fit, data, options)
    rhat = _chains.rhat(mean, method="identity") if len(mean) > 1 else np.nan
    mean, variance = (part.reshape(-1, part.shape[-1]) for part in (mean, variance))
    _, (_, y_test), scale = data
    scores = regression_scores(y_test, mean, variance, scale=scale)
    values = (scores[name] for name in ("rmse", "log_predictive_density", "crps", "coverage_90"))
    seconds += time.perf_counter() - start
    return Row(*map(float, values), float(np.max(rhat)), float(np.median(rhat)), seconds)


def summary_of(by_split, reference):
    """Return means over the splits of a model's rows and their standard errors.

    Splits are harder or easier for all models, so that a model is set beside another, `reference`, split by split.
    """
    found = np.array(list(by_split.values()), float)
    mean = found.mean(0)
    gains = [by_split[split].log_density - reference[split].log_density for split in by_split.keys() & reference]
    return {
        "splits": len(found),
        "RMSE": _common.with_error(found[:, 0]),
        "log density": _common.with_error(found[:, 1]),
        f"log density over {REFERENCE}": _common.with_error(gains, "+.2g")
        if gains and by_split is not reference
        else "",
        "CRPS": f"{mean[2]:.3g}",
        "90 % interval holds": f"{mean[3]:.2f}",
        "R-hat, largest": "" if np.isnan(mean[4]) else f"{found[:, 4].max():.2f}",
        "R-hat, median": "" if np.isnan(mean[5]) else f"{np.median(found[:, 5]):.3f}",
        "seconds": f"{mean[6]:.0f}",
    }


def show(panel, by_model):
    """Draw means over splits and their standard errors; an arrow and its value for one far below all others."""
    means = sorted(np.mean(found) for found in by_model if found)
    edge = means[-1] - 4 * (means[-1] - means[1]) if len(means) > 2 else -np.inf
    for place, found in enumerate(by_model):
        if found and np.mean(found) < edge:
            panel.plot(edge, place, "<", color="C0")
            panel.annotate(f"  {np.mean(found):.3g}", (edge, place), va="center")
        elif found:
            panel.errorbar(np.mean(found), place, xerr=_common.standard_error(found), fmt="o", color="C0")
    panel.set(yticks=range(len(by_model)), yticklabels=[], ylim=(len(by_model) - 0.5, -0.5))
    panel.locator_params(axis="x", nbins=3)


def draw(by_set, options):
    """Draw log predictive densities, a panel for each set."""
    columns = min(2, len(by_set))
    lines = -(-len(by_set) // columns)
    size = 2 + 2.2 * columns, 0.2 + 2 * lines  # legible at half of it
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(by_set) :]:
        panel.set_visible(False)
    for panel, (name, by_model) in zip(axes.flat, by_set.items(), strict=False):
        show(panel, [[row.log_density for row in by_split.values()] for by_split in by_model.values()])
        panel.set_title(name)
    figure.supxlabel("log predictive density")
    for panel in axes[:, 0]:
        panel.set_yticklabels(MODELS)
    _common.save(figure, options, "uci.png", dpi=140)


def main(options):
    """Run the study."""
    sets = options.sets if options.folder else ["diabetes"]
    cells = [Cell(name, split, model) for split in range(options.splits) for name in sets for model in options.models]
    table = options.output / "uci.csv"
    rows = _common.resumed(
        table,
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="fit",
        name=lambda cell: f"{cell.name}, split {cell.split}, {cell.model}",
    )

    by_set = {name: {model: {} for model in MODELS} for name in sorted({cell.name for cell in rows})}
    for cell, row in rows.items():
        by_set[cell.name][cell.model][cell.split] = row
    summary = []
    for name, by_model in by_set.items():
        for model, by_split in by_model.items():
            if by_split:
                star = "*" if any(row.rhat > 1.05 for row in by_split.values()) else ""
                summary.append({"set": name, "model": model + star, **summary_of(by_split, by_model[REFERENCE])})
    _common.write_table(summary, options.output / "uci_summary.csv")
    print("* R-hat of the predictions is above 1.05 in a split.")
    draw(by_set, options)


if __name__ == "__main__":
    several = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the sets, <name>.npz; diabetes without it"},
            sets=several | {"default": ["boston", "concrete", "energy", "wine", "yacht"]},
            models=several | {"default": MODELS, "choices": MODELS},
            splits=(1, "how many of each set, from the first"),
            num_chains=4,
            num_warmup=2000,
            num_samples=3000,
            num_steps=(5000, "of the mean-field guides"),
        )
    )
