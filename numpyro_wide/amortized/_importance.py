"""Importance sampling of a posterior with the trained guide as proposal."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer.util import log_density as model_log_density

from numpyro_wide.amortized._sites import (
    Draws,
    Sites,
    check_guide,
    check_model,
    latent_names,
    log_density,
    trace_guide,
    trace_model,
    values_of_type,
)


class ImportanceSample(NamedTuple):
    """Draws of a guide, weighted to the posterior."""

    samples: Draws
    """Draws of the latents, with a leading axis for the draws."""
    log_weights: Array
    """Logarithms of the weights, Pareto-smoothed and normalised to sum to one, (draws,)."""
    pareto_k: float
    """Shape of the tail of the raw weights: below 0.7 the sample can be relied on."""
    effective_sample_size: float
    """1 / Σ w², between 1 and the number of draws."""


def importance_sample(
    rng_key: Array,
    model: Callable,
    guide: Callable,
    observed: tuple[str, ...],
    params: Mapping[str, Any],
    observed_values: Draws,
    num_samples: int,
    args: tuple,
    kwargs: dict,
) -> ImportanceSample:
    """Draw from the guide, and weigh by the model's joint density over the guide's."""
    if not isinstance(observed_values, Mapping):
        raise TypeError(
            f"observed_values must be a dictionary with the keys {list(observed)}, but is a "
            f"{type(observed_values).__name__}; write {{{observed[0]!r}: ...}}."
        )
    if set(observed_values) != set(observed):
        raise ValueError(f"observed_values must have the keys {list(observed)}, but has {list(observed_values)}.")
    observed_values = {name: jnp.asarray(value) for name, value in observed_values.items()}
    model_sites = trace_model(model, rng_key, args, kwargs)
    check_model(model_sites, observed)
    # At simulated data, so that wrong shapes of the observed values are met by their own check.
    simulated = {name: jnp.asarray(model_sites[name]["value"]) for name in observed}
    guide_sites = trace_guide(guide, rng_key, params, simulated, args, kwargs)
    check_guide(guide_sites, model_sites, observed)
    _check_tractable(model_sites, guide_sites, observed)
    _check_shapes(observed_values, simulated)

    def single(key: Array) -> tuple[Draws, Array]:
        sites = trace_guide(guide, key, params, observed_values, args, kwargs)
        draws = values_of_type(sites, "sample")
        log_joint, _ = model_log_density(model, args, kwargs, {**draws, **observed_values})
        return draws, log_joint - log_density(sites)

    samples, log_ratios = jax.jit(jax.vmap(single))(random.split(rng_key, num_samples))
    log_ratios = np.asarray(log_ratios, dtype=np.float64)
    if not np.isfinite(log_ratios).any():
        raise FloatingPointError("no draw of the guide has a positive finite weight: check the observed values.")
    # A draw outside of the posterior's support weighs nothing, and one that gave NaN is not to be used.
    log_weights, pareto_k = _pareto_smoothed(np.where(np.isnan(log_ratios), -np.inf, log_ratios))
    effective = float(np.exp(-np.logaddexp.reduce(2 * log_weights)))
    return ImportanceSample(samples, jnp.asarray(log_weights), pareto_k, effective)


def _check_shapes(observed_values: Draws, simulated: Draws) -> None:
    """Refuse values that the likelihood would broadcast: they would be counted more than once."""
    for name, value in observed_values.items():
        if value.shape != simulated[name].shape:
            raise ValueError(
                f"observed_values[{name!r}] must have the shape of one simulated data set, {simulated[name].shape}, "
                f"but has {value.shape}; reshape it, or call with the arguments that make the model simulate as much."
            )


def _check_tractable(model_sites: Sites, guide_sites: Sites, observed: tuple[str, ...]) -> None:
    left_out = [name for name in latent_names(model_sites, observed) if name not in guide_sites]
    if left_out:
        raise ValueError(
            f"importance weights need the likelihood of what the guide draws, but the guide marginalises {left_out}, "
            "and their integral is not known. Add these sites to the guide."
        )
    implicit = [
        name
        for name in observed
        if model_sites[name]["type"] != "sample" or isinstance(_innermost(model_sites[name]["fn"]), dist.Delta)
    ]
    if implicit:
        raise ValueError(
            f"importance weights need a likelihood, but the observed sites {implicit} are functions of the latents "
            "(deterministic, or Delta). Judge such a guide by its calibration."
        )


def _innermost(distribution: dist.Distribution) -> dist.Distribution:
    """The distribution beneath .to_event(), .expand() and .mask()."""
    while hasattr(distribution, "base_dist") and not isinstance(distribution, dist.TransformedDistribution):
        distribution = distribution.base_dist
    return distribution


def _pareto_smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    import arviz  # heavy, and needed here alone

    if hasattr(arviz, "psislw"):
        log_weights, pareto_k = arviz.psislw(log_ratios)
    else:  # ArviZ 1.x, which takes log likelihoods, that is, the negative of log ratios
        from arviz_stats.base import array_stats

        log_weights, pareto_k = array_stats.psislw(-log_ratios)
    return np.asarray(log_weights), float(pareto_k)
