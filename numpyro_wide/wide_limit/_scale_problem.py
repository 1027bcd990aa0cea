"""Architecture of an infinitely wide network, its inputs, and the priors of its scales."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide.wide_limit._activation import Activation, activation_dual
from numpyro_wide.wide_limit._rules import fully_connected
from numpyro_wide.wide_limit.layer_kernels import Inputs
from numpyro_wide.wide_limit.network_kernel import kernel

# Standard deviations of the logarithms a priori. Wide, but no scale is driven to where the network is a step function,
# or a constant, for a few nats; those of the weights are narrow where another scale can take their place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5, "input_scale": 1.0}
_B_STD, _NOISE = 0.5, 0.3  # medians a priori, that of the noise in units of the targets' root mean square


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaleProblem:
    """An architecture, its data, and the priors of its scales, whose logarithms over their medians are one vector.

    Attributes:
        activation: name of the network's activation.
        depth: number of hidden layers.
        network: network whose scales are fitted, its own left out; None for a fully connected one of that activation
            and depth.
        inputs: inputs, (n, d_in), or (n, ...) for a network.
        medians: medians of the scales a priori, by name; a layer's ``w_std`` is a multiple of its own, the same for all
            layers.
        spreads: standard deviations of the logarithms, in the vector's order, which is that of ``_SPREADS``.
    """

    activation: Activation = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})
    network: Any = field(metadata={"static": True})
    inputs: Any
    medians: dict[str, np.ndarray]
    spreads: np.ndarray

    @classmethod
    def of(
        cls, activation: Activation, depth: int, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up the problem with the priors that suit the architecture and the size of the function values.

        Args:
            activation: name of the network's activation.
            depth: number of hidden layers.
            inputs: inputs, (n, d_in).
            size: standard deviation of the function values that is expected.
            by_input: whether each column of the inputs has a scale of its own.
            has_noise: whether the noise is one of the scales.
        """
        # What keeps the variance at one.
        behind = float(1 / jnp.sqrt(activation_dual(activation).moments(jnp.ones(1)).product[0]))
        medians = {
            "w_std": np.array([1.0] + [behind] * (depth - 1)),
            "b_std": np.array(_B_STD),
            "readout_w_std": np.array(size * behind),
        }
        if has_noise:
            medians["noise_scale"] = np.array(size * _NOISE)
        if by_input:
            spread = inputs.std(axis=0)
            medians["input_scale"] = 1 / np.where(spread > 0, spread, 1.0)
        counts = [median.size if name == "input_scale" else 1 for name, median in medians.items()]
        spreads = np.repeat([_SPREADS[name] for name in medians], counts)
        return cls(activation, depth, None, inputs, medians, spreads)

    @classmethod
    def of_network(
        cls, network: Any, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up the problem of a network's scales, which are numbers, its own but for the readout's bias left out.

        Args:
            network: module with the attributes ``w_std``, ``b_std`` and ``readout_w_std``.
            inputs: inputs, (n, ...).
            size: standard deviation of the function values that is expected.
            by_input: whether each column of the inputs has a scale of its own.
            has_noise: whether the noise is one of the scales.
        """
        bare = network.clone(w_std=None, b_std=0.0, readout_w_std=None)
        dense = cls.of(network.activation, 2, inputs.reshape(len(inputs), -1), size, by_input, has_noise)
        medians = dense.medians | {"w_std": dense.medians["w_std"][-1]}
        # A mean over pixels lowers the variance by as much as they differ: by the kernel of some rows.
        some = kernel(bare.clone(w_std=float(medians["w_std"]), b_std=_B_STD, readout_w_std=1.0))(inputs[:20])[0]
        medians["readout_w_std"] = np.array(size / np.sqrt(np.mean(np.diagonal(some))))
        depth = getattr(network, "depth", 0)
        return cls(network.activation, depth, bare, inputs, medians, dense.spreads)

    def __getitem__(self, rows: np.ndarray) -> "ScaleProblem":
        """Return the problem of some of the rows, with the same priors."""
        return replace(self, inputs=self.inputs[rows])

    def kernel(self, scales: dict[str, Any], x1: Array, x2: Array, same: Array) -> Array:
        """Return the kernel of a fully connected network's limit for some inputs, (n1, n2).

        Args:
            scales: scales by name.
            x1: inputs, (n1, d_in).
            x2: inputs, (n2, d_in).
            same: which pairs are one and the same input, (n1, n2).
        """
        units = Inputs(x1, x2, same).vectors(scales.get("input_scale"))
        w_std, b_std = (jnp.broadcast_to(scales[name], (self.depth,)) for name in ("w_std", "b_std"))
        readout = scales["readout_w_std"], jnp.zeros(())
        return fully_connected(units, self.activation, (w_std, b_std, *readout)).product

    def network_kernel(self, scales: dict[str, Any]) -> Array:
        """Return the kernel of a network's limit for the inputs with themselves, (n, n)."""
        own = {name: value for name, value in scales.items() if name != "noise_scale"}
        return kernel(self.network.clone(**own))(self.inputs)[0]

    @property
    def noise(self) -> int:
        """Place of the noise among the logarithms."""
        return list(_SPREADS).index("noise_scale")

    @property
    def readout(self) -> int:
        """Place of the readout's scale among the logarithms."""
        return list(_SPREADS).index("readout_w_std")

    def split(self, vector: Any) -> dict[str, Any]:
        """Return the numbers of a vector by name."""
        found, start = {}, 0
        for name in filter(self.medians.__contains__, _SPREADS):  # JAX sorts the names of a dictionary
            size = self.medians[name].size if name == "input_scale" else 1
            found[name] = vector[start : start + size] if name == "input_scale" else vector[start]
            start += size
        return found

    def scales(self, logarithms: Any) -> dict[str, Any]:
        """Return scales and noise by name, from logarithms over their medians."""
        multiples = self.split(jnp.exp(logarithms) if isinstance(logarithms, Array) else np.exp(logarithms))
        return {name: self.medians[name] * multiple for name, multiple in multiples.items()}
