"""Several trained guides of one architecture as one guide."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from numpyro.handlers import block, substitute

from numpyro_wide._traces import sample_sites
from numpyro_wide.amortized._families import JointPart
from numpyro_wide.amortized._guide import AutoAmortized, typed
from numpyro_wide.amortized._simulation import Draws, log_density, run_guide


class JoinedGuides(AutoAmortized):
    """Mixture of guides with equal weights, or one guide by the mean of what their networks compute.

    The loss is convex in the means c and A. The parameters, on a leading axis, are the param site ``<prefix>_members``.
    """

    def __init__(self, member: AutoAmortized, *, is_mean: bool):
        vars(self).update(vars(member))
        self.member, self.is_mean = member, is_mean

    def join(self, members: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Join the params of guides that have the same constants."""
        name = f"{self.prefix}_constants"
        trained = [{key: value for key, value in params.items() if key != name} for params in members]
        return {
            f"{self.prefix}_members": jax.tree.map(lambda *leaves: jnp.stack(leaves), *trained),
            name: members[0][name],
        }

    def __call__(self, observed_values: Mapping[str, ArrayLike], *args: object, **kwargs: object) -> Draws:
        """Draw the latents given one data set; the arguments are those of the model."""
        if self.is_mean:
            return super().__call__(observed_values, *args, **kwargs)
        members, constants = self._members(), {f"{self.prefix}_constants": self._constants(args, kwargs)}
        member_key, draw_key = random.split(typed(numpyro.prng_key()))

        def guide(values: Draws) -> Draws:
            return self.member(values, *args, **kwargs)

        def log_prob(previous: Draws, name: str, value: Array) -> Array:
            def single(params: dict[str, object]) -> Array:
                latents = {**previous, name: value}
                return log_density(run_guide(guide, draw_key, params | constants, observed_values, latents))

            log_probs = jax.vmap(single)(members)
            return logsumexp(log_probs) - jnp.log(len(log_probs))

        index = random.randint(member_key, (), 0, len(jax.tree.leaves(members)[0]))
        params = jax.tree.map(lambda leaf: leaf[index], members)
        sites = sample_sites(run_guide(guide, draw_key, params | constants, observed_values))
        values: Draws = {}
        for name, site in sites.items():
            density = partial(log_prob, dict(values), name) if len(values) + 1 == len(sites) else None
            values[name] = numpyro.sample(name, JointPart(site["value"], density, site["fn"].support))
        return values

    def features(self, observed_values: Mapping[str, ArrayLike], constants: dict[str, Any]) -> Array:
        """Compute the features of all members, one after another."""

        def single(params: dict[str, object]) -> Array:
            with block(), substitute(data=params):
                return self.member.features(observed_values, constants)

        return jax.vmap(single)(self._members()).reshape(-1)

    def _members(self) -> dict[str, Any]:
        return numpyro.param(f"{self.prefix}_members")

    def _head(self, features: Array, size: int, start: Callable[[Array], Array]) -> Array:
        """Compute the mean of the members' linear functions, each of its own features."""
        head = self._members()[f"{self.prefix}_head"]
        by_member = features.reshape(len(head["bias"]), -1)
        return jnp.einsum("mf,mfs->s", by_member, head["kernel"]) / len(by_member) + head["bias"].mean(0)
