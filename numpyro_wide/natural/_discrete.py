"""Discrete distributions in natural parameters."""

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_wide.natural._domain import family, shifted


@family(constraints.real_vector)
def Bernoulli(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Distribution:
    r"""Bernoulli distribution with $T(\theta) = \theta$, η its log-odds.

    Args:
        natural: natural parameters η, (..., 1), any number.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        NumPyro's Bernoulli distribution with these logits, of batch shape (...).

    Raises:
        ValueError: unless the last axis has one entry.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Bernoulli(jnp.zeros((3, 1))).probs.tolist()
        [0.5, 0.5, 0.5]
    """
    return dist.Bernoulli(logits=shifted(natural, shift, Bernoulli, 1)[..., 0], validate_args=validate_args)


@family(constraints.real_vector)
def Categorical(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Distribution:
    r"""Categorical distribution with T(θ) the indicators of its K classes, η their unnormalised log probabilities.

    A number added to all of η changes nothing, so that the convexity of the expected forward KL divergence is
    strict in every direction but that one. Where a unique minimiser matters, hold one entry at zero.

    Args:
        natural: natural parameters η, (..., K), any numbers.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        NumPyro's categorical distribution with these logits, of batch shape (...).

    Raises:
        ValueError: for a single number instead of an array.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Categorical(jnp.log(jnp.array([1.0, 3.0]))).probs.round(2).tolist()
        [0.25, 0.75]
    """
    return dist.Categorical(logits=shifted(natural, shift, Categorical, None), validate_args=validate_args)


@family(constraints.real_vector)
def Poisson(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Poisson:
    r"""Poisson distribution with $T(\theta) = \theta$, η the logarithm of its rate.

    Args:
        natural: natural parameters η, (..., 1), any number.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Poisson` of batch shape (...), whose log density is finite even where
        its rate is zero in floating point.

    Raises:
        ValueError: unless the last axis has one entry.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Poisson(jnp.log(jnp.array([2.0]))).mean
        Array(2., dtype=float32)
    """
    return NaturalPoisson(shifted(natural, shift, Poisson, 1)[..., 0], validate_args=validate_args)


class NaturalPoisson(dist.Poisson):
    """NumPyro's Poisson distribution with a log density computed from the log rate itself."""

    pytree_data_fields = ("log_rate",)

    def __init__(self, log_rate: Array, *, validate_args: bool | None = None):
        self.log_rate = log_rate
        super().__init__(jnp.exp(log_rate), validate_args=validate_args)

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Evaluate the log probability of the counts ``value``."""
        count = jnp.asarray(value, self.log_rate.dtype)
        return count * self.log_rate - jnp.exp(self.log_rate) - gammaln(count + 1)
