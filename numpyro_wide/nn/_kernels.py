"""Kernels of these networks as their layers become infinitely wide: rules for ``wide_limit``."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import whole_number
from numpyro_wide.nn._additive import AdditiveNetwork, dense_block, effects_of, law_nodes, unit_scales
from numpyro_wide.nn._networks import CNN, FCN, WideResNet, checked_scales
from numpyro_wide.wide_limit._additive import Kernel, sum_of_effects, unit_kernel, unit_means
from numpyro_wide.wide_limit._layer_kernels import (
    Inputs,
    LayerKernels,
    fully_connected,
    register_kernel,
    through_layers,
)


def _fcn(network: FCN, inputs: Inputs) -> LayerKernels:
    whole_number("depth", network.depth, 0)
    whole_number("width", network.width)
    scales = network.scales()
    units = inputs.vectors(scales["input_scale"])
    return fully_connected(units, network.depth, network.activation, scales, network.layer_norm)


def _cnn(network: CNN, inputs: Inputs) -> LayerKernels:
    first_w_std, w_std, readout_w_std = checked_scales(network, inputs.x1)

    def layer(units: LayerKernels, w_std: ArrayLike) -> LayerKernels:
        sums = units.convolution(w_std, network.b_std, padding=network.padding)
        return (sums.normalise() if network.layer_norm else sums).activate(network.activation)

    hidden = layer(inputs.images(), first_w_std)
    if network.padding == "VALID":  # layers have different shapes
        for _ in range(network.depth - 1):
            hidden = layer(hidden, w_std)
    else:
        scales = jnp.full(network.depth - 1, jnp.asarray(w_std, hidden.error.dtype))
        hidden = through_layers(layer, hidden, scales, network.depth - 1)
    return hidden.features(network.pooling, readout_w_std, network.readout_b_std)


def _wide_resnet(network: WideResNet, inputs: Inputs) -> LayerKernels:
    first_w_std, w_std, readout_w_std = checked_scales(network, inputs.x1)

    def convolution(units: LayerKernels, size: int, stride: int) -> LayerKernels:
        options = {"kernel_size": (size, size), "strides": (stride, stride)}
        return units.convolution(w_std, network.b_std, padding=network.padding, **options)

    def block(units: LayerKernels, k: int | Array, *, stride: int, is_reshaped: bool) -> LayerKernels:
        active = units.activate(network.activation)
        residual = convolution(convolution(active, 3, stride).activate(network.activation), 3, 1)
        skip = convolution(active, 1, stride) if is_reshaped else units
        return skip.plus(residual, ((k - 1 + network.c) / (k + network.c)) ** 0.5, (1 / (k + network.c)) ** 0.5)

    hidden = inputs.images().convolution(first_w_std, network.b_std, padding=network.padding)
    for group in range(3):
        k = group * network.num_blocks + 1
        hidden = block(hidden, k, stride=2 if group else 1, is_reshaped=group > 0)
        later = jnp.arange(k + 1, k + network.num_blocks).astype(hidden.error.dtype)
        same_shape = partial(block, stride=1, is_reshaped=False)
        hidden = through_layers(same_shape, hidden.settled(), later, network.num_blocks - 1)
    hidden = hidden.activate(network.activation)
    return hidden.features(network.pooling, readout_w_std, network.readout_b_std)


def _additive(network: AdditiveNetwork, inputs: Inputs) -> LayerKernels:
    """Return the kernels of an additive network's features."""
    x1, x2 = (x.reshape(x.shape[0], -1) for x in (inputs.x1, inputs.x2))
    num_inputs, dtype = x1.shape[1], x1.dtype
    effects, scales = effects_of(network, num_inputs), unit_scales(network, num_inputs, dtype)
    nodes, weights = (jnp.asarray(numbers, dtype) for numbers in law_nodes(network.law, num_inputs))

    def kernel(share: Array) -> Kernel:
        """Return the kernel with a share of each unit's tangent kernel."""
        means = (unit_means(network.activation, scales, x, nodes, weights, share) for x in (x1, x2))

        def of_input(column: tuple) -> Kernel:
            return unit_kernel(network.activation, column, inputs.same, share)

        return sum_of_effects(effects, scales, of_input, (scales["w_std"], scales["b_std"], x1.T, x2.T), *means)

    # Of a product of units, the tangent kernel is the derivative along those of the units.
    product, tangent, error = jax.jvp(kernel, (jnp.zeros((), dtype),), (jnp.ones((), dtype),), has_aux=True)
    units = inputs.vectors()
    if network.dense:
        block = dense_block(network, parent=None)
        units = fully_connected(inputs.vectors(block.input_scale), block.depth, block.activation, block.scales())
        product, tangent, error = product + units.product, tangent + units.tangent, jnp.maximum(error, units.error)
    product = product + jnp.asarray(network.readout_b_std, dtype) ** 2
    return replace(units, product=product, tangent=tangent, error=error)


register_kernel(FCN, _fcn)
register_kernel(CNN, _cnn)
register_kernel(WideResNet, _wide_resnet)
register_kernel(AdditiveNetwork, _additive)
