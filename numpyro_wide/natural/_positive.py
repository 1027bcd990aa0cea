"""Distributions on half-lines and simplices in natural parameters."""

import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_wide.natural._domain import boxed, family, shifted

_ABOVE_MINUS_ONE = constraints.greater_than(-1.0)
_NEGATIVE = constraints.less_than(0.0)


@family(boxed(_ABOVE_MINUS_ONE, _NEGATIVE))
def Gamma(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Gamma:
    r"""Gamma distribution with $T(\theta) = (\log\theta, \theta)$, η = (α − 1, −β), α the shape and β the rate.

    Args:
        natural: natural parameters η, (..., 2), the first above −1, the second negative.
        shift: number or array that is added to η; ``shift=jnp.array([0.0, -1.0])`` makes an encoder that starts at zero
            start at Exp(1).
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Gamma` of batch shape (...).

    Raises:
        ValueError: unless the last axis has two entries within their bounds.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Gamma(jnp.array([2.0, -6.0])).mean
        Array(0.5, dtype=float32)
    """
    eta = shifted(natural, shift, Gamma, 2)
    return dist.Gamma(eta[..., 0] + 1, -eta[..., 1], validate_args=validate_args)


@family(boxed(_NEGATIVE))
def Exponential(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Exponential:
    r"""Exponential distribution with $T(\theta) = \theta$, η the negative of its rate.

    Args:
        natural: natural parameters η, (..., 1), negative.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Exponential` of batch shape (...).

    Raises:
        ValueError: unless the last axis has one entry, and it is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Exponential(jnp.array([-4.0])).mean
        Array(0.25, dtype=float32)
    """
    return dist.Exponential(-shifted(natural, shift, Exponential, 1)[..., 0], validate_args=validate_args)


@family(constraints.independent(_ABOVE_MINUS_ONE, 1))
def Beta(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Beta:
    r"""Beta distribution with $T(\theta) = (\log\theta, \log(1 - \theta))$, η = (α − 1, β − 1).

    Args:
        natural: natural parameters η, (..., 2), above −1; zero is the uniform distribution.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Beta` of batch shape (...).

    Raises:
        ValueError: unless the last axis has two entries above −1.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Beta(jnp.array([0.0, 2.0])).mean
        Array(0.25, dtype=float32)
    """
    eta = shifted(natural, shift, Beta, 2)
    return dist.Beta(eta[..., 0] + 1, eta[..., 1] + 1, validate_args=validate_args)


@family(constraints.independent(_ABOVE_MINUS_ONE, 1))
def Dirichlet(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Dirichlet:
    r"""Dirichlet distribution with $T(\theta) = \log\theta$, η = α − 1, α its concentration.

    Args:
        natural: natural parameters η, (..., K), above −1; zero is uniform on the simplex.
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Dirichlet` of batch shape (...) and event shape (K,).

    Raises:
        ValueError: for a single number, or entries of at most −1.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.Dirichlet(jnp.array([0.0, 1.0, 1.0])).mean.tolist()
        [0.2, 0.4, 0.4]
    """
    return dist.Dirichlet(shifted(natural, shift, Dirichlet, None) + 1, validate_args=validate_args)
