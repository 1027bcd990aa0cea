"""Readers of published files, on small files of the same formats written here, whole and damaged."""

import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest

from numpyro_wide import datasets
from numpyro_wide.datasets import Dataset, Standardiser
from numpyro_wide.datasets._idx import read_idx

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
    message = r"cifar-10-python.tar.gz or .*which holds notes.txt. It is had from https://www.cs.toronto.edu/~kriz"
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


def test_idx_of_other_types(tmp_path):
    (tmp_path / "numbers").write_bytes(idx(np.array([[1.5, -2.0]], ">f4"), 0x0D))
    read = read_idx(tmp_path / "numbers")
    assert read.tolist() == [[1.5, -2.0]]
    assert read.dtype == np.dtype("=f4")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda good: good[:-1],
            r"for its shape \(3, 28, 28\) it should have 2368 bytes, but it has",
        ),
        ("train-images-idx3-ubyte", lambda good: good + b"\0", "it should have 2368 bytes, but it has 2369"),
        ("train-images-idx3-ubyte", lambda good: good[:9], "header of 16 bytes is cut short at 9"),
        ("train-images-idx3-ubyte", lambda good: b"<!DOCTYPE html>", "begins with two zero bytes and a known type"),
        ("train-images-idx3-ubyte", lambda good: gzip.compress(good)[:-20], "gzip file that cannot be read"),
        ("train-images-idx3-ubyte", lambda good: idx(DIGITS), r"holds uint8 of shape \(5,\), not images"),
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
    with pytest.raises(FileNotFoundError, match=r"holds nothing. It is had from https://github.com/zalandoresearch"):
        datasets.fashion_mnist(tmp_path)


def test_csv_tables(tmp_path):
    path = tmp_path / "wine.csv"
    path.write_text('\ufeff"acid";"sugar";"quality"\r\n7.0;1.5;5\r\n\r\n6.5;2.5;6\r\n')  # as spreadsheets write it
    by_name = datasets.csv_table(path, target="acid", delimiter=";")
    assert by_name.inputs.tolist() == [[1.5, 5], [2.5, 6]]
    assert by_name.targets.tolist() == [7, 6.5]
    path.write_text("1,2,3\n4,5,6\n")
    assert datasets.csv_table(path, 0, has_header=False).targets.tolist() == [1, 4]
    assert datasets.csv_table(path, has_header=False).inputs.tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    "text",
    [
        "a b c\n1 2 3\n-4e0 5 6.0\n",
        "\n  a  b\tc  \r\n  1    2   3  \r\n \t \r\n -4.0 5\t6 \r\n",  # padded columns, a line of blanks
        "a;b;c\n1;2;3\n-4;5;6\n",
        "a,b,c\n1,2,3\n-4,5,6",
        '"a","b",c\n 1, 2, 3\n-4, 5, 6\n',  # a comma goes before white space
    ],
)
def test_what_separates_the_columns_is_found_out(tmp_path, text):
    path = tmp_path / "table.txt"
    path.write_text(text, newline="")
    by_name = datasets.csv_table(path, target="a")
    assert (by_name.inputs.tolist(), by_name.targets.tolist()) == ([[2, 3], [5, 6]], [1, -4])
    path.write_text(text[text.index("c") + 1 :], newline="")
    without_names = datasets.csv_table(path, has_header=False)
    assert (without_names.inputs.tolist(), without_names.targets.tolist()) == ([[1, 2], [-4, 5]], [3, 6])


def test_a_delimiter_that_is_given_is_not_found_out(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("a, m\tb of c\n1\t2\n")
    assert datasets.csv_table(path, "b of c", delimiter="\t").targets.tolist() == [2]
    with pytest.raises(ValueError, match="line 2: expected 2 fields separated by ',', but got 1; pass delimiter="):
        datasets.csv_table(path)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a b\n1 2\n3\n", {}, "line 3: expected 2 fields separated by white space, but got 1; pass delimiter="),
        ("a b\n1 2,5\n", {}, "line 2: expected a finite number, but got '2,5'"),
        ("1 2\n3 4\n", {}, "begins with a line that holds numbers, such as '1', where .* pass has_header=False if"),
        (" \n\t\n", {}, "holds no rows of data"),
        ("a,b\n1,2\n3\n", {}, "line 3: expected 2 fields separated by ',', but got 1"),
        ("a,b\n1,two\n", {}, "line 2: expected a finite number, but got 'two'"),
        ("a,b\n1,\n", {}, "line 2: expected a finite number, but got ''"),
        ("a,b\n1,nan\n", {}, "expected a finite number, but got 'nan'"),
        ("a,b\n", {}, "holds no rows of data"),
        ("", {}, "holds no rows of data"),
        ("a,b\n1,2\n", {"target": "c"}, "no column 'c'; its columns are a, b"),
        ("1,2\n", {"target": "c", "has_header": False}, "its columns are without names"),
        ("a,b\n1,2\n", {"target": 2}, "has 2 columns, but target is column 2"),
        ("a,b\n1,2\n", {"target": -3}, "target must be a whole number of at least -2, but got -3"),
        ("1,2\n3,4\n", {}, "begins with a line that holds numbers, such as '1', where .* pass has_header=False if"),
        ("a,nan\n3,4\n", {}, "begins with a line that holds numbers, such as 'nan'"),
    ],
)
def test_csv_tables_that_are_wrong(tmp_path, text, options, message):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        datasets.csv_table(path, **options)


def test_names_that_are_numbers(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("id,2019,2020\n1,2,3\n")
    assert datasets.csv_table(path, "2019", has_header=True).targets.tolist() == [2]
    assert datasets.csv_table(path, 1, has_header=True).inputs.tolist() == [[1, 3]]


def test_csv_table_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a table at .*table.csv"):
        datasets.csv_table(tmp_path / "table.csv")


def test_sets_that_are_at_hand():
    digits, diabetes, marathon = datasets.digits(), datasets.diabetes(), datasets.marathon()
    assert np.bincount(digits.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert 19 <= diabetes.inputs[:, 0].min() < diabetes.inputs[:, 0].max() <= 79  # years of age, not standardised
    assert diabetes.targets.shape == (442,)
    assert marathon.inputs[2].tolist() == [1904]
    assert marathon.targets.argmax() == 2  # St Louis


def test_scikit_learn_that_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install .numpyro_wide\[examples\]"):
        datasets.digits()


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


def test_standardiser_holds_copies():
    loc, scale, train = np.zeros(2), np.ones(2), np.array([[1.0, 2.0], [3.0, 6.0]])
    given, fitted = Standardiser(loc, scale), Standardiser.fit(train)
    for array in (loc, scale, train):
        array *= 5
        array += 7
    assert given([[4.0, 6.0]]).tolist() == [[4, 6]]
    assert fitted([4.0, 8.0]).tolist() == [2, 2]  # a single row


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
        (lambda: Standardiser.fit(np.zeros((0, 2))), r"at least one row, but has shape \(0, 2\)"),
        (lambda: Standardiser.fit([1.0, np.nan]), "must be finite, but 1 of its entries are not"),
        (lambda: Standardiser.fit([np.inf, 1.0]), "must be finite, but 1 of its entries are not; drop or impute"),
        (lambda: Standardiser([np.nan], 1.0), "loc must be finite"),
        (lambda: Standardiser(0.0, [1.0, 0.0]), "scale must be positive everywhere"),
        (lambda: Standardiser(np.zeros(2), np.ones(3)), r"must have the same shape.*\(2,\) and \(3,\); pass a number"),
        (lambda: Standardiser.fit(np.eye(3))(np.ones((4, 1))), r"rows of shape \(3,\).*got an array of shape \(4, 1\)"),
        (lambda: Standardiser.fit(np.eye(3)).inverse(1.0), r"rows of shape \(3,\).*got an array of shape \(\)"),
        (lambda: datasets.split(Dataset(np.eye(3), np.ones(4)), 2, 1, 0), "same number of rows, but got 3 and 4"),
        (lambda: datasets.split(datasets.marathon(), -1, 0, 0), "num_train must be a whole number of at least 0"),
        (lambda: datasets.split(datasets.marathon(), 2, -1, 0), "num_test must be a whole number of at least 0"),
        (lambda: datasets.split(datasets.marathon(), 100, 0, 0), "100 training and 0 test rows were asked for"),
    ],
)
def test_what_preparation_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_real_number_is_not_standardised():
    for wrong in (np.eye(2) * 1j, np.array([["a"], ["b"]]), np.array([[None], [1.0]])):
        with pytest.raises(TypeError, match="train must hold real numbers, but has the type"):
            Standardiser.fit(wrong)
        with pytest.raises(TypeError, match="values must hold real numbers, but has the type"):
            Standardiser(0.0, 1.0)(wrong)


def test_arrays_are_split_as_a_dataset():
    with pytest.raises(TypeError, match=r"examples must be a Dataset, but got a tuple; write Dataset"):
        datasets.split((np.zeros((4, 2)), np.zeros(4)), 2, 2, seed=0)
