"""Quasi-KL divergence, finite for singular guides."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from multipledispatch import Dispatcher
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask, sum_rightmost

from numpyro_wide._traces import unwrap
from numpyro_wide.distributions._singular import BernoulliDropout, SingularDistribution

_rules = Dispatcher("quasi_kl")


def register_quasi_kl(q_type: type, p_type: type) -> Callable:
    """Register a closed form ``rule(q, p)`` for :func:`quasi_kl` by the classes of guide and prior, as a decorator.

    The rule gets distributions without ``Expanded``, ``Independent`` or ``Masked``, and returns numbers of q's batch
    shape.

    Example:
        >>> import numpyro.distributions as dist
        >>> from numpyro_wide.distributions import GaussianDropout, register_quasi_kl
        >>> @register_quasi_kl(GaussianDropout, dist.Cauchy)
        ... def upper_bound(q, p): ...
    """
    return _rules.register(q_type, p_type)


def quasi_kl(
    q: dist.Distribution,
    p: dist.Distribution,
    *,
    rng_key: Array | None = None,
    num_samples: int = 1000,
) -> Array:
    r"""Return the quasi-KL divergence $\mathrm{QKL}(Q\|P) = E_Q[\log q/p]$, by batch (Hron 2018, eq. 9; :eq:`qkl`).

    q is the density on the support of Q, p the Lebesgue density of P: the KL where Q has a density, else a limit of
    KLs, up to a constant (Theorems 4 and 5; :eq:`qkl-limit`). Closed forms: :eq:`degenerate`, :eq:`bernoulli`,
    :eq:`dawson`, and NumPyro's. Masked entries of q are left out.

    Args:
        q: distribution of the guide.
        p: distribution of the prior; an elementwise one is a product over q's event.
        rng_key: PRNG key of draws without a closed form; a fixed one if None.
        num_samples: number of these draws.

    Example:
        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_wide.distributions import GaussianDropout
        >>> row = GaussianDropout(jnp.array([3.0, 4.0]), alpha=0.5)
        >>> round(float(quasi_kl(row, dist.Normal(0.0, 1.0))), 2)
        17.91
    """
    try:
        return closed_quasi_kl(q, p)
    except NotImplementedError:
        q, p, mask = _strip_masks(q, p)
        key = jax.random.key(0) if rng_key is None else rng_key
        draws, intermediates = q.sample_with_intermediates(key, (num_samples,))
        log_q = q.log_prob(draws, intermediates) if intermediates else q.log_prob(draws)
        log_p = sum_rightmost(p.log_prob(draws), q.event_dim - p.event_dim)
        return scale_and_mask(jnp.mean(log_q - log_p, 0), mask=mask)


def closed_quasi_kl(q: dist.Distribution, p: dist.Distribution) -> Array:
    """Return the quasi-KL in closed form; NotImplementedError without one."""
    if p.event_dim > q.event_dim:
        raise ValueError(
            f"quasi_kl needs an event of q with the dimensions of the prior's, {p.event_shape}, but got "
            f"{q.event_shape}; use q.to_event({p.event_dim - q.event_dim})."
        )
    if p.event_dim and p.event_shape != q.event_shape[q.event_dim - p.event_dim :]:
        raise ValueError(f"quasi_kl needs equal event shapes, got {q.event_shape} for q and {p.event_shape} for p.")
    q, p, mask = _strip_masks(q, p)
    q_core, p_core = unwrap(q), unwrap(p)
    rule = _rules.dispatch(type(q_core), type(p_core))
    if rule is None or p_core.event_dim > q_core.event_dim:
        return scale_and_mask(kl_divergence(q, p), mask=mask)
    value = rule(q_core, p_core)
    shape = q.shape()[: len(q.shape()) - q_core.event_dim]
    value = sum_rightmost(jnp.broadcast_to(value, shape), q.event_dim - q_core.event_dim)
    return scale_and_mask(value, mask=mask)


def _strip_masks(q: dist.Distribution, p: dist.Distribution) -> tuple[dist.Distribution, dist.Distribution, Any]:
    if isinstance(p, dist.MaskedDistribution) and p._mask is not True and not isinstance(q, dist.MaskedDistribution):
        raise ValueError("quasi_kl got a masked prior and a q without a mask; mask the guide's site as well.")
    mask: Any = None
    if isinstance(q, dist.MaskedDistribution):
        q, mask = q.base_dist, q._mask
    if isinstance(p, dist.MaskedDistribution):
        p, mask = p.base_dist, p._mask if mask is None else jnp.logical_and(mask, p._mask)
    return q, p, None if mask is True else mask


# Closed forms: QKL = −H(q) − E_q log p; for a Gaussian p the latter is −log p at q's mean, and half a trace.


@register_quasi_kl(SingularDistribution, dist.Normal)
def _singular_normal(q: SingularDistribution, p: dist.Normal) -> Array:
    return jnp.sum(0.5 * q.variance / jnp.square(p.scale) - p.log_prob(q.mean), -1) - q.entropy()


@register_quasi_kl(SingularDistribution, dist.MultivariateNormal)
def _singular_multivariate_normal(q: SingularDistribution, p: dist.MultivariateNormal) -> Array:
    factor, weights = q.covariance_factor()
    batch_shape = jnp.broadcast_shapes(q.batch_shape, p.batch_shape)
    root, directions = (jnp.broadcast_to(matrix, batch_shape + matrix.shape[-2:]) for matrix in (p.scale_tril, factor))
    white = jax.scipy.linalg.solve_triangular(root, directions, lower=True)
    trace = jnp.sum(weights * jnp.sum(jnp.square(white), -2), -1)
    return 0.5 * trace - p.log_prob(q.mean) - q.entropy()


@register_quasi_kl(BernoulliDropout, dist.Distribution)
def _dropout_any(q: BernoulliDropout, p: dist.Distribution) -> Array:
    # Two atoms: a sum of two terms for any prior.
    at_zero, at_row = (sum_rightmost(p.log_prob(atom), 1 - p.event_dim) for atom in (jnp.zeros_like(q.rows), q.rows))
    return -q.entropy() - q.rate * at_zero - (1.0 - q.rate) * at_row


# These break ties of the rules above.
register_quasi_kl(BernoulliDropout, dist.Normal)(_singular_normal)
register_quasi_kl(BernoulliDropout, dist.MultivariateNormal)(_singular_multivariate_normal)
