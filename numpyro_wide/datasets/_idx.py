"""MNIST, and Fashion-MNIST in the same format."""

import math
import struct
from pathlib import Path

import numpy as np

from numpyro_wide.datasets._files import Folder, damaged, decompressed, read_gzipped_or_not
from numpyro_wide.datasets._preparation import Dataset

MNIST = "http://yann.lecun.com/exdb/mnist/"
FASHION_MNIST = "https://github.com/zalandoresearch/fashion-mnist"
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
NUM_CLASSES = 10


def mnist(folder: Folder) -> tuple[Dataset, Dataset]:
    """Read MNIST from its four IDX files, gzipped or not.

    Args:
        folder: path of the folder that holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
            ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, each as it is or with ``.gz``.

    Returns:
        Training and test examples: images (n, 28, 28) as bytes, and labels (n,) from 0 to 9. As published, 60,000 and
        10,000.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one is damaged, or images and labels do not belong together.

    Example:
        >>> from numpyro_wide.datasets import mnist
        >>> train, test = mnist("data/mnist")  # doctest: +SKIP
    """
    return _images_and_labels(folder, "train", MNIST), _images_and_labels(folder, "t10k", MNIST)


def fashion_mnist(folder: Folder) -> tuple[Dataset, Dataset]:
    """Read Fashion-MNIST from four IDX files with the names of MNIST's, gzipped or not.

    Args:
        folder: path of the folder that holds the four files, named as MNIST's: another folder than MNIST's own.

    Returns:
        Training and test examples: images (n, 28, 28) as bytes, and labels (n,) from 0 to 9.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one is damaged, or images and labels do not belong together.

    Example:
        >>> from numpyro_wide.datasets import fashion_mnist
        >>> train, test = fashion_mnist("data/fashion-mnist")  # doctest: +SKIP
    """
    return _images_and_labels(folder, "train", FASHION_MNIST), _images_and_labels(folder, "t10k", FASHION_MNIST)


def read_idx(path: Folder) -> np.ndarray:
    """Read one file in the IDX format, gzipped or not.

    Args:
        path: path of the file.

    Returns:
        The array that it holds, in the machine's byte order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not in that format, or cut short.

    Example:
        >>> from numpyro_wide.datasets.internal import read_idx
        >>> images = read_idx("data/mnist/train-images-idx3-ubyte.gz")  # doctest: +SKIP
    """
    return _parse(Path(path), decompressed(Path(path)))


def _images_and_labels(folder: Folder, part: str, source: str) -> Dataset:
    content, images_path = read_gzipped_or_not(folder, f"{part}-images-idx3-ubyte", source)
    images = _parse(images_path, content)
    content, labels_path = read_gzipped_or_not(folder, f"{part}-labels-idx1-ubyte", source)
    labels = _parse(labels_path, content)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise damaged(images_path, f"it holds {images.dtype} of shape {images.shape}, not images (n, 28, 28) of bytes")
    if labels.ndim != 1 or len(labels) != len(images):
        raise damaged(labels_path, f"it holds labels of shape {labels.shape} for {len(images)} images")
    if not len(labels) or labels.max() >= NUM_CLASSES:
        raise damaged(labels_path, f"its labels must be from 0 to {NUM_CLASSES - 1}")
    return Dataset(images, labels.astype(np.int64))


def _parse(path: Path, content: bytes) -> np.ndarray:
    """Parse two zero bytes, the type, the number of axes, their lengths as big-endian integers, and the numbers."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES:
        raise damaged(path, f"an IDX file begins with two zero bytes and a known type, but it with {content[:4]!r}")
    num_axes = content[3]
    start = 4 + 4 * num_axes
    if len(content) < start:
        raise damaged(path, f"its header of {start} bytes is cut short at {len(content)}")
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    dtype = np.dtype(TYPES[content[2]])
    expected = start + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise damaged(path, f"for its shape {shape} it should have {expected} bytes, but it has {len(content)}")
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))
