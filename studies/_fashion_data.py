"""Images for the study of Fashion-MNIST, and class probabilities from regression on classes."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import _data

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
NUM_CLASSES = 10
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(16)


class Images(NamedTuple):
    """Pixels (n, d) and labels (n,) to train on and to test on, and pixels of images of another kind."""

    x: np.ndarray
    labels: np.ndarray
    x_test: np.ndarray
    labels_test: np.ndarray
    x_shifted: np.ndarray


def load(folder, num_train, num_test, pool=2):
    """Read Fashion-MNIST and handwritten digits beside it, or these digits and their negatives without a folder.

    Fashion-MNIST's 28 x 28 pixels are averaged over squares of ``pool`` a side, to 14 x 14 by default, and the digits
    brought to that size. Pixels are standardised by the training images, all with one mean and one scale.
    """
    folder = folder or (DEBIAN if DEBIAN.is_dir() else None)
    digits = _data.digits()
    if folder is None:
        print("No folder of Fashion-MNIST: scikit-learn's digits in its place, and their negatives as shifted images.")
        train, test = _data.split(digits, num_train, num_test, seed=0)
        parts = [part.reshape(-1, 64) for part in (train.inputs, test.inputs, 16.0 - test.inputs)]
    else:
        train, test = _data.fashion_mnist(folder)
        train, test = _data.split(train, num_train, 0, seed=0)[0], _data.split(test, num_test, 0, seed=0)[0]
        # From 8 x 8 to 24 x 24 pixels, in a frame of two.
        enlarged = np.kron(digits.inputs * (255 / 16), np.ones((1, 3, 3)))
        enlarged = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))
        parts = [_data.pooled(part, pool).reshape(len(part), -1) for part in (train.inputs, test.inputs, enlarged)]
    scale = _data.Standardiser.fit(parts[0], by_column=False)
    x, x_test, x_shifted = map(scale, parts)
    return Images(x, train.targets, x_test, test.targets, x_shifted)


def shares_of_largest(mean, variance):
    """Return the probability of each class that its value is the largest of all, for independent Gaussians.

    Args:
        mean: means of the values of the classes, (n, k).
        variance: variance of the values of a row, noise included, (n,).

    Returns:
        The probabilities, (n, k), by quadrature over the value of the class: the others lie below it.
    """
    scaled = mean / jnp.sqrt(variance)[:, None]
    gaps = scaled[:, :, None] - scaled[:, None, :]
    others = ~np.eye(mean.shape[1], dtype=bool)

    def given(node):
        return jnp.prod(jnp.where(others, jax.scipy.special.ndtr(gaps + node), 1.0), axis=-1)

    shares = sum(share * given(node) for node, share in zip(_NODES, _SHARES / _SHARES.sum(), strict=True))
    return shares / shares.sum(-1, keepdims=True)
