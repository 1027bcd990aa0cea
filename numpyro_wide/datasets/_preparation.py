"""Preparation of raw numbers for a network: splits, standardised inputs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_wide._checks import check_positive, kind_of, whole_number


class Dataset(NamedTuple):
    """Inputs and targets, row by row.

    Attributes:
        inputs: bytes of images or floats of a table, (n, ...).
        targets: labels of classes or floats for regression, (n,).
    """

    inputs: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Standardiser:
    """Map of rows that gives the training rows mean zero and variance one.

    Its arrays are copies: what is done to the caller's later changes nothing here.

    Attributes:
        loc: numbers that are subtracted, of the shape of a row, or one number.
        scale: positive numbers that are divided by, of the shape of a row, or one number.

    Raises:
        TypeError: if they are not real numbers.
        ValueError: if they are not finite, ``scale`` is not positive, or the shapes differ.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.datasets import Standardiser
        >>> standardiser = Standardiser.fit(np.array([[1.0, 5.0], [3.0, 5.0]]))
        >>> standardiser(np.array([[4.0, 6.0]])).tolist()  # a constant column is only shifted
        [[2.0, 1.0]]
    """

    loc: np.ndarray
    scale: np.ndarray

    def __post_init__(self) -> None:
        """Check the numbers, and hold copies."""
        for name in ("loc", "scale"):
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        check_positive("scale", self.scale)
        if self.loc.shape != self.scale.shape and self.loc.ndim and self.scale.ndim:
            raise ValueError(
                f"loc and scale must have the same shape, that of a row, but have {self.loc.shape} and "
                f"{self.scale.shape}; pass a number where one holds for the whole row."
            )

    @classmethod
    def fit(cls, train: ArrayLike, *, by_column: bool = True) -> "Standardiser":
        """Take mean and standard deviation of the training rows.

        Args:
            train: training rows alone, (n, ...): nothing of the test rows may enter.
            by_column: whether each entry of a row has its own mean and deviation; False for one of each in all, for
                images.

        Returns:
            The standardiser.

        Raises:
            TypeError: if they are not real numbers.
            ValueError: without rows, or if they hold NaN or infinity.
        """
        values = _finite("train", train)
        if values.ndim == 0 or values.shape[0] == 0:
            raise ValueError(f"train must have at least one row, but has shape {values.shape}; pass rows (n, ...).")
        axis = 0 if by_column else None
        loc, scale = values.mean(axis=axis), values.std(axis=axis)
        # Rounding of a constant column leaves a deviation that is not quite zero.
        is_constant = scale <= 1e-12 * np.abs(loc)
        return cls(loc, np.where(is_constant, 1.0, scale))

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Standardise rows.

        Args:
            values: rows (n, ...) of the shape of the training rows, in their units; or one row.

        Returns:
            The rows without units, in float32.

        Raises:
            TypeError: if they are not real numbers.
            ValueError: if their shape is not that of the training rows.
        """
        return ((self._rows(values) - self.loc) / self.scale).astype(np.float32)

    def inverse(self, values: ArrayLike) -> np.ndarray:
        """Return standardised rows to the units of the training rows.

        Args:
            values: standardised rows (n, ...), or one row.

        Returns:
            The rows in their units, in float64.

        Raises:
            TypeError: if they are not real numbers.
            ValueError: if their shape is not that of the training rows.
        """
        return self._rows(values) * self.scale + self.loc

    def _rows(self, values: ArrayLike) -> np.ndarray:
        rows = _real("values", values)
        row = self.loc.shape or self.scale.shape
        # A column would broadcast to as many columns as the training rows had.
        if rows.shape[max(rows.ndim - len(row), 0) :] != row:
            raise ValueError(
                f"values must be rows of shape {row}, as those that the standardiser was fitted to, but got an array "
                f"of shape {rows.shape}; fit another standardiser for other columns."
            )
        return rows


def _real(name: str, values: ArrayLike) -> np.ndarray:
    """Copy real numbers into float64."""
    array = np.asarray(values)
    if array.dtype.kind in "cOSUmM":
        raise TypeError(f"{name} must hold real numbers, but has the type {array.dtype}; encode what is none.")
    return np.array(array, np.float64)


def _finite(name: str, values: ArrayLike) -> np.ndarray:
    array = _real(name, values)
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be finite, but {int((~np.isfinite(array)).sum())} of its entries are not; drop or impute."
        )
    return array


def split(examples: Dataset, num_train: int, num_test: int, seed: int) -> tuple[Dataset, Dataset]:
    """Draw training and test rows that do not overlap, at random without replacement.

    Args:
        examples: rows to draw from.
        num_train: number of training rows.
        num_test: number of test rows.
        seed: seed of the draw.

    Returns:
        Training and test rows.

    Raises:
        TypeError: if the examples are not a :class:`Dataset`, such as a pair of arrays.
        ValueError: if there are fewer rows than asked for, a number is negative, or inputs and targets have
            different numbers of rows.

    Example:
        >>> from numpyro_wide.datasets import marathon, split
        >>> train, test = split(marathon(), 20, 7, seed=0)
        >>> len(train.targets), len(test.targets)
        (20, 7)
    """
    num_train, num_test = whole_number("num_train", num_train, 0), whole_number("num_test", num_test, 0)
    if not isinstance(examples, Dataset):
        raise TypeError(f"examples must be a Dataset, but got {kind_of(examples)}; write Dataset(inputs, targets).")
    inputs, targets = map(np.asarray, examples)
    available = len(targets)
    if len(inputs) != available:
        raise ValueError(
            f"inputs and targets must have the same number of rows, but got {len(inputs)} and {available}."
        )
    if num_train + num_test > available:
        raise ValueError(
            f"{num_train} training and {num_test} test rows were asked for, but there are {available}; ask for fewer."
        )
    order = np.random.default_rng(seed).permutation(available)
    train, test = order[:num_train], order[num_train : num_train + num_test]
    return (
        Dataset(inputs[train], targets[train]),
        Dataset(inputs[test], targets[test]),
    )
