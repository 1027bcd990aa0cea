"""Are class probabilities calibrated? Label regression, finite networks on codes, softmax, and what scikit-learn has.

Accuracy, negative log-likelihood and calibration error at test rows of several tables, with standard errors and core
seconds. Label regression is ``wide_limit.fit`` at its defaults, of images also with convolutional networks, the
estimator ``WideBNNClassifier``, and logits the variational posterior of the softmax limit; networks of logits by
several ways of sampling are run if they are named. What takes long on many rows is left out there. Probabilities are
kept in classes.npz, so that a study that was interrupted goes on where it stopped. Tables of measurements are read from
--folder, MNIST from --mnist, and left out without it, as Fashion-MNIST is without Debian's package.

    python studies/classes.py --folder path/to/uci --mnist path/to/mnist
"""

import time
import warnings
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
from tqdm.auto import tqdm

import _class_chains
import _class_data
import _class_rivals
import _common
import _fashion_baselines as baselines
from _class_chains import Cost, Task
from numpyro_wide import wide_limit
from numpyro_wide.diagnostics import classification_scores
from numpyro_wide.estimators import WideBNNClassifier
from numpyro_wide.nn import CNN, FCN
from numpyro_wide.plots import plot_reliability

RIVALS = ("logistic regression", "MLPs", "boosting", "GP")
CNNS, CONVOLUTIONAL = "CNNs", "convolutional label regression"
LIMITS = ("label regression", CONVOLUTIONAL, "logits")
DEFAULT = (*RIVALS, CNNS, *LIMITS, "estimator")
MODELS = (*DEFAULT, *(f"network, {way}" for way in _class_chains.WAYS), "network, one-hot codes")
DRAWN = ("MLPs", "boosting", "label regression")
MOST = {"GP": 2000, "logits": 2000, "boosting": 5000, "estimator": 5000}  # rows that are learnt from
LAYERS = 3  # of convolutional limits
CHANNELS, IMAGES_TRAINED = 16, 400_000  # of each of five trained networks, all epochs together
NO_COST = Cost(*[np.nan] * len(Cost._fields))


@cache
def table_of(name, task):
    """Read a table once."""
    return _class_data.load(name, folders_of(task.options), task.options.most_rows)


def folders_of(options):
    """Return where sets are read from."""
    return _class_data.Folders(options.folder, options.mnist)


def has(name, model, task):
    """Tell whether a model is run on a table."""
    if model in (CNNS, CONVOLUTIONAL) and name not in ("digits", *_class_data.OF_IMAGES):
        return False
    return len(table_of(name, task).x) <= MOST.get(model, np.inf)


@cache
def limit_of(name, model, task):
    """Fit the limit once: the fit, and the seconds of a core that it took."""
    table, start = table_of(name, task), time.process_time()
    options = {"likelihood": "bernoulli" if table.num_classes == 2 else "categorical"}
    if model == CONVOLUTIONAL:
        networks = [CNN(LAYERS, 1, activation, padding="SAME") for activation in ("erf", "relu")]
        fit = wide_limit.fit(table.images[0], table.labels, network=networks, **options)
    else:
        fit = wide_limit.fit(table.x, table.labels, labels="logits" if model == "logits" else "codes", **options)
    return fit, time.process_time() - start


def network_of(name, task):
    """Return the network of logits of the limit, or one GELU layer with the readout's scale of the command line."""
    if task.options.readout_scale > 0:
        return _class_chains.with_readout_scale(task.options.readout_scale)
    fit, _ = limit_of(name, "logits", task)
    return FCN(fit.depth, 1, fit.activation, **fit.scales)


def predict(name, model, task):
    """Predict probabilities (n, classes) at the test rows, with the costs of chains and the seconds of a core."""
    table = table_of(name, task)
    if model.startswith("network"):
        network = network_of(name, task)
        if model == "network, one-hot codes":
            return _class_chains.of_codes(table, network, task.options)
        way = _class_chains.WAYS[model.removeprefix("network, ")]
        return _class_chains.of_network(table, network, way, task.options)
    start, seconds = time.process_time(), 0.0
    if model in LIMITS:
        fit, seconds = limit_of(name, model, task)
        start = time.process_time()
        probs = np.asarray(fit.predict(table.images[1] if model == CONVOLUTIONAL else table.x_test))
        probs = np.stack([1 - probs, probs], axis=1) if probs.ndim == 1 else probs
    elif model == "estimator":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # which is in the report
            fit = WideBNNClassifier(random_state=0, time_budget=task.options.budget).fit(table.x, table.labels)
        tqdm.write(f"{name}: {fit.method_}")
        probs = fit.predict_proba(table.x_test)
    elif model == CNNS:
        network, epochs = baselines.ConvolutionalNetwork(2, CHANNELS), min(200, IMAGES_TRAINED // len(table.x))
        x, x_test = table.images
        (probs,) = baselines.ensemble(network, x, table.labels, x_test, num_epochs=epochs)
    elif model in ("logistic regression", "boosting"):
        function = _class_rivals.boosting if model == "boosting" else _class_rivals.logistic_regression
        probs = function(table.x, table.labels).predict_proba(table.x_test)
    else:
        probs = (_class_rivals.ensemble if model == "MLPs" else _class_rivals.gaussian_process)(table)
    return probs, NO_COST._replace(total=seconds + time.process_time() - start)


def predictions(task):
    """Return probabilities and costs by table and model, each kept as soon as it is there."""
    options = task.options
    path = options.output / "classes.npz"
    kept = dict(np.load(path)) if path.exists() else {}
    names = [name for name in options.tables if folders_of(options).have(name)]
    cells = [(name, model) for name in names for model in options.models if has(name, model, task)]
    for name, model in (progress := tqdm(cells, unit="fit")):
        progress.set_description(f"{name}, {model}")
        if f"{name}|{model}" not in kept:
            probs, cost = predict(name, model, task)
            kept |= {f"{name}|{model}": np.asarray(probs, float), f"{name}|{model}|cost": np.array(cost)}
            np.savez_compressed(path, **kept)
    return {cell: (kept["|".join(cell)], Cost(*kept["|".join((*cell, "cost"))])) for cell in cells}


def row(name, model, probs, cost, task):
    """Return the row of a table of results."""
    scores = classification_scores(table_of(name, task).labels_test, probs)
    columns = {"NLL": "negative_log_likelihood", "ECE": "expected_calibration_error", "accuracy": "accuracy"}
    written = {column: f"{scores[of]:.3f} ± {scores[f'{of}_se']:.3f}" for column, of in columns.items()}
    found = {"table": name, "model": model, **written, "seconds": f"{cost.total:.0f}"}
    of_chains = {
        "R-hat, largest": f"{cost.rhat:.2f}",
        "bulk ESS": f"{cost.ess:.0f}",
        "for 1000 gradients": f"{1000 * cost.ess / cost.gradients:.3g}",
        "worst": f"{1000 * cost.worst_ess / cost.gradients:.2g}",
        "a second": f"{cost.ess / cost.seconds:.2g}",
    }
    return found | (of_chains if cost.gradients > 0 else dict.fromkeys(of_chains, ""))


def draw(found, task):
    """Draw reliability diagrams, a row for each model and a column for each table."""
    names, models = (list(dict.fromkeys(cell[i] for cell in found)) for i in (0, 1))
    models = [model for model in DRAWN if model in models] or models
    names = [name for name in names if all((name, model) in found for model in models)]
    size = 0.6 + 2.0 * len(names), 0.4 + 2.0 * len(models)
    figure, axes = plt.subplots(
        len(models), len(names), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for model, panels in zip(models, axes, strict=True):
        for name, panel in zip(names, panels, strict=True):
            plot_reliability(table_of(name, task).labels_test, found[name, model][0], num_bins=10, ax=panel)
            panel.set(xlabel="", ylabel="")
            panel.set_title(name if panel in axes[0] else "", fontsize="medium")
        panels[0].set_ylabel(model, fontsize="medium")
    figure.supxlabel("confidence; bars: share of all rows", fontsize="medium")
    figure.supylabel("share of rows that are right", fontsize="medium")
    _common.save(figure, task.options, "classes.png", dpi=75)


def main(options):
    """Run the study."""
    task = Task(options)
    found = predictions(task)
    rows = [row(*cell, *result, task) for cell, result in found.items()]
    frame = pandas.DataFrame(rows)
    frame = frame.loc[:, (frame != "").any()]  # without chains there are no columns of theirs
    _common.print_table(frame.to_dict("records"))
    frame.to_csv(options.output / "classes.csv", index=False)
    draw(found, task)


if __name__ == "__main__":
    several = {"type": str, "nargs": "+"}
    tables = _class_data.TABLES
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with the UCI sets, <name>.npz"},
            tables=several | {"default": tables, "choices": tables, "metavar": "TABLE", "help": "; ".join(tables)},
            models=several | {"default": DEFAULT, "choices": MODELS, "metavar": "MODEL", "help": "; ".join(MODELS)},
            mnist={"type": Path, "help": "with MNIST's four files, or the first 5000 of its training images"},
            most_rows=(_class_data.MOST_ROWS, "to learn from, but of images"),
            budget=(100.0, "seconds of the estimator"),
            width=128,
            num_warmup=(
                500,
                "draws of each of two chains, of ten steps if microcanonical; blocks take twice, others 0.2 times",
            ),
            num_samples=(300, "draws of each of two chains"),
            readout_scale=(
                0.0,
                "of one GELU layer, in the place of what the limit chooses; times one of unit variance",
            ),
            power=(10.0, "of the likelihood of the cold posterior"),
        )
    )
