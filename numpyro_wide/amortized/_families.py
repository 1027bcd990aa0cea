"""Distributions of standardised latents given features: mixtures of normals site by site, and flows."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints


class ConditionalNormals(dist.Distribution):
    """Mixture of normals of a vector v with standardised values u = (v − loc)/scale, L u − b ~ N(0, I) by component.

    Args:
        logits: unnormalised log weights, (k,).
        shift: b, (k, d).
        factor: L, lower triangular with a positive diagonal, (k, d, d).
        loc: centre of v, (d,).
        scale: scale of v, (d,).
    """

    support = constraints.real_vector
    pytree_data_fields = ("logits", "shift", "factor", "loc", "scale")

    def __init__(self, logits: Array, shift: Array, factor: Array, loc: Array, scale: Array):
        self.logits, self.shift, self.factor = logits, shift, factor
        self.loc, self.scale = loc.astype(shift.dtype), scale.astype(shift.dtype)
        super().__init__((), shift.shape[-1:], validate_args=False)

    def standardised(self, value: Array) -> Array:
        """Standardise values (..., d)."""
        loc, scale = (jnp.broadcast_to(moment, value.shape) for moment in (self.loc, self.scale))
        return (value.astype(loc.dtype) - loc) / scale

    def component_log_probs(self, value: Array) -> Array:
        """Evaluate the log density of values (..., d) under each component, (..., k)."""
        image = jnp.einsum("kij,...j->...ki", self.factor, self.standardised(value))
        error = image - jnp.broadcast_to(self.shift, image.shape)
        log_diagonal = jnp.log(jnp.diagonal(self.factor, axis1=-2, axis2=-1))
        log_det = jnp.sum(log_diagonal, axis=-1) - jnp.sum(jnp.log(self.scale))
        squares = jnp.sum(jnp.square(error), axis=-1)
        constant = log_det - 0.5 * self.event_shape[0] * math.log(2 * math.pi)
        return jnp.broadcast_to(constant, squares.shape) - 0.5 * squares

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Evaluate the log density of values (..., d)."""
        by_component = self.component_log_probs(value)
        weights = jax.nn.log_softmax(self.logits)
        return logsumexp(by_component + jnp.broadcast_to(weights, by_component.shape), axis=-1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw vectors (*sample_shape, d)."""
        component_key, noise_key = random.split(key)
        component = random.categorical(component_key, self.logits, shape=sample_shape)
        noise = random.normal(noise_key, (*sample_shape, *self.event_shape), self.shift.dtype)
        factor, image = self.factor[component], noise + self.shift[component]
        standardised = solve_triangular(factor, image[..., None], lower=True)[..., 0]
        loc, scale = (jnp.broadcast_to(moment, standardised.shape) for moment in (self.loc, self.scale))
        return loc + scale * standardised


class FlowPart(dist.Distribution):
    """One site's part of a joint draw; the last site's has the density of all standardised latents.

    Args:
        drawn: standardised values that a draw takes, (d,).
        known: standardised values of the sites before, (m,).
        joint_log_prob: log density of all, (m + d,); None for a site that others follow.
        loc: centre, (d,).
        scale: scale, (d,).
    """

    support = constraints.real_vector

    def __init__(self, drawn: Array, known: Array, joint_log_prob: Callable | None, loc: Array, scale: Array):
        self.drawn, self.known, self.joint_log_prob = drawn, known, joint_log_prob
        self.loc, self.scale = loc.astype(drawn.dtype), scale.astype(drawn.dtype)
        super().__init__((), drawn.shape, validate_args=False)

    def standardised(self, value: Array) -> Array:
        """Standardise values (d,)."""
        return (value.astype(self.loc.dtype) - self.loc) / self.scale

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Evaluate the log density of one value, with that of the sites before if it is the last."""
        log_scale = jnp.sum(jnp.log(self.scale))
        if self.joint_log_prob is None:
            return -log_scale
        return self.joint_log_prob(jnp.concatenate([self.known, self.standardised(value)])) - log_scale

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Return the part of the joint draw."""
        return jnp.broadcast_to(self.loc + self.scale * self.drawn, (*sample_shape, *self.event_shape))


@lru_cache(maxsize=16)
def conditional_flow(dim: int, num_features: int) -> tuple[dict[str, Array], Callable[[dict[str, Array]], Any]]:
    """Return first parameters of a flow of splines, by number, and the function to the flow of parameters."""
    try:
        import equinox
        from flowjax.bijections import RationalQuadraticSpline
        from flowjax.distributions import StandardNormal
        from flowjax.flows import masked_autoregressive_flow
    except ImportError as error:
        raise ImportError("family='flow' needs flowjax: pip install 'numpyro_wide[flows]'.") from error

    def build() -> Any:
        return masked_autoregressive_flow(
            random.key(0),
            base_dist=StandardNormal((dim,)),
            transformer=RationalQuadraticSpline(knots=8, interval=4),
            cond_dim=num_features,
            flow_layers=5,
        )

    # The guide runs under vmap, where equinox's checks fail; another thread has no transformations around it.
    with ThreadPoolExecutor(1) as thread:
        flow = thread.submit(build).result()
    arrays, rest = equinox.partition(flow, equinox.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)

    def flow_of(params: dict[str, Array]) -> Any:
        return equinox.combine(jax.tree.unflatten(structure, [params[str(i)] for i in range(len(leaves))]), rest)

    return {str(i): leaf for i, leaf in enumerate(leaves)}, flow_of
