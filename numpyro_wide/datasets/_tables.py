"""Tables: text files of numbers, and small sets that need no file."""

import csv
import importlib.resources
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_wide._checks import whole_number
from numpyro_wide.datasets._files import Folder
from numpyro_wide.datasets._preparation import Dataset


def csv_table(
    path: Folder, target: str | int = -1, *, delimiter: str | None = None, has_header: bool | None = None
) -> Dataset:
    r"""Read a table of numbers, one of whose columns is the target.

    Args:
        path: path of the file.
        target: name of the target's column, or its number from 0; negative ones count from the end.
        delimiter: character that stands between the columns; by default a comma if the first line has one, else a
            semicolon if it has one, else any amount of white space.
        has_header: whether the first line names the columns; by default it is taken to, unless it holds a number: then
            you are asked to say.

    Returns:
        The other columns (n, d), in the file's order, and the target (n,), in float64.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the target is no column, a line has more or fewer fields than the first, a field is not a finite
            number, there are no rows, or the first line might be one of them.

    Example:
        >>> import pathlib, tempfile
        >>> from numpyro_wide.datasets import csv_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "table.csv"
        ...     _ = path.write_text("length,depth,drag\n1.0,2.0,0.5\n3.0,4.0,0.7\n")
        ...     examples = csv_table(path, target="drag")
        >>> examples.inputs.tolist(), examples.targets.tolist()
        ([[1.0, 2.0], [3.0, 4.0]], [0.5, 0.7])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"expected a table at {path}, where no file is; this package never downloads.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = list(file)
    return _parse(path, lines, target, _delimiter(lines) if delimiter is None else delimiter, has_header)


def digits() -> Dataset:
    """Load 1797 handwritten digits from scikit-learn: images (n, 8, 8) from 0 to 16, labels from 0 to 9.

    Raises:
        ImportError: if scikit-learn is not installed.

    Example:
        >>> from numpyro_wide.datasets import digits
        >>> digits().inputs.shape
        (1797, 8, 8)
    """
    bunch = _scikit_learn().load_digits()
    return Dataset(bunch.images, bunch.target.astype(np.int64))


def diabetes() -> Dataset:
    """Load 442 patients with 10 measurements in their own units, and the disease's progress, from scikit-learn.

    Raises:
        ImportError: if scikit-learn is not installed.

    Example:
        >>> from numpyro_wide.datasets import diabetes
        >>> diabetes().inputs.shape
        (442, 10)
    """
    bunch = _scikit_learn().load_diabetes(scaled=False)
    return Dataset(bunch.data, bunch.target)


def marathon() -> Dataset:
    """Load the winning paces of the Olympic marathon, men: years (n, 1) and min/km (n,).

    Example:
        >>> from numpyro_wide.datasets import marathon
        >>> marathon().inputs[:2].tolist()
        [[1896.0], [1900.0]]
    """
    table = importlib.resources.files("numpyro_wide.datasets") / "olympic_marathon_men.csv"
    with importlib.resources.as_file(table) as path:
        return csv_table(path)


def _delimiter(lines: list[str]) -> str | None:
    """Find the character that separates the first line that is not blank; None for white space."""
    first = next((line for line in lines if line.strip()), "")
    return next((character for character in ",;" if character in first), None)


def _parse(path: Path, lines: list[str], target: str | int, delimiter: str | None, has_header: bool | None) -> Dataset:
    rows = [(number, row) for number, row in enumerate(_fields(lines, delimiter), start=1) if row]
    if rows and has_header is None:
        _check_names(path, rows[0][1])
        has_header = True
    names = [name.strip() for name in rows[0][1]] if rows and has_header else []
    rows = rows[1:] if has_header else rows
    if not rows:
        raise ValueError(f"{path} holds no rows of data.")
    num_columns = len(names) or len(rows[0][1])
    column = _column(path, target, names, num_columns)
    for number, row in rows:
        if len(row) != num_columns:
            separator = "white space" if delimiter is None else repr(delimiter)
            raise ValueError(
                f"{path}, line {number}: expected {num_columns} fields separated by {separator}, but got {len(row)}; "
                "pass delimiter= if it is another."
            )
    values = np.array([[_number(path, number, field) for field in row] for number, row in rows])
    return Dataset(np.delete(values, column, axis=1), values[:, column])


def _fields(lines: list[str], delimiter: str | None) -> Iterable[list[str]]:
    # csv takes a single character, and would find empty fields in columns that are padded with spaces.
    return (line.split() for line in lines) if delimiter is None else csv.reader(lines, delimiter=delimiter)


def _check_names(path: Path, fields: list[str]) -> None:
    """Refuse a first line that might be a row of data, which would be lost silently."""
    numbers = [field for field in fields if _is_number(field)]
    if numbers:
        raise ValueError(
            f"{path} begins with a line that holds numbers, such as {numbers[0]!r}, where the columns' names are "
            "expected; pass has_header=False if it is the first row of the data, or has_header=True if these are names."
        )


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _column(path: Path, target: str | int, names: list[str], num_columns: int) -> int:
    if isinstance(target, str):
        if target not in names:
            raise ValueError(f"{path} has no column {target!r}; its columns are {', '.join(names) or 'without names'}.")
        if names.count(target) > 1:
            raise ValueError(
                f"{path} has {names.count(target)} columns called {target!r}; give the target's number, and take the "
                "others out of the file, or they will be inputs."
            )
        return names.index(target)
    number = whole_number("target", target, -num_columns)
    if number >= num_columns:
        raise ValueError(f"{path} has {num_columns} columns, but target is column {number}.")
    return number


def _number(path: Path, line: int, field: str) -> float:
    if not _is_number(field) or not np.isfinite(float(field)):
        raise ValueError(
            f"{path}, line {line}: expected a finite number, but got {field!r}. Encode categories and fill in or drop "
            "what is missing first; has_header and delimiter say how the file is laid out."
        )
    return float(field)


def _scikit_learn() -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise ImportError(
            'this data set comes with scikit-learn, which is not installed: pip install "numpyro_wide[examples]".'
        ) from error
    return sklearn.datasets
