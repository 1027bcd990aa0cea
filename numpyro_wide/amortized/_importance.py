"""Importance sampling of a posterior with the trained guide as proposal."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.infer.util import log_density as model_log_density

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide._blocks import map_draws
from numpyro_wide._checks import check_key, listing, whole_number
from numpyro_wide._compile import run_program
from numpyro_wide._traces import Sites, run_model, unwrap
from numpyro_wide.amortized._simulation import (
    Draws,
    bound,
    check_data_set,
    check_guide,
    check_params,
    check_simulator,
    draw_from_guide,
    latent_names,
    site_names,
)

# Of draws, whose simulations and guides may take a megabyte each.
_BATCH_SIZE = 1000


class ImportanceSample(NamedTuple):
    """Draws of a guide, weighted to the posterior.

    Attributes:
        samples: draws by site, (draws, ...).
        log_weights: Pareto-smoothed log weights, normalised, (draws,).
        pareto_k: tail shape of the raw weights, reliable below 0.7.
        effective_sample_size: 1 / Σ w².
    """

    samples: Draws
    log_weights: Array
    pareto_k: float
    effective_sample_size: float


def importance_sample(
    rng_key: Array,
    num_samples: int,
    model: Callable,
    guide: Callable,
    params: Mapping[str, object],
    observed_values: Mapping[str, ArrayLike],
    *model_args: object,
    **model_kwargs: object,
) -> ImportanceSample:
    """Draw from a guide given one observation, and weigh the draws to the posterior (Vehtari et al. 2024).

    For a tractable likelihood and a guide of all latents.

    Args:
        rng_key: a PRNG key.
        num_samples: number of draws.
        model: ``model(*model_args, **model_kwargs)``, called without data, simulates every site.
        guide: ``guide(observed_values, *model_args, **model_kwargs)``, for one data set.
        params: values of the guide's param and mutable sites, {} if it has none.
        observed_values: values of the observed sites of one data set, by name.
        *model_args: arguments of model and guide.
        **model_kwargs: keyword arguments.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.amortized import importance_sample
        >>> def model():
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal(0, 1)), 1))
        >>> def guide(observed_values):
        ...     numpyro.sample("z", dist.Normal(0.4 * observed_values["y"], 1.0))
        >>> sample = importance_sample(jax.random.key(0), 2000, model, guide, {}, {"y": 1.0})
        >>> mean = float((jax.numpy.exp(sample.log_weights) * sample.samples["z"]).sum())
        >>> abs(mean - 0.5) < 0.08, sample.pareto_k < 0.7  # exact: 1/2
        (True, True)
    """
    order = "(rng_key, num_samples, model, guide, params, observed_values)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    observed = site_names(tuple(observed_values))
    values = {name: jnp.asarray(value) for name, value in observed_values.items()}
    model, guide = bound(model, guide, model_args, model_kwargs)
    model_sites = run_model(model, rng_key=rng_key)
    check_simulator(model_sites, observed)
    # At simulated data: wrong shapes have their own check.
    simulated = {name: jnp.asarray(model_sites[name]["value"]) for name in observed}
    guide_sites = check_params(guide, rng_key, params, simulated)
    check_guide(guide_sites, model_sites, observed)
    _check_tractable(model_sites, guide_sites, observed)
    check_data_set(values, simulated)

    def single(key: Array) -> tuple[Draws, Array]:
        draws, log_q = draw_from_guide(guide, key, params, values)
        log_joint, _ = model_log_density(model, (), {}, {**draws, **values})
        return draws, log_joint - log_q

    keys = random.split(rng_key, num_samples)
    samples, ratios = run_program(lambda keys: map_draws(single, keys, _BATCH_SIZE), keys)
    log_ratios = np.asarray(ratios, dtype=np.float64)
    if not np.isfinite(log_ratios).any():
        raise FloatingPointError(
            "no draw of the guide has a positive finite weight: compare the observed values with simulated ones."
        )
    # NaN weighs nothing.
    log_weights, pareto_k = pareto_smoothed(np.where(np.isnan(log_ratios), -np.inf, log_ratios))
    effective = float(np.exp(-np.logaddexp.reduce(2 * log_weights)))
    return ImportanceSample(samples, jnp.asarray(log_weights), pareto_k, effective)


def _check_tractable(model_sites: Sites, guide_sites: Sites, observed: tuple[str, ...]) -> None:
    marginalised = [name for name in latent_names(model_sites, observed) if name not in guide_sites]
    if marginalised:
        raise ValueError(
            f"importance weights need a guide of all latents, but it marginalises {listing(marginalised)}; add these "
            "sites."
        )
    implicit = [
        name
        for name in observed
        if model_sites[name]["type"] != "sample" or isinstance(unwrap(model_sites[name]["fn"], masks=True), dist.Delta)
    ]
    if implicit:
        raise ValueError(
            f"importance weights need a likelihood, but the observed sites {listing(implicit)} are functions of the "
            "latents (deterministic, or Delta)."
        )
