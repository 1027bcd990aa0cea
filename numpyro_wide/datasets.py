"""A small table for the pages: data of one's own are arrays, and scikit-learn reads and splits others."""

import csv
import importlib.resources
from typing import NamedTuple

import numpy as np

__all__ = ["marathon"]


class Dataset(NamedTuple):
    """Inputs (n, d) and targets (n,), row by row."""

    inputs: np.ndarray
    targets: np.ndarray


def marathon() -> Dataset:
    """Load the winning paces of the Olympic marathon, men: years (n, 1) and minutes per km (n,).

    Example:
        >>> from numpyro_wide.datasets import marathon
        >>> marathon().inputs[:2].tolist()
        [[1896.0], [1900.0]]
    """
    table = importlib.resources.files("numpyro_wide") / "olympic_marathon_men.csv"
    _, *rows = csv.reader(table.read_text(encoding="utf-8").splitlines())
    values = np.array(rows, float)
    return Dataset(values[:, :-1], values[:, -1])
