"""Posteriors of finite convolutional networks on images, beside their own wide limits.

Accuracy, negative log-likelihood and calibration error at test images, of digits at 8 x 8 pixels and, with --folder, of
MNIST or Fashion-MNIST averaged to 14 x 14: a network of two ReLU layers of 3 x 3 filters on one-hot codes and under
softmax, its limit under both, five such networks that were trained, and five that have one wide layer. Scale and noise
of codes are those of the limit's evidence, the noise at least 0.1; the scale of logits is what predicts a fifth of the
images best at the limit. Rows are written to finite_cnn.csv as they are done, and a study that was interrupted goes on
where it stopped.

    python studies/finite_cnn.py --sets digits MNIST --folder path/to/mnist
"""

import argparse
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

import _class_chains
import _common
import _data
import _fashion_baselines as baselines
from _class_chains import MICROCANONICAL, Task, limit_kernel
from _class_data import Table
from numpyro_wide.diagnostics import classification_scores
from numpyro_wide.nn import CNN

LEAST_NOISE = 0.1
LOGIT_SCALES = (3.0, 10.0, 30.0, 100.0)
CHAINS = {"softmax": MICROCANONICAL, "softmax, surrogate": MICROCANONICAL._replace(surrogate="limit")}
LIMITS = ("codes, limit", "softmax, limit")
MLPS = "five MLPs"
MODELS = (MLPS, "five trained", LIMITS[0], "codes", LIMITS[1], *CHAINS)
NETWORK = CNN(2, 1, "relu", padding="SAME", b_std=0.1, readout_w_std=2**0.5)


class Cell(NamedTuple):
    """A fit; width is 0 where there are no channels to count."""

    images: str
    model: str
    width: int


class Row(NamedTuple):
    """Scores with their standard errors; then what chains cost, NaN without any, and seconds of a core."""

    accuracy: float
    accuracy_se: float
    nll: float
    nll_se: float
    calibration_error: float
    rhat: float = np.nan
    bulk_ess: float = np.nan
    worst_bulk_ess: float = np.nan
    gradients: float = np.nan
    seconds: float = np.nan


@cache
def table_of(name, task):
    """Read images (n, height, width, 1), black at -1 and white at 1, and labels."""
    options = task.options
    if name == "digits":
        parts = _data.split(_data.digits(), options.num_digits, 797, seed=0)
        x, x_test = (part.inputs[..., None] / 8 - 1 for part in parts)
    else:
        parts = _data.mnist(options.folder)
        parts = [
            _data.split(parts[0], options.num_images, 0, seed=0)[0],
            _data.split(parts[1], 1000, 0, seed=0)[0],
        ]
        x, x_test = (_data.pooled(part.inputs)[..., None] / 127.5 - 1 for part in parts)
    return Table(np.float32(x), parts[0].targets, np.float32(x_test), parts[1].targets)


def limit_of_softmax(network, table):
    """Predict by the limit under softmax."""
    surrogate = _class_chains.surrogate_of(_class_chains.kernel_of(network, table.x), table)
    return np.asarray(baselines.infinite_softmax(limit_kernel(network), surrogate, table.x, table.x_test)[0])


@cache
def network_of_logits(name, task):
    """Return the network with the scale of logits that predicts a fifth of the images best at the limit."""
    table = table_of(name, task)
    rows, held_out = slice(len(table.x) // 5, None), slice(len(table.x) // 5)
    part = Table(table.x[rows], table.labels[rows], table.x[held_out], table.labels[held_out])

    def loss(scale):
        probs = limit_of_softmax(_class_chains.times(NETWORK, scale), part)
        return classification_scores(part.labels_test, probs)["negative_log_likelihood"]

    return _class_chains.times(NETWORK, min(LOGIT_SCALES, key=loss))


def predict(cell, task):
    """Predict probabilities (n, classes) at the test images, with the costs of chains."""
    table, options = table_of(cell.images, task), argparse.Namespace(**vars(task.options), width=cell.width)
    data = table.x, table.labels, table.x_test
    match cell.model:
        case "five MLPs":
            flat = [x.reshape(len(x), -1) for x in (table.x, table.x_test)]
            return baselines.ensemble(baselines.Network(1, options.mlp_width), flat[0], table.labels, flat[1])[0], None
        case "five trained":
            trained = baselines.ConvolutionalNetwork(NETWORK.depth, cell.width)
            return baselines.ensemble(trained, *data, num_epochs=options.num_epochs)[0], None
        case "codes, limit":
            scales = baselines.scales_by_evidence(_class_chains.kernel_of(NETWORK, table.x), table.labels, LEAST_NOISE)
            return baselines.infinite_regression(limit_kernel(NETWORK), *scales, *data)[0], None
        case "codes":
            return _class_chains.of_codes(table, NETWORK, options, MICROCANONICAL, LEAST_NOISE)
        case "softmax, limit":
            return limit_of_softmax(network_of_logits(cell.images, task), table), None
    return _class_chains.of_network(table, network_of_logits(cell.images, task), CHAINS[cell.model], options)


def run(cell, task):
    """Fit, predict, score."""
    start = time.process_time()
    probs, cost = predict(cell, task)
    found = classification_scores(table_of(cell.images, task).labels_test, np.asarray(probs))
    row = Row(
        found["accuracy"],
        found["accuracy_se"],
        found["negative_log_likelihood"],
        found["negative_log_likelihood_se"],
        found["expected_calibration_error"],
        seconds=time.process_time() - start,
    )
    if cost is None:
        return row
    return row._replace(rhat=cost.rhat, bulk_ess=cost.ess, worst_bulk_ess=cost.worst_ess, gradients=cost.gradients)


def cells_of(options):
    """List what there is to run, chains of small networks first."""
    fixed = (*LIMITS, MLPS)
    found = [Cell(name, model, 0) for name in options.sets for model in options.models if model in fixed]
    for width in sorted(options.widths):
        found += [Cell(name, model, width) for name in options.sets for model in options.models if model not in fixed]
    return found


def summary(rows):
    """Return the table of a page."""
    return [
        {
            "images": cell.images,
            "model": cell.model,
            "channels": cell.width or ("∞" if cell.model in LIMITS else ""),
            "accuracy": f"{row.accuracy:.3f} ± {row.accuracy_se:.3f}",
            "NLL": f"{row.nll:.3f} ± {row.nll_se:.3f}",
            "ECE": f"{row.calibration_error:.3f}",
            "R-hat, largest": "" if np.isnan(row.rhat) else f"{row.rhat:.2f}",
            "bulk ESS (worst)": "" if np.isnan(row.rhat) else f"{row.bulk_ess:.0f} ({row.worst_bulk_ess:.0f})",
            "gradients": "" if np.isnan(row.rhat) else f"{row.gradients:.0f}",
            "seconds": f"{row.seconds:.0f}",
        }
        for cell, row in rows.items()
    ]


def draw(rows):
    """Draw scores of every row, a column of panels for each set of images."""
    names = list(dict.fromkeys(cell.images for cell in rows))
    columns = {"nll": "negative log-likelihood", "calibration_error": "calibration error"}
    figure, axes = plt.subplots(
        len(names), 2, figsize=(8, 0.8 + 2.4 * len(names)), sharex="col", squeeze=False, layout="constrained"
    )
    for name, panels in zip(names, axes, strict=True):
        part = {cell: row for cell, row in rows.items() if cell.images == name}
        places = np.arange(len(part))[::-1]
        for panel, (column, label) in zip(panels, columns.items(), strict=True):
            spread = [2 * row.nll_se if column == "nll" else 0 for row in part.values()]
            panel.errorbar([getattr(row, column) for row in part.values()], places, xerr=spread, fmt="o")
            panel.set(xlim=(0, None), yticks=places, title=name)
            panel.grid(axis="y", alpha=0.3)
            if panel in axes[-1]:
                panel.set_xlabel(label)
        panels[0].set_yticklabels([f"{cell.model}, {cell.width}" if cell.width else cell.model for cell in part])
        panels[1].set_yticklabels([])
    return figure


def main(options):
    """Run the study."""
    task = Task(options)
    rows = _common.resumed(
        options.output / "finite_cnn.csv",
        cells_of(options),
        Row,
        lambda cell: run(cell, task),
        unit="fit",
        name=lambda cell: f"{cell.images}, {cell.model}, {cell.width}",
    )
    rows = dict(sorted(rows.items(), key=lambda item: (item[0].images, MODELS.index(item[0].model), item[0].width)))
    _common.write_table(summary(rows), options.output / "finite_cnn_scores.csv")
    _common.save(draw(rows), options, "finite_cnn.png", dpi=100)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            sets={"nargs": "+", "default": ["digits"], "choices": ["digits", "MNIST", "Fashion-MNIST"]},
            folder={
                "type": Path,
                "help": "with the four files of MNIST or Fashion-MNIST: the same names",
            },
            models={"type": str, "nargs": "+", "default": MODELS, "choices": MODELS, "metavar": "MODEL"},
            widths=([4, 16], "channels of a layer"),
            num_digits=1000,
            num_images=(500, "of the two other sets to learn from; 1000 test"),
            num_warmup=(75, "draws of each of two unadjusted microcanonical chains, ten steps a draw"),
            num_samples=(75, "draws of each"),
            power=(1.0, "of the likelihood of a cold posterior"),
            num_epochs=(200, "of a member of the ensemble of convolutional networks"),
            mlp_width=(1024, "units of the layer of the other ensemble"),
        )
    )
