"""Flax networks in the NTK parametrisation (Hron 2022, §1.1), with N(0, 1) parameters, and models of them.

Networks end with the scaled features of the readout, which belongs to the NumPyro model.
"""

from numpyro_wide.nn._encoder import ResidualEncoder as ResidualEncoder
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
    "ResidualEncoder",
    "WideResNet",
    "bnn",
    "by_row_blocks",
    "network_parameters",
    "random_network",
]
