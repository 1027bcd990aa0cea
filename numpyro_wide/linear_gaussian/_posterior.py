"""The readout's exact posterior given the features: moments, draws and predictions."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.linear_gaussian._problem import (
    Problem,
    as_float,
    as_matrix,
    check_data,
    check_positive,
    check_readout,
    like,
    resolve_variant,
    solve,
    standardise,
)
from numpyro_wide.linear_gaussian._roots import cholesky, posterior_root, solve_lower


def readout_posterior(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Mean and covariance of the readout given the features and targets.

    $\Sigma = (I + \sigma^{-2} \Psi^\top \Psi)^{-1}$ and $\mu = \sigma^{-2} \Sigma \Psi^\top Y$ (Hron 2022, eq. 2;
    Mathematics, :eq:`posterior`) for a standard normal prior.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
        prior_scale: standard deviation of the readout's prior; broadcasts likewise.

    Returns:
        The mean, (d,) or (d, k), and the covariance of one output's weights, (d, d); or (k, d, d) where noise or
        prior scale vary over outputs, whose covariances then differ. With d > n its error is that of the prior's
        variance times the rounding, 1e-7 in float32: smaller variances are lost, and eigenvalues may be as far below
        zero. Where they matter, use float64.

    Raises:
        ValueError: if shapes do not fit or the noise is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> mean, covariance = linear_gaussian.readout_posterior(features, targets, noise_scale=1.0)
        >>> print(mean, jnp.diagonal(covariance))
        [ 0.5 -0.4] [0.5 0.2]
    """
    features, targets = as_float(features, targets)
    problem = _problem(features, targets, noise_scale, prior_loc, prior_scale)

    def core(features: Array, targets: Array, variance: Array) -> tuple[Array, Array]:
        num_features = features.shape[1]
        eye = jnp.eye(num_features, dtype=features.dtype)
        if num_features <= features.shape[0]:
            factor = cholesky(features.T @ features, variance)
            root = solve_lower(factor, eye) * jnp.sqrt(variance)
            mean = solve_lower(factor, solve_lower(factor, features.T @ targets), transpose=True)
            return mean, root.T @ root
        factor = cholesky(features @ features.T, variance)
        whitened = solve_lower(factor, features)
        return whitened.T @ solve_lower(factor, targets), eye - whitened.T @ whitened

    mean, covariance = solve(core, problem)
    mean = mean.reshape(features.shape[1], *targets.shape[1:])
    scale = like(prior_scale, mean)
    # One row of scales serves all outputs where they share a covariance.
    column_scale = as_matrix(scale).T[: covariance.shape[0]]
    covariance = column_scale[:, :, None] * covariance * column_scale[:, None, :]
    return like(prior_loc, mean) + scale * mean, covariance[0] if problem.is_shared else covariance


def readout_draw(
    features: ArrayLike,
    targets: ArrayLike,
    phi: ArrayLike,
    noise_scale: ArrayLike,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""A draw of the readout from its posterior given the features, for $\phi \sim N(0, I)$.

    :func:`~numpyro_wide.linear_gaussian.readout_map` at $\lambda = \sigma^2$, without its lower limit on
    $\lambda$: where the noise is below what the precision at hand can resolve, the draw is NaN rather than one from
    a model with more noise.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        phi: standard normal numbers, shape (d,) or (d, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        variant: "feature", "data", "data-cholesky" or "auto".
        prior_loc: mean of the readout's prior; broadcasts against ``phi``.
        prior_scale: standard deviation of the readout's prior; broadcasts against ``phi``.

    Returns:
        The readout, with the shape of ``phi``.

    Raises:
        ValueError: if shapes do not fit, the noise is not positive, or the variant is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> linear_gaussian.readout_draw(jnp.eye(2), jnp.ones(2), jnp.zeros(2), noise_scale=1.0)
        Array([0.5, 0.5], dtype=float32)
    """
    features, targets, phi = as_float(features, targets, phi)
    check_data(features, targets)
    check_readout("phi", phi, features, targets)
    problem = _problem(features, targets, noise_scale, prior_loc, prior_scale)
    variant = resolve_variant(variant, *features.shape)

    def core(features: Array, targets: Array, variance: Array, phi: Array) -> tuple[Array, Array]:
        return posterior_root(variant, features, variance).forward(targets, phi)

    standard, _ = solve(core, problem, as_matrix(phi))
    return like(prior_loc, phi) + like(prior_scale, phi) * standard.reshape(phi.shape)


def readout_predictive(
    test_features: ArrayLike,
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Mean and variance of $\Psi_* W$ at new rows, with the readout integrated over its posterior.

    The moments of Mathematics, :eq:`predictive`. The variance of a row $\psi$ is computed as
    $\|\psi - \Psi^\top c\|^2 + \sigma^2 \|c\|^2$ with $c = K^{-1} \Psi \psi$: a sum of squares, which cannot turn
    negative by rounding. It is that of the noise-free function.

    Args:
        test_features: $\Psi_*$, shape (m, d).
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        noise_scale: $\sigma$ of the training rows, positive; broadcasts against ``targets``.
        prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
        prior_scale: standard deviation of the readout's prior; broadcasts likewise.

    Returns:
        Mean and variance, (m,) or (m, k) each.

    Raises:
        ValueError: if shapes do not fit or the noise is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> linear_gaussian.readout_predictive(jnp.eye(2), jnp.eye(2), jnp.ones(2), noise_scale=1.0)
        (Array([0.5, 0.5], dtype=float32), Array([0.5, 0.5], dtype=float32))
    """
    features, targets, test_features = as_float(features, targets, test_features)
    check_data(features, targets)
    if test_features.ndim != 2 or test_features.shape[1] != features.shape[1]:
        raise ValueError(
            f"test_features must have shape (m, {features.shape[1]}), one column for each of features "
            f"{features.shape}, but got {test_features.shape}."
        )
    readout = jnp.zeros((features.shape[1], *targets.shape[1:]), targets.dtype)
    problem = _problem(features, targets, noise_scale, prior_loc, prior_scale)

    def core(features: Array, targets: Array, variance: Array, scale: Array) -> tuple[Array, Array]:
        test = test_features * scale[:, :1].T
        if features.shape[1] <= features.shape[0]:
            factor = cholesky(features.T @ features, variance)
            solved = solve_lower(factor, solve_lower(factor, test.T), transpose=True)  # (σ²I + ΨᵀΨ)⁻¹ ψ
            weights = features @ solved
            remainder = variance * solved
        else:
            factor = cholesky(features @ features.T, variance)
            weights = solve_lower(factor, solve_lower(factor, features @ test.T), transpose=True)
            remainder = test.T - features.T @ weights
        spread = jnp.sum(remainder**2, axis=0) + variance * jnp.sum(weights**2, axis=0)
        return weights.T @ targets, spread

    mean, spread = solve(core, problem, as_matrix(like(prior_scale, readout)))
    mean = mean.reshape(test_features.shape[0], *targets.shape[1:]) + test_features @ like(prior_loc, readout)
    # One row of variances serves all outputs where they share a covariance.
    return mean, jnp.broadcast_to(spread.T, as_matrix(mean).shape).reshape(mean.shape)


def _problem(
    features: Array, targets: Array, noise_scale: ArrayLike, prior_loc: ArrayLike, prior_scale: ArrayLike
) -> Problem:
    check_positive("noise_scale", noise_scale)
    check_positive("prior_scale", prior_scale)
    variance = jnp.asarray(noise_scale, targets.dtype) ** 2
    return standardise(features, targets, variance, prior_loc, prior_scale)
