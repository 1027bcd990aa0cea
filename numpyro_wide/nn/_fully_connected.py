"""The fully connected network of the wide-limit papers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import Array

from numpyro_wide._checks import as_floats, is_known, whole_number
from numpyro_wide.nn._layers import NTKDense, normalised, scaled_features, scaled_inputs
from numpyro_wide.nn._scales import Activation, activation_function, check_scale, scale_or_unit

SCALES = ("w_std", "b_std", "readout_w_std", "readout_b_std", "input_scale")


class FCN(linen.Module):
    r"""Fully connected network in the NTK parametrisation, up to the scaled features of its readout.

    Hidden layers of ``width`` units, then $\sigma_w / \sqrt{\text{width}}$ times the last of them, and a constant
    column if the readout has a bias. By default the scales keep the prior variance of all units, and of the network's
    outputs, at one at any depth, for inputs with $\|x\|^2 = d_{in}$. The scales of Hron 2022, §4.2.1, are
    ``w_std=2**0.5, b_std=0.1, readout_w_std=1.0, readout_b_std=0.1``.

    All scales may be learnt: numbers that are traced, such as sites of the model; :func:`bnn` makes sites of them.
    There are no biases by default, so that every function is zero at the origin, and with "erf" odd, at any width: give
    ``b_std``, such as 0.5, where the targets are not like that.

    Attributes:
        depth: number of hidden layers, 0 for a linear model.
        width: number of units in each.
        activation: "erf", "gelu" (the exact one), "identity", "relu", "tanh", or a function of arrays.
        w_std: $\sigma_w$ of the hidden layers, a number or one for each; None for those that keep the variance at one.
        b_std: $\sigma_b$ of the hidden layers, a number or one for each; 0, the default, is for no biases.
        readout_w_std: $\sigma_w$ of the readout; None for the one that keeps the variance at one.
        readout_b_std: $\sigma_b$ of the readout, a number; 0, the default, is for no bias.
        input_scale: factor of the inputs, a number or one for each column: a learnt one says how much each input
            matters (automatic relevance determination). None for one.
        layer_norm: whether the units of a layer are brought to mean zero and variance one before each activation,
            without parameters of its own.

    Raises:
        TypeError: when it is run, for a scale that does not hold real numbers, or is a prior.
        ValueError: when it is run, for an unknown activation, a depth or width out of range, or scales that are
            negative or not finite.

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
    w_std: Any = None
    b_std: Any = 0.0
    readout_w_std: Any = None
    readout_b_std: Any = 0.0
    input_scale: Any = None
    layer_norm: bool = False

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return scaled features (n, width), or (n, width + 1) with a bias, for inputs (n, …), flattened."""
        whole_number("depth", self.depth, 0)
        whole_number("width", self.width)
        activate = activation_function(self.activation)
        scales = self.scales()
        (hidden,) = as_floats(x, names=("x",))
        hidden = scaled_inputs(hidden.reshape(hidden.shape[0], -1), self.input_scale)
        by_layer = zip(scales["w_std"], _by_layer("b_std", self.b_std, self.depth), strict=True)
        for layer, (w_std, b_std) in enumerate(by_layer):
            dense = NTKDense(self.width, w_std=_number(w_std), b_std=_number(b_std), name=f"hidden_{layer}")
            hidden = dense(hidden)
            hidden = activate(normalised(hidden) if self.layer_norm else hidden)
        return scaled_features(hidden, scales["readout_w_std"], self.readout_b_std)

    def scales(self) -> dict[str, Any]:
        """Return the five scales, None resolved.

        Returns:
            ``w_std`` (depth,), ``b_std``, ``readout_w_std``, ``readout_b_std`` and ``input_scale``: the keywords of
            :func:`~numpyro_wide.wide_limit.fcn_kernel`, whose kernel the features' inner products tend to.

        Raises:
            ValueError: for negative scales, a ``w_std`` or ``b_std`` that is neither a number nor (depth,), or a
                ``w_std`` of None beside biases of a learnt scale.

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
            w_std: Any = np.array([scale_or_unit(None, activation, b_std) for activation, b_std in by_layer])
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


def _by_layer(name: str, scale: Any, depth: int, is_data: bool = False) -> Any:
    """Return a scale for each layer, (depth,): NumPy's where it is known, so that no bias of scale zero is made.

    Where there is nothing to leave out arrays of JAX's stay what they are, data of the program.
    """
    shape = np.shape(scale)
    if shape not in ((), (depth,)):
        raise ValueError(f"{name} must be a number or have shape ({depth},), but got {shape}.")
    if is_data or not is_known(scale):
        return jnp.broadcast_to(scale, (depth,))
    return np.broadcast_to(np.asarray(scale, float), (depth,))


def _number(scale: Any) -> Any:
    """Return Python's number for NumPy's, which leaves the units their type."""
    return scale if isinstance(scale, Array) else float(scale)
