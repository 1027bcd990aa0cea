"""The studies' readers of published files, on small files of the same formats, whole and damaged, and their scaling."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from numpyro_wide.datasets import marathon
from studies import _data as datasets
from studies._data import Dataset, Standardiser, uci

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 4, 3072), np.uint8)  # the last of the six batches is for testing
LABELS = RNG.integers(0, 10, (6, 4))
CIFAR_BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
IDX_NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def python_2_batch(pixels, labels):
    """A pickle as Python 2 wrote it, with byte strings and NumPy's old module names, opcode by opcode."""
    short = lambda text: b"U" + bytes([len(text)]) + text  # noqa: E731
    rows, columns = (b"J" + struct.pack("<i", length) for length in pixels.shape)
    dtype = (
        b"cnumpy\ndtype\n"
        + short(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + short(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    data = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
    array += b"(K\x01" + rows + columns + b"\x86" + dtype + b"\x89" + data + b"tb"
    label_list = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + label_list + b"u."


def cifar_files(version):
    if version == "python":
        return {name: python_2_batch(*batch) for name, *batch in zip(CIFAR_BATCHES, PIXELS, LABELS, strict=True)}
    records = np.concatenate([LABELS[:, :, None].astype(np.uint8), PIXELS], axis=2)
    return {f"{name}.bin": part.tobytes() for name, part in zip(CIFAR_BATCHES, records, strict=True)}


def write_all(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path, subfolder, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{subfolder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.fault("../studies/_data.py", ".transpose(0, 2, 3, 1)", ".transpose(0, 3, 2, 1)")
@pytest.mark.parametrize(
    ("version", "subfolder"), [("python", "cifar-10-batches-py"), ("binary", "cifar-10-batches-bin")]
)
@pytest.mark.parametrize("form", ["folder", "subfolder", "archive"])
def test_cifar10(tmp_path, version, subfolder, form):
    files = cifar_files(version)
    if form == "archive":
        write_archive(tmp_path / f"cifar-10-{version}.tar.gz", subfolder, files)
    else:
        write_all(tmp_path / (subfolder if form == "subfolder" else ""), files)
    train, test = datasets.cifar10(tmp_path)
    assert train.inputs.shape == (20, 32, 32, 3)
    assert train.inputs.dtype == np.uint8
    np.testing.assert_array_equal(train.targets, LABELS[:5].ravel())
    np.testing.assert_array_equal(test.targets, LABELS[5])
    # 1024 reds, then greens, then blues, each row by row.
    np.testing.assert_array_equal(test.inputs[1, :, :, 2].ravel(), PIXELS[5, 1, 2048:])
    assert train.inputs[4 * 3 + 2, 5, 7, 1] == PIXELS[3, 2, 1024 + 5 * 32 + 7]


def test_cifar10_that_is_missing(tmp_path):
    (tmp_path / "notes.txt").touch()
    message = r"cifar-10-python.tar.gz or .*which holds notes.txt. Get it from https://www.cs.toronto.edu/~kriz"
    with pytest.raises(FileNotFoundError, match=message):
        datasets.cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere, which does not exist"):
        datasets.cifar10(tmp_path / "nowhere")
    files = cifar_files("binary")
    del files["data_batch_4.bin"]
    write_all(tmp_path, files)
    with pytest.raises(FileNotFoundError, match=r"expected data_batch_4.bin .*cifar-10-binary.tar.gz"):
        datasets.cifar10(tmp_path)


class Malicious:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("version", "name", "content", "message"),
    [
        ("binary", "data_batch_2.bin", lambda good: good[:-1], "length must be a multiple of 3073 bytes, but is 12291"),
        ("binary", "test_batch.bin", lambda good: b"\x0b" + good[1:], "labels must be from 0 to 9"),
        ("python", "data_batch_1", lambda good: good[:500], "not a pickled batch"),
        ("python", "data_batch_1", lambda good: b"<html>404</html>", "not a pickled batch"),
        ("python", "data_batch_1", lambda good: pickle.dumps(Malicious()), "not a pickled batch .*no place in a batch"),
        ("python", "test_batch", lambda good: python_2_batch(PIXELS[0], [1, 2]), r"uint8 \(4, 3072\) for 2 labels"),
    ],
)
def test_cifar10_that_is_damaged(tmp_path, version, name, content, message):
    files = cifar_files(version)
    write_all(tmp_path, {**files, name: content(files[name])})
    with pytest.raises(ValueError, match=f"{name} is not as published: .*{message}.*Fetch it again"):
        datasets.cifar10(tmp_path)


def test_cifar10_archive_that_is_damaged(tmp_path):
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_archive(archive, "cifar-10-batches-py", cifar_files("python"))
    archive.write_bytes(archive.read_bytes()[:30000])
    with pytest.raises(ValueError, match="it is an archive that cannot be read"):
        datasets.cifar10(tmp_path)
    write_archive(archive, "cifar-10-batches-py", {"data_batch_1": b""})
    with pytest.raises(ValueError, match="it lacks data_batch_2, data_batch_3"):
        datasets.cifar10(tmp_path)


def idx(values, type_code=0x08):
    header = bytes([0, 0, type_code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


IMAGES, DIGITS = RNG.integers(0, 256, (5, 28, 28), np.uint8), np.array([3, 0, 9, 1, 3], np.uint8)
IDX_FILES = dict(zip(IDX_NAMES, [idx(IMAGES[:3]), idx(DIGITS[:3]), idx(IMAGES[3:]), idx(DIGITS[3:])], strict=True))


@pytest.mark.parametrize("reader", [datasets.mnist, datasets.fashion_mnist])
@pytest.mark.parametrize("is_gzipped", [True, False])
def test_mnist(tmp_path, reader, is_gzipped):
    compressed = {f"{name}.gz": gzip.compress(content) for name, content in IDX_FILES.items()}
    write_all(tmp_path, compressed if is_gzipped else IDX_FILES)
    train, test = reader(tmp_path)
    np.testing.assert_array_equal(train.inputs, IMAGES[:3])
    np.testing.assert_array_equal(test.inputs, IMAGES[3:])
    assert (train.targets.tolist(), test.targets.tolist()) == ([3, 0, 9], [1, 3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda good: good[:-1],
            r"for its shape \(3, 28, 28\) it should have 2368 bytes, but it has",
        ),
        ("train-images-idx3-ubyte", lambda good: good + b"\0", "it should have 2368 bytes, but it has 2369"),
        ("train-images-idx3-ubyte", lambda good: good[:9], "begins with two zeros"),
        ("train-images-idx3-ubyte", lambda good: b"<!DOCTYPE html>", "begins with two zeros"),
        ("train-images-idx3-ubyte", lambda good: gzip.compress(good)[:-20], "gzip file that cannot be read"),
        ("train-images-idx3-ubyte", lambda good: idx(DIGITS), r"holds an array of shape \(5,\), not images"),
        ("t10k-labels-idx1-ubyte", lambda good: idx(DIGITS), r"holds labels of shape \(5,\) for 2 images"),
        ("t10k-labels-idx1-ubyte", lambda good: idx(DIGITS[:2] + np.uint8(8)), "labels must be from 0 to 9"),
    ],
)
def test_mnist_that_is_damaged(tmp_path, name, content, message):
    write_all(tmp_path, {**IDX_FILES, name: content(IDX_FILES[name])})
    with pytest.raises(ValueError, match=f"{name} is not as published: .*{message}"):
        datasets.mnist(tmp_path)


def test_mnist_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte or train-images-idx3-ubyte.gz .*lecun.com"):
        datasets.mnist(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds nothing. Get it from https://github.com/zalandoresearch"):
        datasets.fashion_mnist(tmp_path)


@pytest.mark.fault("datasets.py", "_, *rows = csv", "_, _, *rows = csv")
def test_sets_that_are_at_hand():
    digits, diabetes, games = datasets.digits(), datasets.diabetes(), marathon()
    assert np.bincount(digits.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert 19 <= diabetes.inputs[:, 0].min() < diabetes.inputs[:, 0].max() <= 79  # years of age, not standardised
    assert diabetes.targets.shape == (442,)
    assert games.inputs[2].tolist() == [1904]
    assert games.targets.argmax() == 2  # St Louis


@pytest.mark.fault("../studies/_data.py", "(np.asarray(values, np.float64) - self.loc", "np.asarray(values, np.float64")
def test_standardiser_uses_the_training_rows_alone():
    train, test = RNG.normal(3, 2, (50, 4)), RNG.normal(-1, 1, (20, 4))
    train[:, 2] = 0.1
    standardiser = Standardiser.fit(train)
    scaled = standardiser(train)
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(scaled.std(0), [1, 1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(
        standardiser(test)[:, 0], (test[:, 0] - train[:, 0].mean()) / train[:, 0].std(), rtol=1e-6
    )
    np.testing.assert_allclose(standardiser.inverse(standardiser(test)), test, rtol=1e-5, atol=1e-5)
    whole = Standardiser.fit(IMAGES, by_column=False)(IMAGES)
    assert (whole.dtype, whole.shape) == (np.float32, IMAGES.shape)
    np.testing.assert_allclose((whole.mean(), whole.std()), (0, 1), atol=1e-5)


def test_subsets_by_seed():
    examples = Dataset(np.arange(20)[:, None], np.arange(20))
    train, test = datasets.split(examples, 12, 8, seed=3)
    assert sorted([*train.targets, *test.targets]) == list(range(20))
    np.testing.assert_array_equal(train.inputs[:, 0], train.targets)
    np.testing.assert_array_equal(datasets.split(examples, 5, 0, seed=3)[0].targets, train.targets[:5])
    assert datasets.split(examples, 5, 0, seed=4)[0].targets.tolist() != train.targets[:5].tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Standardiser.fit(np.zeros((0, 2))), r"at least one row, but have shape \(0, 2\)"),
        (lambda: Standardiser.fit([1.0, np.nan]), "must be finite numbers"),
        (
            lambda: datasets.split(datasets.Dataset(*marathon()), 100, 0, 0),
            "100 training and 0 test rows were asked for",
        ),
    ],
)
def test_what_preparation_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ROWS = 10
ARRAYS = {
    "inputs": np.random.default_rng(0).normal(size=(ROWS, 3)),
    "targets": np.arange(float(ROWS)),
    "is_test": np.array([np.isin(np.arange(ROWS), test) for test in ([1, 7], [0, 2, 9], [5])]),
}


def write(folder, name, **changes):
    arrays = {key: value for key, value in {**ARRAYS, **changes}.items() if value is not None}
    np.savez_compressed(folder / f"{name}.npz", **arrays)


@pytest.mark.fault("../studies/_data.py", "Dataset(inputs[~test], targets[~test])", "Dataset(inputs, targets)")
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
    with pytest.raises(FileNotFoundError, match=r"expected boston.npz in .* has the sets none.*"):
        uci(tmp_path, "boston")
    write(tmp_path, "yacht")
    write(tmp_path, "energy")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"expected boston.npz in .* which has the sets energy, yacht\."):
        uci(tmp_path, "boston")
    with pytest.raises(FileNotFoundError, match=r"nowhere, which does not exist"):
        uci(tmp_path / "nowhere", "boston")


def test_splits_that_there_are_not(tmp_path):
    write(tmp_path, "yacht")
    for split in (3, -1):
        with pytest.raises(ValueError, match=f"yacht.npz has 3 splits, from 0 to 2, but split is {split}"):
            uci(tmp_path, "yacht", split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_test": None}, "is_test"),
        ({"inputs": np.zeros(ROWS)}, r"the shapes are \[\(10,\), "),
        ({"inputs": np.zeros((ROWS + 1, 3))}, r"the shapes are \[\(11, 3\), \(10,\)"),
        ({"targets": np.zeros((ROWS, 1))}, r"\(10, 1\)"),
        ({"is_test": ARRAYS["is_test"][0]}, r"\(10,\)\]"),
        ({"is_test": ARRAYS["is_test"].T}, r"\(10, 3\)\]"),
        ({"is_test": ARRAYS["is_test"][:0]}, r"\(0, 10\)\]"),
        ({"is_test": ARRAYS["is_test"].astype(int)}, "is_test is int64"),
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


@pytest.fixture
def emulators(monkeypatch):
    """The simulators of the study of emulators, which imports its neighbours as a script does."""
    monkeypatch.syspath_prepend(Path(datasets.__file__).parent)
    return import_module("_emulators")


def test_simulators_have_their_known_values(emulators):
    powers = 2.0 ** np.arange(1, 6)
    minima = {"Ackley": np.zeros(5), "Griewank": np.zeros(5), "Rosenbrock": np.ones(5)}
    minima["Dixon–Price"] = 2 ** (2 / powers - 1)
    for name, x in minima.items():
        function, _ = emulators.FUNCTIONS[name]
        assert list(function(np.stack([x, x + 0.1])) > 1e-3) == [False, True]
        assert function(x[None])[0] == pytest.approx(0, abs=1e-12)
    assert emulators.buckling(np.array([[2, 1, 0, 2]]))[0] == pytest.approx(np.pi * 200 * 29.5)
    middle = np.mean(emulators.FUNCTIONS["wing weight"][1], axis=1)[None]
    area, paint = middle[0, 0], middle[0, 9]
    heavier = middle * np.where(np.arange(10) == 8, 2, 1)
    lift = [emulators.wing_weight(x)[0] - area * paint for x in (middle, heavier)]
    assert lift[1] / lift[0] == pytest.approx(2**0.49)


def test_simulations_are_disjoint_sets_with_noise_and_even_levels(emulators):
    train, test = emulators.simulations("buckling", 4, 40, 0.05)
    lengths = np.concatenate([rows.inputs[:, 0] for rows in (*train, test)])
    assert len(np.unique(lengths)) == len(lengths) == 20 * 40 + 5000
    assert 0.5 <= lengths.min() < 0.501 and 1.499 < lengths.max() <= 1.5
    for rows in train:
        counts = [np.bincount(levels.astype(int)) for levels in rows.inputs[:, 1:].T]
        assert [list(np.sort(count)) for count in counts] == [[20, 20], [10] * 4, [13, 13, 14]]
    clean = emulators.buckling(test.inputs)
    assert np.std(test.targets - clean) / np.std(clean) == pytest.approx(0.05, rel=0.05)
    assert np.corrcoef(test.targets - clean, clean)[0, 1] == pytest.approx(0, abs=0.06)
