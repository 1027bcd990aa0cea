"""Normal distributions in natural parameters."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_wide.natural._domain import boxed, family, multivariate_normal_space, shifted, unpack_normal


@family(boxed(constraints.real, constraints.less_than(0.0)))
def Normal(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.Normal:
    r"""Normal distribution with $T(\theta) = (\theta, \theta^2)$, η = (μ/σ², −1/(2σ²)); the second is negative.

    Args:
        natural: natural parameters η, (..., 2).
        shift: number or array that is added to η; ``shift=jnp.array([0.0, -0.5])`` makes an encoder that starts at zero
            start at N(0, 1).
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.Normal` of batch shape (...).

    Raises:
        ValueError: unless the last axis has two entries, and the second is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> q = natural.Normal(jnp.array([3.0, -2.0]))
        >>> float(q.loc), float(q.scale)
        (0.75, 0.5)
    """
    loc, scale = _loc_and_scale(shifted(natural, shift, Normal, 2))
    return dist.Normal(loc, scale, validate_args=validate_args)


@family(boxed(constraints.real, constraints.less_than(0.0)))
def LogNormal(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.LogNormal:
    r"""Log-normal distribution with $T(\theta) = (\log\theta, \log^2\theta)$, η as for :func:`Normal`.

    Args:
        natural: natural parameters η, (..., 2).
        shift: number or array that is added to η.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.LogNormal` of batch shape (...).

    Raises:
        ValueError: unless the last axis has two entries, and the second is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> natural.LogNormal(jnp.zeros((4, 2)), shift=jnp.array([0.0, -0.5])).batch_shape
        (4,)
    """
    loc, scale = _loc_and_scale(shifted(natural, shift, LogNormal, 2))
    return dist.LogNormal(loc, scale, validate_args=validate_args)


@family(multivariate_normal_space)
def MultivariateNormal(  # noqa: N802
    natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None
) -> dist.MultivariateNormal:
    r"""Multivariate Normal distribution with T(θ) = (θ, θ_i θ_j for i ≥ j, row by row).

    With the precision Λ, η is Λμ, followed by −½ Λ_ii and −Λ_ij for i > j in the order of
    ``numpy.tril_indices``: D(D + 3)/2 numbers, none of them redundant. Λ must be positive definite.
    :func:`parameters` packs them.

    Args:
        natural: natural parameters η, (..., D(D + 3)/2).
        shift: number or array that is added to η; ``natural.parameters(dist.MultivariateNormal(...))`` is a start for
            an encoder.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Returns:
        A :class:`numpyro.distributions.MultivariateNormal` of batch shape (...) and event shape (D,).

    Raises:
        ValueError: if the last axis has another size, or Λ is not positive definite.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import natural
        >>> q = natural.MultivariateNormal(jnp.array([2.0, 4.0, -1.0, 0.0, -2.0]))
        >>> q.loc.tolist(), q.covariance_matrix.diagonal().tolist()
        ([1.0, 1.0], [0.5, 0.25])
    """
    eta = shifted(natural, shift, MultivariateNormal, None)
    vector, precision = unpack_normal(eta)
    centred = dist.MultivariateNormal(precision_matrix=precision)
    root = centred.scale_tril
    half_way = jnp.einsum("...ij,...i->...j", root, vector)
    loc = jnp.einsum("...ij,...j->...i", root, half_way)
    return dist.MultivariateNormal(loc, scale_tril=root, validate_args=validate_args)


def _loc_and_scale(eta: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
    variance = -0.5 / eta[..., 1]
    return eta[..., 0] * variance, jnp.sqrt(variance)
