"""Flax networks in the NTK parametrisation (Hron 2022, §1.1), with N(0, 1) parameters, and models of them.

Networks end with the scaled features of the readout, which belongs to the NumPyro model.
"""

from numpyro_wide.nn import _additive_problem, _kernels  # noqa: F401  (which tell wide_limit of these networks)
from numpyro_wide.nn._additive import AdditiveNetwork
from numpyro_wide.nn._layers import NTKConv, NTKDense
from numpyro_wide.nn._models import NoiseNetwork, bnn
from numpyro_wide.nn._networks import CNN, FCN, ResidualEncoder, WideResNet
from numpyro_wide.nn._random import by_row_blocks, network_parameters, random_network

__all__ = [
    "CNN",
    "FCN",
    "AdditiveNetwork",
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
