"""Scales with a prior, as sites in coordinates that are N(0, 1), where every kernel has an easy time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr, ndtr, ndtri

from numpyro_wide._checks import as_floats, listing


def scale_site(name: str, prior: Any) -> Any:
    r"""A scale with its prior: the site ``name`` + "_base" is N(0, 1), and ``name`` its image, deterministic.

    Args:
        name: of the site.
        prior: of the kinds in ``IMAGES``: for a log-normal one the image of z is $e^{\mu + \sigma z}$, for any other
            the quantile at $\Phi(z)$. What is not a distribution is itself the scale, and no site.

    Raises:
        ValueError: for any other distribution.
    """
    if not isinstance(prior, dist.Distribution):
        return prior
    shape = prior.shape()
    image = _image(name, prior)
    base = numpyro.sample(f"{name}_base", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
    return numpyro.deterministic(name, image(base))


def _image(name: str, prior: dist.Distribution) -> Callable[[jax.Array], jax.Array]:
    """From standard normal numbers to draws of the prior."""
    inner = prior
    while isinstance(inner, dist.Independent | dist.ExpandedDistribution):
        inner = inner.base_dist
    if type(inner) not in IMAGES:
        raise ValueError(
            f"the prior of {name} must be one of {listing(sorted(kind.__name__ for kind in IMAGES))}, whose quantiles "
            f"are known to the end of both tails in float32, but is a {type(inner).__name__}."
        )
    image = IMAGES[type(inner)]
    return lambda base: jnp.broadcast_to(image(inner, as_floats(base)[0]), prior.shape())


def _log_normal(prior: Any, z: jax.Array) -> jax.Array:
    return jnp.exp(prior.loc + prior.scale * z)


def _half_normal(prior: Any, z: jax.Array) -> jax.Array:
    return prior.scale * _by_tail(z, lambda p: jnp.sqrt(2.0) * jax.lax.erf_inv(p), lambda q: -ndtri(q / 2))


def _half_cauchy(prior: Any, z: jax.Array) -> jax.Array:
    z = jnp.minimum(z, 8.0)  # 1e15; beyond, the square in the derivative would leave float32
    return prior.scale * _by_tail(z, lambda p: jnp.tan(jnp.pi / 2 * p), lambda q: 1 / jnp.tan(jnp.pi / 2 * q))


def _exponential(prior: Any, z: jax.Array) -> jax.Array:
    # Beyond some 13 deviations the tail itself is below the least number of float32, and its logarithm is not.
    lower, upper = -jnp.log1p(-ndtr(jnp.minimum(z, 0.0))), -log_ndtr(-jnp.maximum(z, 0.0))
    return jnp.where(z < 0, lower, upper) / prior.rate


def _uniform(prior: Any, z: jax.Array) -> jax.Array:
    return prior.low + (prior.high - prior.low) * ndtr(z)


def _by_tail(z: jax.Array, of_lower: Callable, of_upper: Callable) -> jax.Array:
    """A quantile as a function of the probability below it, and of that above it: each keeps its digits where small."""
    lower, upper = of_lower(ndtr(jnp.minimum(z, 0.0))), of_upper(ndtr(-jnp.clip(z, 0.0, 12.0)))
    return jnp.where(z < 0, lower, upper)


IMAGES: dict[type[dist.Distribution], Callable[[Any, jax.Array], jax.Array]] = {
    dist.Exponential: _exponential,
    dist.HalfCauchy: _half_cauchy,
    dist.HalfNormal: _half_normal,
    dist.LogNormal: _log_normal,
    dist.Uniform: _uniform,
}
