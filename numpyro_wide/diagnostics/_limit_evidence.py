"""Log evidence of the infinitely wide network, from prior draws of one that is not."""

from typing import Any

import numpy as np
from jax import Array, random
from jax.typing import ArrayLike

from numpyro_wide._traces import latent_sites, run_model
from numpyro_wide.machine import double_precision
from numpyro_wide.readout.internal import ReadoutModel, has_latent_noise
from numpyro_wide.surrogates import mean_kernel
from numpyro_wide.wide_limit import gp_log_evidence

_NUM_COLUMNS = 20_000  # of all draws together
_FEWEST, _MOST = 20, 500  # draws


def limit_log_evidence(
    rng_key: Array, model: ReadoutModel, args: tuple, kwargs: dict[str, Any], kernel: ArrayLike | None = None
) -> float:
    r"""Estimate the log evidence of the infinitely wide network from prior draws of one that is not.

    It is that of the Gaussian process with the mean kernel of the draws (:func:`~numpyro_wide.mean_kernel`): for one
    hidden layer the limit's, at any width, and up to terms of order 1/width for more.

    Args:
        rng_key: a PRNG key.
        model: a wrapped model.
        args: arguments of the model, observations included.
        kwargs: keyword arguments of the model.
        kernel: the limit's own (n, n), in the place of the mean kernel, or None.

    Returns:
        The log evidence in nats; NaN where the readout cannot be integrated out, where noise or mean are latent, for
        then the limit is a mixture of processes, and where the kernel is not positive definite.

    Raises:
        ValueError: for a kernel of another shape.
    """
    names = model.conjugate_sites(args, kwargs)
    if names is None:
        return float("nan")
    kernel_key, *probe_keys = random.split(rng_key, 3)
    one, other = (model.run(names, _prior_draw(model, key, args, kwargs), args, kwargs) for key in probe_keys)
    if has_latent_noise(model, args, kwargs) or not np.array_equal(one.loc, other.loc):
        return float("nan")
    if kernel is None:
        num_draws = int(np.clip(_NUM_COLUMNS // one.features.shape[1], _FEWEST, _MOST))
        kernel = mean_kernel(
            kernel_key, model, model.features, *args, num_draws=num_draws, readout=model.readout, **kwargs
        )
    num_rows = len(one.features)
    if np.shape(kernel) != (num_rows, num_rows):
        raise ValueError(
            f"kernel must be that of the {num_rows} rows of the features with themselves, {(num_rows, num_rows)}, but "
            f"has shape {np.shape(kernel)}; take wide_limit.kernel(network)(x)[0]."
        )
    residual = np.asarray(one.residual, float).reshape(num_rows, -1)  # (n, k)
    noises = np.broadcast_to(np.asarray(one.noise_scale, float), one.loc.shape).reshape(residual.shape)
    if np.array_equal(noises, np.broadcast_to(noises[:, :1], noises.shape)):
        problems = [(residual, noises[:, 0])]
    else:
        problems = list(zip(residual.T, noises.T, strict=True))
    with double_precision():
        try:
            return float(sum(gp_log_evidence(kernel, targets, noise) for targets, noise in problems))
        except ValueError:  # not positive definite
            return float("nan")


def _prior_draw(model: ReadoutModel, rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> dict[str, Array]:
    sites = run_model(model.fn, args, kwargs, rng_key=rng_key)
    return {name: site["value"] for name, site in latent_sites(sites).items()}
