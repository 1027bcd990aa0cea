"""Layers of wide networks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from flax import linen
from jax import Array

from numpyro_wide._activations import LAYER_NORM_EPSILON, PADDINGS, Activation, activation_function
from numpyro_wide._checks import check_finite, check_not_negative, check_one_of, is_known, whole_number

Scale = float | np.floating | np.ndarray | Array  # a standard deviation, or several


def unit_scale(activation: Activation, b_std: float = 0.0) -> float:
    r"""Return $\sigma_w$ with $\sigma_w^2 E[\varphi(u)^2] + \sigma_b^2 = 1$, u ~ N(0, 1)."""
    if not 0 <= b_std < 1:
        raise ValueError(f"b_std must be at least 0 and below 1 for units of variance one, but got {b_std}.")
    # Trapezoidal rule: exact for smooth functions, 1e-6 off with kinks.
    u = np.linspace(-9, 9, 6001)
    with jax.ensure_compile_time_eval():
        # Compiled, since vmap would trace a custom derivative.
        values = np.asarray(jax.jit(activation_function(activation))(jnp.asarray(u)), float)
    second_moment = np.trapezoid(values**2 * np.exp(-(u**2) / 2), u) / np.sqrt(2 * np.pi)
    return float(np.sqrt((1 - b_std**2) / second_moment))


def scale_or_unit(scale: Scale | None, activation: Activation, b_std: Scale) -> Scale:
    """Return a layer's scale; for None, the one of unit variance."""
    if scale is not None:
        return scale
    if not is_known(b_std):
        raise ValueError(
            "w_std=None and readout_w_std=None need biases of a known scale, but theirs is traced; give them, too."
        )
    return unit_scale(activation, float(b_std))


def is_zero(scale: Any) -> bool:
    """Whether a scale is known to be the number 0."""
    return is_known(scale) and np.ndim(scale) == 0 and not np.asarray(scale).any()


def check_scale(name: str, value: Any, *, is_number: bool = False) -> None:
    """Refuse a scale that is a prior, no real number, negative or not finite."""
    if isinstance(value, dist.Distribution):
        raise TypeError(f"{name} is a distribution; give its prior to bnn(..., scales={{{name!r}: ...}}).")
    check_finite(name, value)
    if is_number and np.shape(value) != ():
        raise ValueError(f"{name} must be a number, but has shape {np.shape(value)}.")
    check_not_negative(name, value)


standard_normal = linen.initializers.normal(1.0)


class NTKDense(linen.Module):
    r"""Affine layer $\sigma_w / \sqrt{m}\, h W + \sigma_b b$ for inputs h (…, m) (Hron 2022, §1.1; :eq:`layer`).

    Attributes:
        features: number of outputs.
        w_std: $\sigma_w$, a number.
        b_std: $\sigma_b$, a number; 0 for no bias parameter.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import NTKDense
        >>> layer = NTKDense(4, w_std=2.0, b_std=0.5)
        >>> params = {"kernel": jnp.ones((9, 4)), "bias": jnp.ones(4)}
        >>> layer.apply({"params": params}, jnp.ones((1, 9)))
        Array([[6.5, 6.5, 6.5, 6.5]], dtype=float32)
    """

    features: int
    w_std: Scale = 1.0
    b_std: Scale = 0.0

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return outputs (…, features) for inputs (…, m)."""
        _check_layer(self)
        num_inputs = x.shape[-1]
        kernel = self.param("kernel", standard_normal, (num_inputs, self.features))
        return _add_bias(self, (self.w_std / num_inputs**0.5) * (x @ kernel))


class NTKConv(linen.Module):
    r"""Convolution of images with scale $\sigma_w / \sqrt{m}$, all parameters N(0, 1); m is height · width · channels.

    Attributes:
        features: number of output channels.
        kernel_size: height and width of the filter.
        strides: steps along height and width.
        padding: "CIRCULAR" for equal variance at all pixels, "SAME" with zeros, or "VALID" without.
        w_std: $\sigma_w$, a number.
        b_std: $\sigma_b$, a number; 0 for no bias parameter.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import NTKConv
        >>> images = jnp.ones((2, 8, 8, 3))
        >>> layer = NTKConv(16, strides=(2, 2))
        >>> layer.apply(layer.init(jax.random.key(0), images), images).shape
        (2, 4, 4, 16)
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: str = "CIRCULAR"
    w_std: Scale = 1.0
    b_std: Scale = 0.0

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return images (n, height', width', features) for images (n, height, width, channels)."""
        _check_layer(self)
        check_one_of("padding", self.padding, PADDINGS)
        check_images(x)
        height, width = self.kernel_size
        num_channels = x.shape[-1]
        kernel = self.param("kernel", standard_normal, (height, width, num_channels, self.features))
        padding = self.padding
        if padding == "CIRCULAR":
            around = [((size - 1) // 2, size // 2) for size in self.kernel_size]
            x, padding = jnp.pad(x, [(0, 0), *around, (0, 0)], mode="wrap"), "VALID"
        convolved = _convolve(x, kernel, self.strides, padding)
        return _add_bias(self, (self.w_std / (height * width * num_channels) ** 0.5) * convolved)


def scaled_features(units: Array, readout_w_std: Scale, readout_b_std: Scale) -> Array:
    r"""Return $\sigma_w / \sqrt{d}$ times units (n, d), and a column for a bias."""
    features = (readout_w_std / units.shape[1] ** 0.5) * units
    if is_zero(readout_b_std):
        return features
    bias_column = jnp.full((units.shape[0], 1), readout_b_std, features.dtype)
    return jnp.concatenate([features, bias_column], axis=1)


def normalised(units: Array) -> Array:
    """Standardise the units (..., channels) of each pixel."""
    centred = units - jnp.mean(units, axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + LAYER_NORM_EPSILON)


def check_images(x: Array) -> None:
    if x.ndim != 4:
        raise ValueError(
            f"inputs must be images (n, height, width, channels), but got shape {x.shape}; for grey images "
            "pass x[..., None]."
        )


def _convolve(x: Array, kernel: Array, strides: tuple[int, int], padding: str) -> Array:
    """Convolve images (n, height, width, channels) with filters (height, width, channels, features)."""
    if jax.default_backend() != "cpu":
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout)
    window = kernel.shape[:2]
    around = jax.lax.padtype_to_pads(x.shape[1:3], window, strides, padding)
    x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    spans = [size - extent + 1 for size, extent in zip(x.shape[1:3], window, strict=True)]
    patches = [
        x[:, i : i + spans[0] : strides[0], j : j + spans[1] : strides[1]]
        for i in range(window[0])
        for j in range(window[1])
    ]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def _check_layer(layer: NTKDense | NTKConv) -> None:
    whole_number("features", layer.features)
    check_scale("w_std", layer.w_std)
    check_scale("b_std", layer.b_std)


def _add_bias(layer: NTKDense | NTKConv, outputs: Array) -> Array:
    if is_zero(layer.b_std):
        return outputs
    bias = layer.param("bias", standard_normal, (layer.features,))
    return outputs + layer.b_std * jnp.expand_dims(bias, range(outputs.ndim - 1))
