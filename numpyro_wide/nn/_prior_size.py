"""A warning of a network whose prior is far from the size of its targets: the posterior is then hard to sample."""

import warnings

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import is_known
from numpyro_wide.linear_gaussian.internal import RowFeatures

# Of the output, a priori: between these, as far as scales of a few units go, nothing is said.
LEAST_VARIANCE, LARGEST_VARIANCE = 1e-4, 1e3


def warn_of_prior_size(
    features: Array | RowFeatures, readout_scale: ArrayLike, noise_scale: ArrayLike, y: ArrayLike | None
) -> bool | Array:
    """Warn where the prior variance of the output, given these hidden weights, is far from one, or from the targets'.

    Only where numbers are known and no plate of samples is around, as at the start of a chain: it costs a sum then.

    Args:
        features: features of the rows, (n, d).
        readout_scale: standard deviation of the readout's prior; one by entry is not looked at.
        noise_scale: standard deviation of the noise.
        y: targets; None where they are not to be compared.

    Returns:
        Whether the sizes are usual ones, where numbers are traced; True where they were known, and told.
    """
    if np.ndim(readout_scale):
        return True
    # Of many rows the first block.
    rows = features.rows(0) if isinstance(features, RowFeatures) else features
    is_told = is_known(rows) and is_known(readout_scale)
    # NumPy's where numbers are known: within jit JAX would trace what is done to them, too.
    xp = np if is_told else jnp
    variance = xp.mean(xp.sum(xp.square(xp.asarray(rows, float)), axis=1)) * xp.square(xp.asarray(readout_scale, float))
    is_usual = (variance == 0) | ((variance >= LEAST_VARIANCE) & (variance <= LARGEST_VARIANCE))  # 0: inputs of 0
    if is_told and not is_usual:
        warnings.warn(
            f"the prior variance of the network's output at these inputs is about {variance:.2g}, far from the one of "
            "standardised targets: the posterior will be hard to sample, and may predict worse than a line. Scale "
            "every layer by 1/sqrt(inputs), as nn.NTKDense does and flax.linen.Dense does not, and the features by "
            "1/sqrt(width); standardise the inputs.",
            UserWarning,
            stacklevel=3,
        )
        return True
    if y is None or (is_told and not (is_known(y) and is_known(noise_scale))):
        return is_usual | is_told
    size = xp.mean(xp.square(xp.asarray(y, float)))
    expected = xp.maximum(variance, xp.mean(xp.square(xp.asarray(noise_scale, float))))
    is_small = (size <= LARGEST_VARIANCE * expected) | (expected == 0)
    if is_told and not is_small:
        warnings.warn(
            f"the mean square of the targets is {size:.2g}, far above the {expected:.2g} that network and noise "
            "expect a priori: the posterior will be hard to sample. Standardise the targets "
            "(datasets.Standardiser), or give their size as readout_scale and noise.",
            UserWarning,
            stacklevel=3,
        )
    return is_told | (is_usual & is_small)
