"""Kernels of many images, written by rows of blocks: a call that was cut off is continued by the next."""

import numpy as np


def kernels_on_disk(kernel, folder, x1, x2=None, *, num_rows):
    """Return both kernels of x1 (n1, ...) and x2 (n2, ...), or of x1 with itself, (n1, n2) each.

    Blocks of rows stand in files of the folder, which must be of the same kernel and inputs at every call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    both = [np.empty((len(x1), len(x1 if x2 is None else x2)), np.float32) for _ in range(2)]
    for start in range(0, len(x1), num_rows):
        rows = slice(start, min(start + num_rows, len(x1)))
        path = folder / f"rows_{start}_{rows.stop}.npz"
        if not path.exists():
            unfinished = folder / "unfinished.npz"
            np.savez(unfinished, *map(np.asarray, _block(kernel, x1, x2, rows)))
            unfinished.rename(path)
        with np.load(path) as found:
            for matrix, part in zip(both, found.values(), strict=True):
                if x2 is None:  # on and right of the diagonal
                    matrix[rows, start:], matrix[start:, rows] = part, part.T
                else:
                    matrix[rows] = part
    return both


def _block(kernel, x1, x2, rows):
    """Return a block of rows; of x1 with itself the part on and right of the diagonal."""
    if x2 is not None:
        return kernel(x1[rows], x2)
    own, rest = kernel(x1[rows]), x1[rows.stop :]
    if not len(rest):
        return own
    return [np.concatenate(pair, axis=1) for pair in zip(own, kernel(x1[rows], rest), strict=True)]
