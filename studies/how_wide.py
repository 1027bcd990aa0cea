"""Effective draws of four kernels on three forms of a network, by width and depth: how wide a wide network is.

Each cell is two chains: SplitHMC, NUTS or MicrocanonicalLangevin, unadjusted (MCLMC) or adjusted (MAMS), on the plain,
the repriorised or the collapsed network, erf or ReLU as the evidence of the infinitely wide one says, with its scales
and its noise. Effective draws are those of 100 random projections of the mean function at test rows, the readout
integrated out whatever the form, and of the hidden weights. Readouts that are drawn afresh would make any frequent draw
look independent. Rows are written to how_wide.csv as they are done, and a study that was interrupted goes on where it
stopped. Without --folder the rows are scikit-learn's diabetes patients; with it, those of a set of the UCI repository.

    python studies/how_wide.py --folder path/to/uci --depths 1
"""

import argparse
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import NUTS

import _chains
import _common
import _data
from _sampling import clock, first_states, gradient_seconds, stretch_of
from numpyro_wide import ReadoutPredictive, collapse_readout, mcmc, nn, repriorise, wide_limit
from numpyro_wide.diagnostics import regression_scores
from numpyro_wide.readout import readout_function, site_function

FORMS = ["plain", "repriorised", "collapsed"]
KERNELS = {
    "SplitHMC": mcmc.SplitHMC,
    "NUTS": partial(NUTS, max_tree_depth=7),
    "MCLMC": partial(mcmc.MicrocanonicalLangevin, adjusted=False),
    "MAMS": mcmc.MicrocanonicalLangevin,
}
# What an iteration costs before warmup has found out: of MCLMC what it is given, a step being two gradients.
GUESS = {"SplitHMC": 15, "NUTS": 30, "MAMS": 60}
NUM_CHAINS = 2
MOST_DRAWS = 5000  # of a chain
MOST_OF_MCLMC = 500  # whose draws may be any number of steps apart
LEAST_DRAWS, STRETCH = 50, 10  # of a chain, and those that are made at a time
LARGEST_RHAT = 1.05  # of chains that have met
PATIENCE = 20  # times its seconds that the least draws may take; a cell that needs longer is left out


class Cell(NamedTuple):
    """Two chains."""

    form: str
    kernel: str
    depth: int
    width: int


class Row(NamedTuple):
    """Scores at the test rows in the units of the targets, and effective draws, of both chains together.

    R-hat is the largest, effective draws are means over projections of the mean function and of the hidden weights. NaN
    throughout in a cell that was left out.
    """

    rmse: float
    log_density: float
    rhat: float
    rhat_weights: float
    ess_function: float
    ess_weights: float
    gradients: float
    seconds: float
    draws: float


@cache
def rows_of(folder, name, num_train):
    """Return training and test rows, standardised by the former, and the targets' scale."""
    if folder is None:
        train, test = _data.split(_data.diabetes(), num_train, 142, seed=0)
    else:
        train, test = _data.uci(folder, name)
        train = _data.split(train, num_train, 0, seed=0)[0]
    return _common.standardised_by(train, test, np.float32)


@dataclass(frozen=True, eq=False)
class Task:
    """Rows and options of the study, hashable for what is cached.

    Attributes:
        data: training and test rows, and the targets' scale, those of :func:`rows_of`.
        options: options of the command line.
    """

    data: tuple
    options: argparse.Namespace


@cache
def fitted(task, depth):
    """Return activation, scales and noise, by the evidence of the infinitely wide network of that depth."""
    (x, y), _, _ = task.data
    return wide_limit.fit(x, y, activation=("erf", "relu"), depth=depth, input_scale=True, num_restarts=1)


def models_of(cell, task):
    """Return the network as it is, and in the form of the cell."""
    fit = fitted(task, cell.depth)
    scales = {name: np.asarray(scale, np.float32) for name, scale in fit.scales.items()}
    noise = float(fit.noise_scale)
    plain = nn.bnn(nn.FCN(cell.depth, cell.width, fit.activation), None, noise, scales=scales)
    names = {"readout": "readout", "features": "features"}
    if cell.form == "collapsed":
        return plain, collapse_readout(plain, **names, observed="y")
    if cell.form == "repriorised":
        return plain, repriorise(plain, **names, targets="y", noise_scale=noise)
    return plain, plain


def kernel_of(cell, model, budget):
    """Return the kernel, and the gradients that its first draws may cost."""
    if cell.kernel != "MCLMC":
        return KERNELS[cell.kernel](model), GUESS[cell.kernel]
    num_steps = max(1, budget // 2 // MOST_OF_MCLMC)
    return KERNELS["MCLMC"](model, num_steps=num_steps), 2 * num_steps


def sampled(cell, model, task):
    """Sample: the kernel, positions (chains, draws, ...) after warmup, and their gradients and core seconds.

    None in a cell whose draws take too long.
    """
    (x, y), _, _ = task.data
    options, a_gradient = task.options, gradient_seconds(model, (x, y), NUM_CHAINS)
    budget = int(min(options.gradients, options.seconds / a_gradient))
    kernel, guess = kernel_of(cell, model, budget)
    longest = PATIENCE * options.seconds / LEAST_DRAWS  # a draw
    if guess * a_gradient > longest:
        return None
    num_stretches = int(np.clip(budget // guess, LEAST_DRAWS, MOST_OF_MCLMC)) // STRETCH
    state = first_states(kernel, (x, y), NUM_CHAINS, STRETCH * num_stretches)
    stretch = stretch_of(kernel, (x, y), STRETCH)
    for i in range(num_stretches):
        start = clock()
        state, _ = jax.block_until_ready(stretch(state))
        if i > 0 and (clock() - start) / STRETCH > longest:  # the first compiles
            return None
    found, gradients, start = [], 0, clock()
    while len(found) * STRETCH < LEAST_DRAWS or (gradients < NUM_CHAINS * budget and len(found) * STRETCH < MOST_DRAWS):
        state, (positions, (costs, _)) = stretch(state)
        found.append(jax.tree.map(np.asarray, positions))
        gradients += int(np.sum(costs))
    seconds = clock() - start
    positions = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)
    return kernel, positions, gradients, seconds


def projections_of(task, plain, positions):
    """Return projections (chains, draws, 100) of the mean function at test rows, and of the hidden weights."""
    (x, y), (x_test, _), _ = task.data
    hidden = {name: values for name, values in positions.items() if name.startswith("hidden")}
    collapsed = collapse_readout(plain, readout="readout", features="features", observed="y")
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in hidden.items()}
    mean = jax.jit(partial(jax.lax.map, readout_function(collapsed, (x, y), x_test)))(flat)
    mean = np.asarray(mean).reshape(NUM_CHAINS, -1, len(x_test))
    return [_chains.projected(values, jax.random.key(2)) for values in ({"function": mean}, hidden)]


def functions_of(cell, task, plain, model, kernel, positions):
    """Return the function at test rows (chains, draws, m), of a readout that is drawn where none was sampled."""
    (x, y), (x_test, _), _ = task.data
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in positions.items()}
    if cell.form == "collapsed":
        flat["readout"] = ReadoutPredictive(model, flat, (x, y)).readout(jax.random.key(1))
    to_sites = kernel.postprocess_fn((x, y), {}) if cell.form == "repriorised" else lambda draw: draw
    function = site_function(plain, "y", x_test)

    def values(draw):
        sites = to_sites(draw)
        return function({name: sites[name] for name in sites if name == "readout" or name.startswith("hidden")})

    found = jax.jit(partial(jax.lax.map, values))(flat)
    return np.asarray(found).reshape(NUM_CHAINS, -1, len(x_test))


def run(cell, task):
    """Sample, predict, score."""
    _, (_, y_test), scale = task.data
    plain, model = models_of(cell, task)
    found = sampled(cell, model, task)
    if found is None:
        return Row(**dict.fromkeys(Row._fields, np.nan))
    kernel, positions, gradients, seconds = found
    function = functions_of(cell, task, plain, model, kernel, positions)
    of_function, of_weights = projections_of(task, plain, positions)
    del positions, found
    mean = function.reshape(-1, function.shape[-1])
    variance = np.full_like(mean, float(fitted(task, cell.depth).noise_scale) ** 2)
    scores = regression_scores(y_test, mean, variance, scale=scale)
    jax.clear_caches()  # no two cells share a program
    return Row(
        rmse=scores["rmse"],
        log_density=scores["log_predictive_density"],
        rhat=float(np.max(_chains.rhat(of_function))),
        rhat_weights=float(np.max(_chains.rhat(of_weights))),
        ess_function=float(np.mean(_chains.bulk_ess(of_function))),
        ess_weights=float(np.mean(_chains.bulk_ess(of_weights))),
        gradients=gradients,
        seconds=seconds,
        draws=function.shape[1],
    )


def lines(rows, form, depth, value):
    """Collect what a row gives by kernel and width."""
    found = {kernel: {} for kernel in KERNELS}
    for cell, row in sorted(rows.items(), key=lambda item: item[0].width):
        if (cell.form, cell.depth) == (form, depth):
            found[cell.kernel][cell.width] = value(row)
    return {kernel: values for kernel, values in found.items() if values}


def draw(rows, options):
    """Draw effective draws a gradient and a core second by width, a figure each: a row a depth, a column a form.

    Of the mean function by a line, of the weights by a broken one.
    """
    forms = [form for form in FORMS if any(cell.form == form for cell in rows)]
    depths = sorted({cell.depth for cell in rows})
    widths = sorted({cell.width for cell in rows})
    for unit, cost in (("gradient", "gradients"), ("core second", "seconds")):
        size = 0.6 + 2 * len(forms), 1 + 1.7 * len(depths)  # legible at half of it
        figure, axes = plt.subplots(
            len(depths), len(forms), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for depth, row in zip(depths, axes, strict=True):
            for form, panel in zip(forms, row, strict=True):
                found = [
                    lines(rows, form, depth, lambda row, of=of, cost=cost: getattr(row, of) / getattr(row, cost))
                    for of in ("ess_function", "ess_weights")
                ]
                _common.plot_with_broken(panel, *found)
                _common.number_ticks(panel, widths)
                panel.set_title(f"{form}, {depth} {'layer' if depth == 1 else 'layers'}", fontsize=9)
        found = (zip(*panel.get_legend_handles_labels(), strict=True) for panel in axes.flat)
        kernels = {kernel: line for pairs in found for line, kernel in pairs}
        figure.legend(kernels.values(), kernels, loc="outside upper center", ncols=len(kernels), fontsize=10)
        figure.supxlabel("width", fontsize=10)
        figure.supylabel(f"effective samples a {unit}; broken, of the weights", fontsize=10)
        _common.save(figure, options, f"how_wide_{cost}.png", dpi=140)


def speed(row, cost, unit):
    """Return effective draws of the mean function and of the weights for so much of a cost, as a table has them."""
    each = (unit * draws / getattr(row, cost) for draws in (row.ess_function, row.ess_weights))
    return " / ".join(f"{float(f'{value:.2g}'):g}" for value in each) + "*" * (row.rhat > LARGEST_RHAT)


def score(row):
    """Return the root mean squared error and the log density, as a table has them."""
    return f"{row.rmse:.2f} / {row.log_density:.2f}".replace("-", "−")


def write_tables(rows, options):
    """Write the tables of a page: a line a network and form, a column a kernel; scores of the collapsed form alone."""
    rows = {cell: row for cell, row in sorted(rows.items(), key=place_of) if not np.isnan(row.rhat)}
    tables = {
        "gradients": partial(speed, cost="gradients", unit=1000),
        "seconds": partial(speed, cost="seconds", unit=1),
        "scores": score,
    }
    for name, shown in tables.items():
        lines = {}
        for cell, row in rows.items():
            head = {"network": f"{cell.depth} x {cell.width}"} | ({} if name == "scores" else {"form": cell.form})
            if name != "scores" or cell.form == "collapsed":
                lines.setdefault(tuple(head.values()), head | dict.fromkeys(KERNELS, ""))[cell.kernel] = shown(row)
        _common.write_table(list(lines.values()), options.output / f"how_wide_{name}.csv")


def place_of(item):
    """Return what a table sorts by."""
    cell = item[0]
    return cell.depth, cell.width, FORMS.index(cell.form)


def main(options):
    """Run the study."""
    task = Task(rows_of(options.folder, options.set, options.num_train), options)
    sizes = [(depth, width) for depth in options.depths for width in options.widths]
    sizes = [(depth, width) for depth, width in sizes if (depth - 1) * width**2 <= options.largest]
    cells = [Cell(form, kernel, *size) for size in sizes for form in options.forms for kernel in options.kernels]
    table = options.output / "how_wide.csv"
    rows = _common.resumed(
        table,
        cells,
        Row,
        lambda cell: run(cell, task),
        unit="cell",
        name=lambda cell: f"{cell.kernel}, {cell.form}, {cell.depth} x {cell.width}",
    )
    write_tables(rows, options)
    draw(rows, options)


if __name__ == "__main__":
    names = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the set, <name>.npz; diabetes without it"},
            set=("airfoil", "a set of the UCI repository"),
            num_train=(200, "rows to learn from"),
            widths=[16, 64, 256, 1024],
            depths=[1, 2, 4],
            forms=names | {"default": FORMS, "choices": FORMS},
            kernels=names | {"default": list(KERNELS), "choices": list(KERNELS)},
            largest=(100_000, "weights of a network that is run"),
            gradients=(40_000, "of a chain after warmup, at most"),
            seconds=(5.0, "of a core for a cell after warmup, about"),
        )
    )
