"""Kernels of infinitely wide fully connected networks: the Gaussian process and the tangent kernel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import (
    as_floats,
    as_not_negative,
    check_no_nan,
    check_not_negative,
    is_known,
    whole_number,
)
from numpyro_wide._programs import run_compiled
from numpyro_wide.wide_limit._activation import Activation, activation_dual, warn_of_truncation
from numpyro_wide.wide_limit._rules import fully_connected
from numpyro_wide.wide_limit._shapes import check_matrix
from numpyro_wide.wide_limit.layer_kernels import Inputs, scaled_inputs

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
