r"""Networks in the NTK parametrisation, as flax modules whose parameters are all N(0, 1), and models made of them.

A layer with m inputs h computes $\sigma_w / \sqrt{m}\, W h + \sigma_b b$ (Hron 2022, §1.1), so that the prior is the
same standard normal for every parameter and the scales belong to the network. Networks end with their scaled
features, which the readout multiplies; the readout itself stays in the NumPyro model, where the handlers find it.

The modules are of ``flax.linen``; ``flax.nnx.bridge.ToNNX`` makes NNX modules of them. :func:`random_network` and
:func:`bnn` take modules of both kinds, these and any others.
"""

from numpyro_wide.nn._layers import NTKConv as NTKConv
from numpyro_wide.nn._layers import NTKDense as NTKDense
from numpyro_wide.nn._layers import ScaledReLU as ScaledReLU
from numpyro_wide.nn._layers import inverse_time_schedule as inverse_time_schedule
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
    "ScaledReLU",
    "WideResNet",
    "bnn",
    "by_row_blocks",
    "inverse_time_schedule",
    "network_parameters",
    "random_network",
]
