"""Stored simulations to train on, instead of fresh ones."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_wide._checks import late_progress, num_draws_of
from numpyro_wide._traces import Sites
from numpyro_wide.amortized._simulation import Draws, refuse_missing


def check_simulations(simulations: Any, model_sites: Sites, observed: tuple[str, ...]) -> Draws:
    """Check simulations {site: (n, ...)}, and return those that are finite, in NumPy's arrays."""
    refuse_missing("simulations", observed, simulations, "observed site")
    total = num_draws_of("simulations", simulations)
    finite_draws, num_lost = finite(simulations)
    if num_lost:
        warnings.warn(f"{num_lost} of {total} simulations hold NaN or infinity, and are left out.", stacklevel=3)
    for name, values in finite_draws.items():
        if name in model_sites:
            _check_site(name, values, model_sites[name])
    return finite_draws


def finite(simulations: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the simulations that are finite, and the number of the others."""
    with np.errstate(over="ignore"):  # too large for single precision is infinite
        arrays = {name: np.asarray(jnp.asarray(values)) for name, values in simulations.items()}
    is_finite = np.all([np.isfinite(values.reshape(len(values), -1)).all(axis=1) for values in arrays.values()], axis=0)
    if is_finite.sum() < 2:
        raise ValueError("fewer than two of the simulations are finite; look at the simulator.")
    return {name: values[is_finite] for name, values in arrays.items()}, int(np.sum(~is_finite))


def call_simulator(simulator: Callable, latents: Mapping[str, Any], observed: tuple[str, ...]) -> dict[str, Any]:
    """Call a simulator in Python for each draw of the latents, {site: (n, ...)}; return its data, {site: (n, ...)}."""
    arrays = {name: np.asarray(values) for name, values in latents.items()}
    results = []
    for index in late_progress(range(num_draws_of("latents", arrays)), desc="simulations"):
        data = simulator(**{name: values[index] for name, values in arrays.items()})
        results.append(data if isinstance(data, Mapping) or len(observed) > 1 else {observed[0]: data})
        refuse_missing("what the simulator returns", observed, results[-1])
    return {name: np.stack([result[name] for result in results]) for name in observed}


def _check_site(name: str, values: Array, site: dict) -> None:
    shape = jnp.shape(site["value"])
    if values.shape[1:] != shape:
        raise ValueError(
            f"simulations[{name!r}] must have the shape {shape} after the leading axis, but has {values.shape[1:]}."
        )
    support = site["fn"].support if site["type"] == "sample" else None
    # Arrays in a support may be values of other sites.
    if support is None or any(isinstance(leaf, Array) for leaf in jax.tree.leaves(support)):
        return
    if not np.all(jax.vmap(support)(values)):
        raise ValueError(f"simulations[{name!r}] must lie in the support of the model's site, {support}.")


def split_held_out(simulations: Draws, held_out: int, batch_size: int) -> tuple[Draws, Draws]:
    """Split off the last simulations as held out."""
    num_training = len(next(iter(simulations.values()))) - held_out
    if num_training < batch_size:
        raise ValueError(
            f"simulations must leave a batch of {batch_size} to train on, but of {num_training + held_out} finite ones "
            f"{held_out} are held out; give more, or lower batch_size or held_out."
        )
    train = {name: jnp.asarray(values[:num_training]) for name, values in simulations.items()}
    return train, {name: jnp.asarray(values[num_training:]) for name, values in simulations.items()}


def epochs(
    rng_key: Array, simulations: Draws, batch_size: int
) -> tuple[int, Callable[[Array], Any], Callable[[Any], tuple[Draws, Array]]]:
    """Return an epoch's number of steps, the map of its first step to its entries, and that of an entry to a batch."""
    num_simulations = len(next(iter(simulations.values())))
    length = num_simulations // batch_size
    # No step has this number.
    shuffle_key = random.fold_in(rng_key, 2**32 - 2)

    def draw(first_step: Array) -> tuple[Array, Array]:
        order = random.permutation(random.fold_in(shuffle_key, first_step // length), num_simulations)
        return order[: length * batch_size].reshape(length, batch_size), first_step + jnp.arange(length)

    def gather(entry: tuple[Array, Array]) -> tuple[Draws, Array]:
        rows, step = entry
        keys = random.split(random.fold_in(rng_key, step), batch_size)
        return {name: values[rows] for name, values in simulations.items()}, keys

    return length, draw, gather
