"""Programs behind predictions through draws of all weights, for likelihoods that are not Gaussian.

The same quantities as those of :mod:`_prediction_programs`, where the readout is integrated out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random

from numpyro_wide._programs import combine
from numpyro_wide._traces import Sites, latent_sites, log_prob_by_observation, observed_sites, run_model, unwrap
from numpyro_wide.readout._model import Draws, ReadoutModel
from numpyro_wide.readout._prediction_programs import (
    Quantities,
    Quantity,
    Setting,
    check_observed,
    finite_draws,
    log_of_average,
    map_in_batches,
)
from numpyro_wide.readout._reparam import weights_of_run
from numpyro_wide.readout._run import refuse_other_readout


def observed_site(sites: Sites) -> str:
    """Return the name of the one site that the plain model observes.

    Raises:
        ValueError: if it observes nothing, or several sites.
    """
    names = list(observed_sites(sites))
    if len(names) != 1:
        raise ValueError(
            f"predictions are of one observed site, but the model observes {names or 'none'} with these model_args and "
            "model_kwargs. Pass what it was fitted on, observations included; of several sites, predict with "
            "numpyro's Predictive and draws that hold the readout."
        )
    return names[0]


def weights_at(model: ReadoutModel, values: Draws, fitted_on: tuple[tuple, dict]) -> Draws:
    """Return one draw of the plain model, of one that may hold the base site instead of the readout."""
    if model.readout in values:
        return values
    args, kwargs = fitted_on
    return {**values, **weights_of_run(run_model(model, args, kwargs, values=values))}


def _readouts(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: None
) -> tuple[Array, Array]:
    fitted_on, *_ = combine(data, setting.rest)
    found = map_in_batches(
        lambda draw: weights_at(model, {**params, **draw}, fitted_on)[model.readout], draws, setting, 1
    )
    return found, finite_draws(found)


def _predictions(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: None
) -> tuple[Draws, Array]:
    fitted_on, test = combine(data, setting.rest)
    observed = setting.names.observed

    def single(draw: tuple[Draws, Array]) -> tuple[Draws, Array]:
        site = _run(model, {**params, **draw[0]}, fitted_on, test)[observed]
        check_observed(observed, site["is_observed"], is_wanted=False)
        return {**moments_of(site["fn"]), observed: site["fn"].sample(draw[1])}, _is_finite(site["fn"])

    return _map(single, (draws, random.split(rng_key, setting.num_draws)), setting)


def moments_of(fn: dist.Distribution) -> Draws:
    """Return what predictions tell of an observed distribution besides draws: its moments, or those of its classes."""
    base = unwrap(fn, masks=True)
    if isinstance(base, dist.CategoricalLogits | dist.CategoricalProbs):
        return {"probs": jnp.broadcast_to(base.probs, (*fn.shape(), base.probs.shape[-1]))}
    found = {"mean": fn.mean, "predictive_variance": fn.variance}
    if isinstance(base, dist.BernoulliLogits | dist.BernoulliProbs):
        found["probs"] = fn.mean
    if isinstance(base, dist.Normal):
        found["noise_scale"] = jnp.broadcast_to(base.scale, fn.shape())
    return found


def _log_densities(site: dict) -> Array:
    by_observation = log_prob_by_observation(site)
    if not by_observation.ndim:
        raise ValueError(
            f"the observed site {site['name']!r} is one event, whose density is no product over its rows; take "
            "joint_log_density."
        )
    return by_observation.sum(axis=tuple(range(1, by_observation.ndim)))


def _joint_log_density(site: dict) -> Array:
    return jnp.sum(log_prob_by_observation(site))[None]


def _averaged(
    density: Callable[[dict], Array],
    model: ReadoutModel,
    setting: Setting,
    rng_key: None,
    draws: Draws,
    params: dict,
    data: list,
    solved: None,
) -> tuple[Array, Array]:
    fitted_on, test = combine(data, setting.rest)

    def single(draw: Draws) -> tuple[Array, Array]:
        site = _run(model, {**params, **draw}, fitted_on, test)[setting.names.observed]
        check_observed(setting.names.observed, site["is_observed"], is_wanted=True)
        return density(site), _is_finite(site["fn"])

    found, is_finite = _map(single, draws, setting)
    return log_of_average(found, is_finite), is_finite


def _is_finite(fn: dist.Distribution) -> Array:
    """Return whether the parameters of a distribution are finite; its moments need not be, as Cauchy's are not."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(fn)]).all()


def _run(model: ReadoutModel, values: Draws, fitted_on: tuple[tuple, dict], test: tuple[tuple, dict]) -> Sites:
    args, kwargs = test
    sites = run_model(model.fn, args, kwargs, values=weights_at(model, values, fitted_on))
    readout = latent_sites(sites).get(model.readout)
    if readout is None:
        refuse_other_readout(model.readout)
    return sites


def _map(single: Callable, draws: Any, setting: Setting) -> Any:
    return map_in_batches(single, draws, setting, 2**14)


THROUGH_WEIGHTS = Quantities(
    readouts=Quantity("readouts", _readouts),
    predictions=Quantity("predictions", _predictions),
    log_densities=Quantity("predictions", partial(_averaged, _log_densities), is_average=True),
    joint_log_densities=Quantity("predictions", partial(_averaged, _joint_log_density), is_average=True),
    log_evidences=None,
    posteriors=None,
    is_integrated=False,
)
