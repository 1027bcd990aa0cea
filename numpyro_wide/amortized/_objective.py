"""The objective: simulations of each step, the guide's density of them, and one step of the optimiser."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_wide._simulation import Draws
from numpyro_wide.amortized._pair import FirstRun, ModelAndGuide
from numpyro_wide.amortized._state import AmortizedState

# Numbers that the simulations of a block of steps may hold; and the longest block.
_BLOCK_NUMBERS = 2**20
_LONGEST_BLOCK = 64


@dataclass(frozen=True)
class Objective:
    """The expected forward KL divergence of one model and guide, and its optimiser."""

    pair: ModelAndGuide
    batch_size: int
    optim: _NumPyroOptim
    latents: tuple[str, ...]
    """Names of the latents that the guide covers."""
    supports: dict[str, Any]
    """Constraints of the guide's param sites."""

    def is_like(self, other: "Objective | None") -> bool:
        """Whether what is compiled for the other serves for this one."""
        try:
            return self == other
        except jax.errors.JAXTypeError:  # bounds of a support that are being traced
            return False

    @cached_property
    def transforms(self) -> dict[str, Any]:
        """From unconstrained numbers to the values of each param site."""
        return {name: biject_to(support) for name, support in self.supports.items()}

    def start(self, rng_key: Array, first: FirstRun) -> AmortizedState:
        """The state before the first step, from values at the guide's param and mutable sites."""
        if not first.params:
            raise ValueError("the guide has no param site, and so nothing to train; see numpyro.param, flax_module.")
        params = {name: self.transforms[name].inv(value) for name, value in first.params.items()}
        params, mutable = jax.tree.map(_strongly_typed, (params, first.mutable))
        zero = jnp.zeros((), jnp.int32)
        return AmortizedState(self.optim.init(params), mutable or None, rng_key, zero, zero)

    def constrain(self, unconstrained: dict[str, Any]) -> dict[str, Any]:
        """Values at the guide's param sites."""
        return transform_fn(self.transforms, unconstrained)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Values at the guide's param and mutable sites."""
        return {**self.constrain(self.optim.get_params(state.optim_state)), **(state.mutable_state or {})}

    def simulate_step(self, rng_key: Array, step: Array, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """The simulations of a step that the guide is trained on, and a key for the guide beside each."""
        keys = jax.vmap(random.split)(random.split(random.fold_in(rng_key, step), self.batch_size))
        draws = self.pair.simulate(keys[:, 0], args, kwargs)
        return {name: draws[name] for name in (*self.latents, *self.pair.observed)}, keys[:, 1]

    def block_length(self, rng_key: Array, args: tuple, kwargs: dict) -> int:
        """Number of steps whose simulations are drawn at once, from the largest array that a step's make."""
        step = jnp.zeros((), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda: self.simulate_step(rng_key, step, args, kwargs))()
        largest = max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars)
        return int(max(1, min(_LONGEST_BLOCK, _BLOCK_NUMBERS // largest)))

    def loss(
        self, unconstrained: dict[str, Any], mutable: dict[str, Any] | None, batch: tuple, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any] | None]:
        """The negative mean log density, and the mutable state that is left."""
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
    """What is weakly typed at first would be compiled a second time."""
    return lax.convert_element_type(leaf, jnp.result_type(leaf))
