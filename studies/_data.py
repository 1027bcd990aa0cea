"""Data sets of the studies: readers of published files, scikit-learn's tables, splits, and scaling.

Nothing is downloaded: where a file is missing, the error says its name and where to get it.
"""

import gzip
import io
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets
from numpy.typing import ArrayLike

Folder = str | PathLike[str]

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
MNIST = "http://yann.lecun.com/exdb/mnist/"
FASHION_MNIST = "https://github.com/zalandoresearch/fashion-mnist"
UCI = "https://archive.ics.uci.edu"
NUM_CLASSES = 10


class Dataset(NamedTuple):
    """Inputs (n, ...), bytes of images or floats of a table, and targets (n,), labels or floats."""

    inputs: np.ndarray
    targets: np.ndarray


class Standardiser(NamedTuple):
    """Shift and scale that give the training rows mean zero and variance one; numbers, or of the shape of a row."""

    loc: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, train: ArrayLike, *, by_column: bool = True) -> "Standardiser":
        """Take them from training rows (n, ...): by entry of a row, or one for all, as for images."""
        values = np.asarray(train, np.float64)
        if not values.size or not np.isfinite(values).all():
            raise ValueError(f"training rows must be finite numbers, at least one row, but have shape {values.shape}.")
        axis = 0 if by_column else None
        loc, scale = values.mean(axis=axis), values.std(axis=axis)
        # Rounding of a constant column leaves a deviation that is not quite zero.
        return cls(loc, np.where(scale <= 1e-12 * np.abs(loc), 1.0, scale))

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Standardise rows, in float32."""
        return ((np.asarray(values, np.float64) - self.loc) / self.scale).astype(np.float32)

    def inverse(self, values: ArrayLike) -> np.ndarray:
        """Return standardised rows to their units."""
        return np.asarray(values, np.float64) * self.scale + self.loc


def split(examples: Dataset, num_train: int, num_test: int, seed: int) -> tuple[Dataset, Dataset]:
    """Draw training and test rows at random without replacement."""
    available = len(examples.targets)
    if num_train + num_test > available:
        raise ValueError(f"{num_train} training and {num_test} test rows were asked for, but there are {available}.")
    order = np.random.default_rng(seed).permutation(available)
    train, test = order[:num_train], order[num_train : num_train + num_test]
    return Dataset(*(part[train] for part in examples)), Dataset(*(part[test] for part in examples))


def digits() -> Dataset:
    """Load 1797 handwritten digits: images (n, 8, 8) from 0 to 16, labels from 0 to 9."""
    bunch = sklearn.datasets.load_digits()
    return Dataset(bunch.images, bunch.target.astype(np.int64))


def diabetes() -> Dataset:
    """Load 442 patients with 10 measurements in their own units, and the disease's progress."""
    bunch = sklearn.datasets.load_diabetes(scaled=False)
    return Dataset(bunch.data, bunch.target)


def uci(folder: Folder, name: str, split: int = 0) -> tuple[Dataset, Dataset]:
    """Read training and test rows of one split of a regression set (Hernández-Lobato & Adams 2015).

    The file ``<name>.npz`` holds ``inputs`` (n, d), ``targets`` (n,) and ``is_test`` (splits, n).
    """
    path = Path(folder) / f"{name}.npz"
    if not path.is_file():
        there = sorted(path.stem for path in Path(folder).glob("*.npz"))
        state = f"has the sets {', '.join(there) or 'none'}" if Path(folder).is_dir() else "does not exist"
        raise FileNotFoundError(
            f"expected {name}.npz in the folder {folder}, which {state}. Write it with numpy.savez from the "
            f"table, from {UCI}, and the splits."
        )
    inputs, targets, is_test = _table(path)
    if not 0 <= split < len(is_test):
        raise ValueError(f"{path} has {len(is_test)} splits, from 0 to {len(is_test) - 1}, but split is {split}.")
    test = is_test[split]
    if test.all() or not test.any():
        raise _unfit(path, f"of its split {split}, {test.sum()} of {len(test)} rows are for testing")
    return Dataset(inputs[~test], targets[~test]), Dataset(inputs[test], targets[test])


def _table(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        # Opened here, since NumPy leaves a file open that is a damaged archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            inputs, targets, is_test = (archive[name] for name in ("inputs", "targets", "is_test"))
    # TypeError: of a .npy file under another name NumPy gives the array, which no with statement takes.
    except (EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise _unfit(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    shapes = [array.shape for array in (inputs, targets, is_test)]
    fits = inputs.ndim == 2 and targets.shape == inputs.shape[:1] and is_test.shape[1:] == targets.shape
    if not fits or is_test.dtype != bool or not len(is_test):
        raise _unfit(path, f"the shapes are {shapes}, and is_test is {is_test.dtype}")
    for name, array in (("inputs", inputs), ("targets", targets)):
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise _unfit(path, f"{name}, of type {array.dtype}, are not finite numbers throughout")
    return inputs.astype(np.float64), targets.astype(np.float64), is_test


def _unfit(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} must hold finite inputs (n, d), targets (n,) and is_test (splits, n), True for the test rows, but "
        f"{what}; write it anew with numpy.savez."
    )


def cifar10(folder: Folder) -> tuple[Dataset, Dataset]:
    """Read CIFAR-10, the python or the binary version, unpacked or as archive: images (n, 32, 32, 3), labels (n,)."""
    versions = {"python": ("cifar-10-batches-py", "", _pickled), "binary": ("cifar-10-batches-bin", ".bin", _records)}
    for version, (subfolder, ending, parse) in versions.items():
        names = [f"{name}{ending}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
        archive = Path(folder) / f"cifar-10-{version}.tar.gz"
        for place in (Path(folder) / subfolder, Path(folder)):
            there = [name for name in names if (place / name).is_file()]
            if there:
                for name in set(names) - set(there):
                    raise _missing(place, [name], f"{CIFAR}, in {archive.name}")
                return _images({place / name: (place / name).read_bytes() for name in names}, parse)
        if archive.is_file():
            contents = _members(archive, names)
            return _images({archive / name: contents[name] for name in names}, parse)
    raise _missing(folder, ["cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"], CIFAR)


def _images(contents: dict[Path, bytes], parse: Any) -> tuple[Dataset, Dataset]:
    parts = []
    for path, content in contents.items():
        pixels, labels = parse(path, content)
        if not len(labels) or labels.min() < 0 or labels.max() >= NUM_CLASSES:
            raise _damaged(path, f"its labels must be from 0 to 9, but they are {np.unique(labels)[:20]}")
        parts.append(Dataset(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.astype(np.int64)))
    *train, test = parts
    return Dataset(*map(np.concatenate, zip(*train, strict=True))), test


def _records(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Split a file into its records: a byte for the label, and 3072 for the pixels."""
    if not content or len(content) % 3073:
        raise _damaged(path, f"its length must be a multiple of 3073 bytes, but is {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _pickled(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Unpack a pickled dictionary with an array of pixels and a list of labels."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as error:  # damaged pickles raise nearly anything
        raise _damaged(path, f"it is not a pickled batch ({type(error).__name__}: {error})") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
        raise _damaged(path, f"it holds pixels {pixels.dtype} {pixels.shape} for {len(labels)} labels")
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of NumPy arrays and plain containers, which runs nothing else that a file might ask for."""

    def find_class(self, module: str, name: str) -> Any:
        # NumPy has moved its modules since the files were written; the names have stayed.
        known = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}
        if module.split(".")[0] == "numpy" and name in known:
            return known[name]
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a batch")


def mnist(folder: Folder, source: str = MNIST) -> tuple[Dataset, Dataset]:
    """Read MNIST from its four IDX files, gzipped or not: images (n, 28, 28) as bytes, labels (n,)."""
    return _of_idx(folder, "train", source), _of_idx(folder, "t10k", source)


def fashion_mnist(folder: Folder) -> tuple[Dataset, Dataset]:
    """Read Fashion-MNIST from four files with the names of MNIST's, in another folder than MNIST's own."""
    return mnist(folder, FASHION_MNIST)


def pooled(images: np.ndarray, pool: int = 2) -> np.ndarray:
    """Average square images (n, side, side) over squares of ``pool`` pixels a side."""
    side = images.shape[1] // pool
    return images.reshape(-1, side, pool, side, pool).mean((2, 4))


def _of_idx(folder: Folder, part: str, source: str) -> Dataset:
    images, images_path = _read_idx(folder, f"{part}-images-idx3-ubyte", source)
    labels, labels_path = _read_idx(folder, f"{part}-labels-idx1-ubyte", source)
    if images.ndim != 3:
        raise _damaged(images_path, f"it holds an array of shape {images.shape}, not images (n, 28, 28)")
    if labels.shape != (len(images),):
        raise _damaged(labels_path, f"it holds labels of shape {labels.shape} for {len(images)} images")
    if not len(labels) or labels.max() >= NUM_CLASSES:
        raise _damaged(labels_path, "its labels must be from 0 to 9")
    return Dataset(images, labels.astype(np.int64))


def _read_idx(folder: Folder, name: str, source: str) -> tuple[np.ndarray, Path]:
    """Read bytes in the IDX format: two zero bytes, the type, the number of axes, their lengths, the numbers."""
    places = [Path(folder) / name, Path(folder) / f"{name}.gz"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise _missing(folder, [place.name for place in places], source)
    content = _unzipped(path)
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise _damaged(
            path, f"an IDX file of bytes begins with two zeros, 8 and its shape, but it with {content[:4]!r}"
        )
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise _damaged(
            path, f"for its shape {shape} it should have {start + math.prod(shape)} bytes, but it has {len(content)}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape), path


def _unzipped(path: Path) -> bytes:
    """Read a file, gzipped or not."""
    contents = path.read_bytes()
    if not contents.startswith(b"\x1f\x8b"):
        return contents
    try:
        return gzip.decompress(contents)
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, f"it is a gzip file that cannot be read ({error})") from error


def _members(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read files of an archive by their names without folders."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if Path(member.name).name in names and member.isfile() else None
                if file is not None:
                    contents[Path(member.name).name] = file.read()
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise _damaged(archive, f"it is an archive that cannot be read ({error})") from error
    lacking = [name for name in names if name not in contents]
    if lacking:
        raise _damaged(archive, f"it lacks {', '.join(lacking)}")
    return contents


def _missing(folder: Folder, names: Iterable[str], source: str) -> FileNotFoundError:
    there = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else None
    state = "does not exist" if there is None else f"holds {', '.join(there[:20]) or 'nothing'}"
    return FileNotFoundError(
        f"expected {' or '.join(names)} in the folder {folder}, which {state}. Get it from {source}."
    )


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is not as published: {what}. Fetch it again.")
