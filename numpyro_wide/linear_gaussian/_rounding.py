"""Rounding of the Gram matrix: the noise that it leaves a trace of, and the error of the evidence."""

import jax.numpy as jnp
from jax import Array

from numpyro_wide.linear_gaussian._linalg import cholesky, diagonal, inverse_lower


def above_rounding(variance: Array, squared_norm: Array) -> Array:
    r"""Return the noise variance, or NaN below a tenth of $\epsilon \|\Psi\|_F^2$.

    There the factorisation of a Gram matrix of low rank fails, or gives a finite result that is wrong by many nats.

    Args:
        variance: noise variance, scalar or (k,).
        squared_norm: $\|\Psi\|_F^2$, of a shape that broadcasts against ``variance``.

    Returns:
        The variance, NaN where rounding hides it.
    """
    return jnp.where(variance < least_variance(squared_norm), jnp.nan, variance)


def least_variance(squared_norm: Array) -> Array:
    r"""Return the least noise variance that is not refused, for features of this $\|\Psi\|_F^2$."""
    return 0.1 * jnp.finfo(squared_norm.dtype).eps * squared_norm


def evidence_rounding(features: Array, targets: Array, variance: Array, variant: str) -> Array:
    r"""Return an estimate of the error that rounding leaves in the log evidence.

    The sum of three parts, whose weights were set so that the estimate is seldom below the error against float64:

    - of residuals and result, $2 \epsilon (\|\alpha\| \|Y\| + |\log p|)$ with $\alpha = K^{-1} Y$, which is at most
      $\|Y\| / \sigma^2$;
    - of the log-determinant, $2 k \epsilon \|D H D\|_F$ with $H$ the inverse of the factorised matrix $G$ and $D^2$ the
      diagonal of $G - \sigma^2 I$, every entry of $G$ being rounded at random; of eigenvalues, $D^2$ is the trace;
    - of the mean, the second-order error of the factor's own solution times $\rho^4 / 10$ with
      $\rho = \epsilon \|\Psi\|_F^2 / \sigma^2$, which is what a step of refinement leaves of it.

    Args:
        features: $\Psi$, (n, d).
        targets: $Y$, (n, k).
        variance: noise variance $\sigma^2$, scalar.
        variant: root of the posterior covariance, "feature", "data" or "data-cholesky".

    Returns:
        The error in nats, a scalar; infinite where the evidence is NaN.
    """
    eps = jnp.finfo(features.dtype).eps
    num_rows, num_outputs = targets.shape
    rows = features.T if variant == "feature" else features
    squared_norms = jnp.sum(rows**2, axis=1)
    squared_norm = squared_norms.sum()
    factor = cholesky(rows @ rows.T, variance)
    inverse_factor = inverse_lower(factor)
    inverse = inverse_factor.T @ inverse_factor
    if variant == "feature":
        mean = inverse @ (features.T @ targets)
        alpha = (targets - features @ mean) / variance
        moved = jnp.sum(mean**2) / variance
    else:
        alpha = inverse @ targets
        moved = jnp.sum(alpha**2)

    # log det(K / σ²) is the same of both Gram matrices.
    log_det = 2 * jnp.log(diagonal(factor) / jnp.sqrt(variance)).sum()
    log_normaliser = num_outputs * (log_det + num_rows * jnp.log(2 * jnp.pi * variance))
    size = 0.5 * (jnp.abs(jnp.sum(targets * alpha)) + jnp.abs(log_normaliser))
    by_output = jnp.sqrt(jnp.sum(alpha**2, axis=0) * jnp.sum(targets**2, axis=0)).sum()
    if variant == "data":
        # Eigenvalues err by the rounding of the largest of them.
        of_log_det = 2 * num_outputs * squared_norm * jnp.sqrt(jnp.sum(inverse**2))
    else:
        of_log_det = num_outputs * jnp.sqrt(squared_norms @ (inverse**2 @ squared_norms))

    ratio = eps * squared_norm / variance
    of_mean = ratio**2 * moved * variance * (1 if variant == "data" else 0.1 / len(rows))
    total = 2 * eps * (by_output + size + of_log_det) + ratio**4 * of_mean
    is_lost = (variance < least_variance(squared_norm)) | ~jnp.isfinite(total)
    return jnp.where(is_lost, jnp.inf, total)
