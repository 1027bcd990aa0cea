"""The precision that chains of a regression need: single where rounding hides neither noise nor features."""

import numpy as np

from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit import WideLimitFit, fcn_kernel

_LEAST_NOISE = 0.15  # in standard deviations of the targets: below, chains in single precision lose it
# Features' squares are summed over rows, and the sum's rounding may be so many times below the noise's variance at the
# scales of the fit, from which chains stray.
_ROUNDINGS = 20
_MOST_SUMMED = 500  # rows that the sum is estimated from


def needs_double(fit: WideLimitFit, num_rows: int) -> tuple[bool, str]:
    """Tell whether chains around a fit need double precision, and from which numbers.

    Args:
        fit: scales and noise, of targets of unit variance.
        num_rows: number of rows that the chains are run on.
    """
    with double_precision():
        kernel = fcn_kernel(fit.depth, fit.activation, **fit.scales)
        variance = np.mean(np.diagonal(kernel(fit.inputs[:_MOST_SUMMED])[0]))
    rounding = _ROUNDINGS * np.finfo(np.float32).eps * variance * num_rows
    sizes = f"the noise is {fit.noise_scale:.3g}, and outputs have a prior standard deviation of {variance**0.5:.3g}"
    return bool(fit.noise_scale**2 < max(_LEAST_NOISE**2, rounding)), sizes
