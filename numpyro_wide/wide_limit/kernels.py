"""Kernels of infinitely wide fully connected networks: the Gaussian process and the tangent kernel."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_wide.wide_limit._blocks import in_row_blocks, take_rows
from numpyro_wide.wide_limit._checks import (
    as_floats,
    as_integer,
    check_block_size,
    check_no_nan,
    check_not_negative,
)
from numpyro_wide.wide_limit._dual import DUALS, Dual, reduced_determinant

Kernel = Callable[..., tuple[jax.Array, jax.Array]]
Moments = list[tuple[jax.Array, jax.Array]]
Layers = list[tuple[jax.Array, jax.Array]]  # variances of weights and biases, the readout last


def fcn_kernel(
    depth: int,
    activation: str,
    *,
    w_std: ArrayLike,
    b_std: ArrayLike,
    readout_w_std: ArrayLike = 1.0,
    readout_b_std: ArrayLike = 0.0,
    block_size: int | None = None,
) -> Kernel:
    r"""Kernels of a fully connected network as its hidden layers become infinitely wide.

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
        activation: "erf", "gelu" (the exact one, ``jax.nn.gelu(approximate=False)``), "identity" or "relu".
        w_std: standard deviation of the hidden layers' weights, a number or (depth,).
        b_std: standard deviation of the hidden layers' biases, a number or (depth,).
        readout_w_std: standard deviation of the readout's weights.
        readout_b_std: standard deviation of the readout's bias.
        block_size: rows of the kernels computed at a time, which bounds the memory beyond the results
            themselves; None for all at once. A few hundred rows suit many thousands of inputs.

    Returns:
        ``kernel(x1, x2=None) -> (nngp, ntk)``, with x1 (n1, d_in), x2 (n2, d_in) or None for x1, and two
        (n1, n2) matrices in the dtype of the inputs. With ``x2=None`` the diagonal is free of the rounding
        that the inner products of equal vectors otherwise have.

    Raises:
        ValueError: for an unknown activation, a negative depth or scale, a scale of another shape, a bad
            ``block_size``; from the kernel, for inputs that are not matrices of the same width, or hold NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = fcn_kernel(2, "relu", w_std=2.0**0.5, b_std=0.1)
        >>> nngp, ntk = kernel(jnp.ones((3, 5)), jnp.zeros((4, 5)))
        >>> nngp.shape, ntk.shape
        ((3, 4), (3, 4))
    """
    depth = _checked_depth(depth)
    _check_activation(activation)
    block_size = check_block_size(block_size)
    hidden = {"w_std": w_std, "b_std": b_std}
    readout = {"readout_w_std": readout_w_std, "readout_b_std": readout_b_std}
    _check_scales(depth, hidden, readout)

    def kernel(x1: ArrayLike, x2: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]:
        """Return the NNGP and NTK kernel matrices of ``x1`` (n1, d_in) and ``x2`` (n2, d_in)."""
        inputs = as_floats(x1) if x2 is None else as_floats(x1, x2)
        _check_inputs(*inputs)
        # The inputs set the dtype: a float64 scale does not turn a float32 kernel into a float64 one.
        dtype = inputs[0].dtype
        scales = [jnp.broadcast_to(jnp.asarray(scale, dtype), (depth,)) for scale in hidden.values()]
        scales += [jnp.asarray(scale, dtype) for scale in readout.values()]
        return _kernels(inputs, scales, activation=activation, block_size=block_size)

    return kernel


@partial(jax.jit, static_argnames=("activation", "block_size"))
def _kernels(
    inputs: tuple[jax.Array, ...], scales: list[jax.Array], *, activation: str, block_size: int | None
) -> tuple[jax.Array, jax.Array]:
    """Compute both kernels of ``inputs``, (x1,) or (x1, x2)."""
    w_std, b_std, readout_w_std, readout_b_std = scales
    layers: Layers = [*zip(w_std**2, b_std**2, strict=True), (readout_w_std**2, readout_b_std**2)]
    dual = DUALS[activation]
    x1, x2 = inputs[0], inputs[-1]
    moments = [_moments(jnp.mean(x**2, axis=1), layers, dual) for x in inputs]

    def rows(start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
        inner = jnp.matmul(take_rows(x1, start, size), x2.T, precision="highest") / x1.shape[1]
        row_moments = [(take_rows(square, start, size), take_rows(var, start, size)) for square, var in moments[0]]
        diagonal = (jnp.arange(size), start + jnp.arange(size)) if len(inputs) == 1 else None
        return _recursion(inner, row_moments, moments[-1], diagonal, layers, dual)

    return in_row_blocks(rows, x1.shape[0], block_size)


def _moments(norms: jax.Array, layers: Layers, dual: Dual) -> Moments:
    """Return the mean square (n,) of what each hidden layer takes in, and the variance (n,) of its preactivations."""
    moments: Moments = []
    square = norms
    for w_var, b_var in layers[:-1]:
        variance = w_var * square + b_var
        moments.append((square, variance))
        square = dual(variance, variance, variance, jnp.zeros_like(variance))[0]
    return moments


def _recursion(
    inner: jax.Array,
    moments1: Moments,
    moments2: Moments,
    diagonal: tuple[jax.Array, jax.Array] | None,
    layers: Layers,
    dual: Dual,
) -> tuple[jax.Array, jax.Array]:
    """Carry the scaled inner products (n1, n2) of the inputs through all layers (:eq:`kernels`).

    ``diagonal`` holds the row and column indices of the pairs that are one and the same input, if any are.
    """
    w_var, b_var = layers[0]
    product = inner
    nngp = ntk = w_var * product + b_var
    for layer, (square1, variance1), (square2, variance2) in zip(layers[1:], moments1, moments2, strict=True):
        determinant = reduced_determinant(square1[:, None], square2[None, :], product, w_var, b_var)
        product, slope = dual(variance1[:, None], variance2[None, :], nngp, determinant)
        if diagonal is not None:
            # Variances and covariance are rounded each in its own way. Here they must be the same number, for
            # an angle near 0 is off by √ε where its cosine is off by ε.
            alone = dual(variance1, variance1, variance1, jnp.zeros_like(variance1))
            product, slope = product.at[diagonal].set(alone[0]), slope.at[diagonal].set(alone[1])
        w_var, b_var = layer
        nngp = w_var * product + b_var
        ntk = nngp + w_var * slope * ntk
    return nngp, ntk


def _checked_depth(depth: int) -> int:
    number = as_integer(depth)
    if number is None or number < 0:
        raise ValueError(f"depth, the number of hidden layers, must be an integer of at least 0, but got {depth!r}.")
    return number


def _check_activation(activation: str) -> None:
    if not isinstance(activation, str) or activation not in DUALS:
        raise ValueError(
            f"activation must be one of {sorted(DUALS)}, the ones with closed-form kernels, "
            f"but got {activation!r}. For any other, see empirical_ntk and empirical_nngp."
        )


def _check_scales(depth: int, hidden: dict[str, ArrayLike], readout: dict[str, ArrayLike]) -> None:
    for name, scale in {**hidden, **readout}.items():
        shape = jnp.asarray(scale).shape
        if shape != () and (name in readout or shape != (depth,)):
            layers = "" if name in readout else f" or an array of shape (depth,) = {(depth,)}"
            raise ValueError(f"{name} must be a number{layers}, but got an array of shape {shape}.")
    check_not_negative(**hidden, **readout)


def _check_inputs(x1: jax.Array, x2: jax.Array | None = None) -> None:
    for name, x in {"x1": x1, "x2": x1 if x2 is None else x2}.items():
        if x.ndim != 2 or 0 in x.shape:
            raise ValueError(
                f"{name} must be a matrix (n, d_in) with at least one row and one column, "
                f"but got shape {x.shape}. Flatten images, and write a single input as x[None, :]."
            )
    if x2 is not None and x1.shape[1] != x2.shape[1]:
        raise ValueError(
            f"x1 and x2 must have the same number of columns d_in, but got shapes {x1.shape} and {x2.shape}."
        )
    check_no_nan(x1=x1, **({} if x2 is None else {"x2": x2}))
