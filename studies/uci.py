"""Regression on tables, by the protocol of Hernández-Lobato & Adams (2015): every set, split and model is a row.

Scales and noise are latent, with log-normal priors around what the infinitely wide network's evidence finds on the
training rows; its prediction is the model "NNGP". Rows are written to uci.csv as they are done, and a study that was
interrupted goes on where it stopped. Without --folder, scikit-learn's diabetes patients are split at random.

    python studies/uci.py --folder path/to/uci --sets yacht energy --splits 20
"""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import _common
from numpyro_wide import ReadoutPredictive, collapse_readout, datasets, nn, wide_limit
from numpyro_wide.diagnostics import regression_scores, rhat_squared
from numpyro_wide.mcmc import SplitHMC

# Depth and width of each network.
NETWORKS = {"1 x 50": (1, 50), "wide": (1, 400), "deep": (3, 100)}
MODELS = ["NNGP", *(f"{name}, collapsed" for name in NETWORKS), "1 x 50, mean field, collapsed", "1 x 50, mean field"]
# Above, the infinitely wide network is fitted to some of the rows, and predicts from those.
MOST_ROWS = 2000
SPREAD = 0.5  # of the logarithms of scales and noise a priori, around what the evidence finds


class Cell(NamedTuple):
    """A fit."""

    name: str
    split: int
    model: str


class Row(NamedTuple):
    """Scores in the units of the targets; R-hat of the predictions at the test rows, the largest."""

    rmse: float
    log_density: float
    crps: float
    coverage_90: float
    rhat: float
    seconds: float


def rows_of(cell, options):
    """Training and test rows of a split, standardised by the former, and the targets' scale."""
    if options.folder is None:
        train, test = datasets.split(datasets.diabetes(), 400, 42, seed=cell.split)
    else:
        train, test = datasets.uci(options.folder, cell.name, cell.split)
    inputs, targets = (datasets.Standardiser.fit(part) for part in train)
    parts = [(inputs(part.inputs), targets(part.targets)) for part in (train, test)]
    return *parts, float(np.squeeze(targets.scale))


def fit_scales(x, y, depth):
    """What the evidence finds, by erf and ReLU, on some of the rows where there are many."""
    chosen = np.random.default_rng(0).permutation(len(x))[:MOST_ROWS]
    return wide_limit.fit(x[chosen], y[chosen], activation=("erf", "relu"), depth=depth, input_scale=True)


def model_of(fit, depth, width):
    """A network with latent scales and noise, around those of the fit."""
    scales = {name: dist.LogNormal(np.log(scale), SPREAD) for name, scale in fit.scales.items()}
    noise = dist.LogNormal(np.log(fit.noise_scale), SPREAD)
    return nn.bnn(nn.FCN(depth, width, fit.activation), None, noise, scales=scales)


def moments(cell, train, x_test, options):
    """Mean and variance, noise included, of every draw at the test rows, and the largest R-hat."""
    x, y = train
    depth, width = NETWORKS.get(cell.model.split(",")[0], (1, 50))
    fit = fit_scales(x, y, depth)
    if cell.model == "NNGP":
        mean, variance = fit.predict(x_test)
        return mean[None], variance[None] + fit.noise_scale**2, np.nan
    plain = model_of(fit, depth, width)
    collapsed = collapse_readout(plain, readout="readout", features="features", observed="y")
    x, y, x_test = (part.astype("f") for part in (x, y, x_test))
    if "mean field" in cell.model:
        model = collapsed if "collapsed" in cell.model else plain
        guide = AutoNormal(model, init_scale=0.05)
        svi = SVI(model, guide, _common.numpyro.optim.Adam(0.005), Trace_ELBO())
        params = svi.run(jax.random.key(0), options.num_steps, x, y, progress_bar=False).params
        draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(options.num_samples,))
        if model is plain:
            sites = Predictive(plain, draws)(jax.random.key(2), x_test)
            mean = np.einsum("snd,sd->sn", *(np.asarray(found) for found in (sites["features"], draws["readout"])))
            noise = np.asarray(sites["noise"])[:, None]
            return mean, np.broadcast_to(noise**2, mean.shape), np.nan
        chains = 1
    else:
        lengths = {"num_warmup": options.num_warmup, "num_samples": options.num_samples}
        chains = options.num_chains
        mcmc = MCMC(SplitHMC(collapsed), **lengths, num_chains=chains, chain_method="vectorized", progress_bar=False)
        mcmc.run(jax.random.key(0), x, y)
        draws = mcmc.get_samples()
    found = ReadoutPredictive(collapsed, draws, (x, y))(jax.random.key(3), x_test)
    mean = np.asarray(found["mean"], float)
    rhat = np.sqrt(rhat_squared(mean.reshape(chains, -1, mean.shape[1])).max()) if chains > 1 else np.nan
    return mean, np.asarray(found["variance"], float) + np.asarray(found["noise_scale"], float) ** 2, rhat


def run(cell, options):
    """Fit, predict, score."""
    start = time.perf_counter()
    train, (x_test, y_test), scale = rows_of(cell, options)
    mean, variance, rhat = moments(cell, train, x_test, options)
    scores = regression_scores(y_test, mean, variance, scale=scale)
    values = (scores[name] for name in ("rmse", "log_predictive_density", "crps", "coverage_90"))
    return Row(*map(float, values), float(rhat), time.perf_counter() - start)


names = {"type": str, "nargs": "+"}
options = _common.arguments(
    __doc__,
    folder={"type": Path, "help": "with the sets, <name>.npz; diabetes without it"},
    sets=names | {"default": ["boston", "concrete", "energy", "wine", "yacht"]},
    models=names | {"default": MODELS, "choices": MODELS},
    splits=(1, "how many of each set, from the first"),
    num_chains=4,
    num_warmup=500,
    num_samples=500,
    num_steps=(5000, "of the mean-field guides"),
)
sets = options.sets if options.folder else ["diabetes"]
cells = [Cell(name, split, model) for name in sets for split in range(options.splits) for model in options.models]
table = options.output / "uci.csv"
rows = _common.resumed(
    table,
    cells,
    Row,
    lambda cell: run(cell, options),
    unit="fit",
    name=lambda cell: f"{cell.name}, split {cell.split}, {cell.model}",
)

# Means over splits, and their standard errors; a star where chains disagreed in a split.
summary = []
for name in sets:
    for model in options.models:
        found = np.array([rows[cell] for cell in cells if (cell.name, cell.model) == (name, model)], float)
        mean, error = found.mean(0), found.std(0) / np.sqrt(len(found))
        line = {"set": name, "model": model + ("*" if np.any(found[:, 4] > 1.05) else "")}
        for index, field in enumerate(Row._fields):
            line[field] = mean[index]
            if field in ("rmse", "log_density") and len(found) > 1:
                line[f"± {field}"] = error[index]
        summary.append(line)
_common.print_table(summary)
print("* R-hat of the predictions is above 1.05 in a split.")
figure, axes = _common.plt.subplots(1, len(sets), figsize=(1 + 2.2 * len(sets), 3), squeeze=False, layout="constrained")
for panel, name in zip(axes[0], sets, strict=True):
    lines = [line for line in summary if line["set"] == name]
    places = np.arange(len(lines))[::-1]
    values, errors = ([line.get(key, 0.0) for line in lines] for key in ("log_density", "± log_density"))
    panel.errorbar(values, places, xerr=errors, fmt="o")
    panel.set(title=name, xlabel="log predictive density", yticks=places, yticklabels=[])
axes[0, 0].set_yticklabels([line["model"] for line in summary[: len(options.models)]])
_common.save(figure, options, "uci.png")
