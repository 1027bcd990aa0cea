"""Rules that carry kernels through whole networks, by the type of the module."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide._checks import kind_of, listing, whole_number
from numpyro_wide.wide_limit._activation import Activation
from numpyro_wide.wide_limit.layer_kernels import Inputs, LayerKernels

if TYPE_CHECKING:
    from numpyro_wide.nn import CNN, FCN, WideResNet

Rule = Callable[[Any, Inputs], LayerKernels]

# Layers that are compiled one after the other, as is quicker to run; beyond, the time to compile would grow with the
# depth.
_MAX_UNROLLED = 3

_RULES: dict[type, Rule] = {}


def register_kernel(module_type: type, rule: Rule) -> None:
    r"""Register the rule by which :func:`kernel` handles a network of your own.

    A rule follows the network's forward pass: it begins with ``inputs.vectors()`` or ``inputs.images()``, and every
    layer is a method of the kernels, ``dense``, ``convolution``, ``activate``, ``normalise``, ``plus`` or ``flatten``.
    It ends with ``features(pooling, w_std, b_std)``, the readout's scales, since the network gives the features that
    N(0, 1) weights multiply. It holds for the subclasses of the type that have no rule of their own.

    Args:
        module_type: the class of the network.
        rule: function of the network and its :class:`~numpyro_wide.wide_limit.Inputs` that returns
            :class:`~numpyro_wide.wide_limit.LayerKernels`.

    Raises:
        TypeError: for what is no class, or a rule that is no function.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import linen
        >>> from numpyro_wide import wide_limit
        >>> from numpyro_wide.nn import NTKDense
        >>> class Sum(linen.Module):  # of a linear and a rectified branch
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         return (NTKDense(500)(x) + jnp.maximum(NTKDense(500)(x), 0)) / 500**0.5
        >>> def rule(network, inputs):
        ...     x = inputs.vectors()
        ...     return x.dense(1.0, 0.0).plus(x.dense(1.0, 0.0).activate("relu")).features("flatten", 1.0, 0.0)
        >>> wide_limit.register_kernel(Sum, rule)
        >>> nngp, ntk = wide_limit.kernel(Sum())(jnp.ones((1, 4)))
        >>> nngp.round(3).tolist()
        [[1.5]]
    """
    if not isinstance(module_type, type):
        raise TypeError(
            f"module_type must be a class, but is {kind_of(module_type)}; pass type(network) for a network."
        )
    if not callable(rule):
        raise TypeError(f"rule must be a function of a network and its inputs, but is {kind_of(rule)}.")
    _RULES[module_type] = rule


def rule_of(network: Any) -> Rule:
    """Return the rule of a network.

    Raises:
        TypeError: for one that has none.
    """
    from numpyro_wide.nn import CNN, FCN, WideResNet  # with flax, which is not loaded with the package

    rules: dict[type, Rule] = {FCN: _fcn, CNN: _cnn, WideResNet: _wide_resnet, **_RULES}
    for module_type in type(network).__mro__:
        if module_type in rules:
            return rules[module_type]
    have = listing(module_type.__name__ for module_type in rules)
    if isinstance(network, type):
        raise TypeError(f"network must be a module, not the class {network.__name__} itself; make one of it.")
    raise TypeError(
        f"the {type(network).__name__} has no rule for its infinite width; those that have one are {have}. Give it one "
        "by wide_limit.register_kernel, or estimate its kernel by mean_kernel or wide_limit.empirical_ntk."
    )


def fully_connected(
    units: LayerKernels,
    activation: Activation,
    scales: Sequence[Any],
    layer_norm: bool = False,
) -> LayerKernels:
    """Return the kernels of an FCN's features, for w_std and b_std (depth,) and the readout's two scales."""
    w_std, b_std, readout_w_std, readout_b_std = scales

    def layer(units: LayerKernels, scales: tuple[Array, Array]) -> LayerKernels:
        sums = units.dense(*scales)
        return (sums.normalise() if layer_norm else sums).activate(activation)

    hidden = _through_layers(layer, units, (w_std, b_std), w_std.shape[0])
    return hidden.features("flatten", readout_w_std, readout_b_std)


def _fcn(network: "FCN", inputs: Inputs) -> LayerKernels:
    whole_number("depth", network.depth, 0)
    whole_number("width", network.width)
    scales = network.scales()
    units = inputs.vectors(scales["input_scale"])
    by_layer = [
        jnp.broadcast_to(jnp.asarray(scales[n], units.error.dtype), (network.depth,)) for n in ("w_std", "b_std")
    ]
    numbers = [*by_layer, scales["readout_w_std"], scales["readout_b_std"]]
    return fully_connected(units, network.activation, numbers, network.layer_norm)


def _cnn(network: "CNN", inputs: Inputs) -> LayerKernels:
    from numpyro_wide.nn.internal import check_network, scale_or_unit

    check_network(network, inputs.x1)

    def layer(units: LayerKernels, w_std: Any) -> LayerKernels:
        sums = units.convolution(w_std, network.b_std, padding=network.padding)
        return (sums.normalise() if network.layer_norm else sums).activate(network.activation)

    first = scale_or_unit(network.w_std, "identity", network.b_std)
    w_std = scale_or_unit(network.w_std, network.activation, network.b_std)
    hidden = layer(inputs.images(), first)
    if network.padding == "VALID":  # each layer's image is smaller than the one before
        for _ in range(network.depth - 1):
            hidden = layer(hidden, w_std)
    else:
        scales = jnp.full(network.depth - 1, jnp.asarray(w_std, hidden.error.dtype))
        hidden = _through_layers(layer, hidden, scales, network.depth - 1)
    return _readout(network, hidden)


def _wide_resnet(network: "WideResNet", inputs: Inputs) -> LayerKernels:
    from numpyro_wide.nn.internal import check_network, scale_or_unit

    check_network(network, inputs.x1)
    first = scale_or_unit(network.w_std, "identity", network.b_std)
    w_std = scale_or_unit(network.w_std, network.activation, network.b_std)

    def convolution(units: LayerKernels, size: int, stride: int) -> LayerKernels:
        filter_size, strides = (size, size), (stride, stride)
        return units.convolution(
            w_std, network.b_std, kernel_size=filter_size, strides=strides, padding=network.padding
        )

    def block(units: LayerKernels, k: Any, *, stride: int, is_reshaped: bool) -> LayerKernels:
        active = units.activate(network.activation)
        residual = convolution(convolution(active, 3, stride).activate(network.activation), 3, 1)
        skip = convolution(active, 1, stride) if is_reshaped else units
        return skip.plus(residual, ((k - 1 + network.c) / (k + network.c)) ** 0.5, (1 / (k + network.c)) ** 0.5)

    hidden = inputs.images().convolution(first, network.b_std, padding=network.padding)
    for group in range(3):
        k = group * network.num_blocks + 1
        hidden = block(hidden, k, stride=2 if group else 1, is_reshaped=group > 0)
        later = jnp.arange(k + 1, k + network.num_blocks).astype(hidden.error.dtype)
        same_shape = partial(block, stride=1, is_reshaped=False)
        hidden = _through_layers(same_shape, hidden.settled(), later, network.num_blocks - 1)
    return _readout(network, hidden.activate(network.activation))


def _readout(network: "CNN | WideResNet", hidden: LayerKernels) -> LayerKernels:
    from numpyro_wide.nn.internal import scale_or_unit

    w_std = scale_or_unit(network.readout_w_std, network.activation, network.readout_b_std)
    return hidden.features(network.pooling, w_std, network.readout_b_std)


def _through_layers(
    layer: Callable[[LayerKernels, Any], LayerKernels], units: LayerKernels, scales: Any, num_layers: int
) -> LayerKernels:
    """Carry the kernels through layers that leave their shapes alone, whose scales lie along leading axes."""
    if num_layers <= _MAX_UNROLLED:
        for i in range(num_layers):
            units = layer(units, jax.tree.map(lambda leaf, i=i: leaf[i], scales))
        return units
    # For gradients a layer's temporaries are computed once more, and not held for all layers.
    through = jax.checkpoint(lambda units, numbers: (layer(units, numbers), None))
    return jax.lax.scan(through, units, scales, unroll=2)[0]
