"""Convergence of chains over many weights, on top of ArviZ."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike


def project(samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100) -> Array:
    r"""Project draws of the flattened weights onto random unit directions.

    Args:
        samples: draws of sites, each (chain, draw, ...); ``mcmc.get_samples(group_by_chain=True)``, or a part of it.
        rng_key: a PRNG key. The same key and sites give the same directions.
        num_projections: number of directions.

    Returns:
        Projections, (chain, draw, num_projections).

    Raises:
        ValueError: if there are no sites, or their numbers of chains and draws differ.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import project
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 50, 8, 3))}
        >>> project(samples, jax.random.key(1), num_projections=5).shape
        (2, 50, 5)
    """
    leading = {name: np.shape(draws)[:2] for name, draws in samples.items()}
    if len(set(leading.values())) != 1 or len(next(iter(leading.values()))) != 2:
        raise ValueError(
            "samples must hold arrays (chain, draw, ...) with the same numbers of chains and draws, "
            f"but their leading axes are {leading}; use mcmc.get_samples(group_by_chain=True)."
        )
    total: Array = jnp.zeros(())
    squared_norm: Array = jnp.zeros(())
    # Site by site, so that the flattened weights are never held a second time.
    for index, name in enumerate(sorted(samples)):
        draws = jnp.asarray(samples[name])
        flat = draws.reshape(*draws.shape[:2], -1)
        directions = random.normal(random.fold_in(rng_key, index), (flat.shape[-1], num_projections), flat.dtype)
        total = total + flat @ directions
        squared_norm = squared_norm + jnp.sum(directions**2, axis=0)
    return total / jnp.sqrt(squared_norm)


def projected_ess(samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100) -> dict[str, float]:
    """Effective sample size of random projections of the flattened weights (Hron 2022, §4).

    Args:
        samples: draws of sites, each (chain, draw, ...).
        rng_key: a PRNG key.
        num_projections: number of random unit directions.

    Returns:
        "mean", "min" and "max" over the projections of ArviZ's bulk effective sample size.

    Raises:
        ValueError: if there are no sites, or their numbers of chains and draws differ.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import projected_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 8, 3))}
        >>> sorted(projected_ess(samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    import arviz as az  # heavy, and needed here alone

    projections = project(samples, rng_key, num_projections=num_projections)
    ess = np.asarray(az.ess({"projection": np.asarray(jax.device_get(projections))})["projection"])
    return {"mean": float(ess.mean()), "min": float(ess.min()), "max": float(ess.max())}
