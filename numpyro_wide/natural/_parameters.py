"""Natural parameters of NumPyro distributions."""

from functools import singledispatch

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_wide.natural._domain import pack_normal
from numpyro_wide.natural._von_mises import NaturalVonMises


@singledispatch
def parameters(distribution: dist.Distribution) -> Array:
    """Compute the natural parameters of a NumPyro distribution, in the layout of this module's constructors.

    Args:
        distribution: Normal, LogNormal, MultivariateNormal, VonMises, Gamma, Exponential, Beta, Dirichlet,
            Bernoulli, Categorical or Poisson distribution of NumPyro.

    Returns:
        η, of shape ``distribution.batch_shape + (number of parameters,)``.

    Raises:
        ValueError: for another kind of distribution.

    Example:
        >>> import numpyro.distributions as dist
        >>> from numpyro_wide import natural
        >>> natural.parameters(dist.Normal(3.0, 0.5)).tolist()
        [12.0, -2.0]
    """
    raise ValueError(
        f"natural parameters are known for the families of numpyro_wide.natural, but got "
        f"{type(distribution).__name__}; of a distribution under to_event or expand, pass the base."
    )


def _stack(*components: Array) -> Array:
    return jnp.stack(jnp.broadcast_arrays(*components), axis=-1)


@parameters.register(dist.LogNormal)
@parameters.register(dist.Normal)
def _(distribution: dist.Normal) -> Array:
    precision = 1 / jnp.square(distribution.scale)
    return _stack(distribution.loc * precision, -0.5 * precision)


@parameters.register(dist.MultivariateNormal)
def _(distribution: dist.MultivariateNormal) -> Array:
    precision = distribution.precision_matrix
    return pack_normal(jnp.einsum("...ij,...j->...i", precision, distribution.loc), precision)


@parameters.register(dist.VonMises)
def _(distribution: dist.VonMises) -> Array:
    concentration, loc = distribution.concentration, distribution.loc
    return _stack(concentration * jnp.cos(loc), concentration * jnp.sin(loc))


@parameters.register(NaturalVonMises)
def _(distribution: NaturalVonMises) -> Array:
    return distribution.natural


@parameters.register(dist.Gamma)
def _(distribution: dist.Gamma) -> Array:
    return _stack(distribution.concentration - 1.0, -distribution.rate)


@parameters.register(dist.Exponential)
def _(distribution: dist.Exponential) -> Array:
    return _stack(-distribution.rate)


@parameters.register(dist.Beta)
def _(distribution: dist.Beta) -> Array:
    return _stack(distribution.concentration1 - 1.0, distribution.concentration0 - 1.0)


@parameters.register(dist.Dirichlet)
def _(distribution: dist.Dirichlet) -> Array:
    return distribution.concentration - 1.0


@parameters.register(dist.BernoulliLogits)
@parameters.register(dist.BernoulliProbs)
def _(distribution: dist.BernoulliLogits) -> Array:
    return _stack(distribution.logits)


@parameters.register(dist.CategoricalLogits)
@parameters.register(dist.CategoricalProbs)
def _(distribution: dist.CategoricalLogits) -> Array:
    return distribution.logits


@parameters.register(dist.Poisson)
def _(distribution: dist.Poisson) -> Array:
    return _stack(getattr(distribution, "log_rate", jnp.log(distribution.rate)))
