"""Tables of classes for the study of calibration."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import sklearn.datasets

import _common
import _data
from _fashion_data import DEBIAN

MOST_ROWS, MOST_TESTED = 1000, 2000
OF_SKLEARN = {"breast cancer": "load_breast_cancer", "wine": "load_wine"}
TEST_SHARE = 1 / 3  # of those
# Sets of measurements in a folder, and the value above which a row is of the second class: of wine quality 6 or more,
# of protein a distance of more than 5 ångström, half of them; of the others the median, None.
OF_NUMBERS = {
    "wine quality": ("wine", 5.5),
    "protein": ("protein", 5.0),
    **{name: (name, None) for name in ("airfoil", "concrete", "kin8nm", "power")},
}
# Images of 28 x 28 pixels, averaged over squares of two, and how many of the first are learnt from.
OF_IMAGES = {
    f"{name}, {rows}": (name, rows)
    for name, rows in (("MNIST", 1000), ("Fashion-MNIST", 2000), ("MNIST", 5000), ("Fashion-MNIST", 10_000))
}
TABLES = ("digits", *OF_SKLEARN, *OF_NUMBERS, *OF_IMAGES)


class Table(NamedTuple):
    """Inputs (n, d), standardised by the training rows, and classes (n,), to train on and to test on."""

    x: np.ndarray
    labels: np.ndarray
    x_test: np.ndarray
    labels_test: np.ndarray

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    @property
    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of both parts as images, (n, side, side, 1)."""
        side = round(self.x.shape[1] ** 0.5)
        return self.x.reshape(-1, side, side, 1), self.x_test.reshape(-1, side, side, 1)


class Folders(NamedTuple):
    """Folders with the sets of UCI, ``<name>.npz``, with MNIST's files, and with Fashion-MNIST's."""

    uci: Path | None
    mnist: Path | None
    fashion: Path | None = DEBIAN if DEBIAN.is_dir() else None

    def have(self, name: str) -> bool:
        """Tell whether a table can be read."""
        if name in OF_IMAGES:
            return (self.mnist if OF_IMAGES[name][0] == "MNIST" else self.fashion) is not None
        return name not in OF_NUMBERS or self.uci is not None


def load(name: str, folders: Folders, most_rows: int = MOST_ROWS) -> Table:
    """Read one of ``TABLES``, and split it; ``most_rows`` are the most to train on, but of images."""
    if name == "digits":
        parts = _common.digits(min(1000, most_rows), 797)
    elif name in OF_IMAGES:
        parts = _of_images(*OF_IMAGES[name], folders)
    elif name in OF_SKLEARN:
        inputs, labels = getattr(sklearn.datasets, OF_SKLEARN[name])(return_X_y=True)
        num_test = round(TEST_SHARE * len(labels))
        num_train = min(most_rows, len(labels) - num_test)
        parts = _standardised(*_data.split(_data.Dataset(inputs, labels), num_train, num_test, seed=0))
    else:
        parts = _of_numbers(*OF_NUMBERS[name], folders.uci, most_rows)
    (x, labels), (x_test, labels_test) = parts
    return Table(np.float32(x), np.asarray(labels), np.float32(x_test), np.asarray(labels_test))


def _of_images(name: str, num_train: int, folders: Folders) -> tuple:
    """Take the first images of both parts, standardised by the training images, all pixels with one mean and scale."""
    parts = _data.mnist(folders.mnist) if name == "MNIST" else _data.fashion_mnist(folders.fashion)
    counts = num_train, MOST_TESTED
    firsts = [
        _data.Dataset(_data.pooled(part.inputs[:count]).reshape(count, -1), part.targets[:count])
        for part, count in zip(parts, counts, strict=True)
    ]
    return _standardised(*firsts, by_column=False)


def _of_numbers(file: str, threshold: float | None, folder: Path, most_rows: int) -> tuple:
    """Split a set of numbers, its copies of rows left out, by which side of a threshold the target is on."""
    parts = _data.uci(folder, file)
    rows = np.concatenate([np.column_stack(part) for part in parts])
    rows = np.unique(rows, axis=0)
    threshold = float(np.median(rows[:, -1])) if threshold is None else threshold
    both = _data.Dataset(rows[:, :-1], (rows[:, -1] > threshold).astype(int))
    num_train = min(most_rows, len(rows) // 2)
    return _standardised(*_data.split(both, num_train, min(MOST_TESTED, len(rows) - num_train), seed=0))


def _standardised(train: _data.Dataset, test: _data.Dataset, by_column: bool = True) -> tuple:
    scale = _data.Standardiser.fit(train.inputs, by_column=by_column)
    return tuple(part._replace(inputs=scale(part.inputs)) for part in (train, test))
