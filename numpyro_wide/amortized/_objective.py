"""Objective of the training: simulations of a step, the guide's density of them, and steps of the optimiser."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_wide.amortized._loop import held_out_loss, train
from numpyro_wide.amortized._pair import FirstRun, ModelAndGuide
from numpyro_wide.amortized._simulation import Draws
from numpyro_wide.amortized._state import AmortizedState


@dataclass(frozen=True)
class Objective:
    """Expected forward KL divergence of one model and guide, with its optimiser.

    Attributes:
        pair: model, guide and names of the observed sites.
        batch_size: number of simulations in a step.
        optim: optimiser of the unconstrained parameters.
        latents: names of the latents that the guide covers.
        supports: constraints of the guide's param sites, by name.
    """

    pair: ModelAndGuide
    batch_size: int
    optim: _NumPyroOptim
    latents: tuple[str, ...]
    supports: dict[str, Any]

    @cached_property
    def train(self) -> Callable:
        """Compiled :func:`~numpyro_wide.amortized._loop.train`; a static argument that changes compiles it anew."""
        return jax.jit(partial(train, self), static_argnames=("static", "capacity", "stable"))

    @cached_property
    def held_out_loss(self) -> Callable:
        """Compiled :func:`~numpyro_wide.amortized._loop.held_out_loss`."""
        return jax.jit(partial(held_out_loss, self), static_argnames=("static", "num_simulations"))

    def is_like(self, other: "Objective | None") -> bool:
        """Tell whether the programs that are compiled for the other objective serve for this one."""
        try:
            return self == other
        except jax.errors.JAXTypeError:  # bounds of a support that are being traced
            return False

    @cached_property
    def transforms(self) -> dict[str, Any]:
        """Maps from unconstrained numbers to the values of each param site, by name."""
        return {name: biject_to(support) for name, support in self.supports.items()}

    def start(self, rng_key: Array, first: FirstRun) -> AmortizedState:
        """Make the state before the first step, from the values that the guide's param and mutable sites start from."""
        if not first.params:
            raise ValueError(
                "the guide must have a param site, but has none, and so nothing to train; add numpyro.param or "
                "flax_module."
            )
        params = {name: self.transforms[name].inv(value) for name, value in first.params.items()}
        params, mutable = jax.tree.map(_strongly_typed, (params, first.mutable))
        zero = jnp.zeros((), jnp.int32)
        return AmortizedState(self.optim.init(params), mutable or None, rng_key, zero, zero)

    def constrain(self, unconstrained: dict[str, Any]) -> dict[str, Any]:
        """Map unconstrained numbers to the values of the guide's param sites."""
        return transform_fn(self.transforms, unconstrained)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Read the values of the guide's param and mutable sites off a state."""
        return {**self.constrain(self.optim.get_params(state.optim_state)), **(state.mutable_state or {})}

    def simulate_step(self, rng_key: Array, step: Array, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """Draw the simulations of one step, and a key for the guide beside each."""
        keys = jax.vmap(random.split)(random.split(random.fold_in(rng_key, step), self.batch_size))
        draws = self.pair.simulate(keys[:, 0], args, kwargs)
        return {name: draws[name] for name in (*self.latents, *self.pair.observed)}, keys[:, 1]

    def loss(
        self, unconstrained: dict[str, Any], mutable: dict[str, Any] | None, batch: tuple, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any] | None]:
        """Return the negative mean log density of a batch, and the mutable state that the guide leaves."""
        params = {**self.constrain(unconstrained), **(mutable or {})}
        draws, keys = batch
        log_q, mutable = self.pair.log_prob(params, draws, keys, args, kwargs)
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
        num_skipped = state.num_skipped + (~finite).astype(state.num_skipped.dtype)
        new = AmortizedState(optim_state, mutable_state, state.rng_key, state.step + 1, num_skipped, state.held_out)
        return new, jnp.where(finite, loss, jnp.nan)


def _strongly_typed(leaf: Any) -> Array:
    # A weakly typed state would be compiled again after the first step, which leaves strong types.
    return lax.convert_element_type(leaf, jnp.result_type(leaf))
