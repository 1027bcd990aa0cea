"""Regression sets of the UCI repository with the splits on which published figures were taken."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from numpyro_wide._checks import listing, whole_number
from numpyro_wide.datasets._files import Folder
from numpyro_wide.datasets._preparation import Dataset

SOURCE = "https://archive.ics.uci.edu"
ARRAYS = ("inputs", "targets", "is_test")


def uci(folder: Folder, name: str, split: int = 0) -> tuple[Dataset, Dataset]:
    """Read one split of a regression set, such as those of Hernández-Lobato & Adams 2015, from a NumPy archive.

    Args:
        folder: path of the folder that holds ``<name>.npz``, with the arrays ``inputs`` (n, d), ``targets`` (n,) and
            ``is_test`` (splits, n), each row of which is True where a row of the set is for testing.
        name: name of the set.
        split: number of the split, from 0.

    Returns:
        Training and test rows: inputs (rows, d) and targets (rows,) in float64, in their own units and the file's
        order.

    Raises:
        FileNotFoundError: if the folder has no such set; the sets that it has are listed.
        ValueError: if there is no such split, or the file does not hold these arrays, finite and of shapes that fit.
        TypeError: if ``split`` is not a number.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from numpyro_wide.datasets import uci
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     inputs, is_test = np.arange(8.0).reshape(4, 2), np.array([[False, False, False, True]])
        ...     np.savez(f"{folder}/small.npz", inputs=inputs, targets=np.arange(4.0), is_test=is_test)
        ...     train, test = uci(folder, "small", split=0)
        >>> train.inputs.shape, test.targets.tolist()
        ((3, 2), [3.0])
    """
    split = whole_number("split", split, 0)
    path = Path(folder) / f"{name}.npz"
    if not path.is_file():
        raise _unknown(folder, name)
    inputs, targets, is_test = _checked(path, _arrays(path))
    if split >= len(is_test):
        raise ValueError(f"{path} has {len(is_test)} splits, from 0 to {len(is_test) - 1}, but split is {split}.")
    test = is_test[split]
    if test.all() or not test.any():
        raise _unfit(path, f"of its split {split}, {test.sum()} of {len(test)} rows are for testing")
    return Dataset(inputs[~test], targets[~test]), Dataset(inputs[test], targets[test])


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # Opened here, since NumPy leaves a file open that is a damaged archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in ARRAYS if name in archive}
    # TypeError: of a .npy file under another name NumPy gives the array, which no with statement takes.
    except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise _unfit(path, f"it cannot be read ({type(error).__name__}: {error})") from error


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lacking = [name for name in ARRAYS if name not in arrays]
    if lacking:
        raise _unfit(path, f"it lacks {listing(lacking)}")
    inputs, targets, is_test = (arrays[name] for name in ARRAYS)
    num_rows = len(inputs) if inputs.ndim == 2 else None
    if targets.shape != (num_rows,) or is_test.ndim != 2 or is_test.shape[1] != num_rows or not len(is_test):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise _unfit(path, f"the shapes are {shapes}")
    if is_test.dtype != bool:
        raise _unfit(path, f"is_test is {is_test.dtype} and not bool")
    for name, array in (("inputs", inputs), ("targets", targets)):
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise _unfit(path, f"{name}, of type {array.dtype}, are not finite numbers throughout")
    return inputs.astype(np.float64), targets.astype(np.float64), is_test


def _unknown(folder: Folder, name: str) -> FileNotFoundError:
    there = sorted(path.stem for path in Path(folder).glob("*.npz"))
    state = f"has the sets {listing(there)}" if Path(folder).is_dir() else "does not exist"
    return FileNotFoundError(
        f"expected {name}.npz in the folder {folder}, which {state}. Write it with numpy.savez from the set's table, "
        f"had from {SOURCE}, and the splits; this package never downloads."
    )


def _unfit(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} must hold finite inputs (n, d), targets (n,) and is_test (splits, n), True for the test rows, but "
        f"{what}; write it anew with numpy.savez."
    )
