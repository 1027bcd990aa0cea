"""Stored simulations to train on, instead of fresh ones."""

import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint

from numpyro_wide._checks import late_progress, num_draws_of
from numpyro_wide._traces import Sites
from numpyro_wide.amortized._simulation import Arrays, Draws, refuse_missing


def check_simulations(simulations: Arrays, model_sites: Sites, observed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Check simulations {site: (n, ...)}, and return in NumPy's arrays those that are finite, latents unconstrained."""
    refuse_missing("simulations", observed, simulations, "observed site")
    total = num_draws_of("simulations", simulations)
    finite_draws, num_lost = finite(simulations)
    if num_lost:
        warnings.warn(f"{num_lost} of {total} simulations hold NaN or infinity, and are left out.", stacklevel=3)
    is_kept = np.full(total - num_lost, True)
    for name, values in finite_draws.items():
        if name in model_sites:
            is_kept &= _are_inside(name, values, model_sites[name], is_latent=name not in observed)
    if num_ends := int(np.sum(~is_kept)):
        warnings.warn(
            f"{num_ends} of {total} simulations hold a latent at an end of its support, or rounded to it, and are left "
            "out.",
            stacklevel=3,
        )
    return _rows_of(finite_draws, is_kept)


def finite(simulations: Arrays) -> tuple[dict[str, np.ndarray], int]:
    """Return the simulations that are finite, and the number of the others."""
    with np.errstate(over="ignore"):  # too large for single precision is infinite
        arrays = {name: np.asarray(jnp.asarray(values)) for name, values in simulations.items()}
    is_finite = np.all([np.isfinite(values.reshape(len(values), -1)).all(axis=1) for values in arrays.values()], axis=0)
    return _rows_of(arrays, is_finite), int(np.sum(~is_finite))


def _rows_of(arrays: dict[str, np.ndarray], is_kept: np.ndarray) -> dict[str, np.ndarray]:
    """Return some simulations, two at least."""
    if is_kept.sum() < 2:
        raise ValueError("fewer than two of the simulations are finite; look at the simulator.")
    return {name: values[is_kept] for name, values in arrays.items()}


def call_simulator(simulator: Callable, latents: Arrays, observed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Call a simulator in Python for each draw of the latents, {site: (n, ...)}; return its data, {site: (n, ...)}."""
    arrays = {name: np.asarray(values) for name, values in latents.items()}
    results = []
    for index in late_progress(range(num_draws_of("latents", arrays)), desc="simulations"):
        data = simulator(**{name: values[index] for name, values in arrays.items()})
        results.append(data if isinstance(data, Mapping) or len(observed) > 1 else {observed[0]: data})
        refuse_missing("what the simulator returns", observed, results[-1])
    return {name: np.stack([result[name] for result in results]) for name in observed}


def _are_inside(name: str, values: np.ndarray, site: dict, is_latent: bool) -> np.ndarray:
    """Whether values (n, ...) of a latent are not at an end of its support, (n,); refuse others, and wrong shapes."""
    shape = jnp.shape(site["value"])
    if values.shape[1:] != shape:
        raise ValueError(
            f"simulations[{name!r}] must have the shape {shape} after the leading axis, but has {values.shape[1:]}."
        )
    support, is_inside = site["fn"].support if site["type"] == "sample" else None, np.full(len(values), True)
    # Arrays in a support may be values of other sites.
    if support is None or any(isinstance(leaf, Array) for leaf in jax.tree.leaves(support)):
        return is_inside
    if is_latent and not support.is_discrete:
        is_inside = ~_have_infinite_coordinates(values, support)
    if not np.all(jax.jit(jax.vmap(support))(values[is_inside])):
        raise ValueError(f"simulations[{name!r}] must lie in the support of the model's site, {support}.")
    return is_inside


def _have_infinite_coordinates(values: np.ndarray, support: Constraint) -> np.ndarray:
    """Whether unconstrained coordinates of values (n, ...) are infinite, as at ends of intervals, (n,)."""
    try:
        coordinates = jax.jit(jax.vmap(biject_to(support).inv))(values)
    except NotImplementedError:  # of spheres
        return np.full(len(values), False)
    return np.isinf(coordinates).reshape(len(values), -1).any(axis=1)


def split_held_out(simulations: Mapping[str, np.ndarray], held_out: int, batch_size: int) -> tuple[Draws, Draws]:
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
) -> tuple[int, Callable[[Array], tuple], Callable[[tuple], tuple[Draws, Array]]]:
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
