"""Chains of collapsed networks, from where Adam gets to predictions by draw, and ArviZ's estimates of how they mix."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.diagnostics import random_projections
from numpyro_wide.mcmc import MicrocanonicalLangevin
from numpyro_wide.runs import init_to_optimum

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces its next generation
    import arviz

NUM_KEPT = 200  # draws of a chain that predict


def collapsed(model: Callable) -> Callable:
    """Integrate the readout of a network out, whose sites have the names that ``nn.bnn`` gives them."""
    return collapse_readout(model, readout="readout", features="features", observed="y")


def chains_of(
    model: Callable,
    num_chains: int,
    num_warmup: int,
    num_samples: int,
    *,
    bias_tolerance: float,
    num_kept: int = NUM_KEPT,
    **form: Any,
) -> MCMC:
    """Make unadjusted microcanonical chains, for any data: what they compile stays with them.

    Args:
        model: collapsed network.
        num_chains: number of chains.
        num_warmup: steps of warmup.
        num_samples: steps after it.
        bias_tolerance: bias that the kernel allows itself, as :class:`MicrocanonicalLangevin` has it.
        num_kept: number of steps that are kept, as draws.
        **form: further options of ``MCMC``.

    Returns:
        The chains, before they are run.
    """
    kernel = MicrocanonicalLangevin(model, adjusted=False, bias_tolerance=bias_tolerance)
    lengths = {"num_warmup": num_warmup, "num_samples": num_samples, "thinning": max(1, num_samples // num_kept)}
    return MCMC(kernel, **lengths, num_chains=num_chains, progress_bar=False, **form)


def draws_of(keys: tuple[Array, Array], mcmc: MCMC, *known: Any, num_adam: int) -> dict[str, Array]:
    """Sample from where Adam gets at the medians of the scales and the noise, the same in all rows.

    Args:
        keys: keys of the start and of the chains.
        mcmc: chains, those of :func:`chains_of`.
        *known: arguments of the model, data included.
        num_adam: steps of Adam, for each chain.

    Returns:
        The draws that are kept, chains one after another.
    """
    options = {"num_chains": mcmc.num_chains, "num_steps": num_adam, "hold": "scales", "progress_bar": False}
    start = init_to_optimum(keys[0], mcmc.sampler.model, *known, **options)
    mcmc.run(keys[1], *known, init_params=start)
    return mcmc.get_samples()


def moments(key: Array, model: Callable, draws: Mapping, known: tuple, new: tuple, num_chains: int) -> tuple:
    """Predict by draw.

    Args:
        key: key of the readout's draws.
        model: collapsed network.
        draws: draws of :func:`draws_of`, or of a guide as of one chain.
        known: arguments that the model was fitted with.
        new: arguments at the test rows.
        num_chains: number of chains that the draws are of.

    Returns:
        Mean and variance, noise included, each (chains, draws, m).
    """
    found = ReadoutPredictive(model, draws, known)(key, *new)
    return tuple(
        np.asarray(found[name], float).reshape(num_chains, -1, *found[name].shape[1:])
        for name in ("mean", "predictive_variance")
    )


def projected(samples: Mapping[str, Array], rng_key: Array) -> np.ndarray:
    """Return random projections (chain, draw, 100) of draws of chains, their sites together."""
    return np.asarray(jax.vmap(jax.vmap(random_projections(rng_key, samples)))(dict(samples)))


def bulk_ess(draws: np.ndarray) -> np.ndarray:
    """Estimate effective draws by ArviZ, (...), of draws (chain, draw, ...)."""
    return arviz.ess({"draws": draws})["draws"].values


def rhat(draws: np.ndarray, method: str = "rank") -> np.ndarray:
    """Estimate R-hat by ArviZ, (...), of draws (chain, draw, ...)."""
    return arviz.rhat({"draws": draws}, method=method)["draws"].values


def standard_error(draws: np.ndarray) -> float:
    """Estimate the Monte Carlo error of the mean by ArviZ, of draws (chain, draw)."""
    return float(arviz.mcse({"draws": draws})["draws"])


def summary(draws: Mapping[str, np.ndarray]) -> Any:
    """Return ArviZ's table of draws (chain, draw) by name."""
    return arviz.summary(dict(draws))
