"""Kernels of whole networks."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import ArrayLike

from numpyro_wide._activations import Activation
from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import (
    as_floats,
    as_not_negative,
    check_finite,
    check_not_negative,
    is_known,
    is_tracing,
    late_progress,
    whole_number,
)
from numpyro_wide._compile import program_of
from numpyro_wide.wide_limit._duals import activation_dual, warn_of_truncation
from numpyro_wide.wide_limit._layer_kernels import (
    AllPairsNeededError,
    Inputs,
    LayerKernels,
    check_inputs,
    fully_connected,
    rule_of,
)

Kernel = Callable[..., tuple[Array, Array]]
Rule = Callable[[Inputs], LayerKernels]  # of one network
Tile = tuple[tuple[Array, ...], Array]  # nngp and, if asked for, ntk, (rows, columns), and the share left out


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
    """Give the kernels of a fully connected network as its hidden layers become infinitely wide.

    The NNGP kernel (Lee 2018, eq. 5; Matthews 2018) and the tangent kernel (Jacot 2018, Theorem 1) of one output, in
    the NTK parametrisation (Mathematics, :eq:`layer`, :eq:`kernels`). Differentiable by inputs and scales. Standardise
    the inputs: with erf and GELU the tangent kernel of parallel inputs loses digits in float32.

    Args:
        depth: number of hidden layers; 0 is a linear model with the readout's scales.
        activation: "erf", "gelu" (exact), "identity" or "relu", in closed form; "tanh" or a function of arrays, by a
            Hermite series of 128 degrees (Mathematics, :eq:`mehler`).
        w_std: standard deviation of the hidden layers' weights, a number or (depth,).
        b_std: standard deviation of the hidden layers' biases, a number or (depth,).
        readout_w_std: standard deviation of the readout's weights.
        readout_b_std: standard deviation of the readout's bias.
        input_scale: factor of the inputs, a number or (d_in,).
        block_size: rows computed at a time, for less memory; None for all at once.

    Returns:
        ``kernel(x1, x2=None) -> (nngp, ntk)``, with x1 (n1, d_in), x2 (n2, d_in) or None for x1, and two (n1, n2)
        matrices in the dtype of the inputs.

    Warns:
        UserWarning: from the kernel, if a series leaves out more than a hundred-thousandth.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = fcn_kernel(2, "relu", w_std=2.0**0.5, b_std=0.1)
        >>> nngp, ntk = kernel(jnp.ones((3, 5)), jnp.zeros((4, 5)))
        >>> nngp.shape, ntk.shape
        ((3, 4), (3, 4))
    """
    depth = whole_number("depth", depth, 0)
    activation_dual(activation)  # checks the name
    block_size = None if block_size is None else whole_number("block_size", block_size)
    stds = {"w_std": w_std, "b_std": b_std, "readout_w_std": readout_w_std, "readout_b_std": readout_b_std}
    for name, scale in stds.items():
        shapes = ((),) if name.startswith("readout") else ((), (depth,))
        if np.shape(scale) not in shapes:
            raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))}, but has {np.shape(scale)}.")
        check_not_negative(name, scale)
        check_finite(name, scale)
    if input_scale is not None:
        check_not_negative("input_scale", input_scale)

    def kernel(x1: ArrayLike, x2: ArrayLike | None = None) -> tuple[Array, Array]:
        """Return both kernels, (n1, n2)."""
        inputs = _checked(x1, x2)
        # The inputs set the dtype.
        scales = {name: as_not_negative(name, scale, dtype=inputs[0].dtype) for name, scale in stds.items()}
        nngp, ntk, error = _fcn_kernels(depth, activation, block_size, inputs, input_scale, scales)
        warn_of_truncation(error)
        return nngp, ntk

    return kernel


@partial(jax.jit, static_argnums=(0, 1, 2))
def _fcn_kernels(
    depth: int,
    activation: Activation,
    block_size: int | None,
    inputs: tuple[Array, ...],
    input_scale: ArrayLike | None,
    scales: dict[str, Array],
) -> tuple[Array, Array, Array]:
    """Return both kernels of (x1,) or (x1, x2), and the share that a series leaves out."""
    rule = lambda inputs: fully_connected(inputs.vectors(input_scale), depth, activation, scales)  # noqa: E731
    (nngp, ntk), error = _in_blocks(rule, inputs, 2, block_size, None)
    return nngp, ntk, error


def kernel(network: object, *, block_size: int | None = None) -> "NetworkKernel":
    """Give the kernels of a network as its layers become infinitely wide.

    The kernels of :func:`fcn_kernel`, with its activations (Mathematics, :eq:`kernels`, :eq:`convolution`).
    Differentiable by scales and inputs. The pooling "mean" costs height · width times as much as "flatten".

    Args:
        network: an :class:`~numpyro_wide.nn.FCN`, :class:`~numpyro_wide.nn.CNN`, :class:`~numpyro_wide.nn.WideResNet`,
            or a module with a rule by :func:`register_kernel`; its ``width`` is not used.
        block_size: number of rows and of columns computed at a time; None for all at once.

    Returns:
        ``kernel(x1, x2=None) -> (nngp, ntk)``, a :class:`~numpyro_wide.wide_limit.NetworkKernel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import nn, wide_limit
        >>> network = nn.CNN(depth=2, width=64, activation="relu", padding="SAME")
        >>> nngp, ntk = wide_limit.kernel(network)(jnp.ones((3, 8, 8, 1)), jnp.zeros((4, 8, 8, 1)))
        >>> nngp.shape, ntk.shape
        ((3, 4), (3, 4))
        >>> wide_limit.kernel(network).nngp(jnp.ones((3, 8, 8, 1))).shape  # alone, at two thirds of the cost
        (3, 3)
    """
    rule_of(network)
    return NetworkKernel(network, None if block_size is None else whole_number("block_size", block_size))


class NetworkKernel:
    """Kernels of an infinitely wide network, from :func:`kernel`."""

    def __init__(self, network: object, block_size: int | None):
        self.network, self.block_size = network, block_size

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None) -> tuple[Array, Array]:
        """Return the NNGP and the tangent kernel of ``x1`` (n1, ...) and ``x2`` (n2, ...)."""
        (nngp, ntk), error = self._compute(x1, x2, 2)
        warn_of_truncation(error)
        return nngp, ntk

    def nngp(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Array:
        """Return the NNGP kernel alone, (n1, n2)."""
        (nngp,), error = self._compute(x1, x2, 1)
        warn_of_truncation(error)
        return nngp

    def truncation_error(self, x1: ArrayLike, x2: ArrayLike | None = None) -> Array:
        """Return the largest share of a layer's moments that a Hermite series leaves out."""
        return self._compute(x1, x2, 1)[1]

    def _compute(self, x1: ArrayLike, x2: ArrayLike | None, num_kernels: int) -> Tile:
        """Return the first kernel, or both, and the error."""
        inputs, size = _checked(x1, x2), self.block_size
        rule = partial(rule_of(self.network), self.network)
        by_loop = jax.jit(lambda: _in_blocks(rule, inputs, num_kernels, size, size))
        if is_tracing() or not all(map(is_known, inputs)):
            return by_loop()
        rows, columns = (_blocks(len(x), size) for x in (inputs[0], inputs[-1]))
        first_arguments = _arguments(inputs, rows[0], columns[0])
        traced = jax.make_jaxpr(_tile(rule, len(inputs) == 1, num_kernels))(*first_arguments)
        if not all(map(is_known, traced.consts)):  # differentiated scales
            return by_loop()

        def tile(scales: list[Array], *args: Array) -> Tile:
            *kernels, error = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, scales))(*args)
            return tuple(kernels), error

        program = program_of(tile, traced.consts, *first_arguments)
        if len(rows) == len(columns) == 1:
            return program(traced.consts, *first_arguments)
        kernels = [np.empty((len(inputs[0]), len(inputs[-1])), inputs[0].dtype) for _ in range(num_kernels)]
        error = 0.0
        for i, above in enumerate(late_progress(rows, desc="rows of blocks")):
            for left in columns[i:] if len(inputs) == 1 else columns:
                blocks, share = program(traced.consts, *_arguments(inputs, above, left))
                for matrix, block in zip(kernels, blocks, strict=True):
                    matrix[above, left] = block
                    if len(inputs) == 1:
                        matrix[left, above] = np.asarray(block).T
                error = max(error, float(share))
        return tuple(map(jnp.asarray, kernels)), jnp.asarray(error, inputs[0].dtype)


def _tile(rule: Rule, is_one_set: bool, num_kernels: int) -> Callable[[Array, Array, Array, Array], Tile]:
    """Return the function from rows of both inputs, and their places, to a tile."""

    def tile(x1: Array, x2: Array, places1: Array, places2: Array) -> Tile:
        same = places1[:, None] == places2[None, :] if is_one_set else None
        try:
            layer = rule(Inputs(x1, x2, same))
        except AllPairsNeededError:
            layer = rule(Inputs(x1, x2, same, all_pairs=True))
        return (layer.product, layer.product + layer.tangent)[:num_kernels], layer.error

    return tile


def _in_blocks(
    rule: Rule, inputs: tuple[Array, ...], num_kernels: int, num_rows: int | None, num_columns: int | None
) -> Tile:
    """Compute the kernels of (x1,) or (x1, x2), which may be traced, by blocks in a loop."""
    tile, x1, x2 = _tile(rule, len(inputs) == 1, num_kernels), inputs[0], inputs[-1]
    places = jnp.arange(max(len(x1), len(x2)))

    def rows(start: Array | int, size: int) -> Tile:
        def columns(first_column: Array | int, width: int) -> Tile:
            blocks = take_rows(x1, start, size), take_rows(x2, first_column, width)
            kernels, error = tile(*blocks, take_rows(places, start, size), take_rows(places, first_column, width))
            return tuple(matrix.T for matrix in kernels), jnp.broadcast_to(error, (width,))

        kernels, error = in_row_blocks(columns, len(x2), num_columns)
        return tuple(matrix.T for matrix in kernels), jnp.broadcast_to(jnp.max(error), (size,))

    kernels, error = in_row_blocks(rows, len(x1), num_rows)
    return kernels, jnp.max(error)


def _blocks(num: int, size: int | None) -> list[slice]:
    """Divide rows into blocks of one size, the last shifted back to fit in."""
    if size is None or size >= num:
        return [slice(0, num)]
    starts = (min(start, num - size) for start in range(0, num, size))
    return [slice(start, start + size) for start in starts]


def _arguments(inputs: Sequence[Array], rows: slice, columns: slice) -> tuple[Array, Array, Array, Array]:
    """Return the inputs of a tile and their places."""
    at_rows, at_columns = (jnp.arange(block.start, block.stop) for block in (rows, columns))
    return inputs[0][rows], inputs[-1][columns], at_rows, at_columns


def _checked(x1: ArrayLike, x2: ArrayLike | None) -> tuple[Array, ...]:
    """Return the inputs as floats of one type, (x1,) or (x1, x2)."""
    inputs = as_floats(x1, names=("x1",)) if x2 is None else as_floats(x1, x2, names=("x1", "x2"))
    for name, x in zip(("x1", "x2"), inputs, strict=False):
        check_inputs(name, x)
        check_finite(name, x)
    if inputs[0].shape[1:] != inputs[-1].shape[1:]:
        raise ValueError(f"x1 and x2 must have rows of one shape, but got {inputs[0].shape} and {inputs[-1].shape}.")
    return inputs
