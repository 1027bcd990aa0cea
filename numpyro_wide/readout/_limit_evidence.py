"""The log evidence of a network as wide as can be, from draws of one that is not."""

from typing import Any

import numpy as np
from jax import Array, random

from numpyro_wide._machine import double_precision
from numpyro_wide._traces import run_model
from numpyro_wide.readout._collapse import CollapsedModel
from numpyro_wide.readout._marginal import ReadoutMarginal
from numpyro_wide.readout._mean_kernel import mean_kernel
from numpyro_wide.wide_limit import gp_log_evidence

_NUM_COLUMNS = 20_000  # of all draws together
_FEWEST, _MOST = 20, 500  # draws


def limit_log_evidence(rng_key: Array, model: CollapsedModel, args: tuple, kwargs: dict[str, Any]) -> float:
    r"""The log evidence of the infinitely wide network, from prior draws of one that is not.

    That of the Gaussian process with the mean kernel of the draws (:func:`mean_kernel`): for one hidden layer the
    limit's, at any width, and up to terms of order 1/width for more.

    Args:
        rng_key: a PRNG key.
        model: what :func:`collapse_readout` gave.
        args: its arguments, observations included.
        kwargs: likewise.

    Returns:
        In nats; NaN where noise or mean are latent, for then the limit is a mixture of processes, and where the mean
        kernel is not positive definite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout, nn
        >>> from numpyro_wide.readout import limit_log_evidence
        >>> model = nn.bnn(nn.FCN(depth=1, width=20), num_outputs=None, noise=0.5)
        >>> model = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> limit_log_evidence(jax.random.key(0), model, (jnp.eye(3), jnp.zeros(3)), {}) < 0
        True
    """
    marginals = []
    for key in random.split(rng_key):
        site = run_model(model, args, kwargs, rng_key=key)[model.observed]
        if not isinstance(site["fn"], ReadoutMarginal):
            return float("nan")
        marginals.append((site["fn"], site["value"]))
    (one, value), (other, _) = marginals
    noise_scale = np.asarray(one.problem.noise_scale, float)
    if not (np.array_equal(noise_scale, other.problem.noise_scale) and np.array_equal(one.loc, other.loc)):
        return float("nan")
    num_draws = int(np.clip(_NUM_COLUMNS // one.problem.features.shape[1], _FEWEST, _MOST))
    kernel = mean_kernel(rng_key, model, model.features, *args, num_draws=num_draws, readout=model.readout, **kwargs)
    residual = (np.asarray(value, float) - np.asarray(one.loc, float)).reshape(len(kernel), -1)  # (n, k)
    noises = np.broadcast_to(noise_scale, one.loc.shape).reshape(residual.shape)
    if np.array_equal(noises, np.broadcast_to(noises[:, :1], noises.shape)):
        problems = [(residual, noises[:, 0])]
    else:
        problems = list(zip(residual.T, noises.T, strict=True))
    with double_precision():
        try:
            return float(sum(gp_log_evidence(kernel, targets, noise) for targets, noise in problems))
        except ValueError:  # not positive definite
            return float("nan")
