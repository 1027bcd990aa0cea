"""Scales with a prior, as sites in coordinates that are N(0, 1) a priori."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import log_ndtr, ndtr, ndtri

from numpyro_wide._checks import as_floats, check_one_of, is_known


def scale_site(name: str, prior: Any) -> Any:
    r"""Sample a scale by its prior: the site ``name`` + "_base" is N(0, 1), and ``name`` its image, deterministic.

    Args:
        name: name of the site.
        prior: distribution of one of the kinds in ``IMAGES``: for a log-normal one the image of z is
            $e^{\mu + \sigma z}$, for any other the quantile at $\Phi(z)$. What is not a distribution is itself the
            scale, and no site.

    Returns:
        The scale, of the prior's shape.

    Raises:
        ValueError: if the prior is of another kind, or not one of positive numbers.
    """
    if not isinstance(prior, dist.Distribution):
        return prior
    shape = prior.shape()
    image = _image(name, prior)
    base = numpyro.sample(f"{name}_base", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
    return numpyro.deterministic(name, image(base))


def check_prior(name: str, prior: dist.Distribution) -> None:
    """Refuse a prior of a scale that is of another kind than those in ``IMAGES``, or reaches below zero.

    Args:
        name: name of the scale, for messages.
        prior: distribution, whose parameters may be traced and are then not looked at.

    Raises:
        ValueError: if the prior is of another kind, or one of numbers that may be negative.
    """
    inner = _without_shape(prior)
    kinds = sorted(kind.__name__ for kind in IMAGES)
    check_one_of(f"the prior of {name}", type(inner).__name__, kinds, also="(their quantiles are known in both tails)")
    # NumPyro has checked the parameters against their constraints; that of a uniform is any interval.
    if isinstance(inner, dist.Uniform) and is_known(inner.low) and not np.all(np.asarray(inner.low) >= 0):
        raise ValueError(
            f"the prior of {name} must be one of positive numbers, but is uniform from {inner.low} on; let it begin at "
            "0 or above."
        )


def _without_shape(prior: dist.Distribution) -> dist.Distribution:
    while isinstance(prior, dist.Independent | dist.ExpandedDistribution):
        prior = prior.base_dist
    return prior


def _image(name: str, prior: dist.Distribution) -> Callable[[Array], Array]:
    """Return the map from standard normal numbers to draws of the prior."""
    check_prior(name, prior)
    inner = _without_shape(prior)
    image = IMAGES[type(inner)]
    return lambda base: jnp.broadcast_to(image(inner, as_floats(base)[0]), prior.shape())


def _log_normal(prior: Any, z: Array) -> Array:
    return jnp.exp(prior.loc + prior.scale * z)


def _half_normal(prior: Any, z: Array) -> Array:
    return prior.scale * _by_tail(z, lambda p: jnp.sqrt(2.0) * jax.lax.erf_inv(p), lambda q: -ndtri(q / 2))


def _half_cauchy(prior: Any, z: Array) -> Array:
    z = jnp.minimum(z, 8.0)  # 1e15; beyond, the square in the derivative would leave float32
    return prior.scale * _by_tail(z, lambda p: jnp.tan(jnp.pi / 2 * p), lambda q: 1 / jnp.tan(jnp.pi / 2 * q))


def _exponential(prior: Any, z: Array) -> Array:
    # Beyond some 13 deviations the tail itself is below the least number of float32, and its logarithm is not.
    lower, upper = -jnp.log1p(-ndtr(jnp.minimum(z, 0.0))), -log_ndtr(-jnp.maximum(z, 0.0))
    return jnp.where(z < 0, lower, upper) / prior.rate


def _uniform(prior: Any, z: Array) -> Array:
    return prior.low + (prior.high - prior.low) * ndtr(z)


def _by_tail(z: Array, of_lower: Callable, of_upper: Callable) -> Array:
    """Return a quantile from the probability below it or above it, whichever is small and so keeps its digits."""
    lower, upper = of_lower(ndtr(jnp.minimum(z, 0.0))), of_upper(ndtr(-jnp.clip(z, 0.0, 12.0)))
    return jnp.where(z < 0, lower, upper)


IMAGES: dict[type[dist.Distribution], Callable[[Any, Array], Array]] = {
    dist.Exponential: _exponential,
    dist.HalfCauchy: _half_cauchy,
    dist.HalfNormal: _half_normal,
    dist.LogNormal: _log_normal,
    dist.Uniform: _uniform,
}
