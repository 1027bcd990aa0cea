"""Simulate from a model, and draw from a guide or by MCMC given what was simulated."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import arviz
import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC, Predictive
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from tqdm.auto import tqdm

from numpyro_wide.calibration._simulations import Simulations

Model = Callable[..., Any]
Values = dict[str, jax.Array]


def from_guide(
    rng_key: jax.Array,
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
        params: the guide's parameters, as a trainer returns them.
        *model_args: arguments of both.
        observed: the site name, or names, that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: draws from the guide for each; num_draws + 1 with many divisors makes for even histograms.
        batch_size: number of data sets whose draws are made at a time.

    Returns:
        :class:`Simulations` of the guide's sites.

    Raises:
        ValueError: if the model does not sample a site of the observed names, or of the guide.

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
    simulate_key, guide_key = jax.random.split(rng_key)
    joint, data = _simulate(simulate_key, model, model_args, observed, num_simulations)

    def posterior(inputs: tuple[jax.Array, Values, Values]) -> tuple[Values, jax.Array, jax.Array]:
        key, values, truth = inputs
        draws = Predictive(guide, params=params, num_samples=num_draws)(key, values, *model_args)
        draws = {name: draws[name] for name in sites}
        at = lambda latents: log_density(guide, (values, *model_args), {}, {**params, **latents})[0]  # noqa: E731
        return draws, at(truth), jax.vmap(at)(draws)

    first = {name: value[0] for name, value in data.items()}
    sites = _latent_sites(guide, params, (first, *model_args), joint)
    truth = {name: joint[name] for name in sites}
    keys = jax.random.split(guide_key, num_simulations)
    run = jax.jit(lambda inputs: jax.lax.map(posterior, inputs, batch_size=min(batch_size, num_simulations)))
    draws, at_truth, at_draws = run((keys, data, truth))
    return Simulations(truth, draws, data, at_truth, at_draws)


def from_mcmc(
    rng_key: jax.Array,
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
        make_kernel: makes a kernel of a model, such as ``NUTS`` or ``partial(NUTS, target_accept_prob=0.9)``.
        *model_args: arguments of the model.
        observed: the site name, or names, that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: draws that are kept of each chain; num_draws + 1 with many divisors makes for even histograms.
        num_warmup: steps of warmup of each chain.
        thinning: steps from one draw that is kept to the next.
        sites: latents to look at; None for all that the model samples.
        progress_bar: show the number of chains that have run.

    Returns:
        :class:`Simulations` with ``ess``.

    Raises:
        ValueError: if the model does not sample a site of the given names.
    """
    simulate_key, chain_key = jax.random.split(rng_key)
    joint, data = _simulate(simulate_key, model, model_args, observed, num_simulations)
    latents = sorted(set(joint) - set(data))
    wanted = latents if sites is None else list(sites)
    _check_sites("sites", wanted, latents)

    def conditioned(values: Values, *args: Any) -> Any:
        return handlers.condition(model, data=values)(*args)

    # Under jit as a whole: MCMC compiles anew for each run, because it initialises its kernel outside.
    @jax.jit
    def run(key: jax.Array, values: Values) -> Values:
        mcmc = MCMC(
            make_kernel(conditioned),
            num_warmup=num_warmup,
            num_samples=num_draws * thinning,
            thinning=thinning,
            progress_bar=False,
        )
        mcmc.run(key, values, *model_args)
        return {name: mcmc.get_samples()[name] for name in wanted}

    keys = jax.random.split(chain_key, num_simulations)
    chains = []
    for index in tqdm(range(num_simulations), desc="chains", disable=not progress_bar):
        chains.append(jax.device_get(run(keys[index], {name: value[index] for name, value in data.items()})))
    draws = {name: np.stack([chain[name] for chain in chains]) for name in wanted}
    ess = {name: _effective_sample_sizes(values) for name, values in draws.items()}
    _warn_of_correlation(ess, num_draws, thinning)
    return Simulations({name: joint[name] for name in wanted}, draws, data, ess=ess)


def _simulate(
    rng_key: jax.Array, model: Model, model_args: tuple[Any, ...], observed: str | Sequence[str], num_simulations: int
) -> tuple[Values, Values]:
    """Draw all sample sites (num_simulations, ...), and give those that are observed once more."""
    trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(*model_args)
    sampled = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
    names = [observed] if isinstance(observed, str) else list(observed)
    _check_sites("observed", names, sampled)
    joint = Predictive(model, num_samples=num_simulations, return_sites=sampled)(rng_key, *model_args)
    return joint, {name: joint[name] for name in names}


def _latent_sites(guide: Model, params: dict[str, Any], args: tuple[Any, ...], joint: Values) -> list[str]:
    """The guide's sample sites, which must be among the model's."""
    seeded = handlers.seed(handlers.substitute(guide, data=params), jax.random.key(0))
    trace = handlers.trace(seeded).get_trace(*args)
    sites = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
    _check_sites("the guide's sites", sites, sorted(set(joint) - set(args[0])))
    return sites


def _check_sites(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        raise ValueError(
            f"{what} must name sites that the model samples when it is called without data, {list(known)}, "
            f"but got {list(names)}."
        )


def _effective_sample_sizes(draws: np.ndarray) -> np.ndarray:
    """ArviZ's effective sample sizes (num_simulations, ...) of single chains (num_simulations, num_draws, ...)."""
    columns = draws.reshape(draws.shape[0], draws.shape[1], -1)
    chains = np.moveaxis(columns, 0, 1)[None].astype(float)  # simulations as components of one chain
    return np.asarray(arviz.ess({"x": chains})["x"]).reshape(draws.shape[:1] + draws.shape[2:])


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
