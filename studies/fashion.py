"""Fashion-MNIST: wide Bayesian networks under softmax and on one-hot codes, held against what is usual.

Accuracy, negative log-likelihood and calibration at test images, and predictive entropy there and on handwritten
digits, by size and model; effective draws for each gradient and second with and without surrogates. One-hot codes are
regressed on with the readout integrated out, scale and noise by the evidence of the infinitely wide network; the
probability of a class is that its code, noise included, has the largest value. Rows are written to fashion.csv as they
are done, and a study that was interrupted goes on where it stopped. Weights are not stored. Without Debian's package
dataset-fashion-mnist, or a --folder with its files, scikit-learn's digits take its place.

    python studies/fashion.py --folder path/to/fashion-mnist
"""

import argparse
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.special import entr

import _chains
import _common
import _fashion_baselines as baselines
import _fashion_data
from _fashion_data import NUM_CLASSES
from numpyro_wide import collapse_readout, diagnostics, fitted_surrogate, repriorise, surrogate_targets
from numpyro_wide.linear_gaussian import readout_posterior
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.readout import site_function
from numpyro_wide.runs import reduced
from numpyro_wide.surrogates import class_contrasts
from numpyro_wide.wide_limit import fcn_kernel

SOFTMAX = ("softmax, fitted", "softmax, quick", "softmax, plain")
NNGPS = ("NNGP, one-hot codes", "NNGP, softmax, variational")
MODELS = ("logistic regression", *NNGPS, "deep ensemble", "one-hot codes", *SOFTMAX)
COMPARED = SOFTMAX[1:]  # at the first size alone
W_STD, B_STD, LOGIT_SCALE = 2**0.5, 0.1, 3.0  # about the prior standard deviation of a logit
FITTED = {"NNGP, softmax, variational": "fitted", "softmax, fitted": "fitted", "softmax, quick": "quick"}


class Cell(NamedTuple):
    """A fit; depth and width are 0 where there is no such thing."""

    model: str
    depth: int
    width: int


class Row(NamedTuple):
    """Scores; then what chains cost, NaN without any: ESS of projections of test functions, ArviZ's and equation 7."""

    accuracy: float
    nll: float
    calibration_error: float
    entropy_test: float
    entropy_shifted: float
    bulk_ess: float = np.nan
    worst_bulk_ess: float = np.nan
    paper_ess: float = np.nan
    largest_rhat: float = np.nan
    draws: float = np.nan
    gradients: float = np.nan
    seconds: float = np.nan


@dataclass(frozen=True, eq=False)
class Task:
    """Images and options of the study, hashable for what is cached.

    Attributes:
        images: images and labels to train on and to test on, and images of another kind.
        options: options of the command line.
    """

    images: _fashion_data.Images
    options: argparse.Namespace

    @property
    def elsewhere(self):
        """Images that are predicted: those of the test and the shifted ones."""
        return np.concatenate([self.images.x_test, self.images.x_shifted])


def network(x, observed=None, *, depth, width, likelihood, num_outputs, readout_scale):
    """Sample some GELU layers in NTK parametrisation, every weight N(0, 1)."""
    hidden = x
    for i in range(depth):
        shape = (hidden.shape[1], width)
        weights = numpyro.sample(f"weights_{i}", dist.Normal(0, 1).expand(shape).to_event(2))
        bias = numpyro.sample(f"bias_{i}", dist.Normal(0, 1).expand([width]).to_event(1))
        hidden = jax.nn.gelu(W_STD / np.sqrt(shape[0]) * hidden @ weights + B_STD * bias, approximate=False)
    features = numpyro.deterministic("features", readout_scale / np.sqrt(width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width, num_outputs]).to_event(2))
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("observed", likelihood(features @ readout), obs=observed)


def softmax(values):
    """Return the distribution of classes, by contrasts of their logits."""
    return dist.Categorical(logits=values @ class_contrasts(NUM_CLASSES).T)


@cache
def evidence_scales(task, depth):
    """Return the scale of the readout and of the noise of one-hot codes."""
    kernel = fcn_kernel(depth, "gelu", w_std=W_STD, b_std=B_STD)
    return baselines.scales_by_evidence(kernel(task.images.x)[0], task.images.labels)


@cache
def surrogate(task, form, depth):
    """Return the quick surrogate, or the one fitted at the wide limit, and the seconds that took."""
    images, start, several = task.images, time.process_time(), {"num_classes": NUM_CLASSES, "contrasts": True}
    if form == "quick":
        found = surrogate_targets(images.labels, "categorical", **several)
    else:
        kernel = fcn_kernel(depth, "gelu", w_std=W_STD, b_std=B_STD, readout_w_std=LOGIT_SCALE)
        found = fitted_surrogate(images.labels, "categorical", kernel(images.x)[0], **several)
    return found, time.process_time() - start


def of_softmax(cell, task):
    """Return the model, its observations, and functions of a draw: test logits, probabilities of all images."""
    sizes = {"depth": cell.depth, "width": cell.width, "num_outputs": NUM_CLASSES - 1}
    plain = model = partial(network, **sizes, likelihood=softmax, readout_scale=LOGIT_SCALE)
    form = cell.model.split(", ")[1]
    if form != "plain":
        gaussian, _ = surrogate(task, form, cell.depth)
        model = repriorise(plain, readout="readout", features="features", targets="observed", surrogate=gaussian)

    def values(draw):
        return site_function(plain, "features", task.elsewhere)(draw) @ draw["readout"]

    return model, task.images.labels, lambda draw: (values(draw), jax.nn.softmax(softmax(values(draw)).logits))


def of_one_hot(cell, task):
    """Return the same for regression on one-hot codes, with the readout integrated out."""
    scale, noise = evidence_scales(task, cell.depth)
    sizes = {"depth": cell.depth, "width": cell.width, "num_outputs": NUM_CLASSES}
    normal = lambda values: dist.Normal(values, noise).to_event(1)  # noqa: E731
    plain = partial(network, **sizes, likelihood=normal, readout_scale=scale)
    codes = _common.centred_codes(task.images.labels, NUM_CLASSES)

    def functions(draw):
        known, new = (site_function(plain, "features", x)(draw) for x in (task.images.x, task.elsewhere))
        mean, covariance = readout_posterior(known, codes, noise)
        variance = jnp.sum((new @ covariance) * new, axis=1)
        return new @ mean, _fashion_data.shares_of_largest(new @ mean, variance + noise**2)

    return collapse_readout(plain, readout="readout", features="features", observed="observed"), codes, functions


def sample(cell, task):
    """Run two chains, one after the other: mean probabilities, and what effective draws of the test values cost."""
    images, options = task.images, task.options
    model, observed, functions = of_softmax(cell, task) if cell.model in SOFTMAX else of_one_hot(cell, task)
    sites = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(images.x, observed)
    drop = [name for name, site in sites.items() if name != "observed" and site["type"] in ("sample", "deterministic")]
    project = diagnostics.random_projections(jax.random.key(0), ["values"])
    num_test = len(images.x_test)
    stored = {
        "probs": lambda draw: functions(draw)[1],
        "projections": lambda draw: project({"values": functions(draw)[0][:num_test]}),
    }
    kernel = reduced(SplitHMC(model, persistence=0.0), drop=drop, functions=stored)
    lengths = {"num_warmup": options.num_warmup, "num_samples": options.num_samples, "num_chains": 2}
    mcmc = MCMC(kernel, **lengths, chain_method="sequential", progress_bar=False)
    mcmc.run(jax.random.key(1), images.x, observed, extra_fields=("num_grad",))
    draws = mcmc.get_samples(group_by_chain=True)
    probs, projections = np.asarray(draws["probs"]).mean((0, 1)), np.asarray(draws["projections"])
    bulk = _chains.bulk_ess(projections)
    rhat = _chains.rhat(projections)
    num_grad = int(mcmc.get_extra_fields()["num_grad"].sum())
    paper = diagnostics.effective_sample_size(projections)
    costs = bulk.mean(), bulk.min(), paper.mean(), rhat.max(), projections[..., 0].size, num_grad
    return (probs[:num_test], probs[num_test:]), costs


def predict(cell, task):
    """Predict probabilities at test and at shifted images, with the costs of a chain."""
    images, options = task.images, task.options
    kernel = fcn_kernel(cell.depth, "gelu", w_std=W_STD, b_std=B_STD) if cell.depth else None
    elsewhere = images.x_test, images.x_shifted
    match cell.model:
        case "logistic regression":
            return baselines.logistic_regression(images), ()
        case "deep ensemble":
            network = baselines.Network(cell.depth, cell.width)
            return baselines.ensemble(network, images.x, images.labels, *elsewhere, num_epochs=options.num_epochs), ()
        case "NNGP, one-hot codes":
            scales = evidence_scales(task, cell.depth)
            return baselines.infinite_regression(kernel, *scales, images.x, images.labels, *elsewhere), ()
        case "NNGP, softmax, variational":
            kernel = fcn_kernel(cell.depth, "gelu", w_std=W_STD, b_std=B_STD, readout_w_std=LOGIT_SCALE)
            fitted, _ = surrogate(task, "fitted", cell.depth)
            return baselines.infinite_softmax(kernel, fitted, images.x, *elsewhere), ()
    return sample(cell, task)


def run(cell, task):
    """Fit, predict, score; seconds are the processor's, compilation and what is fitted before the chains included."""
    seconds = surrogate(task, FITTED[cell.model], cell.depth)[1] if cell.model in FITTED else 0.0
    start = time.process_time()
    (probs, shifted), costs = predict(cell, task)
    scores = diagnostics.classification_scores(task.images.labels_test, probs)
    row = [scores[name] for name in ("accuracy", "negative_log_likelihood", "expected_calibration_error")]
    row += [float(entr(np.asarray(part)).sum(-1).mean()) for part in (probs, shifted)]
    return Row(*row, *map(float, costs))._replace(seconds=seconds + time.process_time() - start)


def cells_of(sizes, models):
    """List what there is to run: the cheap before the dear, comparisons of chains at the first size."""
    sizes = [tuple(map(int, size.split("x"))) for size in sizes]
    found = []
    for model in models:
        if model == MODELS[0]:
            found.append(Cell(model, 0, 0))
        elif model in NNGPS:
            found += [Cell(model, depth, 0) for depth in sorted({depth for depth, _ in sizes})]
        else:
            found += [Cell(model, *size) for size in (sizes[:1] if model in COMPARED else sizes)]
    return found


def summary(rows):
    """Return the table of what was predicted, and that of what chains cost, under the names of a page."""
    scores, costs = [], []
    for cell, row in rows.items():
        size = f"{cell.depth} x {cell.width}" if cell.width else f"{cell.depth} x ∞" if cell.depth else ""
        scores.append(
            {
                "model": cell.model,
                "size": size,
                "accuracy": f"{row.accuracy:.3f}",
                "NLL": f"{row.nll:.3f}",
                "ECE": f"{row.calibration_error:.3f}",
                "entropy, test": f"{row.entropy_test:.2f}",
                "entropy, shifted": f"{row.entropy_shifted:.2f}",
                "seconds": f"{row.seconds:.0f}",
            }
        )
        if row.draws > 0:
            costs.append(
                {
                    "model": cell.model,
                    "size": size,
                    "draws": f"{row.draws:.0f}",
                    "gradients a draw": f"{row.gradients / row.draws:.1f}",
                    "bulk ESS": f"{row.bulk_ess:.0f}",
                    "worst": f"{row.worst_bulk_ess:.0f}",
                    "ESS by Hron 2022": f"{row.paper_ess:.0f}",
                    "R-hat, largest": f"{row.largest_rhat:.2f}",
                    "gradients for one": f"{row.gradients / row.bulk_ess:.1f}",
                    "seconds for one": f"{row.seconds / row.bulk_ess:.2f}",
                }
            )
    return scores, costs


def draw(rows):
    """Draw scores and entropies of every row."""
    size = 8, 1.5 + 0.5 * len(rows)  # legible at half of it
    figure, grid = plt.subplots(2, 2, figsize=size, sharey=True, layout="constrained")
    axes = grid.ravel()
    panels = dict(zip(("accuracy", "nll", "calibration_error", "entropy_test"), axes, strict=True))
    for column, panel in (*panels.items(), ("entropy_shifted", axes[3])):
        places = np.arange(len(rows))[::-1]
        panel.plot([getattr(row, column) for row in rows.values()], places, "o", label=column.replace("entropy_", ""))
        panel.grid(axis="y", alpha=0.3)
    titles = ("accuracy", "negative log-likelihood", "calibration error", "predictive entropy, nats")
    for panel, title in zip(axes, titles, strict=True):
        panel.set(xlabel=title, ylim=(-0.5, len(rows) - 0.5))
    axes[3].legend(title="images")
    names = [f"{cell.model}, {cell.depth} x {cell.width or '∞'}" if cell.depth else cell.model for cell in rows]
    for panel in grid[:, 0]:
        panel.set_yticks(places, names)
    return figure


def main(options):
    """Run the study."""
    images = _fashion_data.load(options.folder, options.num_train, options.num_test)
    task = Task(images, options)
    cells = cells_of(options.sizes, options.models)
    table = options.output / "fashion.csv"
    rows = _common.resumed(
        table,
        cells,
        Row,
        lambda cell: run(cell, task),
        unit="fit",
        name=lambda cell: f"{cell.model}, {cell.depth}x{cell.width}",
    )
    rows = dict(sorted(rows.items(), key=lambda item: (MODELS.index(item[0].model), item[0])))
    for name, part in zip(("fashion_scores.csv", "fashion_costs.csv"), summary(rows), strict=True):
        _common.write_table(part, options.output / name)
    _common.save(draw(rows), options, "fashion.png", dpi=100)


if __name__ == "__main__":
    several = {"type": str, "nargs": "+"}
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": f"with the four files; by default {_fashion_data.DEBIAN}, or else digits"},
            sizes=several | {"default": ["1x256", "1x512", "1x1024", "3x256"], "help": "layers x units"},
            models=several | {"default": MODELS, "choices": MODELS, "metavar": "MODEL", "help": "; ".join(MODELS)},
            num_train=2000,
            num_test=2000,
            num_warmup=150,
            num_samples=(150, "of each of two chains"),
            num_epochs=(60, "of a member of the ensemble"),
        )
    )
