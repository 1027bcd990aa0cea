"""The log evidence of networks by width, depth and scales, beside what they predict.

Networks with their readout integrated out, of several widths and depths, on rows of each data set: the log evidence of
those rows, the evidence of further rows given them, and the log predictive density of these. Scales and noise are those
that the infinitely wide network's evidence likes best, or, "latent", have log-normal priors around them. A width of 0
stands for the infinitely wide network. Each network is a row of a table that is written as it is done: run it again,
and it goes on. Without a folder with the UCI sets it takes the marathon and whether digits are even, 1 or -1; with
--sets digits, their one-hot codes, for which chains of the default length are too short.

    python studies/evidence.py --folder data/uci
"""

import functools
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import _common
import _data
from numpyro_wide import ReadoutPredictive, collapse_readout, datasets, model_evidence, nn, wide_limit
from numpyro_wide.mcmc import SplitHMC

NUM_CHAINS = 4
SPREAD = 0.5  # of the logarithms of latent scales, around what the limit likes best
TABLES = ("boston", "concrete", "airfoil")
# Of the labels of digits, what is learnt.
CODES = {
    "parity": lambda labels: np.where(labels % 2, -1.0, 1.0).astype(np.float32),
    "digits": lambda labels: _common.centred_codes(labels, 10),
}
SETS = ("marathon", *CODES, *TABLES)
INFINITE = 0
LARGEST_ERROR = 0.1  # of the evidence of further rows by draws of the posterior; beyond, by the evidence of all rows


class Cell(NamedTuple):
    """A network: ``scales`` are "fixed" or "latent", ``width`` 0 for the limit."""

    name: str
    scales: str
    depth: int
    width: int


class Row(NamedTuple):
    """In nats: the evidence of the first rows, that of the others given them, and the mean density of these by row."""

    log_evidence: float
    error: float
    is_trusted: float
    temperatures: float
    conditional: float
    conditional_error: float
    log_density: float
    seconds: float


@functools.cache
def rows_of(name, folder, num_train, num_test):
    """Return inputs and targets to learn from, and those to predict, standardised by the former."""
    if name in CODES:
        parts = _common.digits(num_train, num_test)
        return tuple((part.inputs, CODES[name](part.targets)) for part in parts)
    data = datasets.marathon() if name == "marathon" else _data.uci(folder, name, split=0)[0]
    num_train = min(num_train, int(0.8 * len(data.targets)))
    num_test = min(num_test, len(data.targets) - num_train)
    return _common.standardised_by(*_data.split(data, num_train, num_test, seed=0), np.float32)[:2]


@functools.cache
def fitted(name, folder, depth, num_train, num_test):
    """Fit scales and noise: those that the infinitely wide network's evidence likes best."""
    activation = "erf" if name == "marathon" else "relu"
    return wide_limit.fit(*rows_of(name, folder, num_train, num_test)[0], activation=activation, depth=depth)


def around(value):
    """Return a log-normal prior around a scale, or one of each layer."""
    return dist.LogNormal(np.log(value), SPREAD)


def network_of(cell, fit, num_outputs):
    """Return the model of a finite width, collapsed."""
    network = nn.FCN(cell.depth, cell.width, fit.activation, **fit.scales)
    latent = cell.scales == "latent"
    scales = {name: around(value) for name, value in fit.scales.items()} if latent else None
    model = nn.bnn(network, num_outputs, around(fit.noise_scale) if latent else fit.noise_scale, scales=scales)
    return collapse_readout(model, readout="readout", features="features", observed="y")


def process_of(cell, fit):
    """Return the model of the infinite width with latent scales: a Gaussian process, its scales sampled."""

    def model(x, y):
        scales = {name: numpyro.sample(name, around(value).to_event()) for name, value in fit.scales.items()}
        noise = numpyro.sample("noise", around(fit.noise_scale))
        kernel = wide_limit.fcn_kernel(cell.depth, fit.activation, **scales)(x)[0]
        covariance = kernel + noise**2 * jnp.eye(len(x), dtype=kernel.dtype)
        numpyro.sample("y", dist.MultivariateNormal(0.0, covariance).expand(y.shape[1:]).to_event(), obs=y.T)

    return model


def lengths(options):
    """Return the lengths of the chains, those of the evidence and those that predict."""
    sizes = {"num_chains": NUM_CHAINS, "num_warmup": options.num_warmup, "num_samples": options.num_samples}
    return {**sizes, "progress_bar": False}


def of_process(cell, fit, first, others, options):
    """Return a row's values for the limit: in closed form, or with latent scales by their integral."""
    both = tuple(np.concatenate(part) for part in zip(first, others, strict=True))
    if cell.scales == "latent":
        model = process_of(cell, fit)
        less, more = (model_evidence(jax.random.key(0), model, *rows, **lengths(options)) for rows in (first, both))
        error = np.hypot(less.standard_error, more.standard_error)
        conditional = more.log_evidence - less.log_evidence
        temperatures = len(less.inverse_temperatures)
        return less.log_evidence, less.standard_error, less.is_trusted, temperatures, conditional, error, np.nan
    kernel = wide_limit.fcn_kernel(cell.depth, fit.activation, **fit.scales)
    less, more = (float(wide_limit.gp_log_evidence(kernel(x)[0], y, fit.noise_scale)) for x, y in (first, both))
    mean, variance = fit.predict(others[0], with_noise=True)
    scale = np.sqrt(variance).reshape(-1, *[1] * (mean.ndim - 1))
    density = dist.Normal(mean, scale).log_prob(others[1]).reshape(len(mean), -1).sum(1).mean()
    return less, 0.0, True, 0, more - less, 0.0, float(density)


def of_network(cell, fit, first, others, options):
    """Return a row's values for a finite width: the evidence by tempered chains or a bridge, the rest by draws."""
    model = network_of(cell, fit, None if first[1].ndim == 1 else first[1].shape[1])
    found = model_evidence(jax.random.key(0), model, *first, **lengths(options))
    mcmc = MCMC(SplitHMC(model, persistence=0.0), **lengths(options), chain_method="vectorized")
    mcmc.run(jax.random.key(1), *first)
    draws = mcmc.get_samples(group_by_chain=True)
    chains = [{name: draw[chain] for name, draw in draws.items()} for chain in range(NUM_CHAINS)]
    joint = np.array([float(ReadoutPredictive(model, chain, first).joint_log_density(*others)) for chain in chains])
    weights = np.exp(joint - joint.max())  # each chain's estimate, but for a factor
    conditional = joint.max() + np.log(weights.mean())
    error = weights.std(ddof=1) / NUM_CHAINS**0.5 / weights.mean()
    if error > LARGEST_ERROR:  # a few draws tell it, and too little
        both = tuple(np.concatenate(part) for part in zip(first, others, strict=True))
        more = model_evidence(jax.random.key(0), model, *both, **lengths(options))
        conditional = more.log_evidence - found.log_evidence
        error = np.hypot(more.standard_error, found.standard_error)
    density = np.mean(ReadoutPredictive(model, mcmc.get_samples(), first).log_density(*others))
    temperatures = len(found.inverse_temperatures) if found.method == "stepping-stone" else 0
    return (*found[:2], found.is_trusted, temperatures, conditional, error, density)


def run(cell, options):
    """Fit the scales, then all that a row tells."""
    start = time.perf_counter()
    sizes = options.num_train, options.num_test
    first, others = rows_of(cell.name, options.folder, *sizes)
    fit = fitted(cell.name, options.folder, cell.depth, *sizes)
    if cell.width == INFINITE:
        found = of_process(cell, fit, first, others, options)
    else:
        found = of_network(cell, fit, first, others, options)
    return Row(*map(float, found), time.perf_counter() - start)


def draw(axes, name, rows):
    """Draw the log evidence less the limit's, of first and of further rows, by width; hollow if not trusted."""
    for scales, depth in sorted({(cell.scales, cell.depth) for cell in rows if cell.name == name}):
        chosen = {cell: row for cell, row in rows.items() if cell[:3] == (name, scales, depth)}
        by_width = {cell.width: row for cell, row in chosen.items()}
        limit = by_width.pop(INFINITE, None)
        if limit is None or not by_width:
            continue
        widths = sorted(by_width)
        style = {"color": f"C{depth}", "marker": "o", "markersize": 4, "linestyle": "-" if scales == "fixed" else ":"}
        label = f"depth {depth}" + (", latent scales" if scales == "latent" else "")
        doubtful = [width for width in widths if not by_width[width].is_trusted]
        told = (("log_evidence", "error"), ("conditional", "conditional_error"))
        for panel, (value, error) in zip(axes, told, strict=True):
            gains = {width: getattr(by_width[width], value) - getattr(limit, value) for width in widths}
            errors = [2 * np.hypot(getattr(by_width[width], error), getattr(limit, error)) for width in widths]
            panel.errorbar(widths, list(gains.values()), yerr=errors, label=label, **style)
            panel.plot(
                doubtful,
                [gains[width] for width in doubtful],
                "o",
                markersize=4,
                color="white",
                zorder=3,
                mec=style["color"],
            )
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.axhline(0, color="black", linewidth=0.8)


def draw_sets(sets, rows, options):
    """Draw the gains of every set, a row for each."""
    names = [name for name in dict.fromkeys(cell.name for cell in rows) if name in sets]
    size = 6.4, 1 + 1.7 * len(names)  # legible at half of it
    figure, axes = plt.subplots(len(names), 2, figsize=size, squeeze=False, sharex=True, layout="constrained")
    for panels, name in zip(axes, names, strict=True):
        draw(panels, name, rows)
        panels[0].set_ylabel(name)
    axes[0, 0].set_title("log evidence\nless the limit's, nats", fontsize="medium")
    axes[0, 1].set_title("log evidence of further rows\nless the limit's, nats", fontsize="medium")
    for panel in axes[-1]:
        panel.set_xlabel("width")
    handles, labels = max((panel.get_legend_handles_labels() for panel in axes[:, 0]), key=lambda found: len(found[0]))
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    _common.save(figure, options, "evidence.png", dpi=140)


def main(options):
    """Run the study."""
    sets = [name for name in options.sets if options.folder or name not in TABLES]
    cells = [
        Cell(name, scales, depth, width)
        for scales in ("fixed", "latent")
        for depth in options.depths
        for width in (INFINITE, *options.widths)
        for name in sets
        if (depth - 1) * width**2 <= options.most_weights
        and (scales == "fixed" or (depth == 1 and name in options.latent))
    ]
    rows = _common.resumed(
        options.output / "evidence.csv",
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="network",
        name=lambda cell: f"{cell.name}, {cell.scales} scales, depth {cell.depth}, width {cell.width}",
    )
    _common.print_table([{**cell._asdict(), **row._asdict()} for cell, row in sorted(rows.items())])
    draw_sets(sets, rows, options)


if __name__ == "__main__":
    several = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the sets, <name>.npz"},
            sets=several
            | {"default": ["marathon", "parity", *TABLES], "choices": SETS, "metavar": "SET", "help": "; ".join(SETS)},
            latent=several | {"default": ["airfoil"], "help": "sets on which one hidden layer has latent scales, too"},
            widths=[8, 64, 512, 4096],
            depths=[1, 2, 4],
            most_weights=(20_000, "in the hidden layers that map to one another; wider networks are left out"),
            num_train=(100, "rows of which the evidence is told"),
            num_test=(30, "rows that are predicted"),
            num_warmup=(100, "of each of the four chains"),
            num_samples=(100, "of each of the four chains"),
        )
    )
