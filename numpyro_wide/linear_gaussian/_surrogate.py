"""Gaussian likelihood that stands in for another one, by which a readout is repriorised."""

from typing import NamedTuple

from jax import Array


class Surrogate(NamedTuple):
    """Targets and noise scale of the Gaussian likelihood that stands in for another one.

    Attributes:
        targets: values that the Gaussian takes for observed, (n,) or (n, k).
        noise_scale: standard deviation of the Gaussian: a scalar, of the shape of ``targets``, or (n, 1) where a row's
            outputs share it.
    """

    targets: Array
    noise_scale: Array
