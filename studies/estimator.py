"""Three lines on tables: ``WideBNNRegressor`` at its defaults, on random splits and on splits with gaps.

Every split of ``datasets.uci`` and every input's gap is a row: a gap leaves the middle third of an input out, by rank,
and scores what is predicted there. Beside the scores stands how much wider predictions are in the gap, noise included,
than at rows that were learnt from. What a fit decided, and from which numbers, is kept in a folder of reports. Rows are
written to estimator.csv as they are done, and a study that was interrupted goes on where it stopped. Without --folder,
scikit-learn's diabetes patients take the sets' place.

    python studies/estimator.py --folder path/to/uci --sets yacht energy --splits 20 --time-budget 120
"""

import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas
from scipy.stats import rankdata

import _common
from numpyro_wide import datasets
from numpyro_wide.estimators import WideBNNRegressor

WORDS = {"split": "random rows", "gap": "gaps"}
FEWEST_VALUES = 9  # of an input that has a middle third


class Cell(NamedTuple):
    """A fit: a split, or the input that has a gap."""

    name: str
    kind: str
    index: int


class Row(NamedTuple):
    """Scores in the units of the targets, what the standard deviation is over that of known rows, and the costs."""

    rmse: float
    log_density: float
    coverage_90: float
    widening: float
    is_of_chains: float
    seconds: float
    core_seconds: float


def all_rows(folder, name):
    """Return all rows of a set, as inputs (n, d) and targets (n,)."""
    if folder is None:
        return datasets.diabetes()
    parts = datasets.uci(folder, name)
    return datasets.Dataset(*(np.concatenate(both) for both in zip(*parts, strict=True)))


def rows_of(cell, folder):
    """Return rows to learn from and to test on."""
    if cell.kind == "gap":
        found = all_rows(folder, cell.name)
        is_left_out = is_middle(found.inputs[:, cell.index])
        return tuple(datasets.Dataset(*(part[rows] for part in found)) for rows in (~is_left_out, is_left_out))
    if folder is None:
        return datasets.split(datasets.diabetes(), 400, 42, seed=cell.index)
    return datasets.uci(folder, cell.name, cell.index)


def is_middle(column):
    """Mark the middle third of an input by rank, rows of the same value together."""
    ranks = rankdata(column) / len(column)
    return (ranks > 1 / 3) & (ranks <= 2 / 3)


def gaps_of(inputs):
    """List the inputs that have a middle third: enough values, and rows on both sides."""
    shares = [is_middle(column).mean() for column in inputs.T]
    return [i for i, share in enumerate(shares) if len(np.unique(inputs[:, i])) >= FEWEST_VALUES and 0.2 < share < 0.5]


def cells_of(options):
    """List the fits: splits of all sets in turn, then the gaps."""
    sets = options.sets if options.folder else ["diabetes"]
    found = [Cell(name, "split", split) for split in range(options.splits) for name in sets]
    if options.gaps:
        for name in sets:
            gaps = gaps_of(all_rows(options.folder, name).inputs)
            found += [Cell(name, "gap", index) for index in gaps[: options.gaps]]
    return found


def run(cell, options):
    """Fit, predict, score."""
    train, test = rows_of(cell, options.folder)
    start, core_start = time.perf_counter(), time.process_time()
    model = WideBNNRegressor(time_budget=options.time_budget, random_state=0).fit(*train)
    mean, sd = model.predict(test.inputs, return_std=True)
    lower, upper = model.predict_interval(test.inputs).T
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
    reports = options.output / "estimator_reports"
    reports.mkdir(exist_ok=True)
    (reports / f"{'_'.join(map(str, cell))}.txt").write_text(str(model.report_))
    _, known_sd = model.predict(train.inputs, return_std=True)
    return Row(
        rmse=_common.rms(mean - test.targets),
        log_density=float(np.mean(model.log_density(*test))),
        coverage_90=float(np.mean((lower < test.targets) & (test.targets < upper))),
        widening=float(np.mean(sd) / np.mean(known_sd)),
        is_of_chains=float(model.method_ == "chains"),
        seconds=seconds,
        core_seconds=core_seconds,
    )


def summary_of(rows):
    """Return means over the splits or gaps of each set, with their standard errors."""
    table = pandas.DataFrame([{**cell._asdict(), **row._asdict()} for cell, row in rows.items()])
    found = []
    for (name, kind), part in table.groupby(["name", "kind"]):
        mean, error = part.mean(numeric_only=True), part.sem(numeric_only=True).fillna(0.0)
        found.append(
            {
                "set": name,
                "held out": WORDS[kind],
                "fits": len(part),
                "RMSE": f"{mean['rmse']:.3g} ± {error['rmse']:.2g}",
                "log density": f"{mean['log_density']:.3g} ± {error['log_density']:.2g}",
                "median": f"{part['log_density'].median():.3g}",
                "90 % interval holds": f"{mean['coverage_90']:.2f}",
                "wider than at known rows": f"{part['widening'].median():.2f}",
                "of chains": f"{mean['is_of_chains']:.0%}",
                "core seconds": f"{mean['core_seconds']:.0f}",
            }
        )
    return found


def draw(rows):
    """Draw how often 90 % intervals hold, and how much wider predictions are, a line of points for each set."""
    names = sorted({cell.name for cell in rows})
    figure, axes = plt.subplots(1, 2, figsize=(8, 1 + 0.45 * len(names)), sharey=True, layout="constrained")
    for panel, column in zip(axes, ("coverage_90", "widening"), strict=True):
        for kind, colour in zip(WORDS, ("C0", "C1"), strict=True):
            found = [(getattr(row, column), names.index(cell.name)) for cell, row in rows.items() if cell.kind == kind]
            if found:
                values, places = np.transpose(found)
                label = {"split": "random rows", "gap": "gaps"}[kind]
                panel.plot(
                    values, places + (0.12 if kind == "gap" else -0.12), "o", color=colour, alpha=0.6, label=label
                )
        panel.grid(axis="y", alpha=0.3)
    axes[0].axvline(0.9, color="0.5", linewidth=1)
    axes[0].set(xlabel="share that 90 % intervals hold", yticks=range(len(names)), yticklabels=names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[1].set(xlabel="standard deviation over that at known rows", xscale="log")
    axes[0].legend(fontsize="small")
    return figure


def main(options):
    """Run the study."""
    rows = _common.resumed(
        options.output / "estimator.csv",
        cells_of(options),
        Row,
        lambda cell: run(cell, options),
        unit="fit",
        name=lambda cell: f"{cell.name}, {cell.kind} {cell.index}",
    )
    summary = summary_of(rows)
    _common.print_table(summary)
    pandas.DataFrame(summary).to_csv(options.output / "estimator_summary.csv", index=False)
    _common.save(draw(rows), options, "estimator.png", dpi=100)


if __name__ == "__main__":
    several = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the sets, <name>.npz; diabetes without it"},
            sets=several | {"default": ["boston", "concrete", "energy", "wine", "yacht"]},
            splits=(1, "random splits of each set, from the first"),
            gaps=(20, "most inputs of a set that get a gap; 0 for none"),
            time_budget=(600.0, "seconds of a fit"),
        )
    )
