"""Gaussian stand-in for another likelihood."""

from typing import NamedTuple

from jax import Array


class Surrogate(NamedTuple):
    """Targets and noise scale of a Gaussian stand-in for another likelihood.

    Attributes:
        targets: pseudo-targets, (n,) or (n, k).
        noise_scale: standard deviation: a scalar, (n, 1), or of the shape of ``targets``.
    """

    targets: Array
    noise_scale: Array
