"""Moments of a standardised readout's posterior given the features, and of its function at new rows."""

import jax.numpy as jnp
from jax import Array

from numpyro_wide.linear_gaussian._linalg import cholesky, inverse_lower, row_sums_of_squares, solve_lower


def posterior_moments(features: Array, targets: Array, variance: Array) -> tuple[Array, Array]:
    """Return mean and covariance of the readout's posterior.

    Args:
        features: (n, d).
        targets: (n, k).
        variance: noise variance, scalar.

    Returns:
        Mean, (d, k), and covariance of each output's weights, (d, d).
    """
    num_rows, num_features = features.shape
    eye = jnp.eye(num_features, dtype=features.dtype)
    if num_features <= num_rows:
        factor = cholesky(features.T @ features, variance)
        root = solve_lower(factor, eye) * jnp.sqrt(variance)
        mean = solve_lower(factor, solve_lower(factor, features.T @ targets), transpose=True)
        return mean, root.T @ root
    factor = cholesky(features @ features.T, variance)
    whitened = solve_lower(factor, features)
    return whitened.T @ solve_lower(factor, targets), eye - whitened.T @ whitened


def function_moments(
    test: Array, features: Array, targets: Array, variance: Array, scale: Array, phi: Array, residuals: Array
) -> tuple[tuple[Array, Array], Array]:
    """Return the function's mean and a draw's deviation from it at test rows, and its variance there.

    Args:
        test: test rows, (m, d), not standardised.
        features: (n, d).
        targets: (n, k).
        variance: noise variance, scalar.
        scale: standard deviations of the readout's prior, (d, k), of which one column serves all outputs here.
        phi: standard normal numbers, (d, k).
        residuals: standard normal numbers, (n, k).

    Returns:
        Mean and deviation, (m, k) each, and the variance of each output, (m,).
    """
    weights, remainder = _conditioning_weights(features, variance, test * scale[:, :1].T)
    spread = row_sums_of_squares(remainder) + variance * row_sums_of_squares(weights)
    deviation = remainder @ phi - jnp.sqrt(variance) * weights @ residuals
    return (weights @ targets, deviation), spread


def joint_function_moments(
    test: Array, features: Array, targets: Array, variance: Array, scale: Array
) -> tuple[Array, Array]:
    """Return the function's mean at test rows, (m, k), and each output's covariance over them, (m, m)."""
    weights, remainder = _conditioning_weights(features, variance, test * scale[:, :1].T)
    return weights @ targets, remainder @ remainder.T + variance * weights @ weights.T


def _conditioning_weights(features: Array, variance: Array, test: Array) -> tuple[Array, Array]:
    r"""Return $c = K^{-1} \Psi \psi$ and $\psi - \Psi^\top c$ of each test row $\psi$.

    All by rows, and by the factor's inverse: products along rows, which take half the time of the solves.

    Args:
        features: $\Psi$, (n, d).
        variance: noise variance, scalar.
        test: test rows, (m, d).

    Returns:
        Weights of the targets in the mean, (m, n), and what of each test row they leave over, (m, d).
    """
    if features.shape[1] <= features.shape[0]:
        inverse = inverse_lower(cholesky(features.T @ features, variance))
        solved = (test @ inverse.T) @ inverse  # ψᵀ (σ²I + ΨᵀΨ)⁻¹
        return solved @ features.T, variance * solved
    inverse = inverse_lower(cholesky(features @ features.T, variance))
    weights = ((test @ features.T) @ inverse.T) @ inverse
    return weights, test - weights @ features
