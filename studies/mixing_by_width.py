"""The mixing of every kernel, by width and by number of images, in three sets of coordinates (Hron 2022, Figure 7).

Each cell of the study is one chain: a kernel on the plain, the repriorised or the collapsed form of a network with one
hidden layer, at one width, number of images and regulariser. Effective draws are those of the mean function at test
images, the readout integrated out whatever the form, and of the hidden weights. Its row is written to
mixing_by_width.csv as soon as it is done, so that a study that was interrupted goes on where it stopped; delete the
file to start again.

    python studies/mixing_by_width.py --quick
    python studies/mixing_by_width.py --cifar10 path/to/cifar-10-batches-py
"""

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS

import _chains
import _common
import _data
from numpyro_wide import collapse_readout, mcmc, nn, repriorise
from numpyro_wide.diagnostics import random_projections
from numpyro_wide.readout import readout_function
from numpyro_wide.runs import reduced

NUM_TEST = 100
COUNTED = ("function_ess", "weight_ess")  # drawn by lines, and by broken ones
NOISE_SCALE = 0.1
HIDDEN = "hidden.hidden_0.kernel"
# The forms of the model, and the wide sites that a draw of each holds.
FORMS = {
    "plain": [HIDDEN, "features", "readout"],
    "repriorised": [HIDDEN, "readout", "readout_base"],
    "collapsed": [HIDDEN],
}
KERNELS = {
    "NUTS": partial(NUTS, max_tree_depth=8),
    "SplitHMC": partial(mcmc.SplitHMC, persistence=0.0),  # whole trajectories: an iteration is a draw
    "Langevin": mcmc.UnderdampedLangevin,
    "pCN": mcmc.PreconditionedCrankNicolson,
    "pCN-Langevin": mcmc.PreconditionedCrankNicolsonLangevin,
}
# What one iteration costs before warmup has found out, for the length of warmup.
GRADIENTS_AN_ITERATION = {"NUTS": 30, "SplitHMC": 15}


class Cell(NamedTuple):
    """One chain of the study; the regulariser is in units of the noise variance."""

    kernel: str
    form: str
    num_train: int
    width: int
    regulariser: float = 1.0


class Row(NamedTuple):
    """Results of a cell: effective draws of the mean function and of the weights a gradient, and what draws cost."""

    function_ess: float
    weight_ess: float
    gradients_per_draw: float
    accept_prob: float
    seconds: float


def model_of(cell):
    """Return one GELU layer in NTK parametrisation, weight variance 2, in the cell's coordinates."""
    plain = nn.bnn(nn.FCN(1, cell.width, "gelu", w_std=2**0.5, readout_w_std=2**0.5), 10, NOISE_SCALE)
    if cell.form == "plain":
        return plain
    names = {"readout": "readout", "features": "features"}
    if cell.form == "collapsed":
        return collapse_readout(plain, **names, observed="y")
    regulariser = cell.regulariser * NOISE_SCALE**2
    return repriorise(plain, **names, targets="y", noise_scale=NOISE_SCALE, regulariser=regulariser)


def run(cell, data, x_test, budget) -> Row:
    """Run a chain: warm up for half the budget, as far as can be told, then draw for the budget."""
    x, y = (part[: cell.num_train] for part in data)
    num_warmup = max(10, budget // 2 // GRADIENTS_AN_ITERATION.get(cell.kernel, 1))
    mean = readout_function(model_of(cell._replace(form="collapsed")), (x, y), x_test)
    of_values, of_weights = (random_projections(jax.random.key(1), [name]) for name in ("values", HIDDEN))
    projections = {
        "function": lambda draw: of_values({"values": mean({HIDDEN: draw[HIDDEN]})}),
        "weights": of_weights,
    }
    # NumPyro remembers the latest chains, draws included: with their weights, a study would fill the memory.
    kernel = reduced(KERNELS[cell.kernel](model_of(cell)), drop=FORMS[cell.form], functions=projections)
    chain = MCMC(kernel, num_warmup=num_warmup, num_samples=1, progress_bar=False)
    cost = "num_steps" if cell.kernel == "NUTS" else "num_grad"
    start = time.perf_counter()
    chain.warmup(jax.random.key(0), x, y, collect_warmup=True, extra_fields=(cost,))
    mean_cost = float(np.mean(chain.get_extra_fields()[cost][-max(4, num_warmup // 5) :]))

    chain.num_samples = max(8, int(budget / mean_cost))
    chain.run(chain.post_warmup_state.rng_key, x, y, extra_fields=(cost, "accept_prob"))
    fields = chain.get_extra_fields()
    spent, accept_prob = int(np.sum(fields[cost])), float(np.mean(fields["accept_prob"]))
    draws = chain.get_samples(group_by_chain=True)
    ess = [float(_chains.bulk_ess(draws[name]).mean()) / spent for name in projections]
    return Row(*ess, spent / chain.num_samples, accept_prob, time.perf_counter() - start)


def lines(rows, kernels, by, of, **fixed):
    """Return ESS per gradient of the kernels by width or number of images, where the rest is as given."""
    fixed["regulariser"] = 1.0
    cells = [cell for cell in rows if all(getattr(cell, name) == value for name, value in fixed.items())]
    cells.sort(key=lambda cell: getattr(cell, by))
    return {k: {getattr(c, by): getattr(rows[c], of) for c in cells if c.kernel == k} for k in kernels}


def draw_mixing(width, num_train, rows, options):
    """Draw a column for each form; by width above, by number of images below; broken lines are the weights'."""
    style = {"figsize": (1 + 3 * len(options.forms), 6), "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(2, len(options.forms), **style)
    for column, form in zip(axes.T, options.forms, strict=True):
        sizes = ("width", {"num_train": num_train}, options.widths), ("num_train", {"width": width}, options.num_train)
        for panel, (by, fixed, ticks) in zip(column, sizes, strict=True):
            found = [lines(rows, options.kernels, by, of, form=form, **fixed) for of in COUNTED]
            _common.plot_with_broken(panel, *found)
            _common.number_ticks(panel, ticks)
        column[0].set(title=form, xlabel=f"width, {num_train} images")
        column[1].set(xlabel=f"number of images, width {width}")
    figure.supylabel("ESS per gradient; broken, of the weights")
    axes[0, 0].legend(fontsize=8)
    _common.save(figure, options, "mixing_by_width.png", dpi=110)


def draw_regularisers(width, num_train, rows, options):
    """Draw effective draws of repriorised NUTS against the regulariser, with the plain model as its limit."""
    cells = [Cell("NUTS", "repriorised", num_train, width, value) for value in sorted({1.0, *options.regularisers})]
    cells = [cell for cell in cells if cell in rows]
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    found = [{"repriorised": {cell.regulariser: getattr(rows[cell], of) for cell in cells}} for of in COUNTED]
    _common.plot_with_broken(axes, *found)
    plain = rows.get(Cell("NUTS", "plain", num_train, width))
    if plain is not None:
        axes.axhline(plain.function_ess, color="0.5", label="plain")
        axes.axhline(plain.weight_ess, color="0.5", linestyle="--", linewidth=1)
    title = f"NUTS, {num_train} images, width {width}"
    axes.set(xlabel="regulariser / noise variance", ylabel="ESS per gradient; broken, of the weights", title=title)
    axes.legend()
    _common.save(figure, options, "regulariser.png")


def main(options):
    """Run the study."""
    if options.quick:
        options.widths, options.num_train, options.budget = [32, 128], [32, 64], 400
    if min(len(options.widths), len(options.num_train)) < 2:
        raise SystemExit("expected at least two widths and two numbers of images")
    images = _data.digits() if options.cifar10 is None else _data.cifar10(options.cifar10)[0]
    images, test = _data.split(images, max(options.num_train), NUM_TEST, seed=0)
    pixels, pixels_test = (part.inputs.reshape(len(part.targets), -1) for part in (images, test))
    scale = _data.Standardiser.fit(pixels, by_column=False)
    data, x_test = (scale(pixels), _common.centred_codes(images.targets, 10)), scale(pixels_test)

    # Widths at one number of images, numbers of images at one width, regularisers at both.
    num_train, width = options.num_train[-2], options.widths[-2]
    sizes = dict.fromkeys([*((num_train, w) for w in options.widths), *((n, width) for n in options.num_train)])
    cells = [Cell(kernel, form, *size) for kernel in options.kernels for form in options.forms for size in sizes]
    cells += [Cell("NUTS", "repriorised", num_train, width, regulariser) for regulariser in options.regularisers]
    cells = list(dict.fromkeys(cells))
    table = options.output / "mixing_by_width.csv"

    def run_alone(cell):
        """Run a cell and forget its programs: no two cells share one."""
        row = run(cell, data, x_test, options.budget)
        jax.clear_caches()
        return row

    rows = _common.resumed(
        table,
        cells,
        Row,
        run_alone,
        unit="chain",
        name=lambda cell: f"{cell.kernel}, {cell.form}, n = {cell.num_train}, width {cell.width}",
    )
    rows = {cell: rows[cell] for cell in cells}
    _common.print_table([cell._asdict() | row._asdict() for cell, row in rows.items()])
    print(f"\nTable: {table}")
    draw_mixing(width, num_train, rows, options)
    draw_regularisers(width, num_train, rows, options)


if __name__ == "__main__":
    names = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            widths=([32, 128, 512, 1024], "two or more"),
            num_train=([64, 256, 1024], "two or more"),
            kernels=names | {"default": list(KERNELS), "choices": list(KERNELS)},
            forms=names | {"default": list(FORMS), "choices": list(FORMS), "help": "coordinates"},
            regularisers={"type": float, "nargs": "*", "default": [0.1, 10.0, 100.0], "help": "over noise variance"},
            budget=(4000, "gradients of a chain after warmup"),
            cifar10={"type": Path, "help": "folder with the CIFAR-10 batches; digits without it"},
            quick={"action": "store_true", "help": "widths 32 and 128, 32 and 64 images, 400 gradients"},
        )
    )
