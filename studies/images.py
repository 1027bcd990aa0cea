"""Images and the wide limit: MNIST by a published convolutional GP, and by a fully connected one.

The kernel of the ConvNet GP of Garriga-Alonso et al. (2019), seven layers of 7 x 7 filters with the hyperparameters of
its authors' code, stands on rows 5000 onwards, as theirs does: errors at every twentieth test image by number of rows,
with the tangent kernel of the same network and a fully connected one beside it. Classes are codes; their noise is
chosen by the log density of rows left out, their scale by the evidence. Kernels are written to disk, so that a study
that was interrupted goes on where it stopped. Without a --folder with MNIST's files, digits take its place.

    python studies/images.py --folder path/to/mnist
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas
from flax import linen

import _common
import _data
from _fashion_data import shares_of_largest
from _kernels_on_disk import kernels_on_disk
from numpyro_wide import diagnostics, wide_limit
from numpyro_wide.nn import FCN, NTKConv

FIRST_ROW, TEST_STRIDE, NUM_CLASSES = 5000, 20, 10
# Of the authors' configuration: variances of a bias, and of a weight at each place of the filter.
VAR_BIAS, VAR_WEIGHT, SIDE, DEPTH = 7.86, 2.79, 7, 7
NOISES = np.geomspace(1e-6, 1e-1, 16)  # of the kernel's mean diagonal
BLOCK, NUM_ROWS = 32, 256  # of the tiles, and of the rows that are written at a time


class ConvNet(linen.Module):
    """Network of the published GP: ReLU, zero padding, all pixels in the readout."""

    width: int = 16

    @linen.compact
    def __call__(self, x):
        """Return the scaled features (n, d) of images."""
        layer = partial(NTKConv, self.width, kernel_size=(SIDE, SIDE), padding="SAME")
        for _ in range(DEPTH):
            x = jax.nn.relu(layer(w_std=SIDE * VAR_WEIGHT**0.5, b_std=VAR_BIAS**0.5)(x))
        units = x.reshape(len(x), -1)
        bias = jnp.full((len(x), 1), VAR_BIAS**0.5)
        return jnp.concatenate([(VAR_WEIGHT / units.shape[1]) ** 0.5 * units, bias], axis=1)


def convnet_rule(_, inputs):
    """Give the kernels of a ConvNet."""
    units = inputs.images()
    for _ in range(DEPTH):
        units = units.convolution(
            SIDE * VAR_WEIGHT**0.5, VAR_BIAS**0.5, kernel_size=(SIDE, SIDE), padding="SAME"
        ).activate("relu")
    return units.features("flatten", VAR_WEIGHT**0.5, VAR_BIAS**0.5)


wide_limit.register_kernel(ConvNet, convnet_rule)


class Images(NamedTuple):
    """Images (n, height, width, 1) with pixels in [0, 1], and labels (n,), to train on and to test on."""

    x: np.ndarray
    labels: np.ndarray
    x_test: np.ndarray
    labels_test: np.ndarray


def load(folder, num_train, num_test):
    """Read MNIST, or digits in its place."""
    if folder is None:
        print("No folder of MNIST: scikit-learn's digits in its place.")
        train, test = _data.split(_data.digits(), num_train, num_test, seed=0)
        scale = 16
    else:
        train, test = _data.mnist(folder)
        train, test = train._replace(inputs=train.inputs[FIRST_ROW:], targets=train.targets[FIRST_ROW:]), test
        test = test._replace(inputs=test.inputs[::TEST_STRIDE], targets=test.targets[::TEST_STRIDE])
        scale = 255
    x, x_test = (np.float32(part.inputs[..., None] / scale) for part in (train, test))
    return Images(x[:num_train], train.targets[:num_train], x_test[:num_test], test.targets[:num_test])


def kernels(network, images, folder):
    """Return both kernels of the rows, of test images and rows, and their diagonals at test images."""
    kernel = wide_limit.kernel(network, block_size=BLOCK)
    cross = kernels_on_disk(kernel, folder / "cross", images.x_test, images.x, num_rows=NUM_ROWS)
    own = jax.jit(partial(jax.lax.map, lambda x: jnp.stack(kernel(x[None]))[:, 0, 0]))(jnp.asarray(images.x_test))
    return kernels_on_disk(kernel, folder / "rows", images.x, num_rows=NUM_ROWS), cross, np.asarray(own).T


class Regression(NamedTuple):
    """Regression on codes: means (m, k) of test images' values, and variance (m,) of each, noise included."""

    mean: np.ndarray
    variance: np.ndarray


def codes_of(labels):
    """Return 1 for the class of an image and -1 for the others, (n, k), as the published GP has them."""
    return 2 * np.eye(NUM_CLASSES)[labels] - 1


def regression(rows, cross, own, labels):
    """Regress on codes, the amplitude by the evidence, the noise by the log density of rows left out."""
    codes, cross = codes_of(labels), np.asarray(cross, float)
    values, vectors = np.linalg.eigh(np.asarray(rows, float))
    rotated, found = vectors.T @ codes, []
    for noise in NOISES * np.trace(rows) / len(rows):
        shrunk = 1 / (np.maximum(values, 0) + noise)
        weights, precisions = vectors @ (shrunk[:, None] * rotated), vectors**2 @ shrunk
        amplitude = np.mean(codes * weights)
        variances = amplitude / precisions[:, None]
        # The row's own code less its mean given the others is its weight over its precision.
        misfit = (weights / precisions[:, None]) ** 2 / variances
        found.append((-np.mean(misfit + np.log(variances)), noise, amplitude, shrunk, weights))
    _, noise, amplitude, shrunk, weights = max(found, key=lambda candidate: candidate[0])
    variance = np.asarray(own, float) + noise - (cross @ vectors) ** 2 @ shrunk
    return Regression(cross @ weights, amplitude * variance)


def scores(probs, labels):
    """Return error, NLL and calibration error of probabilities."""
    found = diagnostics.classification_scores(labels, jnp.asarray(probs))
    return 1 - found["accuracy"], found["negative_log_likelihood"], found["expected_calibration_error"]


def probabilities(mean, variance):
    """Return the probability of each class that its code is the largest, for means (m, k) and variances (m,)."""
    return np.asarray(shares_of_largest(jnp.asarray(mean), jnp.asarray(variance)))


def curves(images, sizes, folder):
    """Return scores of the limits by number of rows."""
    networks = {
        "ConvNet GP": (ConvNet(), 0),
        "its tangent kernel": (ConvNet(), 1),
        "FCN GP, 3 ReLU layers": (FCN(3, 1, "relu", w_std=2**0.5, b_std=0.3, readout_b_std=0.3), 0),
    }
    rows = []
    for name, (network, which) in networks.items():
        parts = kernels(network, images, folder / type(network).__name__)
        square, cross, own = (part[which] for part in parts)
        for size in sizes:
            found = regression(square[:size, :size], cross[:, :size], own, images.labels[:size])
            probs = probabilities(found.mean, found.variance)
            rows.append((name, size, *scores(probs, images.labels_test)))
    return rows


def draw(table):
    """Draw errors by number of rows."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for name, part in table.groupby("model", sort=False):
        for panel, column in zip(panels, ("error", "nll"), strict=True):
            panel.plot(part["rows"], part[column], "o-", label=name)
    for panel, label in zip(panels, ("error at test images", "negative log-likelihood"), strict=True):
        panel.set(xscale="log", ylim=(0, None), xlabel="images to learn from", ylabel=label)
        _common.number_ticks(panel, sorted(set(table["rows"])))
    panels[1].legend(fontsize="small")
    return figure


def main(options):
    """Run the study."""
    images = load(options.folder, max(options.sizes), options.num_test)
    rows = curves(images, sorted(options.sizes), options.output / "kernels")
    columns = ["model", "rows", "error", "nll", "calibration_error"]
    table = pandas.DataFrame(rows, columns=columns)
    _common.print_table(table.to_dict("records"))
    table.to_csv(options.output / "images.csv", index=False, float_format="%.5g")
    _common.save(draw(table), options, "images.png", dpi=100)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            folder={"type": Path, "help": "with MNIST's four files; without it, digits"},
            sizes=([500, 1000, 2000], "images to learn from"),
            num_test=500,
        )
    )
