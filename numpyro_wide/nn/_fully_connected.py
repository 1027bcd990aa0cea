"""The fully connected network of the wide-limit papers."""

from typing import Any

import jax
import numpy as np
from flax import linen

from numpyro_wide.nn._layers import NTKDense, as_real, scaled_features
from numpyro_wide.nn._scales import Activation, activation_function, check_count, check_scale, scale_or_unit, unit_scale


class FCN(linen.Module):
    r"""Fully connected network in the NTK parametrisation, up to the scaled features of its readout.

    Hidden layers of ``width`` units, then $\sigma_w / \sqrt{\text{width}}$ times the last of them, and a constant
    column if the readout has a bias. By default the scales keep the prior variance of all units, and of the network's
    outputs, at one at any depth, for inputs with $\|x\|^2 = d_{in}$. The scales of Hron 2022, §4.2.1, are
    ``w_std=2**0.5, b_std=0.1, readout_w_std=1.0, readout_b_std=0.1``.

    There are no biases by default, so that every function is zero at the origin, and with "erf" odd, at any width: give
    ``b_std``, 0.5 say, where the targets are not like that.

    Attributes:
        depth: number of hidden layers, 0 for a linear model.
        width: units in each.
        activation: "erf", "gelu" (the exact one), "identity", "relu", or a function of arrays.
        w_std: $\sigma_w$ of the hidden layers, a number or one for each; None for :func:`unit_scale`'s.
        b_std: $\sigma_b$ of the hidden layers, a number; 0, the default, is for no biases.
        readout_w_std: $\sigma_w$ of the readout; None for the one that keeps the variance at one.
        readout_b_std: $\sigma_b$ of the readout, a number; 0, the default, is for no bias.

    Raises:
        ValueError: when it is run, for an unknown activation, a depth or width out of range, or negative scales.

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
    b_std: float = 0.0
    readout_w_std: float | None = None
    readout_b_std: float = 0.0

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scaled features (n, width), or (n, width + 1) with a bias, for inputs (n, …), flattened."""
        check_count("depth", self.depth, least=0)
        check_count("width", self.width)
        activate = activation_function(self.activation)
        scales = self.scales()
        hidden = as_real(x).reshape(x.shape[0], -1)
        for layer, w_std in enumerate(scales["w_std"]):
            name = f"hidden_{layer}"
            hidden = activate(NTKDense(self.width, w_std=float(w_std), b_std=self.b_std, name=name)(hidden))
        return scaled_features(hidden, scales["readout_w_std"], self.readout_b_std)

    def scales(self) -> dict[str, Any]:
        """The four scales as numbers, None resolved.

        Returns:
            ``w_std`` (depth,), ``b_std``, ``readout_w_std`` and ``readout_b_std``: the keywords of
            :func:`~numpyro_wide.wide_limit.fcn_kernel`, whose kernel the features' inner products tend to.

        Raises:
            ValueError: for negative scales, or a ``w_std`` that is neither a number nor (depth,).

        Example:
            >>> from numpyro_wide.nn import FCN
            >>> from numpyro_wide.wide_limit import fcn_kernel
            >>> network = FCN(depth=2, width=100, activation="relu")
            >>> network.scales()["w_std"].round(3).tolist()
            [1.0, 1.414]
            >>> kernel = fcn_kernel(network.depth, network.activation, **network.scales())
        """
        for name in ("w_std", "b_std", "readout_w_std", "readout_b_std"):
            if getattr(self, name) is not None:
                check_scale(name, getattr(self, name))
        if self.w_std is None:
            # No activation precedes the first layer.
            preceding = ["identity", *[self.activation] * (self.depth - 1)][: self.depth]
            by_layer = np.array([unit_scale(activation, self.b_std) for activation in preceding])
        else:
            by_layer = np.asarray(self.w_std, float)
            if by_layer.shape not in ((), (self.depth,)):
                raise ValueError(f"w_std must be a number or have shape ({self.depth},), but got {by_layer.shape}.")
        return {
            "w_std": np.broadcast_to(by_layer, (self.depth,)),
            "b_std": self.b_std,
            "readout_w_std": scale_or_unit(
                self.readout_w_std, self.activation if self.depth else "identity", self.readout_b_std
            ),
            "readout_b_std": self.readout_b_std,
        }
