"""Distributions of standardised latents given features: mixtures of normals site by site, and flows."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint


class ConditionalNormals(dist.Distribution):
    """Mixture of normals, L u − b ~ N(0, I) by component: logits (k,), shift b (k, d), lower triangular L (k, d, d)."""

    support = constraints.real_vector
    pytree_data_fields = ("logits", "shift", "factor")

    def __init__(self, logits: Array, shift: Array, factor: Array):
        self.logits, self.shift, self.factor = logits, shift, factor
        super().__init__((), shift.shape[-1:], validate_args=False)

    def component_log_probs(self, value: Array) -> Array:
        """Evaluate the log density of values (..., d) under each component, (..., k)."""
        return _component_log_probs(value.astype(self.shift.dtype), self.shift, self.factor)

    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Evaluate the log density of values (..., d)."""
        by_component = self.component_log_probs(value)
        weights = jax.nn.log_softmax(self.logits)
        return logsumexp(by_component + jnp.broadcast_to(weights, by_component.shape), axis=-1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw vectors (*sample_shape, d)."""
        return _draw(key, self.logits, self.shift, self.factor, sample_shape)


# Compiled as wholes: guides are first run operation by operation.
@jax.jit
def _component_log_probs(value: Array, shift: Array, factor: Array) -> Array:
    image = jnp.einsum("kij,...j->...ki", factor, value)
    squares = jnp.sum(jnp.square(image - jnp.broadcast_to(shift, image.shape)), axis=-1)
    log_det = jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), axis=-1)
    constant = log_det - 0.5 * shift.shape[-1] * math.log(2 * math.pi)
    return jnp.broadcast_to(constant, squares.shape) - 0.5 * squares


@partial(jax.jit, static_argnames="sample_shape")
def _draw(key: Array, logits: Array, shift: Array, factor: Array, sample_shape: tuple[int, ...]) -> Array:
    component_key, noise_key = random.split(key)
    component = random.categorical(component_key, logits, shape=sample_shape)
    image = random.normal(noise_key, (*sample_shape, shift.shape[-1]), shift.dtype) + shift[component]
    return solve_triangular(factor[component], image[..., None], lower=True)[..., 0]


@partial(jax.jit, static_argnames="dim")
def regressions(outputs: Array, dim: int) -> tuple[Array, Array, Array]:
    """Return logits (k,), b = D c (k, d) and L = D A (k, d, d) from rows of log weight, c, log D and A's slopes."""
    logits, loc, precision, below = _split_outputs(outputs, dim)
    return logits, precision * loc, precision[:, :, None] * (jnp.eye(dim, dtype=below.dtype)[None] + below)


@partial(jax.jit, static_argnames="dim")
def covariance_factors(outputs: Array, dim: int) -> tuple[Array, Array, Array]:
    """Return logits (k,), b = L m (k, d) and L = C⁻¹ (k, d, d) from rows of log weight, m, -log diag C and C below."""
    logits, loc, precision, below = _split_outputs(outputs, dim)
    diagonal = jax.vmap(jnp.diag)(1 / precision)
    eye = jnp.broadcast_to(jnp.eye(dim, dtype=below.dtype), below.shape)
    factor = solve_triangular(diagonal + below, eye, lower=True)
    return logits, jnp.einsum("kij,kj->ki", factor, loc), factor


def _split_outputs(outputs: Array, dim: int) -> tuple[Array, Array, Array, Array]:
    """Return logits (k,), numbers (k, d), positive numbers (k, d), and strictly lower triangles (k, d, d)."""
    below = jnp.zeros((len(outputs), dim, dim), outputs.dtype)
    if outputs.shape[1] > 1 + 2 * dim:
        rows, columns = np.tril_indices(dim, -1)
        below = below.at[:, rows, columns].set(outputs[:, 1 + 2 * dim :])
    return outputs[:, 0], outputs[:, 1 : 1 + dim], jnp.exp(outputs[:, 1 + dim : 1 + 2 * dim]), below


class JointPart(dist.Distribution):
    """One site's part of a joint draw; the last site has the density of all, a function of its value."""

    def __init__(self, drawn: Array, joint_log_prob: Callable | None, support: Constraint = constraints.real_vector):
        self.drawn, self.joint_log_prob, self._support = drawn, joint_log_prob, support  # None unless it is the last
        super().__init__((), drawn.shape, validate_args=False)

    @property
    def support(self) -> Constraint:
        """The site's support."""
        return self._support

    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Evaluate the log density of one value, with that of the sites before if it is the last."""
        return jnp.zeros(()) if self.joint_log_prob is None else self.joint_log_prob(value)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Return the part of the joint draw."""
        return jnp.broadcast_to(self.drawn, (*sample_shape, *self.event_shape))


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
    arrays, static = equinox.partition(flow, equinox.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)

    def flow_of(params: dict[str, Array]) -> Any:
        return equinox.combine(jax.tree.unflatten(structure, [params[str(i)] for i in range(len(leaves))]), static)

    return {str(i): leaf for i, leaf in enumerate(leaves)}, flow_of
