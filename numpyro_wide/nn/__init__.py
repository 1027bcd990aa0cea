r"""Networks in the NTK parametrisation, as flax modules whose parameters are all N(0, 1), and models made of them.

A layer with m inputs h computes $\sigma_w / \sqrt{m}\, W h + \sigma_b b$ (Hron 2022, §1.1): every parameter has the
same standard normal prior, and the scales belong to the network. Networks end with the scaled features that the
readout multiplies; the readout itself stays in the NumPyro model, where the handlers find it.

The modules are of ``flax.linen``; ``flax.nnx.bridge.ToNNX`` makes NNX modules of them. :func:`random_network` and
:func:`bnn` take modules of both kinds, these and any others.
"""

from numpyro_wide.nn._layers import NTKConv as NTKConv
from numpyro_wide.nn._layers import NTKDense as NTKDense
from numpyro_wide.nn._models import NoiseNetwork as NoiseNetwork
from numpyro_wide.nn._models import bnn as bnn
from numpyro_wide.nn._networks import CNN as CNN
from numpyro_wide.nn._networks import FCN as FCN
from numpyro_wide.nn._networks import WideResNet as WideResNet
from numpyro_wide.nn._random import by_row_blocks as by_row_blocks
from numpyro_wide.nn._random import network_parameters as network_parameters
from numpyro_wide.nn._random import random_network as random_network

__all__ = [
    "CNN",
    "FCN",
    "NTKConv",
    "NTKDense",
    "NoiseNetwork",
    "WideResNet",
    "bnn",
    "by_row_blocks",
    "network_parameters",
    "random_network",
]
