"""Model and guide over a batch: simulations of the model, and the guide's log density of each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from numpyro_wide._traces import run_model
from numpyro_wide.amortized._simulation import (
    Draws,
    check_guide,
    check_params,
    check_simulator,
    log_density,
    run_guide,
    simulate,
    values_of_type,
)

AXIS_NAME = "simulations"


class FirstRun(NamedTuple):
    """Sites of a guide, read off its first run.

    Attributes:
        latents: names of the latents that the guide covers.
        supports: constraints of its param sites, by name.
        params: constrained values that its param sites start from, by name.
        mutable: values that its mutable sites start from, by name.
    """

    latents: tuple[str, ...]
    supports: dict[str, Any]
    params: dict[str, Any]
    mutable: dict[str, Any]


class ModelAndGuide(NamedTuple):
    """Model that simulates and guide that scores.

    Attributes:
        model: ``model(*args, **kwargs)``.
        guide: ``guide(observed_values, *args, **kwargs)`` for one data set.
        observed: names of the sites that are data to the guide.
    """

    model: Callable
    guide: Callable
    observed: tuple[str, ...]

    def first_run(
        self, model_key: Array, guide_key: Array, params: Mapping[str, Any], args: tuple, kwargs: dict
    ) -> FirstRun:
        """Run both once, check that they fit, and read the guide's sites off its run.

        The guide runs on one simulation, as a batch of it, for it may ask for the batch's axis.
        """
        model_sites = run_model(self.model, args, kwargs, rng_key=model_key)
        check_simulator(model_sites, self.observed)
        latents: list[str] = []
        supports: dict[str, Any] = {}

        def single(observed_values: Draws) -> tuple[dict[str, Any], dict[str, Any]]:
            guide = _InitialState(self.guide)
            sites = run_guide(guide, guide_key, params, observed_values, args, kwargs)
            check_guide(sites, model_sites, self.observed)
            latents.extend(values_of_type(sites, "sample"))
            for name, site in sites.items():
                if site["type"] == "param":
                    supports[name] = site["kwargs"].get("constraint", constraints.real)
            return values_of_type(sites, "param"), guide.values

        observed_values = {name: jnp.asarray(model_sites[name]["value"])[None] for name in self.observed}
        values = jax.vmap(single, axis_name=AXIS_NAME)(observed_values)
        initial, mutable = jax.tree.map(lambda leaf: leaf[0], values)
        return FirstRun(tuple(latents), supports, initial, mutable)

    def simulate(self, keys: Array, args: tuple, kwargs: dict) -> Draws:
        """Simulate once for each key, (n,); the values have a leading axis (n,)."""
        return jax.vmap(lambda key: simulate(self.model, key, self.observed, args, kwargs))(keys)

    def held_out(self, rng_key: Array, num_simulations: int, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """Simulate what no step is trained on, with a key for the guide beside each."""
        # Steps fold in their numbers, which do not come as far as this one.
        keys = random.split(random.fold_in(rng_key, 2**32 - 1), (num_simulations, 2))
        return self.simulate(keys[:, 0], args, kwargs), keys[:, 1]

    def log_prob(
        self, params: Mapping[str, Any], draws: Draws, keys: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any]]:
        """Score the latents of each simulation.

        Args:
            params: values of the guide's param and mutable sites, by name.
            draws: values of the latents and of the observed sites, by name, with a leading axis (n,).
            keys: PRNG keys for the guide, (n,).
            args: further arguments of the guide.
            kwargs: keyword arguments of the guide.

        Returns:
            The guide's log density of each simulation's latents, (n,), and the mutable state that it leaves.
        """
        observed_values = {name: draws[name] for name in self.observed}
        latents = {name: value for name, value in draws.items() if name not in self.observed}

        def single(latents: Draws, observed_values: Draws, key: Array) -> tuple[Array, dict[str, Any]]:
            sites = run_guide(self.guide, key, params, observed_values, args, kwargs, latents)
            return log_density(sites), values_of_type(sites, "mutable")

        log_q, mutable = jax.vmap(single, axis_name=AXIS_NAME)(latents, observed_values, keys)
        return log_q, jax.tree.map(_merge, mutable)

    def check_params(self, params: Mapping[str, Any], draws: Draws, args: tuple, kwargs: dict) -> None:
        """Refuse parameters that lack one of the guide's sites."""
        first = {name: draws[name][:1] for name in self.observed}

        def single(observed_values: Draws) -> None:
            check_params(self.guide, random.key(0), params, observed_values, args, kwargs)

        jax.vmap(single, axis_name=AXIS_NAME)(first)


class _InitialState(Messenger):
    """Recorder of what mutable sites hold before the guide writes into them."""

    def __init__(self, fn: Callable):
        super().__init__(fn)
        self.values: dict[str, Any] = {}

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "mutable" and msg["value"] is not None:
            self.values[msg["name"]] = jax.tree.map(lambda leaf: leaf, msg["value"])


def _merge(leaf: Array) -> Array:
    """Merge the states (n, ...) that the simulations of a batch leave into one, strongly typed as the first one."""
    merged = leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0]
    return lax.convert_element_type(merged, leaf.dtype)
