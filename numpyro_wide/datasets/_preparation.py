"""From raw numbers to what a network takes: subsets, standardised inputs, centred one-hot targets."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_wide._checks import whole_number


class Dataset(NamedTuple):
    """Inputs and targets, row by row.

    Attributes:
        inputs: (n, ...): bytes for images, floats for tables.
        targets: (n,): labels for classes, floats for regression.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Standardiser(NamedTuple):
    """Shift and scale that give the training rows mean zero and variance one.

    Attributes:
        loc: what is subtracted; broadcasts against rows.
        scale: what is divided by, likewise.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.datasets import Standardiser
        >>> standardiser = Standardiser.fit(np.array([[1.0, 5.0], [3.0, 5.0]]))
        >>> standardiser(np.array([[4.0, 6.0]])).tolist()  # a constant column is only shifted
        [[2.0, 1.0]]
    """

    loc: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, train: ArrayLike, *, by_column: bool = True) -> "Standardiser":
        """Take mean and standard deviation of the training rows.

        Args:
            train: (n, ...), the training rows alone: nothing of the test rows may enter.
            by_column: one mean and one deviation for each entry of a row; False for one of each in all, for images.

        Returns:
            The standardiser.

        Raises:
            ValueError: without rows, or if they hold NaN or infinity.
        """
        values = np.asarray(train, np.float64)
        if values.ndim == 0 or values.shape[0] == 0:
            raise ValueError(f"train must have at least one row, but has shape {values.shape}.")
        if not np.isfinite(values).all():
            raise ValueError(f"train must be finite, but {int((~np.isfinite(values)).sum())} of its entries are not.")
        axis = 0 if by_column else None
        loc, scale = values.mean(axis=axis), values.std(axis=axis)
        # Rounding of a constant column leaves a deviation that is not quite zero.
        is_constant = scale <= 1e-12 * np.abs(loc)
        return cls(np.asarray(loc), np.where(is_constant, 1.0, scale))

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Standardise any rows, as float32."""
        return ((np.asarray(values, np.float64) - self.loc) / self.scale).astype(np.float32)

    def inverse(self, values: ArrayLike) -> np.ndarray:
        """Back to the units of the training rows."""
        return np.asarray(values, np.float64) * self.scale + self.loc


def centred_one_hot(labels: ArrayLike, num_classes: int) -> np.ndarray:
    """Targets for regression on classes: one for the label less the mean, 1 / num_classes (Hron 2022, §4).

    Args:
        labels: whole numbers from 0 to num_classes − 1, (n,).
        num_classes: number of classes.

    Returns:
        (n, num_classes), float32; rows sum to zero.

    Raises:
        ValueError: for labels that are not whole numbers in that range, or not a vector.

    Example:
        >>> from numpyro_wide.datasets import centred_one_hot
        >>> centred_one_hot([1, 3], 4).tolist()
        [[-0.25, 0.75, -0.25, -0.25], [-0.25, -0.25, -0.25, 0.75]]
    """
    num_classes = whole_number("num_classes", num_classes)
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be a vector of whole numbers, but got {labels.dtype} of shape {labels.shape}.")
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(
            f"labels must be from 0 to {num_classes - 1}, but they are from {labels.min()} to {labels.max()}."
        )
    return (np.arange(num_classes) == labels[:, None]).astype(np.float32) - np.float32(1 / num_classes)


def subset(examples: Dataset, num_rows: int, seed: int) -> Dataset:
    """Rows drawn at random without replacement; the same for the same seed, on every machine.

    Args:
        examples: to draw from.
        num_rows: how many.
        seed: of the draw. The subset of fewer rows is the beginning of that of more.

    Returns:
        The rows drawn, in the order drawn.

    Raises:
        ValueError: if there are not so many rows.

    Example:
        >>> from numpyro_wide.datasets import marathon, subset
        >>> subset(marathon(), 3, seed=0).inputs.shape
        (3, 1)
    """
    return split(examples, whole_number("num_rows", num_rows, 0), 0, seed)[0]


def split(examples: Dataset, num_train: int, num_test: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and test rows that do not overlap, drawn at random without replacement.

    Args:
        examples: to draw from.
        num_train: number of training rows.
        num_test: number of test rows.
        seed: of the draw.

    Returns:
        Training and test rows.

    Raises:
        TypeError: if the examples are no :class:`Dataset`, such as a pair of arrays.
        ValueError: if there are fewer rows than asked for, or a number is negative.

    Example:
        >>> from numpyro_wide.datasets import marathon, split
        >>> train, test = split(marathon(), 20, 7, seed=0)
        >>> len(train.targets), len(test.targets)
        (20, 7)
    """
    num_train, num_test = whole_number("num_train", num_train, 0), whole_number("num_test", num_test, 0)
    if not isinstance(examples, Dataset):
        raise TypeError(
            f"examples must be a Dataset, but got a {type(examples).__name__}; write Dataset(inputs, targets)."
        )
    available = len(examples.targets)
    if num_train + num_test > available:
        raise ValueError(f"{num_train} training and {num_test} test rows were asked for, but there are {available}.")
    order = np.random.default_rng(seed).permutation(available)
    train, test = order[:num_train], order[num_train : num_train + num_test]
    return (
        Dataset(examples.inputs[train], examples.targets[train]),
        Dataset(examples.inputs[test], examples.targets[test]),
    )
