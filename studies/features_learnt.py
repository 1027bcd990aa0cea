"""What a network learns that its infinitely wide limit does not: a dense and an additive network by width.

Rosenbrock's function of ten inputs, and Sobol's g of eight. Collapsed networks of one erf layer with latent scales and
noise, by unadjusted microcanonical chains from where Adam gets: root mean squared error of the mean at noisy test rows
in standard deviations of their targets (RRMSE); the log evidence of the features, averaged over draws; the largest
R-hat of the predictive mean at a test row, and of the variance of an effect. The limits, of which the evidence chose
the scales, are rows of width 0. Sobol indices of additive networks have 90 % intervals, and the truth beside them. Each
row is written to features_learnt.csv as it is done, and a study that was interrupted goes on where it stopped.

    python studies/features_learnt.py --dense 32 128 --additive 16
    python studies/features_learnt.py --dense 512 --additive 0 --steps 6000
    python studies/features_learnt.py --dense 1024 --additive 0 --steps 6000 --bias-tolerance 0.05
    python studies/features_learnt.py --function "Sobol g" --num-rows 200 --dense 32 128 --additive 16
    python studies/features_learnt.py --function "Sobol g" --num-rows 200 --dense 0 --additive 32 --steps 24000
"""

import os
from types import SimpleNamespace
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
import pandas
from numpyro.infer import log_likelihood
from scipy.stats import sobol_indices

import _chains
import _common
from _data import Dataset
from _emulators import FUNCTIONS, simulations
from numpyro_wide import ReadoutPredictive, wide_limit
from numpyro_wide.diagnostics import effects
from numpyro_wide.nn import FCN, AdditiveNetwork, bnn

DENSE, ADDITIVE = "dense", "additive"
LIMIT = 0  # the width
NUM_INPUTS = {"Rosenbrock": 10, "Sobol g": 8}
BY_COLUMN = ("Sobol g",)  # functions most of whose inputs matter little: networks have a scale by input
NUM_CHAINS = 4
LARGEST_RHAT = 1.05  # of chains that agree
RHAT_TICKS = 1, 1.5, 2, 3, 5
NUM_KEPT = 1000  # draws of a chain: the largest of many R-hats takes more than predictions
INDICES = ("first", "total")
NUM_WEIGHED = 100  # draws of which the evidence is averaged
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

    function: str
    network: str
    width: int
    rows: int
    steps: int  # of each chain after warmup


class Row(NamedTuple):
    """Scores, and how the chains agree; of limits no R-hat, of dense networks no effects."""

    rrmse: float
    coverage_95: float
    noise_scale: float
    log_evidence: float
    rhat: float = np.nan
    rhat_effects: float = np.nan
    num_features: float = np.inf
    core_seconds: float = np.nan


def scales_of(cell):
    """Return priors of the scales of a network."""
    if cell.function not in BY_COLUMN:
        return PRIORS[cell.network]
    name = "input_scale" if cell.network == DENSE else "relevance"
    return PRIORS[cell.network] | {name: dist.LogNormal(np.zeros(NUM_INPUTS[cell.function]), 1.5)}


def network_of(cell, x):
    """Return the network, and the number of its features."""
    if cell.network == DENSE:
        return FCN(1, cell.width, "erf"), cell.width
    network = AdditiveNetwork(2, cell.width, "erf", law=law_of(x))
    return network, cell.width * len(network.terms(x.shape[1])) + 1


def law_of(x):
    """Return quantiles (64, d) of inputs, as those of the limit."""
    return np.quantile(x, (np.arange(64) + 0.5) / 64, axis=0)


def true_indices(function, law):
    """Return Sobol indices of independent inputs with a law (m, d), (2, d)."""
    dists = [SimpleNamespace(ppf=lambda u, at=at: at[(u * len(at)).astype(int)]) for at in law.T]
    found = sobol_indices(func=lambda x: FUNCTIONS[function][0](x.T), n=2**16, dists=dists, rng=0)
    return np.array([found.first_order, found.total_order])


def indices_of(cell, found, truths):
    """Return rows of Sobol indices with their 90 % intervals, beside the true ones."""
    return [
        {**cell._asdict(), "index": name, "input": column, "mean": np.mean(draws), "truth": truth[column]}
        | dict(zip(("lower", "upper"), np.quantile(draws, [0.05, 0.95]), strict=True))
        for name, by_input, truth in zip(INDICES, (found.first, found.total), truths, strict=True)
        for column, draws in enumerate(by_input.T)
    ]


def sampled(cell, known, x_new, options):
    """Sample; mean and variance, noise included, (chains, draws, m), the draws' predictions, and fields of the row."""
    network, num_features = network_of(cell, known[0])
    model = _chains.collapsed(bnn(network, None, dist.LogNormal(np.log(0.3), 1.5), scales=scales_of(cell)))
    lengths = NUM_CHAINS, cell.steps // 3, cell.steps
    form = {"bias_tolerance": options.bias_tolerance, "num_kept": NUM_KEPT, "chain_method": "sequential"}
    mcmc = _chains.chains_of(model, *lengths, **form)
    keys = jax.random.split(jax.random.key(0), 4)
    draws = _chains.draws_of((keys[0], keys[1]), mcmc, *known, num_adam=options.num_adam)
    mean, variance = _chains.moments(keys[2], model, draws, known, (x_new,), NUM_CHAINS)
    few = {name: value[:: max(1, len(value) // NUM_WEIGHED)] for name, value in draws.items()}
    fields = {
        "noise_scale": float(np.mean(draws["noise"])),
        "log_evidence": float(np.mean(log_likelihood(model, few, *known)["y"])),
        "rhat": float(np.max(_chains.rhat(mean))),
        "num_features": num_features,
    }
    return mean, variance, ReadoutPredictive(model, draws, known), fields


def run(cell, options):
    """Fit, predict, score; write the indices of additive networks."""
    train, test = simulations(cell.function, NUM_INPUTS[cell.function], cell.rows, options.noise)
    test = Dataset(*(part[: options.num_test] for part in test))
    known, (x_new, y_new), _ = _common.standardised_by(train[0], test, np.float32)
    start = sum(os.times()[:4])
    if cell.width == LIMIT:
        form = {"structure": cell.network, "input_scale": cell.function in BY_COLUMN}
        source = wide_limit.fit(*known, **form, num_restarts=1, progress_bar=False)
        mean, variance = source.predict(x_new, with_noise=True)
        fields = {"noise_scale": source.noise_scale, "log_evidence": source.log_evidence}
    else:
        means, variances, source, fields = sampled(cell, known, x_new, options)
        mean = means.mean(axis=(0, 1))
        variance = variances.mean(axis=(0, 1)) + means.var(axis=(0, 1))
    if cell.network == ADDITIVE:
        # Of a network one function of each draw.
        found = effects(source, known[0], num_draws=400 if cell.width == LIMIT else 1, rng_key=jax.random.key(3))
        if cell.width != LIMIT:
            by_chain = np.log(found.variances.reshape(NUM_CHAINS, -1, found.variances.shape[1]))
            fields["rhat_effects"] = float(np.max(_chains.rhat(by_chain)))
        path = options.output / "features_learnt_indices.csv"
        table = pandas.DataFrame(indices_of(cell, found, true_indices(cell.function, law_of(train[0].inputs))))
        table.to_csv(path, mode="a", header=not path.exists(), index=False)
    core_seconds = sum(os.times()[:4]) - start
    error = y_new - mean
    rrmse, coverage = _common.rms(error) / np.std(y_new), np.mean(np.abs(error) < 1.96 * np.sqrt(variance))
    return Row(rrmse, coverage, **fields, core_seconds=core_seconds)


def draw_by_width(panels, rows, options):
    """Draw error, log evidence and R-hat by the number of features; hollow points are of chains that do not agree."""
    errors, evidence, agreement = panels
    for colour, (name, some) in zip(("C0", "C1"), rows.groupby("network", sort=False), strict=False):
        limit, finite = some[some.width == LIMIT], some[some.width != LIMIT].sort_values("width")
        agrees = finite[["rhat", "rhat_effects"]].max(axis=1) <= LARGEST_RHAT
        for panel, column in ((errors, "rrmse"), (evidence, "log_evidence")):
            for value in limit[column]:
                panel.axhline(value, color=colour, linestyle="--", label=f"{name}, infinite")
            panel.plot(finite.num_features, finite[column], color=colour, linewidth=1, label=name)
            for part, face in ((finite[agrees], colour), (finite[~agrees], "white")):
                panel.plot(part.num_features, part[column], "o", color=colour, markerfacecolor=face)
        agreement.plot(finite.num_features, finite.rhat, "o-", color=colour, label=f"{name}, function")
        if name == ADDITIVE:
            agreement.plot(finite.num_features, finite.rhat_effects, "^:", color=colour, label=f"{name}, effects")
    errors.axhline(options.noise, color="0.6", linewidth=1)
    agreement.axhline(LARGEST_RHAT, color="0.6", linewidth=1)
    errors.set(ylim=(0, 1.4 * rows.rrmse.max()))  # with room for the legend
    agreement.set(yscale="log", ylim=(0.95, None), xlabel="features")
    sizes = [2 * 4**power for power in range(8)]
    for panel in panels:
        panel.set(xscale="log")
        panel.grid(alpha=0.3)
        limits = panel.get_xlim()
        _common.number_ticks(panel, sizes)
        panel.set_xlim(limits)
    agreement.set_yticks(RHAT_TICKS, map(str, RHAT_TICKS))
    agreement.minorticks_off()


def draw_indices(panel, rows):
    """Draw total Sobol indices of the widest additive network and the limit with 90 % intervals, and the true ones."""
    for width, shift, colour in ((LIMIT, -0.15, "0.4"), (rows.width.max(), 0.15, "C1")):
        some = rows[rows.width == width]
        spread = np.abs(some[["lower", "upper"]].to_numpy().T - some["mean"].to_numpy())
        label = "additive" if width else "additive, infinite"
        panel.errorbar(some.input + 1 + shift, some["mean"], yerr=spread, fmt="o", ms=3, color=colour, label=label)
    panel.plot(some.input + 1, some.truth, "k_", ms=16, label="true")
    panel.set(xlabel="input", xticks=some.input + 1)
    panel.grid(alpha=0.3)


def longest(table):
    """Return the longest runs of each network, of the most rows of each function."""
    table = table[table.rows == table.groupby("function").rows.transform("max")]
    others = [name for name in ("index", "input") if name in table]
    table = table.sort_values("steps").drop_duplicates(["function", "network", "width", *others], keep="last")
    return table.sort_values(["function", "network"], ascending=[True, False])


def draw(table, indices, options):
    """Draw a column of panels for each function."""
    functions = table.function.unique()
    size = 3.4 * len(functions) + 0.6, 9  # legible at half of it
    figure, axes = plt.subplots(4, len(functions), figsize=size, squeeze=False, layout="constrained")
    for panels, function in zip(axes.T, functions, strict=True):
        draw_by_width(panels[:3], table[table.function == function], options)
        draw_indices(panels[3], indices[(indices.function == function) & (indices["index"] == INDICES[1])])
        panels[0].set_title(f"{function}, {NUM_INPUTS[function]} inputs")
    names = "RRMSE", "log evidence", "largest R-hat", "total Sobol index"
    for panel, name in zip(axes[:, 0], names, strict=True):
        panel.set_ylabel(name)
    axes[0, 0].legend(fontsize=7, loc="upper left", ncols=2)
    for panel in axes[2:, 0]:
        panel.legend(fontsize=7)
    _common.save(figure, options, "features_learnt.png")


def main(options):
    """Run the study, limits first."""
    widths = {DENSE: [LIMIT, *options.dense], ADDITIVE: [LIMIT, *options.additive]}
    cells = [
        Cell(options.function, name, width, options.num_rows, options.steps if width else 0)
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
    indices = pandas.read_csv(options.output / "features_learnt_indices.csv")
    draw(longest(table), longest(indices), options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            function={"default": "Rosenbrock", "choices": list(NUM_INPUTS), "help": "function to learn"},
            num_rows=(400, "to learn from"),
            num_test=(1000, "rows to predict, up to 5000"),
            noise=(0.05, "standard deviation of the noise, over that of the function"),
            dense=([32, 128, 512, 1024], "widths of dense networks"),
            additive=([16], "widths of additive networks"),
            num_adam=(500, "steps of Adam before each chain"),
            steps=(20000, "of each of the four chains, after a third as many of warmup"),
            bias_tolerance=(0.15, "share of a draw's variance that may be bias"),
        )
    )
