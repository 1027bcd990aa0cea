"""CIFAR-10, in both versions that its publisher ships."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_wide.datasets._files import Folder, damaged, missing, read_members
from numpyro_wide.datasets._preparation import Dataset

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ARCHIVES = {"python": "cifar-10-python.tar.gz", "binary": "cifar-10-binary.tar.gz"}
FOLDERS = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}
ENDINGS = {"python": "", "binary": ".bin"}
BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
NUM_CLASSES, NUM_PIXELS, IMAGE = 10, 3072, (3, 32, 32)


def cifar10(folder: Folder) -> tuple[Dataset, Dataset]:
    """Read CIFAR-10 from its python or binary version, unpacked or as the archive that is published.

    Args:
        folder: path of the folder that holds ``cifar-10-python.tar.gz`` or ``cifar-10-binary.tar.gz``, or what is in
            them: ``cifar-10-batches-py`` or ``cifar-10-batches-bin``; or one of the latter two itself.

    Returns:
        Training and test examples: images (n, 32, 32, 3) as bytes, and labels (n,) from 0 to 9. As published, 50,000
        and 10,000.

    Raises:
        FileNotFoundError: if there is none of them, or a batch is missing.
        ValueError: if a file is damaged.

    Example:
        >>> from numpyro_wide.datasets import cifar10
        >>> train, test = cifar10("data")  # doctest: +SKIP
    """
    for version in ARCHIVES:
        names = [name + ENDINGS[version] for name in (*BATCHES, "test_batch")]
        for place in (Path(folder) / FOLDERS[version], Path(folder)):
            if any((place / name).is_file() for name in names):
                return _from_folder(place, names, version)
        archive = Path(folder) / ARCHIVES[version]
        if archive.is_file():
            contents = read_members(archive, names)
            return _examples({archive / name: contents[name] for name in names}, version)
    raise missing(folder, [*ARCHIVES.values(), *FOLDERS.values()], SOURCE)


def _from_folder(place: Path, names: list[str], version: str) -> tuple[Dataset, Dataset]:
    for name in names:
        if not (place / name).is_file():
            raise missing(place, [name], f"{SOURCE}, in {ARCHIVES[version]}")
    return _examples({place / name: (place / name).read_bytes() for name in names}, version)


def _examples(contents: dict[Path, bytes], version: str) -> tuple[Dataset, Dataset]:
    parse = _parse_pickle if version == "python" else _parse_binary
    parts = [parse(path, content) for path, content in contents.items()]
    images = [pixels.reshape(-1, *IMAGE).transpose(0, 2, 3, 1) for pixels, _ in parts]
    labels = [labels for _, labels in parts]
    train = Dataset(np.concatenate(images[:-1]), np.concatenate(labels[:-1]))
    return train, Dataset(np.ascontiguousarray(images[-1]), labels[-1])


def _parse_binary(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Split the file into its records: a byte for the label, and 3072 for the pixels."""
    if not content or len(content) % (1 + NUM_PIXELS):
        raise damaged(path, f"its length must be a multiple of {1 + NUM_PIXELS} bytes, but is {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + NUM_PIXELS)
    return records[:, 1:], _checked_labels(path, records[:, 0])


def _parse_pickle(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Unpack a pickled dictionary with an array of pixels and a list of labels."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as error:  # damaged pickles raise nearly anything
        raise damaged(path, f"it is not a pickled batch ({type(error).__name__}: {error})") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape != (len(labels), NUM_PIXELS):
        raise damaged(
            path, f"it holds pixels {pixels.dtype} {pixels.shape} for {len(labels)} labels, not (n, {NUM_PIXELS}) bytes"
        )
    return pixels, _checked_labels(path, labels)


def _checked_labels(path: Path, labels: np.ndarray) -> np.ndarray:
    if not len(labels) or labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise damaged(path, f"its labels must be from 0 to {NUM_CLASSES - 1}, but they are {np.unique(labels)[:20]}")
    return labels.astype(np.int64)


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
