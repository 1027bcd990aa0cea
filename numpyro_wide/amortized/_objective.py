"""The objective: simulations of each step, the guide's density of them, and one step of the optimiser."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_wide.amortized._sites import (
    Draws,
    InitialState,
    Sites,
    check_guide,
    log_density,
    simulated_values,
    trace_guide,
    trace_model,
    values_of_type,
)
from numpyro_wide.amortized._state import AmortizedState

AXIS_NAME = "simulations"
# Numbers that the simulations of a block of steps may hold; and the longest block.
_BLOCK_NUMBERS = 2**20
_LONGEST_BLOCK = 64


class Objective:
    """The expected forward KL divergence of one model and guide, and its optimiser."""

    def __init__(
        self, model: Callable, guide: Callable, observed: tuple[str, ...], batch_size: int, optim: _NumPyroOptim
    ):
        self.model, self.guide, self.observed = model, guide, observed
        self.batch_size, self.optim = batch_size, optim
        self._inverse_transforms: dict[str, Any] | None = None
        self._latents: list[str] = []

    @property
    def is_ready(self) -> bool:
        """Whether the guide's sites are known."""
        return self._inverse_transforms is not None

    def initial_values(
        self, rng_key: Array, model_sites: Sites, params: Mapping[str, Any], args: tuple, kwargs: dict
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Note what the guide covers and how its parameters are constrained; return these, and its mutable state.

        The guide runs on one simulation, as a batch of it, for it may ask for the batch's axis.
        """
        observed_values = {name: jnp.asarray(model_sites[name]["value"])[None] for name in self.observed}
        supports: dict[str, Any] = {}

        def single(observed_values: Draws) -> tuple[dict[str, Any], dict[str, Any]]:
            guide = InitialState(self.guide)
            sites = trace_guide(guide, rng_key, params, observed_values, args, kwargs)
            check_guide(sites, model_sites, self.observed)
            self._latents = list(values_of_type(sites, "sample"))
            param_sites = {name: site for name, site in sites.items() if site["type"] == "param"}
            for name, site in param_sites.items():
                supports[name] = site["kwargs"].get("constraint", constraints.real)
            return values_of_type(sites, "param"), guide.values

        values = jax.vmap(single, axis_name=AXIS_NAME)(observed_values)
        initial, mutable = jax.tree.map(lambda leaf: leaf[0], values)
        self._inverse_transforms = {name: biject_to(support) for name, support in supports.items()}
        return {name: self._inverse_transforms[name].inv(value) for name, value in initial.items()}, mutable

    def constrain(self, unconstrained: dict[str, Any]) -> dict[str, Any]:
        """Values at the guide's param sites."""
        if self._inverse_transforms is None:
            raise ValueError("the guide's parameters are not known yet; call init or run first.")
        return transform_fn(self._inverse_transforms, unconstrained)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Values at the guide's param and mutable sites."""
        return {**self.constrain(self.optim.get_params(state.optim_state)), **(state.mutable_state or {})}

    def simulate(self, keys: Array, args: tuple, kwargs: dict) -> Draws:
        """One simulation for each key."""

        def single(key: Array) -> Draws:
            return simulated_values(trace_model(self.model, key, args, kwargs), self.observed)

        return jax.vmap(single)(keys)

    def simulate_step(self, rng_key: Array, step: Array, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """The simulations of a step that the guide is trained on, and a key for the guide beside each."""
        keys = jax.vmap(random.split)(random.split(random.fold_in(rng_key, step), self.batch_size))
        draws = self.simulate(keys[:, 0], args, kwargs)
        return {name: draws[name] for name in (*self._latents, *self.observed)}, keys[:, 1]

    def held_out(self, rng_key: Array, num_simulations: int, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """Simulations that no step is trained on, and a key for the guide beside each."""
        # Steps fold in their numbers, which do not come as far as this one.
        keys = random.split(random.fold_in(rng_key, 2**32 - 1), (num_simulations, 2))
        return self.simulate(keys[:, 0], args, kwargs), keys[:, 1]

    def block_length(self, rng_key: Array, args: tuple, kwargs: dict) -> int:
        """Number of steps whose simulations are drawn at once, from the largest array that a step's make."""
        step = jnp.zeros((), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda: self.simulate_step(rng_key, step, args, kwargs))()
        largest = max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars)
        return int(max(1, min(_LONGEST_BLOCK, _BLOCK_NUMBERS // largest)))

    def log_prob(
        self, params: Mapping[str, Any], draws: Draws, keys: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any]]:
        """The guide's log density of each simulation's latents, (n,), and the mutable state that is left."""
        observed_values = {name: draws[name] for name in self.observed}
        latents = {name: value for name, value in draws.items() if name not in self.observed}

        def single(latents: Draws, observed_values: Draws, key: Array) -> tuple[Array, dict[str, Any]]:
            sites = trace_guide(self.guide, key, params, observed_values, args, kwargs, latents)
            return log_density(sites), values_of_type(sites, "mutable")

        log_q, mutable = jax.vmap(single, axis_name=AXIS_NAME)(latents, observed_values, keys)
        return log_q, jax.tree.map(_merge, mutable)

    def loss(
        self, unconstrained: dict[str, Any], mutable: dict[str, Any] | None, batch: tuple, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any] | None]:
        """The negative mean log density, and the mutable state that is left."""
        params = {**self.constrain(unconstrained), **(mutable or {})}
        draws, keys = batch
        log_q, mutable = self.log_prob(params, draws, keys, args, kwargs)
        return -jnp.mean(log_q), mutable or None

    def step(
        self, state: AmortizedState, batch: tuple, args: tuple, kwargs: dict, *, stable: bool
    ) -> tuple[AmortizedState, Array]:
        """Follow the gradient on a batch; if ``stable``, keep the old values where anything is not finite."""
        loss_fn = partial(self.loss, mutable=state.mutable_state, batch=batch, args=args, kwargs=kwargs)
        params = self.optim.get_params(state.optim_state)
        (loss, mutable), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)

        def follow() -> tuple[Any, Any]:
            return self.optim.update(gradient, state.optim_state, value=loss), mutable

        if not stable:
            optim_state, mutable_state = follow()
            return state._replace(optim_state=optim_state, mutable_state=mutable_state, step=state.step + 1), loss
        finite = jnp.isfinite(loss)
        for leaf in jax.tree.leaves(gradient):
            finite &= jnp.isfinite(leaf).all()
        # Selecting leaf by leaf would take a fifth longer.
        optim_state, mutable_state = lax.cond(finite, follow, lambda: (state.optim_state, state.mutable_state))
        num_skipped = state.num_skipped + ~finite
        new = AmortizedState(optim_state, mutable_state, state.rng_key, state.step + 1, num_skipped, state.held_out)
        return new, jnp.where(finite, loss, jnp.nan)


def _merge(leaf: Array) -> Array:
    """One state of the states that the simulations of a batch leave, strongly typed as the first one."""
    merged = leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0]
    return lax.convert_element_type(merged, leaf.dtype)
