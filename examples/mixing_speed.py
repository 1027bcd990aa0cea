"""How fast every kernel mixes, by width and by number of images, in three sets of coordinates (Hron 2022, Figure 7).

Each cell of the study is one chain: a kernel on the plain, the repriorised or the collapsed form of a network with one
hidden layer, at one width, number of images and regulariser. Its row is written to mixing_speed.csv as soon as it is
done, so that a study that was interrupted goes on where it stopped; delete the file to start again.

    python examples/mixing_speed.py --quick
    python examples/mixing_speed.py --cifar10 path/to/cifar-10-batches-py
"""

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from tqdm.auto import tqdm

import numpyro_wide
from numpyro_wide import collapse_readout, datasets, repriorise
from numpyro_wide.diagnostics import random_projections, reduced
from numpyro_wide.mcmc import (
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces its next generation
    import arviz

NOISE_SCALE = 0.1
# The forms of the model, and the wide sites that a draw of each holds.
FORMS = {
    "plain": ["hidden", "features", "readout"],
    "repriorised": ["hidden", "readout", "readout_base"],
    "collapsed": ["hidden"],
}
KERNELS: dict[str, Callable[..., Any]] = {
    "NUTS": partial(NUTS, max_tree_depth=8),
    "SplitHMC": SplitHMC,
    "Langevin": UnderdampedLangevin,
    "pCN": PreconditionedCrankNicolson,
    "pCN-Langevin": PreconditionedCrankNicolsonLangevin,
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
    """What a cell gave."""

    ess_per_gradient: float
    gradients_per_draw: float
    accept_prob: float
    seconds: float


def bnn(x, y=None, *, width):
    """One GELU layer in NTK parametrisation, weight variance 2."""
    weights = numpyro.sample("hidden", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    hidden = jax.nn.gelu(np.sqrt(2 / x.shape[1]) * x @ weights, approximate=False)
    features = numpyro.deterministic("features", np.sqrt(2 / width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width, 10]).to_event(2))
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(2), obs=y)


def model_of(cell: Cell) -> Callable:
    """The network in the cell's coordinates."""
    plain = partial(bnn, width=cell.width)
    if cell.form == "plain":
        return plain
    if cell.form == "collapsed":
        return collapse_readout(plain, readout="readout", features="features", observed="y")
    return repriorise(
        plain,
        readout="readout",
        features="features",
        targets="y",
        noise_scale=NOISE_SCALE,
        regulariser=cell.regulariser * NOISE_SCALE**2,
    )


def load_data(cifar10: Path | None, num_train: int) -> tuple[np.ndarray, np.ndarray]:
    """Standardised pixels and centred one-hot labels of images drawn at random."""
    images = datasets.digits() if cifar10 is None else datasets.cifar10(cifar10)[0]
    images = datasets.subset(images, num_train, seed=0)
    pixels = images.inputs.reshape(num_train, -1)
    inputs = datasets.Standardiser.fit(pixels, by_column=False)(pixels)
    return inputs, datasets.centred_one_hot(images.targets, 10)


def run(cell: Cell, data: tuple[np.ndarray, np.ndarray], budget: int) -> Row:
    """Warm up for half the budget, as far as can be told beforehand, then draw for the budget."""
    x, y = (part[: cell.num_train] for part in data)
    guess = GRADIENTS_AN_ITERATION.get(cell.kernel, 1)
    num_warmup = max(10, budget // 2 // guess)
    projections = {"projections": random_projections(jax.random.key(1), ["hidden"])}
    # NumPyro remembers the latest chains, draws included: with their weights, a study would fill the memory.
    kernel = reduced(KERNELS[cell.kernel](model_of(cell)), drop=FORMS[cell.form], functions=projections)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=1, progress_bar=False)
    cost = "num_steps" if cell.kernel == "NUTS" else "num_grad"
    start = time.perf_counter()
    mcmc.warmup(jax.random.key(0), x, y, collect_warmup=True, extra_fields=(cost,))
    mean_cost = float(np.mean(mcmc.get_extra_fields()[cost][-max(4, num_warmup // 5) :]))

    mcmc.num_samples = max(8, int(budget / mean_cost))
    mcmc.run(mcmc.post_warmup_state.rng_key, x, y, extra_fields=(cost, "accept_prob"))
    fields = mcmc.get_extra_fields()
    spent = int(np.sum(fields[cost]))
    ess = float(arviz.ess(mcmc.get_samples(group_by_chain=True))["projections"].mean())
    accept_prob = float(np.mean(fields["accept_prob"]))
    return Row(ess / spent, spent / mcmc.num_samples, accept_prob, time.perf_counter() - start)


def study(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell: widths at one number of images, numbers of images at one width, regularisers at both."""
    sizes = [(options.num_train[-2], width) for width in options.widths]
    sizes += [(num_train, options.widths[-2]) for num_train in options.num_train]
    for kernel in options.kernels:
        for form in options.forms:
            for num_train, width in dict.fromkeys(sizes):
                yield Cell(kernel, form, num_train, width)
    for regulariser in options.regularisers:
        yield Cell("NUTS", "repriorised", options.num_train[-2], options.widths[-2], regulariser)


def read_rows(path: Path) -> dict[Cell, Row]:
    """The rows of an earlier run."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Cell(row["kernel"], row["form"], int(row["num_train"]), int(row["width"]), float(row["regulariser"])): Row(
                *(float(row[name]) for name in Row._fields)
            )
            for row in csv.DictReader(file)
        }


def append_row(path: Path, cell: Cell, row: Row) -> None:
    """Keep what is done."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow((*Cell._fields, *Row._fields))
        writer.writerow((*cell, *row))


def plot_lines(axes: Any, rows: dict[Cell, Row], kernels: list[str], by: str, fixed: dict[str, int]) -> None:
    """ESS per gradient of the kernels against width or number of images."""
    for index, kernel in enumerate(kernels):
        cells = [
            cell
            for cell in rows
            if cell.kernel == kernel
            and cell.regulariser == 1.0
            and all(getattr(cell, name) == value for name, value in fixed.items())
        ]
        cells.sort(key=lambda cell: getattr(cell, by))
        values = [rows[cell].ess_per_gradient for cell in cells]
        axes.loglog(
            [getattr(cell, by) for cell in cells], values, marker="osD^v"[index % 5], markersize=4, label=kernel
        )
    ticks = sorted({getattr(cell, by) for cell in rows if all(getattr(cell, k) == v for k, v in fixed.items())})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def plot_study(rows: dict[Cell, Row], options: argparse.Namespace, path: Path) -> None:
    """A column for each form; by width above, by number of images below."""
    figure, axes = plt.subplots(
        2, len(options.forms), figsize=(1 + 3 * len(options.forms), 6), sharey=True, squeeze=False, layout="constrained"
    )
    num_train, width = options.num_train[-2], options.widths[-2]
    for column, form in enumerate(options.forms):
        plot_lines(axes[0, column], rows, options.kernels, "width", {"form": form, "num_train": num_train})
        plot_lines(axes[1, column], rows, options.kernels, "num_train", {"form": form, "width": width})
        axes[0, column].set(title=form, xlabel=f"width, {num_train} images")
        axes[1, column].set(xlabel=f"number of images, width {width}")
    for row in axes:
        row[0].set_ylabel("ESS per gradient")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_regularisers(rows: dict[Cell, Row], options: argparse.Namespace, path: Path) -> None:
    """ESS per gradient of repriorised NUTS against the regulariser, with the plain model as its limit."""
    num_train, width = options.num_train[-2], options.widths[-2]
    cells = [Cell("NUTS", "repriorised", num_train, width, value) for value in sorted({1.0, *options.regularisers})]
    cells = [cell for cell in cells if cell in rows]
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    values = [rows[cell].ess_per_gradient for cell in cells]
    axes.loglog([cell.regulariser for cell in cells], values, marker="o", label="repriorised")
    plain = rows.get(Cell("NUTS", "plain", num_train, width))
    if plain is not None:
        axes.axhline(plain.ess_per_gradient, color="0.5", linestyle="--", label="plain")
    axes.set(xlabel="regulariser / noise variance", ylabel="ESS per gradient")
    axes.set_title(f"NUTS, {num_train} images, width {width}")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--quick`` stands for small sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128, 512, 1024], help="two or more")
    parser.add_argument("--num-train", type=int, nargs="+", default=[64, 256, 1024], help="two or more")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS), help="coordinates")
    parser.add_argument("--regularisers", type=float, nargs="*", default=[0.1, 10.0, 100.0], help="over noise variance")
    parser.add_argument("--budget", type=int, default=4000, help="gradients of a chain after warmup")
    parser.add_argument("--cifar10", type=Path, help="folder with the CIFAR-10 batches; digits without it")
    parser.add_argument("--quick", action="store_true", help="widths 32 and 128, 32 and 64 images, 400 gradients")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the table and the figures")
    options = parser.parse_args()
    if options.quick:
        options.widths, options.num_train, options.budget = [32, 128], [32, 64], 400
    if min(len(options.widths), len(options.num_train)) < 2:
        parser.error("expected at least two widths and two numbers of images")
    return options


def main() -> None:
    """Run the cells that are not done, then print and draw all."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    data = load_data(options.cifar10, max(options.num_train))
    options.output.mkdir(parents=True, exist_ok=True)
    table = options.output / "mixing_speed.csv"
    rows = read_rows(table)
    cells = list(dict.fromkeys(study(options)))
    todo = [cell for cell in cells if cell not in rows]
    with tqdm(todo, disable=None) as progress:
        for cell in progress:
            progress.set_description(f"{cell.kernel}, {cell.form}, n = {cell.num_train}, width {cell.width}")
            rows[cell] = run(cell, data, options.budget)
            append_row(table, cell, rows[cell])
            jax.clear_caches()  # no two cells share a program

    rows = {cell: rows[cell] for cell in cells}
    print("kernel        form         images  width  regulariser  ESS/gradient  gradients/draw  accepted  seconds")
    for cell, row in rows.items():
        print(
            f"{cell.kernel:12s}  {cell.form:11s}  {cell.num_train:6d}  {cell.width:5d}  {cell.regulariser:11g}  "
            f"{row.ess_per_gradient:12.5f}  {row.gradients_per_draw:14.1f}  {row.accept_prob:8.2f}  {row.seconds:7.1f}"
        )
    plot_study(rows, options, options.output / "mixing_speed.png")
    plot_regularisers(rows, options, options.output / "regulariser.png")
    print(f"\nTable and figures in {options.output}: mixing_speed.csv, mixing_speed.png, regulariser.png")


if __name__ == "__main__":
    main()
