"""Emulators of simulators: networks that see the structure, beside published Gaussian processes and TabPFN-2.5.

The benchmark of 2606.01427: Sobol inputs, noise of 0.5 % of the function's deviation, 10 or 40 rows for each input, up
to 20 disjoint training sets, 5000 noisy test rows; root mean squared error (RRMSE) and the score of 95 % intervals in
standard deviations of the test targets, medians over training sets. Ours is the limit of additive networks, alone and
with a dense block, of up to ten inputs with and without relevances by column, in closed form. The evidence of the
training rows chooses scales and structure, and targets or their shifted logarithms. Rows are written to emulators.csv
as they are done, and a study that was interrupted goes on where it stopped.

    python studies/emulators.py --sets 3 --models limit estimator
"""

import os
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas

import _common
from _data import Dataset, Standardiser
from _emulators import simulations
from numpyro_wide import wide_limit

LIMIT, ESTIMATOR = "limit", "estimator"
INPUTS = {"wing weight": [10], "buckling": [4]}  # of others 10, 20 and 40
RIVALS = ("GP+", "TabPFN-2.5")
PUBLISHED = {  # RRMSE and interval score of the rivals, by function, inputs, and rows for each input
    ("wing weight", 10, 10): ((0.016, 0.073), (0.033, 0.167)),
    ("wing weight", 10, 40): ((0.007, 0.033), (0.013, 0.082)),
    ("buckling", 4, 10): ((0.174, 1.567), (0.419, 0.656)),
    ("buckling", 4, 40): ((0.016, 0.056), (0.097, 0.155)),
    ("Ackley", 10, 10): ((0.301, 1.57), (0.378, 1.89)),
    ("Ackley", 10, 40): ((0.213, 1.07), (0.210, 0.993)),
    ("Ackley", 20, 10): ((0.316, 1.61), (0.385, 1.83)),
    ("Ackley", 20, 40): ((0.217, 1.07), (0.214, 0.995)),
    ("Ackley", 40, 10): ((0.298, 1.50), (0.416, 1.96)),
    ("Ackley", 40, 40): ((0.243, 1.18), (0.230, 1.11)),
    ("Dixon–Price", 10, 10): ((0.442, 2.04), (0.427, 2.01)),
    ("Dixon–Price", 10, 40): ((0.279, 1.29), (0.162, 0.840)),
    ("Dixon–Price", 20, 10): ((0.474, 2.29), (0.469, 2.16)),
    ("Dixon–Price", 20, 40): ((0.334, 1.56), (0.195, 0.977)),
    ("Dixon–Price", 40, 10): ((0.455, 2.18), (0.480, 2.33)),
    ("Dixon–Price", 40, 40): ((0.431, 2.09), (0.231, 1.14)),
    ("Griewank", 10, 10): ((0.011, np.nan), (0.512, np.nan)),
    ("Griewank", 10, 40): ((0.007, np.nan), (0.100, np.nan)),
    ("Griewank", 20, 10): ((0.139, np.nan), (0.515, np.nan)),
    ("Griewank", 20, 40): ((0.008, np.nan), (0.140, np.nan)),
    ("Griewank", 40, 10): ((0.255, np.nan), (0.548, np.nan)),
    ("Griewank", 40, 40): ((0.008, np.nan), (0.173, np.nan)),
    ("Rosenbrock", 10, 10): ((0.459, 2.21), (0.379, 2.08)),
    ("Rosenbrock", 10, 40): ((0.337, 1.59), (0.105, 0.500)),
    ("Rosenbrock", 20, 10): ((0.490, 2.44), (0.468, 2.29)),
    ("Rosenbrock", 20, 40): ((0.373, 1.75), (0.157, 0.764)),
    ("Rosenbrock", 40, 10): ((0.481, 2.28), (0.501, 2.37)),
    ("Rosenbrock", 40, 40): ((0.422, 2.00), (0.215, 1.07)),
}
_FEW_INPUTS = 5  # whose effects of all orders are compared with those of one and two inputs
_MOST_BY_COLUMN = 10  # inputs, for which relevances are compared with none
_FEW_ROWS = 150  # by which the shift is chosen
_SHIFTS = np.array([0.0, 0.1, 1.0])  # of logarithms, in deviations of the targets
_REACH = 1.96  # of a 95 % interval, in standard deviations


class Cell(NamedTuple):
    """A fit."""

    function: str
    inputs: int
    ratio: int  # rows for each input
    model: str
    set: int


class Row(NamedTuple):
    """Scores in standard deviations of the noisy test targets, and what the evidence chose of limits: 1 is yes.

    ``shift`` is that of logarithms, in deviations of the targets, infinite of the targets themselves.
    """

    rrmse: float
    interval_score: float
    coverage_95: float
    core_seconds: float
    shift: float = np.nan
    order: float = np.nan
    has_block: float = np.nan
    is_by_column: float = np.nan


def transformed(targets, shift):
    """Return shifted logarithms (Box and Cox 1964); the targets themselves at infinity."""
    return targets if np.isinf(shift) else np.log(targets + shift)


def log_marginal(table, shift):
    """Return that of the targets by the cheapest limit of their shifted logarithms, without a constant."""
    scaled = table._replace(targets=transformed(table.targets, shift))
    (x, y), _, scale = _common.standardised_by(scaled, scaled, float)
    fit = wide_limit.fit(x, y, structure="additive", num_restarts=1, progress_bar=False)
    log_slope = 0.0 if np.isinf(shift) else -np.sum(np.log(table.targets + shift))
    return fit.table[0]["log_marginal"] - len(y) * np.log(scale) + log_slope


def best_shift(train):
    """Return the shift of the largest evidence of some rows: none, or from zero on as long as it grows."""
    some = Dataset(*(part[:_FEW_ROWS] for part in train))
    best, largest = np.inf, log_marginal(some, np.inf)
    for shift in _SHIFTS * np.std(train.targets):
        if train.targets.min() + shift <= 0:
            continue
        if (evidence := log_marginal(some, shift)) < largest:
            break
        best, largest = shift, evidence
    return best


def limit(train, test):
    """Fit limits; mean and interval (m, 3) of the test targets, and what was chosen."""
    shift, num_inputs = best_shift(train), train.inputs.shape[1]
    known = train._replace(targets=transformed(train.targets, shift))
    scaled = [Standardiser.fit(part) for part in known]
    fit = wide_limit.fit(
        *(scale(part) for scale, part in zip(scaled, known, strict=True)),
        structure=("additive", "both"),
        order=(2, num_inputs) if num_inputs <= _FEW_INPUTS else 2,
        input_scale=(False, True) if num_inputs <= _MOST_BY_COLUMN else False,
        num_restarts=1,
        progress_bar=False,
    )
    mean, variance = fit.predict(scaled[0](test.inputs), with_noise=True)
    mean, sd = scaled[1].loc + scaled[1].scale * mean, scaled[1].scale * np.sqrt(variance)
    found = np.stack([mean, mean - _REACH * sd, mean + _REACH * sd], axis=1)
    if np.isfinite(shift):
        found[:, 0] += sd**2 / 2  # the mean of a log-normal law
        found = np.exp(found) - shift
    print(f"\n{fit}", flush=True)
    best = fit.table[0]
    chosen = {"order": best["order"], "has_block": best["structure"] == "both", "is_by_column": best["input_scale"]}
    return found, {"shift": shift / np.std(train.targets), **{name: float(value) for name, value in chosen.items()}}


def estimator(train, test, time_budget):
    """Fit the estimator; mean and interval (m, 3) of the test targets."""
    from numpyro_wide.estimators import WideBNNRegressor

    model = WideBNNRegressor(time_budget=time_budget, random_state=0).fit(*train)
    print(f"\n{model.report_}", flush=True)
    mean, interval = model.predict(test.inputs), model.predict_interval(test.inputs, 0.95)
    return np.column_stack([mean, interval]), {}


def scores_of(targets, mean, lower, upper):
    """Return the error, the interval score (Gneiting and Raftery 2007) and the share inside."""
    deviation = np.std(targets)
    outside = np.maximum(lower - targets, 0) + np.maximum(targets - upper, 0)
    return {
        "rrmse": _common.rms(targets - mean) / deviation,
        "interval_score": np.mean(upper - lower + 2 / 0.05 * outside) / deviation,
        "coverage_95": np.mean(outside == 0),
    }


def run(cell, options):
    """Fit, predict, score."""
    train, test = simulations(cell.function, cell.inputs, cell.ratio * cell.inputs, options.noise)
    start = sum(os.times()[:4])
    if cell.model == LIMIT:
        found, chosen = limit(train[cell.set], test)
    else:
        found, chosen = estimator(train[cell.set], test, options.time_budget)
    core_seconds = sum(os.times()[:4]) - start
    return Row(**scores_of(test.targets, *found.T), core_seconds=core_seconds, **chosen)


def summary_of(group, rows):
    """Return medians over training sets of a model beside what is published, as a row of a page."""
    function, inputs, ratio, model = group
    table = pandas.DataFrame(rows)
    middle = table.median()
    published = PUBLISHED.get((function, inputs, ratio), ((np.nan, np.nan),) * 2)
    return {
        "function": function,
        "inputs": inputs,
        "rows": ratio * inputs,
        "model": model,
        "sets": len(table),
        "RRMSE": f"{middle.rrmse:.4f}",
        **{rival: numbers[0] for rival, numbers in zip(RIVALS, published, strict=True)},
        "interval score": f"{middle.interval_score:.3f}",
        **{f"{rival}'s": numbers[1] for rival, numbers in zip(RIVALS, published, strict=True)},
        "95 % interval holds": f"{table.coverage_95.mean():.3f}",
        "core seconds": f"{middle.core_seconds:.0f}",
    }


def draw(summary, options):
    """Draw errors, hollow those that are published, a panel for each number of rows for an input."""
    table = pandas.DataFrame(summary).astype({"RRMSE": float})
    ratios = (table.rows // table.inputs).unique()
    form = {"sharex": True, "sharey": True, "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(1, len(ratios), figsize=(8, 4.5), **form)
    places = {name: -place for place, name in enumerate(dict.fromkeys(zip(table.function, table.inputs, strict=True)))}
    for panel, ratio in zip(axes[0], ratios, strict=True):
        shown = table[table.rows == ratio * table.inputs]
        heights = [places[name] for name in zip(shown.function, shown.inputs, strict=True)]
        for rival, marker in zip(RIVALS, "sD", strict=True):
            panel.plot(shown[rival], heights, marker, color="0.4", markerfacecolor="none", label=rival)
        for model, ours in shown.groupby("model", sort=False):
            heights = [places[name] for name in zip(ours.function, ours.inputs, strict=True)]
            panel.plot(ours.RRMSE, heights, "o", label=model)
        panel.axvline(options.noise, color="0.6", linewidth=1)
        panel.set(xscale="log", xlabel="RRMSE", title=f"{ratio} rows for each input")
        panel.grid(alpha=0.3)
    names = [f"{function}, {inputs}" for function, inputs in places]
    axes[0, 0].set_yticks(list(places.values()), names)
    figure.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    _common.save(figure, options, "emulators.png")


def main(options):
    """Run the study, fits of few rows and inputs first."""
    cells = [
        Cell(function, inputs, ratio, model, number)
        for number in range(options.sets)
        for function in options.functions
        for inputs in INPUTS.get(function, [10, 20, 40])
        for ratio in options.ratios
        for model in options.models
        if inputs <= options.most_inputs
    ]
    cells.sort(key=lambda cell: (cell.set, cell.inputs * (cell.inputs * cell.ratio) ** 2))
    rows = _common.resumed(
        options.output / "emulators.csv",
        cells,
        Row,
        lambda cell: run(cell, options),
        unit="fit",
        name=lambda cell: f"{cell.function}, {cell.inputs} inputs, {cell.ratio * cell.inputs} rows, set {cell.set}",
    )
    order = [*PUBLISHED, *(cell[:3] for cell in rows if cell[:3] not in PUBLISHED)]
    groups = sorted(dict.fromkeys(cell[:4] for cell in rows), key=lambda group: order.index(group[:3]))
    summary = [summary_of(group, [row for cell, row in rows.items() if cell[:4] == group]) for group in groups]
    _common.write_table(summary, options.output / "emulators_summary.csv")
    draw(summary, options)


if __name__ == "__main__":
    names = list(dict.fromkeys(function for function, *_ in PUBLISHED))
    main(
        _common.arguments(
            __doc__,
            functions={"type": str, "nargs": "+", "default": names, "choices": names},
            ratios=([10, 40], "rows to learn from for each input"),
            most_inputs=(40, "of a function"),
            sets=(1, "training sets, up to 20"),
            noise=(0.005, "standard deviation of the noise, over that of the function"),
            models={"type": str, "nargs": "+", "default": [LIMIT], "choices": [LIMIT, ESTIMATOR]},
            time_budget=(60.0, "seconds that the estimator may take, compilation included"),
        )
    )
