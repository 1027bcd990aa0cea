"""Command line, data, a network and its limit, tables and figures, shared by the studies."""

import argparse
import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import jax
import matplotlib
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
from tqdm.auto import tqdm

import _data
import numpyro_wide
from numpyro_wide.wide_limit import gp_log_evidence, gp_posterior

matplotlib.use("Agg")  # figures go to files, where there is no screen, too


def centred_codes(labels: Any, num_classes: int) -> np.ndarray:
    """Return one-hot codes less their mean (n, num_classes), targets for regression on classes (Hron 2022, §4)."""
    return np.float32(np.eye(num_classes)[labels] - 1 / num_classes)


def arguments(doc: str, **options: Any) -> argparse.Namespace:
    """Read the command line, make the folder of ``--output``, and set BLAS up.

    An option is its default, or a pair of it and a line of help, or a dictionary for ``argparse``.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, option in {**options, "output": (Path("figures"), "folder for the figures")}.items():
        if not isinstance(option, dict):
            default, text = option if isinstance(option, tuple) else (option, None)
            is_list = isinstance(default, list)
            option = {"type": type(default[0] if is_list else default), "default": default, "help": text}
            option |= {"nargs": "+"} if is_list else {}
        parser.add_argument("--" + name.replace("_", "-"), **option)
    found = parser.parse_args()
    numpyro_wide.set_blas_threads(1)
    found.output.mkdir(parents=True, exist_ok=True)
    return found


def digits(num_train: int, num_test: int) -> tuple[Any, Any]:
    """Split handwritten digits at random: pixels (n, 64), standardised by the training part, and labels (n,)."""
    train, test = _data.split(_data.digits(), num_train, num_test, seed=0)
    pixels = [part.inputs.reshape(-1, 64) for part in (train, test)]
    scale = _data.Standardiser.fit(pixels[0], by_column=False)
    return train._replace(inputs=scale(pixels[0])), test._replace(inputs=scale(pixels[1]))


def standardised(data: Any, num_train: int | None = None) -> Any:
    """Standardise inputs and targets by the first ``num_train`` rows, by all without it."""
    return type(data)(*(_data.Standardiser.fit(part[:num_train])(part) for part in data))


def standardised_by(train: Any, test: Any, dtype: Any) -> tuple[Any, Any, float]:
    """Standardise inputs and targets of both by the training rows; with the targets' scale."""
    scales = [_data.Standardiser.fit(column) for column in train]
    parts = [
        tuple(scale(column).astype(dtype) for scale, column in zip(scales, part, strict=True)) for part in (train, test)
    ]
    return *parts, float(np.squeeze(scales[1].scale))


def with_ones(x: np.ndarray) -> np.ndarray:
    """Append a column of ones."""
    return np.concatenate([x, np.ones_like(x[:, :1])], axis=1).astype(np.float32)


def erf_network(x, y=None, *, width, w_std, b_std, readout_std, noise_scale):
    """Sample a network of one erf layer in NTK parametrisation, every weight N(0, 1), and observe its outputs."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.lax.erf(w_std * x @ weights + b_std * bias)
    features = numpyro.deterministic("features", readout_std / np.sqrt(width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    function = numpyro.deterministic("function", features @ readout)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(function, noise_scale), obs=y)


def resumed(path: Path, cells: list[Any], row_type: Any, run: Callable, *, unit: str, name: Callable) -> dict[Any, Any]:
    """Run cells, each written to a table as it is done: a study that was interrupted goes on where it stopped.

    Args:
        path: path of the table.
        cells: named tuples of text and numbers, each a thing to run.
        row_type: type of a row, a named tuple of floats.
        run: function from a cell to its row.
        unit: word for a cell.
        name: function from a cell to its name, for the progress bar.

    Returns:
        All rows of the table, those of other cells that were run earlier included.
    """
    cell_type = type(cells[0])
    kinds = get_type_hints(cell_type)
    with path.open("a+", newline="") as file:
        file.seek(0)
        lines = list(csv.reader(file))
        rows = {}  # first those of an earlier run
        for line in lines[1:]:
            fields = (kind(text) for kind, text in zip(kinds.values(), line, strict=False))
            rows[cell_type(*fields)] = row_type(*map(float, line[len(kinds) :]))
        writer = csv.writer(file)
        if not lines:
            writer.writerow((*kinds, *row_type._fields))
        todo = [cell for cell in cells if cell not in rows]
        print(f"{len(todo)} {unit}s to run, {len(cells) - len(todo)} done before; rows go to {path}", flush=True)
        for cell in (progress := tqdm(todo, unit=unit)):
            progress.set_description(name(cell))
            rows[cell] = run(cell)
            writer.writerow((*cell, *rows[cell]))
            file.flush()
    return rows


class Posterior(NamedTuple):
    """Mean and standard deviation (m,) of a function, and a bound on the log evidence or itself."""

    mean: np.ndarray
    sd: np.ndarray
    log_evidence: float = float("nan")

    def distance(self, other: "Posterior") -> tuple[float, float]:
        """Return root mean squares of the differences of means and of standard deviations."""
        return rms(self.mean - other.mean), rms(self.sd - other.sd)


def nngp_posterior(kernel: Callable, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, noise: float) -> Posterior:
    """Return the posterior of an infinitely wide network, in closed form."""
    train = kernel(x)[0]
    mean, covariance = gp_posterior(train, kernel(x_test, x)[0], kernel(x_test)[0], y, noise)
    return Posterior(np.asarray(mean), np.sqrt(np.diag(covariance)), float(gp_log_evidence(train, y, noise)))


def rms(values: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 of one value, which says nothing of it."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def with_error(values: Sequence[float], form: str = ".3g") -> str:
    """Write the mean of values, and of several its standard error."""
    mean = f"{np.mean(values):{form}}"
    return f"{mean} ± {standard_error(values):.2g}" if len(values) > 1 else mean


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows under the names of their columns, floats with four digits."""
    print(pandas.DataFrame(rows).to_string(index=False, float_format="{:.4g}".format, na_rep=""), flush=True)


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Print rows under the names of their columns, and write them to a file."""
    print_table(rows)
    pandas.DataFrame(rows).to_csv(path, index=False)


def number_ticks(axes: Any, numbers: Iterable[int]) -> None:
    """Mark these numbers alone on the first axis."""
    numbers = list(numbers)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def plot_lines(axes: Any, lines: Mapping[str, Mapping[int, float]]) -> None:
    """Plot lines by label, each a dictionary of numbers, on logarithmic axes."""
    for (label, values), marker in zip(lines.items(), "osD^vP*X", strict=False):
        axes.loglog(list(values), list(values.values()), marker=marker, markersize=4, label=label)


def plot_with_broken(axes: Any, lines: Mapping[str, Mapping], broken: Mapping[str, Mapping]) -> None:
    """Plot lines by label, as :func:`plot_lines` does, and broken ones in their colours."""
    plot_lines(axes, lines)
    for line, values in zip(axes.get_lines(), broken.values(), strict=True):
        axes.plot(list(values), list(values.values()), "--", color=line.get_color(), linewidth=1)


def shades(count: int) -> np.ndarray:
    """Return colours from light to dark, for growing widths."""
    return matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, count))


def save(figure: Any, options: argparse.Namespace, name: str, dpi: int = 150) -> None:
    """Write a figure, and say where."""
    figure.savefig(options.output / name, dpi=dpi, bbox_inches="tight")
    plt.close(figure)
    print(f"Figure: {options.output / name}")
