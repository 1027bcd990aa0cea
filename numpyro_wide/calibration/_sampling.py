"""Simulations of a model, with draws of a guide or by MCMC given what was simulated."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax, random
from numpyro.handlers import condition
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from tqdm.auto import tqdm

from numpyro_wide._arviz import effective_sample_size
from numpyro_wide._checks import check_key, check_names_known, listing, whole_number
from numpyro_wide._traces import Sites, run_model, sample_sites
from numpyro_wide.amortized.internal import (
    Draws,
    check_guide,
    check_params,
    check_simulator,
    draw_from_guide,
    latent_names,
    log_density,
    run_guide,
    simulate,
    site_names,
)
from numpyro_wide.calibration._simulations import Simulations

Model = Callable[..., Any]


def from_guide(
    rng_key: Array,
    model: Model,
    guide: Model,
    params: dict[str, Any],
    *model_args: Any,
    observed: str | Sequence[str],
    num_simulations: int = 500,
    num_draws: int = 99,
    batch_size: int = 50,
) -> Simulations:
    """Draw from an amortised guide for data simulated from the model.

    Latents of the model that the guide does not sample are marginalised. The guide's log densities are kept, for
    highest-density regions.

    Args:
        rng_key: a PRNG key.
        model: ``model(*model_args)``, called without data, samples every site.
        guide: ``guide(observed_values, *model_args)``, given a dictionary of the observed sites of *one* simulated data
            set, samples latents of the model.
        params: values of the guide's param and mutable sites, as a trainer returns them; {} if it has none.
        *model_args: arguments of model and guide.
        observed: name, or names, of the sample or deterministic sites that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: number of draws from the guide for each data set; num_draws + 1 with many divisors makes for even
            histograms.
        batch_size: number of data sets whose draws are made at a time.

    Returns:
        :class:`Simulations` of the guide's sites.

    Raises:
        ValueError: if the model does not simulate (it observes, has factors, param sites, subsampled plates or scaled
            densities) or lacks an observed site; if the guide draws anything but latents of the model in the model's
            shapes; or if ``params`` lacks one of the guide's sites, which would then not be the fitted guide.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.calibration import from_guide, sbc_ranks
        >>> def model():
        ...     z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(z, 1.0))
        >>> def guide(observed):  # the exact posterior
        ...     numpyro.sample("z", dist.Normal(observed["y"] / 2, 0.5**0.5))
        >>> simulations = from_guide(jax.random.key(0), model, guide, {}, observed="y", num_simulations=20)
        >>> sbc_ranks(simulations)["z"].shape
        (20,)
    """
    check_key("rng_key", rng_key, "from_guide(rng_key, model, guide, params, x, observed=...)")
    num_simulations = whole_number("num_simulations", num_simulations)
    num_draws, batch_size = whole_number("num_draws", num_draws), whole_number("batch_size", batch_size)
    simulate_key, guide_key = random.split(rng_key)
    names = site_names(observed)
    model_sites = _checked_run(model, model_args, names)
    joint = _simulate(simulate_key, model, model_args, names, num_simulations)
    data = {name: joint[name] for name in names}
    first = {name: value[0] for name, value in data.items()}
    guide_sites = check_params(guide, guide_key, params, first, model_args, {})
    check_guide(guide_sites, model_sites, names)
    truth = {name: joint[name] for name in sample_sites(guide_sites)}

    def posterior(inputs: tuple[Array, Draws, Draws]) -> tuple[Draws, Array, Array]:
        key, values, truth = inputs
        key, draw_key = random.split(key)
        at_truth = log_density(run_guide(guide, key, params, values, model_args, {}, truth))
        draw = lambda key: draw_from_guide(guide, key, params, values, model_args, {})  # noqa: E731
        draws, at_draws = jax.vmap(draw)(random.split(draw_key, num_draws))
        return draws, at_truth, at_draws

    keys = random.split(guide_key, num_simulations)
    run = jax.jit(lambda inputs: lax.map(posterior, inputs, batch_size=min(batch_size, num_simulations)))
    draws, at_truth, at_draws = run((keys, data, truth))
    return Simulations(truth, draws, data, at_truth, at_draws)


def from_mcmc(
    rng_key: Array,
    model: Model,
    make_kernel: Callable[[Model], MCMCKernel],
    *model_args: Any,
    observed: str | Sequence[str],
    num_simulations: int = 100,
    num_draws: int = 99,
    num_warmup: int = 500,
    thinning: int = 1,
    sites: Sequence[str] | None = None,
    progress_bar: bool = True,
) -> Simulations:
    """Draw by MCMC for data simulated from the model, one chain for each data set.

    Ranks among correlated draws are not uniform: thin until the draws that are kept are as good as independent
    (Talts 2018, Section 5.1). The effective sample sizes are in the result, and a warning proposes a thinning if
    they fall short. Everything is compiled once.

    Args:
        rng_key: a PRNG key.
        model: ``model(*model_args)``, called without data, samples every site.
        make_kernel: function from a model to a kernel, such as ``NUTS`` or ``partial(NUTS, target_accept_prob=0.9)``.
        *model_args: arguments of the model.
        observed: name, or names, of the sample sites that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: number of draws that are kept of each chain; num_draws + 1 with many divisors makes for even
            histograms.
        num_warmup: number of warmup steps of each chain.
        thinning: number of steps from one draw that is kept to the next.
        sites: names of the latents to look at; None for all that the model samples.
        progress_bar: whether to show the number of chains that have run.

    Returns:
        :class:`Simulations` with ``ess``.

    Raises:
        ValueError: if the model does not simulate, as for :func:`from_guide`, or does not sample a site of the given
            names.
    """
    check_key("rng_key", rng_key, "from_mcmc(rng_key, model, make_kernel, x, observed=...)")
    num_simulations, num_draws = whole_number("num_simulations", num_simulations), whole_number("num_draws", num_draws)
    num_warmup, thinning = whole_number("num_warmup", num_warmup, least=0), whole_number("thinning", thinning)
    simulate_key, chain_key = random.split(rng_key)
    names = site_names(observed)
    model_sites = _checked_run(model, model_args, names)
    _check_have_densities(model_sites, names)
    latents = sorted(latent_names(model_sites, names))
    wanted = latents if sites is None else list(sites)
    check_names_known("sites", wanted, latents, kind="latent site")
    if not wanted:
        raise ValueError(f"sites must name some of the model's latent sites, {listing(latents)}, but names none.")
    joint = _simulate(simulate_key, model, model_args, names, num_simulations)
    data = {name: joint[name] for name in names}

    def conditioned(values: Draws, *args: Any) -> Any:
        return condition(model, data=values)(*args)

    # Under jit as a whole: MCMC compiles anew for each run, because it initialises its kernel outside.
    @jax.jit
    def run(key: Array, values: Draws) -> Draws:
        mcmc = MCMC(
            make_kernel(conditioned),
            num_warmup=num_warmup,
            num_samples=num_draws * thinning,
            thinning=thinning,
            progress_bar=False,
        )
        mcmc.run(key, values, *model_args)
        return {name: mcmc.get_samples()[name] for name in wanted}

    keys = random.split(chain_key, num_simulations)
    chains = []
    for index in tqdm(range(num_simulations), desc="chains", disable=not progress_bar):
        chains.append(jax.device_get(run(keys[index], {name: value[index] for name, value in data.items()})))
    draws = {name: np.stack([chain[name] for chain in chains]) for name in wanted}
    ess = {name: _effective_sample_sizes(values) for name, values in draws.items()}
    _warn_of_correlation(ess, num_draws, thinning)
    return Simulations({name: joint[name] for name in wanted}, draws, data, ess=ess)


def _checked_run(model: Model, model_args: tuple[Any, ...], observed: tuple[str, ...]) -> Sites:
    sites = run_model(model, model_args)
    check_simulator(sites, observed)
    return sites


def _simulate(
    rng_key: Array, model: Model, model_args: tuple[Any, ...], observed: tuple[str, ...], num_simulations: int
) -> Draws:
    """Simulate, one data set after another, all sample sites and the observed ones, (num_simulations, ...)."""
    keys = random.split(rng_key, num_simulations)
    return lax.map(lambda key: simulate(model, key, observed, model_args, {}), keys)


def _check_have_densities(model_sites: Sites, observed: tuple[str, ...]) -> None:
    without = [name for name in observed if model_sites[name]["type"] != "sample"]
    if without:
        raise ValueError(
            f"a chain needs the density of what is observed, but {listing(without)} are functions of the latents; name "
            "sample sites as observed, or see from_guide, which needs none."
        )


def _effective_sample_sizes(draws: np.ndarray) -> np.ndarray:
    """Estimate the effective sample sizes (num_simulations, ...) of single chains (num_simulations, num_draws, ...)."""
    columns = draws.reshape(draws.shape[0], draws.shape[1], -1)
    chains = np.moveaxis(columns, 0, 1)[None].astype(float)  # simulations as components of one chain
    return effective_sample_size(chains).reshape(draws.shape[:1] + draws.shape[2:])


def _warn_of_correlation(ess: dict[str, np.ndarray], num_draws: int, thinning: int) -> None:
    """Warn if the typical chain of some latent is worth far fewer draws than it has."""
    name, typical = min(
        ((name, float(np.min(np.median(values, axis=0)))) for name, values in ess.items()), key=lambda pair: pair[1]
    )
    if typical < 0.7 * num_draws:
        warnings.warn(
            f"the {num_draws} draws of {name!r} are worth {typical:.0f} independent ones in the median simulation, so "
            "that ranks are not uniform even for an exact posterior: "
            f"use thinning={math.ceil(thinning * num_draws / typical)}.",
            UserWarning,
            stacklevel=3,
        )
