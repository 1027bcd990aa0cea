"""Kernels of any network that has a rule, for the very module that is sampled."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import as_floats, check_finite, check_known, is_known, is_tracing, whole_number
from numpyro_wide._programs import TracedProgram
from numpyro_wide.wide_limit._activation import warn_of_truncation
from numpyro_wide.wide_limit._rules import rule_of
from numpyro_wide.wide_limit._tiles import MatrixFiles, Tiles, identity_of_run
from numpyro_wide.wide_limit.layer_kernels import AllPairsNeededError, Inputs

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
        from numpyro_wide.runs.internal import sole_use  # a room that few need together with this one

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
