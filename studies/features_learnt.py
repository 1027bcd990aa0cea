"""What a network learns that its infinitely wide limit does not: a dense and an additive network by width.

Rosenbrock's function of ten inputs. Collapsed networks of one erf layer with latent scales and noise, by unadjusted
microcanonical chains from where Adam gets: root mean squared error of the mean at noisy test rows in standard
deviations of their targets (RRMSE), and the largest R-hat of the predictive mean at a test row, and of the variance of
an effect. The limits, of which the evidence chose the scales, are rows of width 0. Each row is written to
features_learnt.csv as it is done, and a study that was interrupted goes on where it stopped.

    python studies/features_learnt.py --dense 32 128 --additive 16
"""

import os
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
import pandas

import _chains
import _common
from _data import Dataset
from _emulators import simulations
from numpyro_wide import ReadoutPredictive, wide_limit
from numpyro_wide.diagnostics import effects
from numpyro_wide.nn import FCN, AdditiveNetwork, bnn

DENSE, ADDITIVE = "dense", "additive"
LIMIT = 0  # the width
FUNCTION, NUM_INPUTS = "Rosenbrock", 10
NUM_CHAINS = 4
LARGEST_RHAT = 1.05  # of chains that agree
NUM_KEPT = 1000  # draws of a chain: the largest of many R-hats takes more than predictions
PRIORS = {  # of scales; broad where the limit's are
    DENSE: {
        "w_std": dist.LogNormal(0.0, 0.5),
        "b_std": dist.LogNormal(np.log(0.5), 0.5),
        "readout_w_std": dist.LogNormal(0.0, 1.0),
    },
    ADDITIVE: {
        "w_std": dist.LogNormal(np.log(0.5), 0.5),
        "b_std": 3.0,  # units turn at any of the inputs
        "order_scale": dist.LogNormal(np.log([5.0, 10.0]), 1.0),
        "readout_b_std": 1.0,
    },
}


class Cell(NamedTuple):
    """A network; of an additive one the width is that of units of each input, and of features of each effect."""

    network: str
    width: int
    rows: int
    steps: int  # of each chain after warmup


class Row(NamedTuple):
    """Scores, and how the chains agree; of limits no R-hat, of dense networks no effects."""

    rrmse: float
    coverage_95: float
    noise_scale: float
    rhat: float = np.nan
    rhat_effects: float = np.nan
    num_features: float = np.inf
    core_seconds: float = np.nan


def network_of(cell, x):
    """Return the network, and the number of its features."""
    if cell.network == DENSE:
        return FCN(1, cell.width, "erf"), cell.width
    law = np.quantile(x, (np.arange(64) + 0.5) / 64, axis=0)  # as that of the limit
    network = AdditiveNetwork(2, cell.width, "erf", law=law)
    return network, cell.width * len(network.terms(x.shape[1])) + 1


def sampled(cell, known, x_new, options):
    """Sample; mean and variance, noise included, (chains, draws, m), and fields of the row."""
    network, num_features = network_of(cell, known[0])
    model = _chains.collapsed(bnn(network, None, dist.LogNormal(np.log(0.3), 1.5), scales=PRIORS[cell.network]))
    lengths = NUM_CHAINS, cell.steps // 3, cell.steps
    form = {"bias_tolerance": options.bias_tolerance, "num_kept": NUM_KEPT, "chain_method": "sequential"}
    mcmc = _chains.chains_of(model, *lengths, **form)
    keys = jax.random.split(jax.random.key(0), 4)
    draws = _chains.draws_of((keys[0], keys[1]), mcmc, *known, num_adam=options.num_adam)
    mean, variance = _chains.moments(keys[2], model, draws, known, (x_new,), NUM_CHAINS)
    fields = {"noise_scale": float(np.mean(draws["noise"])), "rhat": float(np.max(_chains.rhat(mean)))}
    if cell.network == ADDITIVE:
        predictive = ReadoutPredictive(model, draws, known)
        variances = effects(predictive, known[0], num_draws=1, rng_key=keys[3]).variances  # one of each draw
        by_chain = np.log(variances.reshape(NUM_CHAINS, -1, variances.shape[1]))
        fields["rhat_effects"] = float(np.max(_chains.rhat(by_chain)))
    return mean, variance, {**fields, "num_features": num_features}


def run(cell, options):
    """Fit, predict, score."""
    train, test = simulations(FUNCTION, NUM_INPUTS, cell.rows, options.noise)
    test = Dataset(*(part[: options.num_test] for part in test))
    known, (x_new, y_new), _ = _common.standardised_by(train[0], test, np.float32)
    start = sum(os.times()[:4])
    if cell.width == LIMIT:
        fit = wide_limit.fit(*known, structure=cell.network, num_restarts=1, progress_bar=False)
        mean, variance = fit.predict(x_new, with_noise=True)
        fields = {"noise_scale": fit.noise_scale}
    else:
        means, variances, fields = sampled(cell, known, x_new, options)
        mean = means.mean(axis=(0, 1))
        variance = variances.mean(axis=(0, 1)) + means.var(axis=(0, 1))
    core_seconds = sum(os.times()[:4]) - start
    error = y_new - mean
    rrmse, coverage = _common.rms(error) / np.std(y_new), np.mean(np.abs(error) < 1.96 * np.sqrt(variance))
    return Row(rrmse, coverage, **fields, core_seconds=core_seconds)


def draw(table, options):
    """Draw errors and R-hat by the number of features; hollow points are of chains that do not agree."""
    figure, (errors, agreement) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (name, rows), colour in zip(table.groupby("network", sort=False), ("C0", "C1"), strict=False):
        limit, finite = rows[rows.width == LIMIT], rows[rows.width != LIMIT].sort_values("width")
        for value in limit.rrmse:
            errors.axhline(value, color=colour, linestyle="--", label=f"{name}, infinitely wide")
        errors.plot(finite.num_features, finite.rrmse, color=colour, linewidth=1, label=name)
        agrees = finite[["rhat", "rhat_effects"]].max(axis=1) <= LARGEST_RHAT
        for part, face in ((finite[agrees], colour), (finite[~agrees], "white")):
            errors.plot(part.num_features, part.rrmse, "o", color=colour, markerfacecolor=face)
        agreement.plot(finite.num_features, finite.rhat, "o-", color=colour, label=f"{name}, predictive mean")
        if name == ADDITIVE:
            agreement.plot(finite.num_features, finite.rhat_effects, "^:", color=colour, label=f"{name}, effects")
    errors.axhline(options.noise, color="0.6", linewidth=1, label="noise alone")
    errors.set(xscale="log", yscale="log", xlabel="features", ylabel="RRMSE")
    agreement.axhline(LARGEST_RHAT, color="0.6", linewidth=1)
    agreement.set(xscale="log", xlabel="features", ylabel="largest R-hat of four chains")
    for panel in (errors, agreement):
        _common.number_ticks(panel, sorted({int(number) for number in table.num_features if np.isfinite(number)}))
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    _common.save(figure, options, "features_learnt.png")


def main(options):
    """Run the study, limits first."""
    widths = {DENSE: [LIMIT, *options.dense], ADDITIVE: [LIMIT, *options.additive]}
    cells = [
        Cell(name, width, options.num_rows, options.steps if width else 0)
        for name, some in widths.items()
        for width in some
    ]
    rows = _common.resumed(
        options.output / "features_learnt.csv",
        sorted(cells, key=lambda cell: cell.width),
        Row,
        lambda cell: run(cell, options),
        unit="network",
        name=lambda cell: f"{cell.network}, width {cell.width or 'infinite'}",
    )
    table = pandas.DataFrame([{**cell._asdict(), **row._asdict()} for cell, row in rows.items()])
    _common.print_table(table.to_dict("records"))
    longest = table.sort_values("steps").drop_duplicates(["network", "width"], keep="last")
    draw(longest[longest.rows == options.num_rows], options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            num_rows=(200, "to learn from"),
            num_test=(1000, "rows to predict, up to 5000"),
            noise=(0.05, "standard deviation of the noise, over that of the function"),
            dense=([32, 128], "widths of dense networks"),
            additive=([16], "widths of additive networks"),
            num_adam=(500, "steps of Adam before each chain"),
            steps=(20000, "of each of the four chains, after a third as many of warmup"),
            bias_tolerance=(0.15, "share of a draw's variance that may be bias"),
        )
    )
