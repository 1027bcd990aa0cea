"""Tables of classes for the study of calibration."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import sklearn.datasets

import _common
import _data
import _fashion_data

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
TABLES = ("digits", *OF_SKLEARN, *OF_NUMBERS, "fashion")


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


def load(name: str, folder: Path | None, most_rows: int = MOST_ROWS) -> Table:
    """Read a table, and split it.

    Args:
        name: one of ``TABLES``.
        folder: folder with the UCI sets, ``<name>.npz``, for those of numbers.
        most_rows: most training rows, of which Fashion-MNIST has twice as many.
    """
    if name == "digits":
        parts = _common.digits(min(1000, most_rows), 797)
    elif name == "fashion":
        images = _fashion_data.load(None, 2 * most_rows, MOST_TESTED)
        return Table(images.x, images.labels, images.x_test, images.labels_test)
    elif name in OF_SKLEARN:
        inputs, labels = getattr(sklearn.datasets, OF_SKLEARN[name])(return_X_y=True)
        num_test = round(TEST_SHARE * len(labels))
        num_train = min(most_rows, len(labels) - num_test)
        parts = _standardised(*_data.split(_data.Dataset(inputs, labels), num_train, num_test, seed=0))
    else:
        parts = _of_numbers(*OF_NUMBERS[name], folder, most_rows)
    (x, labels), (x_test, labels_test) = parts
    return Table(np.float32(x), np.asarray(labels), np.float32(x_test), np.asarray(labels_test))


def _of_numbers(file: str, threshold: float | None, folder: Path, most_rows: int) -> tuple:
    """Split a set of numbers, its copies of rows left out, by which side of a threshold the target is on."""
    parts = _data.uci(folder, file)
    rows = np.concatenate([np.column_stack(part) for part in parts])
    rows = np.unique(rows, axis=0)
    threshold = float(np.median(rows[:, -1])) if threshold is None else threshold
    both = _data.Dataset(rows[:, :-1], (rows[:, -1] > threshold).astype(int))
    num_train = min(most_rows, len(rows) // 2)
    return _standardised(*_data.split(both, num_train, min(MOST_TESTED, len(rows) - num_train), seed=0))


def _standardised(train: _data.Dataset, test: _data.Dataset) -> tuple:
    scale = _data.Standardiser.fit(train.inputs)
    return tuple(part._replace(inputs=scale(part.inputs)) for part in (train, test))
