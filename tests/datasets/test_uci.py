"""Regression sets with their splits, on small archives of the same format written here."""

import io

import numpy as np
import pytest

from numpyro_wide.datasets import uci

ROWS = 10
ARRAYS = {
    "inputs": np.random.default_rng(0).normal(size=(ROWS, 3)),
    "targets": np.arange(float(ROWS)),
    "is_test": np.array([np.isin(np.arange(ROWS), test) for test in ([1, 7], [0, 2, 9], [5])]),
}


def write(folder, name, **changes):
    arrays = {key: value for key, value in {**ARRAYS, **changes}.items() if value is not None}
    np.savez_compressed(folder / f"{name}.npz", **arrays)


def test_splits(tmp_path):
    write(tmp_path, "yacht")
    for split, expected in enumerate(([1, 7], [0, 2, 9], [5])):
        train, test = uci(tmp_path, "yacht", split)
        assert test.targets.tolist() == expected
        assert sorted([*train.targets, *test.targets]) == list(range(ROWS))
        for part in (train, test):  # targets number the rows
            np.testing.assert_array_equal(part.inputs, ARRAYS["inputs"][part.targets.astype(int)])
    np.testing.assert_array_equal(uci(str(tmp_path), "yacht")[1].targets, [1, 7])


def test_single_precision_and_whole_numbers_are_read_as_float64(tmp_path):
    write(tmp_path, "whole", inputs=ARRAYS["inputs"].astype(np.float32), targets=np.arange(ROWS))
    train, _ = uci(tmp_path, "whole")
    assert train.inputs.dtype == train.targets.dtype == np.float64


def test_a_set_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected boston.npz in .* has the sets none.*never downloads"):
        uci(tmp_path, "boston")
    write(tmp_path, "yacht")
    write(tmp_path, "energy")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"expected boston.npz in .* which has the sets 'energy', 'yacht'\."):
        uci(tmp_path, "boston")
    with pytest.raises(FileNotFoundError, match=r"nowhere, which does not exist"):
        uci(tmp_path / "nowhere", "boston")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (3, "yacht.npz has 3 splits, from 0 to 2, but split is 3"),
        (-1, "split must be a whole number of at least 0, but got -1"),
        (0.5, "split must be a whole number of at least 0, but got 0.5"),
    ],
)
def test_splits_that_there_are_not(tmp_path, split, message):
    write(tmp_path, "yacht")
    with pytest.raises(ValueError, match=message):
        uci(tmp_path, "yacht", split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_test": None}, "it lacks 'is_test'"),
        ({"inputs": np.zeros(ROWS)}, r"the shapes are inputs \(10,\), targets"),
        ({"inputs": np.zeros((ROWS + 1, 3))}, r"the shapes are inputs \(11, 3\), targets \(10,\)"),
        ({"targets": np.zeros((ROWS, 1))}, r"targets \(10, 1\)"),
        ({"is_test": ARRAYS["is_test"][0]}, r"is_test \(10,\)"),
        ({"is_test": ARRAYS["is_test"].T}, r"is_test \(10, 3\)"),
        ({"is_test": ARRAYS["is_test"][:0]}, r"is_test \(0, 10\)"),
        ({"is_test": ARRAYS["is_test"].astype(int)}, "is_test is int64 and not bool"),
        ({"is_test": np.zeros((1, ROWS), bool)}, "of its split 0, 0 of 10 rows are for testing"),
        ({"is_test": np.ones((1, ROWS), bool)}, "of its split 0, 10 of 10 rows are for testing"),
        ({"targets": np.full(ROWS, np.nan)}, "targets, of type float64, are not finite numbers throughout"),
        ({"inputs": np.full((ROWS, 3), "a")}, "inputs, of type <U1, are not finite numbers"),
        ({"targets": np.full(ROWS, None)}, "cannot be read .*pickle"),
    ],
)
def test_archives_that_do_not_fit(tmp_path, changes, message):
    write(tmp_path, "odd", **changes)
    with pytest.raises(ValueError, match=f"odd.npz must hold finite inputs .*{message}.*numpy.savez"):
        uci(tmp_path, "odd")


def lone_array():
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04 cut short", lone_array()])
def test_files_that_are_no_archive(tmp_path, content):
    (tmp_path / "odd.npz").write_bytes(content)
    assert_unreadable(tmp_path)


def test_a_damaged_member(tmp_path):
    write(tmp_path, "odd")
    content = bytearray((tmp_path / "odd.npz").read_bytes())
    content[80:120] = bytes(40)
    (tmp_path / "odd.npz").write_bytes(content)
    assert_unreadable(tmp_path)


def assert_unreadable(folder):
    with pytest.raises(ValueError, match=r"odd.npz must hold .* it cannot be read"):
        uci(folder, "odd")
