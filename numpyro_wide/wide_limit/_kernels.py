"""Kernels of whole networks."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import (
    as_floats,
    as_not_negative,
    check_finite,
    check_known,
    check_no_nan,
    check_not_negative,
    is_known,
    is_tracing,
    whole_number,
)
from numpyro_wide._compile import TracedProgram, digest, program_digest, run_compiled
from numpyro_wide._resume import read, refuse_another_run, save, versions
from numpyro_wide.wide_limit._duals import Activation, activation_dual, warn_of_truncation
from numpyro_wide.wide_limit._layer_kernels import (
    AllPairsNeededError,
    Inputs,
    check_matrix,
    fully_connected,
    rule_of,
    scaled_inputs,
)

Kernel = Callable[..., tuple[Array, Array]]


def fcn_kernel(
    depth: int,
    activation: Activation,
    *,
    w_std: ArrayLike,
    b_std: ArrayLike,
    readout_w_std: ArrayLike = 1.0,
    readout_b_std: ArrayLike = 0.0,
    input_scale: ArrayLike | None = None,
    block_size: int | None = None,
) -> Kernel:
    r"""Give the kernels of a fully connected network as its hidden layers become infinitely wide.

    The network is in the NTK parametrisation (Mathematics, :eq:`layer`), all its weights and biases
    N(0, 1): a layer with m inputs h maps them to ``w_std`` / √m · W h + ``b_std`` · b, the readout does so
    with its own two scales. With $\kappa^0 = x^\top x' / d_{in}$ the NNGP kernel of layer l + 1 is
    $K^{l+1} = \sigma_w^2 \kappa^l + \sigma_b^2$ where $\kappa^l = E[\varphi(u) \varphi(v)]$,
    (u, v) ~ N(0, K^l) (Lee 2018, eq. 5; Matthews 2018), and the tangent kernel is
    $\Theta^{l+1} = K^{l+1} + \sigma_w^2 E[\varphi'(u) \varphi'(v)] \Theta^l$, Θ¹ = K¹
    (Jacot 2018, Theorem 1; Mathematics, :eq:`kernels`). Both are those of one output; several outputs are
    independent of each other.

    For erf and GELU, whose kernels are not homogeneous, rounding in the inner product of two different inputs that
    are nearly parallel or opposite is magnified by the variance v of their preactivations: the tangent kernel of such
    a pair has a relative error of about 1e-7 v in float32, ten times that for GELU and opposite inputs. Standardise
    the inputs, or use float64 where v exceeds 1e4. Inputs up to 1e12 are within float32's range.

    The kernels can be differentiated with respect to inputs and scales everywhere. Where the ReLU's tangent
    kernel has a cusp (equal inputs), the derivative is the mean of its two sides.

    Args:
        depth: number of hidden layers; 0 is a linear model with the readout's scales.
        activation: "erf", "gelu" (the exact one, ``jax.nn.gelu(approximate=False)``), "identity" or "relu", whose
            kernels are known in closed form; or "tanh" or a function of arrays, whose kernels go by a Hermite series of
            128 degrees (Mathematics, :eq:`mehler`).
        w_std: standard deviation of the hidden layers' weights, a number or (depth,).
        b_std: standard deviation of the hidden layers' biases, a number or (depth,).
        readout_w_std: standard deviation of the readout's weights.
        readout_b_std: standard deviation of the readout's bias.
        input_scale: factor of the inputs, a number or (d_in,), one for each column (automatic relevance determination);
            None for one.
        block_size: rows of the kernels computed at a time, which bounds the memory beyond the results
            themselves; None for all at once. A few hundred rows suit many thousands of inputs.

    Returns:
        ``kernel(x1, x2=None) -> (nngp, ntk)``, with x1 (n1, d_in), x2 (n2, d_in) or None for x1, and two
        (n1, n2) matrices in the dtype of the inputs, at least single precision. With ``x2=None`` the diagonal is free
        of the rounding that the inner products of equal vectors otherwise have.

    Raises:
        ValueError: for an unknown activation, a negative depth or scale, a scale of another shape, a bad
            ``block_size``; from the kernel, for inputs that are not matrices of the same width, or hold NaN.

    Warns:
        UserWarning: from the kernel, if a series leaves out more than a hundred-thousandth, where numbers are known.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = fcn_kernel(2, "relu", w_std=2.0**0.5, b_std=0.1)
        >>> nngp, ntk = kernel(jnp.ones((3, 5)), jnp.zeros((4, 5)))
        >>> nngp.shape, ntk.shape
        ((3, 4), (3, 4))
    """
    depth = whole_number("depth", depth, 0)
    activation_dual(activation)  # refuses an unknown one now
    block_size = None if block_size is None else whole_number("block_size", block_size)
    hidden = {"w_std": w_std, "b_std": b_std}
    readout = {"readout_w_std": readout_w_std, "readout_b_std": readout_b_std}
    _check_scales(depth, hidden, readout)
    if input_scale is not None:
        _check_numbers("input_scale", input_scale)

    def kernel(x1: ArrayLike, x2: ArrayLike | None = None) -> tuple[Array, Array]:
        """Return the NNGP and NTK kernel matrices of ``x1`` (n1, d_in) and ``x2`` (n2, d_in)."""
        inputs = as_floats(x1, names=("x1",)) if x2 is None else as_floats(x1, x2, names=("x1", "x2"))
        _check_inputs(*inputs)
        # The inputs set the dtype: a float64 scale does not turn a float32 kernel into a float64 one.
        dtype = inputs[0].dtype
        inputs = tuple(scaled_inputs(x, input_scale) for x in inputs)
        scales = [as_not_negative(name, scale, dtype=dtype) for name, scale in (hidden | readout).items()]
        scales[:2] = [jnp.broadcast_to(scale, (depth,)) for scale in scales[:2]]
        if isinstance(activation, str):
            nngp, ntk, error = _compiled_kernels(activation, block_size, inputs, scales)
        else:  # of a function of the user's, by what it computes at this call
            nngp, ntk, error = run_compiled(_kernels, activation, block_size, inputs, scales)
        warn_of_truncation(error)
        return nngp, ntk

    return kernel


def _kernels(
    activation: Activation, block_size: int | None, inputs: tuple[Array, ...], scales: list[Array]
) -> tuple[Array, Array, Array]:
    """Compute both kernels of ``inputs``, (x1,) or (x1, x2), and by row the share that a series leaves out."""
    x1, x2 = inputs[0], inputs[-1]

    def rows(start: Array | int, size: int) -> tuple[Array, Array, Array]:
        same = None
        if len(inputs) == 1:
            same = (start + jnp.arange(size))[:, None] == jnp.arange(x2.shape[0])[None, :]
        units = Inputs(take_rows(x1, start, size), x2, same).vectors()
        found = fully_connected(units, activation, scales)
        return found.product, found.product + found.tangent, jnp.broadcast_to(found.error, (size,))

    return in_row_blocks(rows, x1.shape[0], block_size)


_compiled_kernels = jax.jit(_kernels, static_argnums=(0, 1))


def _check_scales(depth: int, hidden: dict[str, ArrayLike], readout: dict[str, ArrayLike]) -> None:
    for name, scale in {**hidden, **readout}.items():
        shape = np.shape(scale)
        if shape != () and (name in readout or shape != (depth,)):
            layers = "" if name in readout else f" or an array of shape (depth,) = {(depth,)}"
            raise ValueError(f"{name} must be a number{layers}, but got an array of shape {shape}.")
        _check_numbers(name, scale)


def _check_numbers(name: str, scale: ArrayLike) -> None:
    """Refuse a scale that is no real number, negative, NaN or infinite, where its numbers are known already."""
    try:
        as_floats(scale)
    except TypeError as error:
        raise TypeError(f"{name} must be a number or an array of real numbers, but got {scale!r}.") from error
    check_not_negative(name, scale)
    if is_known(scale) and not np.all(np.isfinite(scale)):
        raise ValueError(f"{name} must be finite, but got {scale}.")


def _check_inputs(x1: Array, x2: Array | None = None) -> None:
    for name, x in {"x1": x1, "x2": x1 if x2 is None else x2}.items():
        check_matrix(name, x)
        check_no_nan(name, x)
    if x2 is not None and x1.shape[1] != x2.shape[1]:
        raise ValueError(
            f"x1 and x2 must have the same number of columns d_in, but got shapes {x1.shape} and {x2.shape}."
        )


_PATIENCE = 10  # seconds of work before a progress bar shows


@dataclass(frozen=True)
class Tiles:
    """Division of a matrix into tiles of one size, the last of a row or column shifted back to fit in.

    Attributes:
        row_starts: first rows.
        column_starts: first columns.
        size: number of rows and columns of a tile at most; None for all.
        is_symmetric: whether tiles below the diagonal are those above it.
    """

    row_starts: tuple[int, ...]
    column_starts: tuple[int, ...]
    size: int | None
    is_symmetric: bool

    @classmethod
    def of(cls, inputs: Sequence[Array], size: int | None) -> "Tiles":
        """Divide the kernel of inputs (x1,) or (x1, x2)."""
        return cls(_starts(len(inputs[0]), size), _starts(len(inputs[-1]), size), size, len(inputs) == 1)

    @property
    def is_one(self) -> bool:
        """Whether the matrix is one tile."""
        return len(self.row_starts) == len(self.column_starts) == 1

    def arguments(self, inputs: Sequence[Array], row: int, column: int) -> tuple[Array, Array, Array, Array]:
        """Return the inputs of a tile and their places, by the indices of the tile."""
        x1, x2 = inputs[0], inputs[-1]
        rows = _places(self.row_starts[row], len(x1), self.size)
        columns = _places(self.column_starts[column], len(x2), self.size)
        return x1[rows], x2[columns], jnp.arange(rows.start, rows.stop), jnp.arange(columns.start, columns.stop)

    def rows(self, first: int, progress_bar: bool) -> Iterator[int]:
        """Yield the indices of rows of tiles from ``first`` on, with a bar if that takes long."""
        from tqdm.auto import tqdm  # shows nothing of short work

        is_off = not progress_bar or "CI" in os.environ
        indices = range(first, len(self.row_starts))
        yield from tqdm(indices, "rows of blocks", len(self.row_starts), initial=first, delay=_PATIENCE, disable=is_off)

    def fill_row(
        self,
        program: Callable,
        inputs: Sequence[Array],
        row: int,
        matrices: Sequence[np.ndarray],
        devices: Sequence = (),
    ) -> float:
        """Compute a row of tiles, write it, and return the largest error.

        Args:
            program: function from the arguments of a tile to its numbers and their error.
            inputs: (x1,) or (x1, x2).
            row: index of the row of tiles.
            matrices: where the numbers go.
            devices: devices that take a tile each, again and again; none for JAX's default.
        """
        error = 0.0
        columns, at_once = range(row if self.is_symmetric else 0, len(self.column_starts)), max(1, len(devices))
        for start in range(0, len(columns), at_once):
            arguments = [self.arguments(inputs, row, column) for column in columns[start : start + at_once]]
            # All are started before the first is waited for; more than one a device would take the memory of them all.
            placed = list(map(jax.device_put, arguments, devices)) if devices else arguments
            found = [program(*values) for values in placed]
            for (_, _, *places), (*parts, share) in zip(arguments, found, strict=True):
                self._write([slice(int(at[0]), int(at[-1]) + 1) for at in places], parts, matrices)
                error = max(error, float(share))
        return error

    def _write(self, place: list[slice], parts: Sequence[Array], matrices: Sequence[np.ndarray]) -> None:
        """Write a tile, and its mirror image."""
        rows, columns = place
        for matrix, part in zip(matrices, parts, strict=True):
            matrix[rows, columns] = part
            if self.is_symmetric:
                matrix[columns, rows] = np.asarray(part).T


class MatrixFiles:
    """Two matrices in files, and how many rows of tiles they hold so far.

    Args:
        path: folder.
        shape: of each matrix.
        dtype: of their numbers.

    Raises:
        ValueError: if the path is a file.
    """

    def __init__(self, path: Any, shape: tuple[int, int], dtype: Any):
        self.folder = Path(path)
        if self.folder.is_file():
            raise ValueError(f"the path of a folder is needed, but {self.folder} is a file.")
        self.matrices: list[np.ndarray] = []
        self._shape, self._dtype, self._identity = shape, np.dtype(dtype), ""
        self._checksums: list[list[int]] = []

    def begin(self, tiles: Tiles, identity: dict[str, Any]) -> int:
        """Open the files, and return the first row of tiles that is missing.

        Raises:
            ValueError: if the folder holds other kernels.
        """
        # In the order of blame: the size of the blocks is in the program, too.
        self._identity, self._tiles = json.dumps({"block size": repr(tiles)} | identity), tiles
        first, sums = 0, None
        if self._progress.exists():
            stored = read(self._progress)
            own = self._identity
            refuse_another_run(
                f"the folder {self.folder}", str(stored["['run']"]), own, kind="folder", programs=["network"]
            )
            first, sums = int(stored["['num_rows']"]), stored["['checksums']"]
        mode = "w+" if sums is None else "r+"
        for path in self._paths:
            if sums is not None:
                self._refuse_other_file(path)
            shape = self._shape if sums is None else None
            self.matrices.append(np.lib.format.open_memmap(path, mode, dtype=self._dtype, shape=shape))
        if sums is not None:
            self._checksums = sums.tolist()
            if self._checksums != [self._checksum(row) for row in range(first)]:
                self._refuse("the numbers in its files are not those that were written")
        return first

    def finish(self, row: int) -> None:
        """Note that a row of tiles is in the files."""
        for matrix in self.matrices:
            matrix.flush()  # type: ignore[attr-defined]
        # The last tiles are shifted back, over rows of those before.
        again = max(0, row - 1)
        self._checksums[again:] = [self._checksum(index) for index in range(again, row + 1)]
        done = {"num_rows": np.array(row + 1), "checksums": np.array(self._checksums, np.int64)}
        save(self._progress, {"run": self._identity, **done})

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Map both matrices, read-only."""
        first, second = (np.load(path, mmap_mode="r") for path in self._paths)
        return first, second

    def _refuse_other_file(self, path: Path) -> None:
        """Refuse a file that is not of the matrix' shape and type, or not as long."""
        try:
            matrix = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            self._refuse(f"{path.name} cannot be read", error)
        if matrix.shape != self._shape or matrix.dtype != self._dtype:
            self._refuse(f"{path.name} holds {matrix.dtype} {matrix.shape}, not {self._dtype} {self._shape}")

    def _refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        remedy = "remove the folder, and run again"
        raise ValueError(f"the folder {self.folder} is damaged: {what}; {remedy}.") from error

    def _checksum(self, index: int) -> list[int]:
        """Return a checksum of a row of tiles, and of the column that mirrors it, of each matrix."""
        size = self._tiles.size or max(self._shape)
        rows = slice(index * size, (index + 1) * size)
        found = []
        for matrix in self.matrices:
            is_mirrored = self._tiles.is_symmetric
            parts = (matrix[rows, rows.start :], matrix[rows.start :, rows].T) if is_mirrored else (matrix[rows],)
            checksum = 0
            for part in parts:
                checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
            found.append(checksum)
        return found

    @property
    def _progress(self) -> Path:
        return self.folder / "progress.npz"

    @property
    def _paths(self) -> list[Path]:
        return [self.folder / "nngp.npy", self.folder / "ntk.npy"]


def identity_of_run(tile: Callable, arguments: Sequence[Array], inputs: Sequence[Array]) -> dict[str, Any]:
    """Return what tells one run from another: the inputs, and what the network computes of them."""
    network = program_digest(tile, *arguments)
    return {"set of inputs": digest(*map(np.asarray, inputs)), "network": network, "versions": versions()}


def _starts(num: int, size: int | None) -> tuple[int, ...]:
    if size is None or size >= num:
        return (0,)
    return tuple(min(start, num - size) for start in range(0, num, size))


def _places(start: int, num: int, size: int | None) -> slice:
    return slice(start, num if size is None else min(start + size, num))


Tile = tuple[Array, Array, Array]  # nngp and ntk, (rows, columns), and the share that a series leaves out


def kernel(
    network: Any, *, block_size: int | None = None, devices: Sequence[jax.Device] | None = None
) -> "NetworkKernel":
    r"""Give the kernels of a network as its layers become infinitely wide.

    The same object is finite and infinite: what ``nn.bnn`` samples is what this takes, ``width`` left out of account.
    The NNGP kernel is the limit of the features' inner products, and so of the covariance of an output whose readout
    weights are N(0, 1); the tangent kernel adds the hidden layers' (Mathematics, :eq:`kernels`, :eq:`convolution`).
    Scales may be traced, and the kernels be differentiated with respect to them and to the inputs.

    Of images, covariances are held for each pixel with itself, (n1, n2, h, w), and for all pairs of pixels where the
    pooling is "mean", which costs h · w times as much. Activations without a closed form ("tanh", functions of
    arrays) go by a Hermite series of 128 degrees (Mathematics, :eq:`mehler`). A gradient by an image that is zero
    around a pixel, in a network without biases, leaves that pixel out where the activation has a series.

    Args:
        network: an :class:`~numpyro_wide.nn.FCN`, :class:`~numpyro_wide.nn.CNN`, :class:`~numpyro_wide.nn.WideResNet`,
            or another module that :func:`register_kernel` has a rule for.
        block_size: number of rows and of columns of the kernels computed at a time; None for all at once. With
            ``x2=None`` blocks below the diagonal are those above it. Work of more than ten seconds shows a progress
            bar.
        devices: devices that take the blocks in turn, such as ``jax.devices()``, outside of ``jax.jit``; None for JAX's
            default.

    Returns:
        ``kernel(x1, x2=None) -> (nngp, ntk)``, a :class:`~numpyro_wide.wide_limit.NetworkKernel`.

    Raises:
        TypeError: for a module without a rule.
        ValueError: for a bad ``block_size``, or devices without one; from the kernel, for inputs that are not of the
            network's shape, or hold NaN or infinities, and for what the network refuses when it is run.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import nn, wide_limit
        >>> network = nn.CNN(depth=2, width=64, activation="relu", padding="SAME")
        >>> nngp, ntk = wide_limit.kernel(network)(jnp.ones((3, 8, 8, 1)), jnp.zeros((4, 8, 8, 1)))
        >>> nngp.shape, ntk.shape
        ((3, 4), (3, 4))
    """
    rule_of(network)
    if devices is not None and (block_size is None or not len(devices)):
        raise ValueError(
            "devices need blocks to share: give block_size, the number of rows and columns of one, and at least one "
            "device; devices=None computes on JAX's default."
        )
    size = None if block_size is None else whole_number("block_size", block_size)
    return NetworkKernel(network, size, tuple(devices or ()))


class NetworkKernel:
    """Kernels of an infinitely wide network, as :func:`kernel` gives them.

    Args:
        network: module that has a rule.
        block_size: number of rows and of columns computed at a time, or None.
        devices: devices that take blocks in turn; none for JAX's default.
    """

    def __init__(self, network: Any, block_size: int | None, devices: tuple[jax.Device, ...] = ()):
        self.network, self.block_size, self.devices = network, block_size, devices

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None) -> tuple[Array, Array]:
        """Return the NNGP and the tangent kernel of ``x1`` (n1, ...) and ``x2`` (n2, ...), (n1, n2) each.

        Warns:
            UserWarning: if a Hermite series leaves out more than a hundred-thousandth, where numbers are known.
        """
        nngp, ntk, error = self._compute(_checked(x1, x2))
        warn_of_truncation(error)
        return nngp, ntk

    def truncation_error(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Array:
        """Return the largest share of a layer's moments that the Hermite series leaves out; 0 of closed forms.

        It is that of equal inputs, and bounds that of different ones, whose kernels converge faster.
        """
        return self._compute(_checked(x1, x2))[2]

    def to_disk(
        self, path: Any, x1: ArrayLike, x2: ArrayLike | None = None, *, progress_bar: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write both kernels to a folder, a row of blocks at a time, and continue where an earlier call was cut off.

        Args:
            path: folder, made if it is missing; its files are ``nngp.npy``, ``ntk.npy`` and ``progress.npz``.
            x1: inputs, (n1, ...).
            x2: inputs, (n2, ...), or None for x1.
            progress_bar: whether work of more than ten seconds shows a bar.

        Returns:
            both kernels, (n1, n2) each, mapped from their files, read-only.

        Raises:
            TypeError: under a transformation of JAX, where numbers are not known.
            ValueError: if the folder holds the kernels of other inputs, another network or block size, or files that
                were cut short or changed; if the path is a file.
            RuntimeError: if another process writes to the folder.
        """
        from numpyro_wide.runs._pieces import sole_use  # a room that few need together with this one

        inputs = _checked(x1, x2)
        check_known("to_disk writes numbers", *inputs)
        tiles, program = Tiles.of(inputs, self.block_size), self._program(inputs)
        files = MatrixFiles(path, (len(inputs[0]), len(inputs[-1])), inputs[0].dtype)
        with sole_use(files.folder):
            first = files.begin(tiles, identity_of_run(self._tile(inputs), tiles.arguments(inputs, 0, 0), inputs))
            error = 0.0
            for row in tiles.rows(first, progress_bar):
                error = max(error, tiles.fill_row(program, inputs, row, files.matrices, self.devices))
                files.finish(row)
        warn_of_truncation(np.asarray(error))
        return files.read()

    def _compute(self, inputs: tuple[Array, ...]) -> Tile:
        """Return both kernels and the error."""
        tiles = Tiles.of(inputs, self.block_size)
        if is_tracing() or not all(map(is_known, inputs)):
            return self._traced(inputs, tiles.size)
        program = self._program(inputs)
        if tiles.is_one:
            return program(*tiles.arguments(inputs, 0, 0))
        if not all(map(is_known, program.constants)):
            return self._traced(inputs, tiles.size)
        matrices = [np.empty((len(inputs[0]), len(inputs[-1])), inputs[0].dtype) for _ in range(2)]
        rows = tiles.rows(0, True)
        error = max(tiles.fill_row(program, inputs, row, matrices, self.devices) for row in rows)
        return jnp.asarray(matrices[0]), jnp.asarray(matrices[1]), jnp.asarray(error, inputs[0].dtype)

    def _program(self, inputs: tuple[Array, ...]) -> TracedProgram:
        """Return the program of a tile; that of another kernel of the same text is not compiled again."""
        return TracedProgram(self._tile(inputs), *Tiles.of(inputs, self.block_size).arguments(inputs, 0, 0))

    def _tile(self, inputs: tuple[Array, ...]) -> Any:
        """Return the function of some rows of both inputs, and of their places, that gives their part of the kernels.

        Places are compared only where there is one set of inputs.
        """
        rule, network, is_one_set = rule_of(self.network), self.network, len(inputs) == 1

        def tile(x1: Array, x2: Array, places1: Array, places2: Array) -> Tile:
            same = places1[:, None] == places2[None, :] if is_one_set else None
            try:
                found = rule(network, Inputs(x1, x2, same))
            except AllPairsNeededError:
                found = rule(network, Inputs(x1, x2, same, all_pairs=True))
            return found.product, found.product + found.tangent, found.error

        return tile

    def _traced(self, inputs: tuple[Array, ...], size: int | None) -> Tile:
        """Compute the kernels where numbers are not known: blocks in a loop of the program."""
        tile, x1, x2 = self._tile(inputs), inputs[0], inputs[-1]
        places = jnp.arange(max(len(x1), len(x2)))

        def rows(start: Array | int, num_rows: int) -> Tile:
            def columns(first: Array | int, num_columns: int) -> Tile:
                some = take_rows(x1, start, num_rows), take_rows(x2, first, num_columns)
                at = take_rows(places, start, num_rows), take_rows(places, first, num_columns)
                nngp, ntk, error = tile(*some, *at)
                return nngp.T, ntk.T, jnp.broadcast_to(error, (num_columns,))

            nngp, ntk, error = in_row_blocks(columns, len(x2), size)
            return nngp.T, ntk.T, jnp.broadcast_to(jnp.max(error), (num_rows,))

        nngp, ntk, error = jax.jit(lambda: in_row_blocks(rows, len(x1), size))()
        return nngp, ntk, jnp.max(error)


def _checked(x1: ArrayLike, x2: ArrayLike | None) -> tuple[Array, ...]:
    """Return the inputs as floats of one type, (x1,) or (x1, x2)."""
    inputs = as_floats(x1, names=("x1",)) if x2 is None else as_floats(x1, x2, names=("x1", "x2"))
    for name, x in zip(("x1", "x2"), inputs, strict=False):
        if x.ndim < 2 or 0 in x.shape:
            raise ValueError(
                f"{name} must have at least one row and one number a row, (n, d_in) or (n, height, width, channels), "
                f"but has shape {x.shape}; write a single input as x[None], a single column as x[:, None]."
            )
        check_finite(name, x)
    if inputs[0].shape[1:] != inputs[-1].shape[1:]:
        raise ValueError(f"x1 and x2 must have rows of one shape, but got {inputs[0].shape} and {inputs[-1].shape}.")
    return inputs
