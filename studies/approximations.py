"""Approximations of Bayesian networks scored by certified posteriors: which to trust, and where.

Each is fitted to the data of the members in studies/references whose card says certified, and scored by
score_references.py. Draws stay in --output, so that a study that was interrupted goes on where it stopped.

    python studies/approximations.py
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import numpyro

import _common
import score_references
from _approximations import METHODS, applies
from score_references import COLUMNS, FOLDER

BEST = "half of the reference"
TITLES = {
    "mean_error": "error of means, in deviations",
    "deviation_error": "relative error of deviations",
    "c2st": "C2ST",
    "log_density_gap": "log density gained, nats a row",
}


def fitted(name, method, options):
    """Fit, or read what was fitted."""
    path = options.output / "approximations" / f"{name}_{re.sub('[^a-z0-9]+', '_', method.lower())}.npz"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **METHODS[method](name, options))
    with np.load(path) as file:
        return {key: file[key] for key in file}


def draw(rows, options):
    """Draw a panel for each score, a line for each method, members along the axis."""
    names = list(dict.fromkeys(row["member"] for row in rows))
    figure, axes = plt.subplots(2, 2, figsize=(6.4, 6.8), sharex=True, layout="constrained")  # legible at half of it
    for panel, (column, title) in zip(axes.flat, TITLES.items(), strict=True):
        for number, method in enumerate([*METHODS, BEST]):
            found = {row["member"]: row[column] for row in rows if row["method"] == method}
            values = np.array([found.get(name, np.nan) for name in names])
            style = (
                {"color": "k", "marker": "_", "markersize": 14} if method == BEST else {"marker": "osD^vP*X"[number]}
            )
            panel.plot(np.arange(len(names)) + 0.06 * (number - 3), values, label=method, linestyle="", **style)
        panel.set_title(title, fontsize="medium")
        panel.set(xticks=range(len(names)), xlim=(-0.5, len(names) - 0.5))
        panel.set_xticklabels(names, rotation=40, ha="right")
        if column.endswith("error"):
            panel.set_yscale("log")
        else:
            panel.axhline({"c2st": 0.5, "log_density_gap": 0}[column], color="k", linewidth=0.5)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    _common.save(figure, options, "approximations.png", dpi=140)


def main(options):
    """Fit, score, and draw."""
    numpyro.enable_x64()
    paths = sorted(options.references.glob("*.npz"))
    references = {path.stem: score_references.load(path.stem, options.references) for path in paths}
    options.inference = {name: reference["card"]["inference"] for name, reference in references.items()}
    rows = []
    for name, reference in references.items():
        if not (reference["card"]["certified"] or options.all) or name not in (options.member or references):
            continue
        rows.append({"member": name, "method": BEST, **score_references.halves(reference)})
        for method in (method for method in options.methods if applies(method, name)):
            rows.append(
                {
                    "member": name,
                    "method": method,
                    **score_references.scores(reference, **fitted(name, method, options)),
                }
            )
            print(rows[-1], flush=True)
    _common.write_table(
        [{**row, **{column: round(row[column], 4) for column in COLUMNS}} for row in rows],
        options.output / "approximations.csv",
    )
    draw(rows, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            member={"nargs": "+", "help": "names of references; all that are certified by default"},
            methods={"nargs": "+", "default": list(METHODS), "choices": list(METHODS)},
            references={"type": Path, "default": FOLDER, "help": "folder of the references"},
            all={"action": "store_true", "help": "those that are not certified, too"},
            num_steps=(5000, "of Adam"),
        )
    )
