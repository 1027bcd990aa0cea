"""Regression networks of a finite width, with latent scales and noise around medians that are arguments."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_wide import collapse_readout
from numpyro_wide.nn import FCN, NoiseNetwork, bnn

SPREAD = 0.5  # of the logarithms of scales and noise a priori


class Network(NamedTuple):
    """A network, but for its scales.

    Attributes:
        depth: number of hidden layers.
        width: number of units in each.
        activation: activation, by name or as a function.
        num_outputs: number of outputs; None for targets that are a vector.
        by_row: whether the noise depends on the inputs.
    """

    depth: int
    width: int
    activation: str | Callable[[Array], Array]
    num_outputs: int | None
    by_row: bool


def run_network(network: Network, medians: Mapping[str, Array], x: Array, y: Array | None = None) -> None:
    """Run the model of a network: latent scales and noise, log-normal around medians.

    The medians are arguments, as the data are, so that what is compiled serves other data of as many rows. Where
    columns have scales of their own these are the first layer's, and ``w_std`` is held.

    Args:
        network: the network.
        medians: medians of the scales by name, that of "noise" among them.
        x: inputs, (n, d).
        y: targets, (n,) or (n, k); None to predict.
    """
    scales: dict[str, Any] = {name: dist.LogNormal(jnp.log(median), SPREAD) for name, median in medians.items()}
    noise = NoiseNetwork(level=scales.pop("noise")) if network.by_row else scales.pop("noise")
    if "input_scale" in medians:
        scales["w_std"] = medians["w_std"]
    with warnings.catch_warnings():
        # The data chose the scales, and the report tells how large the outputs are.
        warnings.filterwarnings("ignore", message="the prior variance of the network's output")
        bnn(FCN(network.depth, network.width, network.activation), network.num_outputs, noise, scales=scales)(x, y)


@cache
def collapsed(network: Network) -> Any:
    """Return the model ``(medians, x, y)`` of a network with the readout integrated out.

    Args:
        network: the network.
    """
    model = partial(run_network, network)
    return collapse_readout(model, readout="readout", features="features", observed="y")
