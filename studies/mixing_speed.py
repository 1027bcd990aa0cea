"""The mixing of chains by architecture and number of images, plain and repriorised (Hron 2022, Figures 8 and 9).

Each cell is chains of one kernel on one network, as it stands or repriorised, for as many seconds as --seconds says, of
which a third is warmup: SplitHMC, NUTS, or the paper's Langevin sampler, unadjusted, with its damping of 0.05. Targets
are one-hot codes of Fashion-MNIST, of scikit-learn's digits without Debian's package or a --folder. Effective draws are
those of 100 random projections of all weights, the readout among them, and of the function at test images, R-hat
squared that of the weights. A kernel for which the seconds are too few is left out. Rows are written to
mixing_speed.csv as they are done, and a study that was interrupted goes on where it stopped.

    python studies/mixing_speed.py --folder path/to/fashion-mnist

The paper's sizes, which want an accelerator:

    python studies/mixing_speed.py --architecture fcn3 --width 1024 --pixels 28 --num-train 1024 10240 40960 \
        --seconds 3600 --precision highest
    python studies/mixing_speed.py --architecture resnet20 --width 128 --pixels 28 --num-train 1024 10240 \
        --seconds 3600 --precision highest
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from numpyro import handlers
from numpyro.infer import NUTS

import _chains
import _common
import _fashion_data
from _sampling import clock, first_states, gradient_seconds, stretch_of
from numpyro_wide import mcmc, nn, repriorise
from numpyro_wide.diagnostics import effective_sample_size, random_projections, rhat_squared
from numpyro_wide.readout import site_function

NOISE_SCALE = 0.1
FORMS = {"plain": "--", "repriorised": "-"}  # and how they are drawn
KERNELS = {
    "SplitHMC": partial(mcmc.SplitHMC, persistence=0.0),  # whole trajectories: an iteration is a draw
    "Langevin": partial(mcmc.UnderdampedLangevin, adjusted=False, damping=0.05),
    "NUTS": partial(NUTS, max_tree_depth=7),
}
# Gradients for a draw before warmup has found out: as it stands, and repriorised.
GUESS = {"SplitHMC": (120, 15), "Langevin": (5, 5), "NUTS": (120, 60)}
THINNING = {"SplitHMC": 1, "Langevin": 5, "NUTS": 1}
STRETCH = 5  # draws that are made at a time
LEAST_DRAWS, MOST_DRAWS = 20, 500  # of a chain; if a quarter of the former is too much, none
PATIENCE = 10  # times the seconds that a cell may take for the least of its draws, or for its warmup
UNMIXED = 1.2  # R-hat squared, mean over projections of the weights
STAGES = 8  # at which R-hat is told, the last of them the end


class Architecture(NamedTuple):
    """A network by its width; what a CPU can bear of it; the map's regulariser, over the noise variance, by n."""

    network: Callable[[int], Any]
    width: int
    pixels: int
    regulariser: Callable[[int], float] = lambda num_train: 1.0


READOUT = {"readout_w_std": 1.0, "readout_b_std": 0.1}
SMOOTH = {"activation": "gelu", "w_std": 2**0.5, "b_std": 0.1, **READOUT}
RESIDUAL = {"activation": "gelu", "w_std": 2.2**0.5, **READOUT}
# Scales and regularisers as in the paper, §4.1.3, §4.2.1 and §4.2.2, but for the convolutional network, which it lacks.
ARCHITECTURES = {
    "fcn1": Architecture(lambda width: nn.FCN(1, width, **SMOOTH), 512, 14),
    "fcn3": Architecture(lambda width: nn.FCN(3, width, **SMOOTH), 256, 14),
    "cnn": Architecture(lambda width: nn.CNN(2, width, **SMOOTH), 16, 7),
    "resnet": Architecture(lambda width: nn.WideResNet(1, width, **RESIDUAL), 8, 7, float),
    "resnet20": Architecture(lambda width: nn.WideResNet(3, width, **RESIDUAL), 8, 7, float),
}


class Cell(NamedTuple):
    """Chains of a kernel on a form of a network, a width and images of so many pixels a side."""

    architecture: str
    form: str
    kernel: str
    num_train: int
    width: int
    pixels: int
    precision: str


# Effective draws: ArviZ's, their mean, least and largest over projections, and equation 7; what they took; R-hat.
SIZES = [f"{of}_{what}" for of in ("weights", "function") for what in ("bulk", "least", "largest", "paper")]
COSTS = ["draws", "gradients", "seconds", "accept_prob", "gradient_seconds"]
RHATS = [f"rhat_squared_{what}_{stage}" for what in ("mean", "largest") for stage in range(1, STAGES + 1)]
Row = NamedTuple("Row", [(name, float) for name in (*SIZES, *COSTS, *RHATS)])


@cache
def images_of(pixels, folder, num_train, num_test):
    """Read training images and one-hot codes, and test images, of so many pixels a side."""
    images = _fashion_data.load(folder, num_train, num_test, pool=28 // pixels)
    side = int(images.x.shape[1] ** 0.5)
    x, x_test = (part.reshape(-1, side, side, 1) for part in (images.x, images.x_test))
    return x, _common.centred_codes(images.labels, _fashion_data.NUM_CLASSES), x_test


def data_of(cell, options):
    """Return inputs and codes to learn from, and test inputs, flat but for convolutions."""
    x, y, x_test = images_of(cell.pixels, options.folder, max(options.num_train), options.num_test)
    shape = (-1,) if cell.architecture.startswith("fcn") else x.shape[1:]
    x, x_test = (part.reshape(len(part), *shape) for part in (x[: cell.num_train], x_test))
    return (x, y[: cell.num_train]), x_test


def models_of(cell):
    """Return the network as it is, and in the form of the cell."""
    found = ARCHITECTURES[cell.architecture]
    plain = nn.bnn(found.network(cell.width), _fashion_data.NUM_CLASSES, NOISE_SCALE)
    if cell.form == "plain":
        return plain, plain
    regulariser = found.regulariser(cell.num_train) * NOISE_SCALE**2
    names = {"readout": "readout", "features": "features", "targets": "y"}
    return plain, repriorise(plain, **names, noise_scale=NOISE_SCALE, regulariser=regulariser)


def projections_of(kernel, plain, args, x_test):
    """Compile a function of positions: projections of all weights, and of the function at test images."""
    to_sites, features = kernel.postprocess_fn(args, {}), site_function(plain, "features", x_test)
    sites = handlers.trace(handlers.seed(plain, 0)).get_trace(*args)
    names = [name for name, site in sites.items() if site["type"] == "sample" and name != "y"]
    of_weights, of_function = (
        random_projections(jax.random.key(i), part) for i, part in enumerate((names, "function"))
    )

    def told(position):
        draw = to_sites(position)
        return of_weights(draw), of_function({"function": features(draw) @ draw["readout"]})

    return jax.jit(jax.vmap(jax.vmap(told)))


def run(cell, options):
    """Run chains: warm up for a third of the seconds, sample for the others, tell how far that got."""
    jax.clear_caches()  # no two cells share a program
    args, x_test = data_of(cell, options)
    plain, model = models_of(cell)
    a_gradient = gradient_seconds(model, args, options.num_chains)
    guess = GUESS[cell.kernel][list(FORMS).index(cell.form)]
    affordable = int(options.seconds / a_gradient / guess)  # draws
    if affordable < LEAST_DRAWS // 4:
        return too_slow(a_gradient)
    num_stretches = min(MOST_DRAWS, max(LEAST_DRAWS // 2, affordable // 3)) // STRETCH
    kernel = KERNELS[cell.kernel](model)
    num_warmup = num_stretches * STRETCH * THINNING[cell.kernel]
    state = first_states(kernel, args, options.num_chains, num_warmup)
    stretch = stretch_of(kernel, args, STRETCH, THINNING[cell.kernel])
    for i in range(num_stretches):
        start = clock()
        state, _ = jax.block_until_ready(stretch(state))
        if (clock() - start) * num_stretches > PATIENCE * options.seconds and i > 0:
            return too_slow(a_gradient)
    projections = projections_of(kernel, plain, args, x_test)
    weights, values, gradients, acceptance, seconds = [], [], 0, [], 0.0
    while seconds < options.seconds * (1 if len(weights) * STRETCH >= LEAST_DRAWS else PATIENCE):
        if len(weights) * STRETCH >= MOST_DRAWS:
            break
        start = clock()
        state, (positions, (costs, rates)) = jax.block_until_ready(stretch(state))
        seconds += clock() - start
        gradients += int(np.sum(costs))
        acceptance.append(np.mean(rates))
        for told, part in zip((weights, values), projections(positions), strict=True):
            told.append(np.asarray(part))
    weights, values = (np.concatenate(part, axis=1) for part in (weights, values))
    stages = [weights[:, : max(2, weights.shape[1] * stage // STAGES)] for stage in range(1, STAGES + 1)]
    rhats = [rhat_squared(stage) for stage in stages]
    costs = weights.shape[1], gradients, seconds, float(np.mean(acceptance)), a_gradient
    return Row(*sizes(weights), *sizes(values), *costs, *map(np.mean, rhats), *map(np.max, rhats))


def too_slow(a_gradient):
    """Return the row of a cell that is left out."""
    return Row(**dict.fromkeys(Row._fields, np.nan) | {"gradient_seconds": a_gradient})


def sizes(draws):
    """Return effective draws of projections (chains, draws, 100): ArviZ's, and the paper's mean."""
    bulk = _chains.bulk_ess(draws)
    return *(float(of(bulk)) for of in (np.mean, np.min, np.max)), float(np.mean(effective_sample_size(draws)))


def lines(panel, rows, of, unit):
    """Draw effective draws by number of images, and the band of projections; hollow where chains disagree."""
    for (kernel, form), by_size in grouped(rows).items():
        style = {"color": f"C{list(KERNELS).index(kernel)}", "linestyle": FORMS[form]}
        numbers = sorted(by_size)
        mean, least, largest = (
            [getattr(by_size[n], f"{of}_{what}") / getattr(by_size[n], unit) for n in numbers]
            for what in ("bulk", "least", "largest")
        )
        panel.loglog(numbers, mean, marker="o", markersize=4, label=f"{kernel}, {form}", **style)
        apart = [i for i, n in enumerate(numbers) if getattr(by_size[n], f"rhat_squared_mean_{STAGES}") > UNMIXED]
        panel.plot(np.take(numbers, apart), np.take(mean, apart), "wo", markersize=2.5, zorder=3)
        panel.fill_between(numbers, least, largest, color=style["color"], alpha=0.08, linewidth=0)
    _common.number_ticks(panel, sorted({cell.num_train for cell in rows}))


def rhat_lines(panel, rows, options):
    """Draw R-hat squared less one of the most images, by gradients: its mean over projections."""
    for (kernel, form), by_size in grouped(rows).items():
        row = by_size[max(by_size)]
        gradients = row.gradients / options.num_chains * np.arange(1, STAGES + 1) / STAGES
        excess = [getattr(row, f"rhat_squared_mean_{stage}") - 1 for stage in range(1, STAGES + 1)]
        panel.loglog(gradients, excess, color=f"C{list(KERNELS).index(kernel)}", linestyle=FORMS[form])


def grouped(rows):
    """Group rows by kernel and form, then by number of images, without those of too few seconds."""
    found = {}
    for cell, row in rows.items():
        if row.draws > 0:
            found.setdefault((cell.kernel, cell.form), {})[cell.num_train] = row
    return found


def several(choices):
    """Make an option that takes some of these."""
    return {"type": str, "nargs": "+", "default": list(choices), "choices": list(choices)}


def draw(rows, options):
    """Draw a column for each network: effective draws a gradient and a second, and R-hat."""
    networks = list(dict.fromkeys((cell.architecture, cell.width) for cell in rows))
    figure, axes = plt.subplots(
        4, len(networks), figsize=(1 + 3.2 * len(networks), 10.5), sharey="row", squeeze=False, layout="constrained"
    )
    for column, (architecture, width) in zip(axes.T, networks, strict=True):
        of_network = {
            cell: row for cell, row in rows.items() if (cell.architecture, cell.width) == (architecture, width)
        }
        for panel, of, unit in zip(
            column, ("weights", "function", "function"), ("gradients", "gradients", "seconds"), strict=False
        ):
            lines(panel, of_network, of, unit)
            panel.set_xlabel("number of images")
        rhat_lines(column[3], of_network, options)
        column[0].set_title(f"{architecture}, width {width}")
        column[3].set_xlabel("gradients of a chain")
    labels = [f"ESS of {what}" for what in ("weights / gradient", "function / gradient", "function / second")]
    for panel, label in zip(axes[:, 0], (*labels, r"$\hat R^2 - 1$, most images"), strict=True):
        panel.set_ylabel(label)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(options.kernels), fontsize=8
    )
    _common.save(figure, options, "mixing_speed.png", dpi=80)


def main(options):
    """Run the study."""
    if options.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    else:
        jax.config.update("jax_default_matmul_precision", options.precision)
    cells = [
        Cell(name, form, kernel, n, options.width or found.width, options.pixels or found.pixels, options.precision)
        for name, n, kernel, form in product(options.architecture, options.num_train, options.kernels, options.forms)
        for found in [ARCHITECTURES[name]]
    ]
    table = options.output / "mixing_speed.csv"
    rows = _common.resumed(
        table,
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="cell",
        name=lambda cell: f"{cell.architecture}, {cell.num_train} images, {cell.kernel}, {cell.form}",
    )
    rows = {cell: rows[cell] for cell in cells}  # the table may have other widths, pixels and precisions
    shown = ("weights_bulk", "weights_least", "weights_paper", "function_bulk", "function_paper", *COSTS, RHATS[-1])
    _common.print_table([cell._asdict() | {name: getattr(row, name) for name in shown} for cell, row in rows.items()])
    draw(rows, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": f"with the four files; by default {_fashion_data.DEBIAN}, or else digits"},
            architecture=several(ARCHITECTURES) | {"default": ["fcn1", "fcn3", "resnet"]},
            kernels=several(KERNELS),
            forms=several(FORMS),
            num_train=[64, 256, 1024],
            num_test=(200, "images at which the function is told"),
            width={
                "type": int,
                "help": "units or first channels; by default "
                + ", ".join(f"{found.width} of {name}" for name, found in ARCHITECTURES.items()),
            },
            pixels={"type": int, "choices": [28, 14, 7], "help": "a side; by default 14, for convolutions 7"},
            num_chains=2,
            seconds=(12.0, "for a cell after warmup, about; of a core on a CPU"),
            precision=("default", "of matrix products: default, high, highest; or float64 for everything"),
        )
    )
