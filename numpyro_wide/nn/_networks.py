"""Fully connected, convolutional and residual networks, and one that summarises data for an amortised guide."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import Array

from numpyro_wide._checks import as_floats, check_input_scale, check_not_negative, check_one_of, is_known, whole_number
from numpyro_wide.nn._layers import (
    Activation,
    NTKConv,
    NTKDense,
    Scale,
    activation_function,
    check_images,
    check_scale,
    normalised,
    scale_or_unit,
    scaled_features,
)

SCALES = ("w_std", "b_std", "readout_w_std", "readout_b_std", "input_scale")


class FCN(linen.Module):
    r"""Fully connected network in the NTK parametrisation, up to the scaled features of its readout.

    Default scales keep the prior variance of units and outputs at one for $\|x\|^2 = d_{in}$. Those of Hron 2022,
    §4.2.1, are ``w_std=2**0.5, b_std=0.1, readout_w_std=1.0, readout_b_std=0.1``. Traced scales may be learnt. Without
    biases functions are zero at the origin.

    Attributes:
        depth: number of hidden layers; 0 for a linear model.
        width: number of units in each.
        activation: "erf", "gelu", "identity", "relu", "tanh", or a function of arrays.
        w_std: $\sigma_w$ of hidden layers, a number or one by layer; None for unit variance.
        b_std: $\sigma_b$ of hidden layers, a number or one by layer; 0 for none.
        readout_w_std: $\sigma_w$ of the readout; None for unit variance.
        readout_b_std: $\sigma_b$ of the readout; 0 for none.
        input_scale: factor of the inputs, a number or one by column; None for one.
        layer_norm: whether units are standardised before each activation, without parameters.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import FCN
        >>> network = FCN(depth=2, width=100, activation="erf", b_std=0.5, readout_b_std=0.1)
        >>> params = network.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> network.apply(params, jnp.ones((5, 3))).shape
        (5, 101)
    """

    depth: int
    width: int
    activation: Activation = "gelu"
    w_std: Scale | Sequence[float] | None = None
    b_std: Scale | Sequence[float] = 0.0
    readout_w_std: Scale | None = None
    readout_b_std: Scale = 0.0
    input_scale: Scale | None = None
    layer_norm: bool = False

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return scaled features (n, width), or (n, width + 1) with a bias, for inputs (n, …)."""
        whole_number("depth", self.depth, 0)
        whole_number("width", self.width)
        activate = activation_function(self.activation)
        scales = self.scales()
        (hidden,) = as_floats(x, names=("x",))
        hidden = hidden.reshape(hidden.shape[0], -1)
        if self.input_scale is not None:
            check_input_scale(self.input_scale, hidden.shape[1])
            hidden = hidden * jnp.broadcast_to(jnp.asarray(self.input_scale, hidden.dtype), hidden.shape)
        by_layer = zip(scales["w_std"], _by_layer("b_std", self.b_std, self.depth), strict=True)
        for layer, (w_std, b_std) in enumerate(by_layer):
            dense = NTKDense(self.width, w_std=_number(w_std), b_std=_number(b_std), name=f"hidden_{layer}")
            hidden = dense(hidden)
            hidden = activate(normalised(hidden) if self.layer_norm else hidden)
        return scaled_features(hidden, scales["readout_w_std"], self.readout_b_std)

    def scales(self) -> dict[str, Any]:
        """Return the scales by name, None resolved, as keywords of :func:`~numpyro_wide.wide_limit.fcn_kernel`.

        Example:
            >>> from numpyro_wide.nn import FCN
            >>> from numpyro_wide.wide_limit import fcn_kernel
            >>> network = FCN(depth=2, width=100, activation="relu")
            >>> network.scales()["w_std"].round(3).tolist()
            [1.0, 1.414]
            >>> kernel = fcn_kernel(network.depth, network.activation, **network.scales())
        """
        for name in SCALES:
            if getattr(self, name) is not None:
                check_scale(name, getattr(self, name), is_number=name.startswith("readout"))
        b_std = _by_layer("b_std", self.b_std, self.depth)
        if self.w_std is None:
            # No activation precedes the first layer.
            preceding = ["identity", *[self.activation] * (self.depth - 1)][: self.depth]
            by_layer = zip(preceding, b_std, strict=True)
            w_std: Scale = np.array([scale_or_unit(None, activation, b_std) for activation, b_std in by_layer])
        else:
            w_std = _by_layer("w_std", self.w_std, self.depth, is_data=isinstance(self.w_std, Array))
        return {
            "w_std": w_std,
            "b_std": self.b_std if np.ndim(self.b_std) == 0 else b_std,
            "readout_w_std": scale_or_unit(
                self.readout_w_std, self.activation if self.depth else "identity", self.readout_b_std
            ),
            "readout_b_std": self.readout_b_std,
            "input_scale": self.input_scale,
        }


def _by_layer(name: str, scale: Any, depth: int, is_data: bool = False) -> Array | np.ndarray:
    """Return a scale by layer, (depth,): NumPy's where known, to omit biases of scale zero."""
    shape = np.shape(scale)
    if shape not in ((), (depth,)):
        raise ValueError(f"{name} must be a number or have shape ({depth},), but got {shape}.")
    if is_data or not is_known(scale):
        return jnp.broadcast_to(scale, (depth,))
    return np.broadcast_to(np.asarray(scale, float), (depth,))


def _number(scale: Scale) -> float | Array:
    """Return a NumPy number as Python's, for the units' type."""
    return scale if isinstance(scale, Array) else float(scale)


POOLINGS = ("flatten", "mean")


class CNN(linen.Module):
    r"""Convolutional network in the NTK parametrisation, of 3 × 3 filters, up to the scaled features of its readout.

    Attributes:
        depth: number of hidden layers, at least 1.
        width: number of channels in each.
        activation: as of :class:`FCN`.
        w_std: $\sigma_w$ of hidden layers, a number; None for unit variance.
        b_std: $\sigma_b$ of hidden layers, a number.
        readout_w_std: as of :class:`FCN`.
        readout_b_std: as of :class:`FCN`.
        padding: as of :class:`NTKConv`.
        pooling: "flatten" for units of all pixels, or "mean" over pixels, of lower variance.
        layer_norm: whether a pixel's channels are standardised before each activation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import CNN
        >>> network, images = CNN(depth=2, width=16), jnp.ones((3, 8, 8, 1))
        >>> features, params = jax.eval_shape(network.init_with_output, jax.random.key(0), images)
        >>> features.shape
        (3, 1024)
    """

    depth: int
    width: int
    activation: Activation = "gelu"
    w_std: Scale | None = None
    b_std: Scale = 0.0
    readout_w_std: Scale | None = None
    readout_b_std: Scale = 0.0
    padding: str = "CIRCULAR"
    pooling: str = "flatten"
    layer_norm: bool = False

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return scaled features (n, d), a bias column included, for images (n, h, w, channels)."""
        first_w_std, later_w_std, readout_w_std = checked_scales(self, x)
        activate = activation_function(self.activation)
        (hidden,) = as_floats(x, names=("x",))
        for layer in range(self.depth):
            w_std = later_w_std if layer else first_w_std
            convolution = NTKConv(
                self.width, padding=self.padding, w_std=w_std, b_std=self.b_std, name=f"hidden_{layer}"
            )
            hidden = convolution(hidden)
            hidden = activate(normalised(hidden) if self.layer_norm else hidden)
        return _pooled_features(self, hidden, readout_w_std)


class WideResNet(linen.Module):
    r"""Wide residual network without normalisers (Hron 2022, §4.2.2), up to the scaled features of its readout.

    A convolution, then three groups of residual blocks (Zagoruyko 2016), of 1, 2 and 4 times ``width`` channels, at
    full, half and quarter resolution. The k-th residual sum is (Shao 2020)

    $$\sqrt{(k - 1 + c) / (k + c)}\, f_k^{skip}(x) + \sqrt{1 / (k + c)}\, f_k^{resid}(x)$$

    The paper's scales are ``w_std=2.2**0.5, readout_w_std=1.0, readout_b_std=0.1``.

    Attributes:
        num_blocks: number n of residual blocks by group, for 6n + 2 layers.
        width: number of channels in the first group.
        activation: as of :class:`FCN`.
        w_std: $\sigma_w$ of all convolutions; None for unit variance.
        b_std: $\sigma_b$ of all convolutions.
        readout_w_std: as of :class:`FCN`.
        readout_b_std: as of :class:`FCN`.
        c: constant of the residual sums, at least 0.
        padding: as of :class:`NTKConv`.
        pooling: as of :class:`CNN`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import WideResNet
        >>> network, images = WideResNet(num_blocks=1, width=8), jnp.ones((2, 16, 16, 3))
        >>> features, params = jax.eval_shape(network.init_with_output, jax.random.key(0), images)
        >>> features.shape
        (2, 32)
    """

    num_blocks: int
    width: int
    activation: Activation = "gelu"
    w_std: Scale | None = None
    b_std: Scale = 0.0
    readout_w_std: Scale | None = None
    readout_b_std: Scale = 0.0
    c: float = 1.0
    padding: str = "CIRCULAR"
    pooling: str = "mean"

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return scaled features (n, d), a bias column included, for images (n, h, w, channels)."""
        first_w_std, later_w_std, readout_w_std = checked_scales(self, x)
        activate = activation_function(self.activation)
        layer = partial(NTKConv, padding=self.padding, b_std=self.b_std)
        hidden = layer(self.width, w_std=first_w_std, name="stem")(*as_floats(x, names=("x",)))
        k = 0
        for group, num_channels in enumerate((self.width, 2 * self.width, 4 * self.width)):
            convolution = partial(layer, num_channels, w_std=later_w_std)
            for block in range(self.num_blocks):
                k += 1
                name = f"group_{group}_block_{block}"
                strides = (2, 2) if group and not block else (1, 1)
                active = activate(hidden)
                inner = activate(convolution(strides=strides, name=f"{name}_first")(active))
                residual = convolution(name=f"{name}_second")(inner)
                skip = hidden
                if hidden.shape[-1] != num_channels or strides != (1, 1):
                    skip = convolution(kernel_size=(1, 1), strides=strides, name=f"{name}_skip")(active)
                hidden = ((k - 1 + self.c) / (k + self.c)) ** 0.5 * skip + (1 / (k + self.c)) ** 0.5 * residual
        return _pooled_features(self, activate(hidden), readout_w_std)


def checked_scales(network: CNN | WideResNet, x: Array) -> tuple[Scale, Scale, Scale]:
    """Check a network and its images; return the weights' scales in the first layer, later ones and the readout."""
    if isinstance(network, CNN):
        whole_number("depth", network.depth)
    else:
        whole_number("num_blocks", network.num_blocks)
        check_not_negative("c", network.c)
    check_images(x)
    whole_number("width", network.width)
    for name in ("w_std", "b_std", "readout_w_std", "readout_b_std"):
        if getattr(network, name) is not None:
            check_scale(name, getattr(network, name), is_number=True)
    check_one_of("pooling", network.pooling, POOLINGS)
    first_w_std = scale_or_unit(network.w_std, "identity", network.b_std)
    later_w_std = scale_or_unit(network.w_std, network.activation, network.b_std)
    return first_w_std, later_w_std, scale_or_unit(network.readout_w_std, network.activation, network.readout_b_std)


def _pooled_features(network: CNN | WideResNet, units: Array, readout_w_std: Scale) -> Array:
    """Return the readout's features for units (n, h, w, channels)."""
    pooled = units.mean(axis=(1, 2)) if network.pooling == "mean" else units.reshape(units.shape[0], -1)
    return scaled_features(pooled, readout_w_std, network.readout_b_std)


class ResidualEncoder(linen.Module):
    """Fully connected residual network of GELU units, from data to features, with flax's own parametrisation.

    The data are among the features, so that what is linear in them need not be learnt by units.

    Attributes:
        width: number of units in each layer.
        depth: number of hidden layers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import ResidualEncoder
        >>> encoder = ResidualEncoder(width=100)
        >>> encoder.apply(encoder.init(jax.random.key(0), jnp.ones((1, 3))), jnp.ones((5, 3))).shape
        (5, 103)
    """

    width: int = 256
    depth: int = 3

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return features (n, width + d) of data (n, ...), d numbers a row."""
        whole_number("width", self.width)
        whole_number("depth", self.depth)
        (x,) = as_floats(x, names=("x",))
        x = x.reshape(len(x), -1)
        dense = [linen.Dense(self.width, param_dtype=x.dtype, name=f"hidden_{i}") for i in range(self.depth)]
        features = linen.gelu(dense[0](x))
        for layer in dense[1:]:
            features = features + linen.gelu(layer(features))
        return jnp.concatenate([features, x], axis=1)
