"""The estimator at its defaults on tables: splits at random, and splits with a gap.

Random splits are those of studies/uci.py, whose scores by hand-made steps stand beside these. A split with a gap leaves
the middle third of the rows out, sorted by one input (Foong et al. 2019), a split for each input; there the width of
the intervals is compared with that at the training rows. Rows are written to estimator.csv as they are done, reports of
the fits to a folder, and a study that was interrupted goes on where it stopped. Without --folder it runs on
scikit-learn's diabetes patients.

    python studies/estimator.py --folder path/to/uci --splits 20 --beside docs/figures/uci.csv
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas

import _common
import _data
from numpyro_wide.estimators import WideBNNRegressor

RANDOM, GAP = "random", "gap"
BY_HAND = "1 x 50, collapsed"  # of studies/uci.py: the tabular guide's steps, longer


class Cell(NamedTuple):
    """A fit to one split; a gap has the number of its input."""

    name: str
    kind: str
    split: int


class Row(NamedTuple):
    """Scores in the units of the targets; width of 90 % intervals at test rows over that at training rows, medians.

    ``is_finite`` is 1 where a finite network predicts, 0 where the closed form of the infinitely wide one does.
    """

    rmse: float
    log_density: float
    crps: float
    coverage_90: float
    widening: float
    is_finite: float
    by_row: float
    seconds: float
    core_seconds: float


def rows_of(folder, cell):
    """Return training and test rows."""
    if folder is None:
        train, test = _data.split(_data.diabetes(), 100, 40, seed=cell.split)
    else:
        train, test = _data.uci(folder, cell.name, cell.split if cell.kind == RANDOM else 0)
    if cell.kind == RANDOM:
        return train, test
    parts = zip(train, test, strict=True)
    return with_gap(_data.Dataset(*(np.concatenate(part) for part in parts)), cell.split)


def with_gap(rows, column):
    """Leave the middle third out, sorted by a column; rows of the same value in an order of chance."""
    chance = np.random.default_rng(0).permutation(len(rows.targets))
    order = chance[np.argsort(rows.inputs[chance, column], kind="stable")]
    third = len(order) // 3
    outer = np.concatenate([order[:third], order[2 * third :]])
    return tuple(_data.Dataset(*(part[some] for part in rows)) for some in (outer, order[third : 2 * third]))


def run(cell, options):
    """Fit, predict, score."""
    train, test = rows_of(options.folder, cell)
    if cell.split % 5 == 0:
        jax.clear_caches()  # Linux maps 65,530 pieces of memory for a process, and a compiled program is some of them
    start, core_start = time.perf_counter(), sum(os.times()[:4])
    model = WideBNNRegressor(time_budget=options.time_budget, random_state=cell.split).fit(*train)
    seconds, core_seconds = time.perf_counter() - start, sum(os.times()[:4]) - core_start
    reports = options.output / "reports"
    reports.mkdir(exist_ok=True)
    (reports / "{}_{}_{}.txt".format(*cell)).write_text(f"{model.report_}\n")
    lower, upper = model.predict_interval(test.inputs, 0.9).T
    known = np.ptp(model.predict_interval(train.inputs, 0.9), axis=1)
    draws = model.sample_y(test.inputs, 1000)
    if "the targets are discrete" in str(model.report_):
        draws = rounded(draws, np.unique(train.targets))
    return Row(
        rmse=_common.rms(test.targets - model.predict(test.inputs)),
        log_density=float(np.mean(model.log_density(*test))),
        crps=crps_of(test.targets, draws),
        coverage_90=float(np.mean((lower < test.targets) & (test.targets < upper))),
        widening=float(np.median(upper - lower) / np.median(known)),
        is_finite=float(model.method_ != "limit"),
        by_row=float("units, noise by row;" in str(model.report_)),
        seconds=seconds,
        core_seconds=core_seconds,
    )


def rounded(draws, values):
    """Return the nearest of some ordered values to each draw."""
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, draws)]


def crps_of(targets, draws):
    """Return the mean continuous ranked probability score of draws (n, s), without the bias that few would have."""
    ordered, number = np.sort(draws, axis=1), draws.shape[1]
    places = 2 * np.arange(1, number + 1) - number - 1
    apart = ordered @ places / (number * (number - 1))  # half the mean distance of two draws
    return float(np.mean(np.abs(draws - targets[:, None]).mean(axis=1) - apart))


def summary_of(name, kind, by_split, by_hand):
    """Return means over splits; set beside the hand-made steps split by split, for some splits are harder."""
    found = pandas.DataFrame(by_split.values())
    gains = [row.log_density - by_hand[name, split] for split, row in by_split.items() if (name, split) in by_hand]
    return {
        "set": name,
        "splits": f"{len(found)} {kind}",
        "RMSE": _common.with_error(found.rmse),
        "log density": _common.with_error(found.log_density),
        "CRPS": _common.with_error(found.crps) if kind == RANDOM else "",  # as published ones
        f"over {BY_HAND}": _common.with_error(gains, "+.2g") if gains and kind == RANDOM else "",
        "90 % interval holds": f"{found.coverage_90.mean():.2f}",
        "widening": f"{found.widening.median():.2f}",
        "finite": f"{found.is_finite.sum():.0f}",
        "noise by row": f"{found.by_row.sum():.0f}",
        "core seconds": f"{found.core_seconds.median():.0f}",
    }


def log_densities_by_hand(path):
    """Read log densities by set and split from the table of studies/uci.py; none without a path."""
    if path is None:
        return {}
    table = pandas.read_csv(path)
    table = table[table.model == BY_HAND]
    return dict(zip(zip(table.name, table.split, strict=True), table.log_density, strict=True))


def draw(rows, options):
    """Draw coverage and widening of the intervals, a point for each split."""
    names = list(dict.fromkeys(cell.name for cell in rows))
    figure, axes = plt.subplots(1, 2, figsize=(8, 0.8 + 0.5 * len(names)), sharey=True, layout="constrained")
    for kind, marker, shift in ((RANDOM, "o", -0.12), (GAP, "s", 0.12)):
        cells = [cell for cell in rows if cell.kind == kind]
        places = [names.index(cell.name) + shift for cell in cells]
        for panel, score in zip(axes, ("coverage_90", "widening"), strict=True):
            values = [getattr(rows[cell], score) for cell in cells]
            panel.plot(values, places, marker, markersize=4, alpha=0.6, label=f"{kind} splits")
    axes[0].axvline(0.9, color="0.5", linewidth=1)
    axes[0].set(xlabel="share of test rows in their 90 % intervals", yticks=range(len(names)), yticklabels=names)
    axes[1].axvline(1, color="0.5", linewidth=1)
    axes[1].set(xlabel="width of intervals, over that at training rows", xscale="log")
    axes[1].legend()
    axes[0].invert_yaxis()
    _common.save(figure, options, "estimator.png")


def main(options):
    """Run the study."""
    sets = options.sets if options.folder is not None else ["diabetes"]
    cells = []
    for name in sets:
        columns = 10 if options.folder is None else _data.uci(options.folder, name)[0].inputs.shape[1]
        cells += [Cell(name, RANDOM, split) for split in range(options.splits)]
        cells += [Cell(name, GAP, column) for column in range(min(columns, options.gaps))]
    rows = _common.resumed(
        options.output / "estimator.csv",
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="fit",
        name=lambda cell: f"{cell.name}, {cell.kind} {cell.split}",
    )
    by_hand = log_densities_by_hand(options.beside)
    groups = list(dict.fromkeys((cell.name, cell.kind) for cell in rows))
    summary = [
        summary_of(*group, {cell.split: row for cell, row in rows.items() if cell[:2] == group}, by_hand)
        for group in groups
    ]
    _common.write_table(summary, options.output / "estimator_summary.csv")
    draw(rows, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the sets, <name>.npz; diabetes without it"},
            sets=(["boston", "concrete", "energy", "wine", "yacht"], "names of the sets"),
            splits=(1, "how many random ones of each set, from the first"),
            gaps=(100, "how many splits with a gap of each set at the most, from the first input"),
            time_budget=(600.0, "seconds that a fit may take, compilation included"),
            beside={"type": Path, "help": "table of studies/uci.py, whose scores are set beside these"},
        )
    )
