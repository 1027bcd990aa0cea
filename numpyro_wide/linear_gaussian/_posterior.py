"""The readout's exact posterior given the features: moments, draws and predictions."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats
from numpyro_wide.linear_gaussian._linalg import cholesky, inverse_lower, solve_lower
from numpyro_wide.linear_gaussian._maps import map_readout
from numpyro_wide.linear_gaussian._problem import (
    ReadoutProblem,
    as_matrix,
    broadcast_like,
    for_each_output,
    resolved,
    standardise,
)


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
    problem = ReadoutProblem.of(features, targets, noise_scale, prior_loc=prior_loc, prior_scale=prior_scale)
    standard = standardise(problem)

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

    mean, covariance = for_each_output(core, standard)
    mean = mean.reshape(problem.readout_shape)
    scale = broadcast_like(problem.prior_scale, mean)
    # One row of scales serves all outputs where they share a covariance.
    column_scale = as_matrix(scale).T[: covariance.shape[0]]
    covariance = column_scale[:, :, None] * covariance * column_scale[:, None, :]
    mean = broadcast_like(problem.prior_loc, mean) + scale * mean
    return mean, covariance[0] if standard.is_shared else covariance


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
    problem = ReadoutProblem.of(
        features,
        targets,
        noise_scale,
        variant=variant,
        prior_loc=prior_loc,
        prior_scale=prior_scale,
        readout=("phi", np.shape(phi)),
        same_type=(phi,),
    )
    return draw_readout(problem, *as_floats(phi, dtype=problem.features.dtype))


def draw_readout(problem: ReadoutProblem, phi: Array) -> Array:
    """What stands behind :func:`readout_draw`."""
    return map_readout(problem.exact(), phi, is_limited=False)[0]


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
    problem = ReadoutProblem.of(
        features, targets, noise_scale, prior_loc=prior_loc, prior_scale=prior_scale, same_type=(test_features,)
    )
    (test_features,) = as_floats(test_features, dtype=problem.features.dtype)
    num_features = problem.features.shape[1]
    if test_features.ndim != 2 or test_features.shape[1] != num_features:
        raise ValueError(
            f"test_features must have shape (m, {num_features}), one column for each of features "
            f"{problem.features.shape}, but got {test_features.shape}."
        )
    mean, variance, _ = predict_readout(problem, test_features)
    return mean, variance


def predict_readout(
    problem: ReadoutProblem, test_features: Array, phi: Array | None = None, residuals: Array | None = None
) -> tuple[Array, Array, Array]:
    r"""What stands behind :func:`readout_predictive`, and a draw of the function with it, at no further factorisation.

    Given the weights $c = K^{-1} \Psi \psi$ that the mean and the variance are made of, the function of
    $\phi \sim N(0, I)$, conditioned on the targets with residuals $\sigma \varepsilon$, is
    $\psi^\top \phi + c^\top (Y - \Psi \phi - \sigma \varepsilon)$: its covariance over rows is the posterior's
    (Matheron's rule).

    Args:
        problem: the readout's.
        test_features: (m, d).
        phi: standard normal, of the readout's shape; zeros by default.
        residuals: $\varepsilon$, standard normal, of the targets' shape; zeros by default.

    Returns:
        Mean, variance and draw of the function, (m,) or (m, k) each.
    """

    def core(
        features: Array, targets: Array, variance: Array, scale: Array, phi: Array, residuals: Array
    ) -> tuple[tuple[Array, Array], Array]:
        weights, remainder = _conditioned(features, variance, test_features * scale[:, :1].T)
        spread = _sum_of_squares(remainder) + variance * _sum_of_squares(weights)
        deviation = remainder @ phi - jnp.sqrt(variance) * weights @ residuals
        return (weights @ targets, deviation), spread

    readout = jnp.zeros(problem.readout_shape, problem.targets.dtype)
    phi = readout if phi is None else phi
    residuals = jnp.zeros_like(problem.targets) if residuals is None else residuals
    scale = broadcast_like(problem.prior_scale, readout)
    columns = (as_matrix(column) for column in (scale, phi))
    standard = resolved(standardise(problem.exact()))
    (mean, deviation), spread = for_each_output(core, standard, *columns, as_matrix(residuals))
    shape = (test_features.shape[0], *problem.targets.shape[1:])
    mean = mean.reshape(shape) + test_features @ broadcast_like(problem.prior_loc, readout)
    # One row of variances serves all outputs where they share a covariance.
    variance = jnp.broadcast_to(spread.T, as_matrix(mean).shape).reshape(shape)
    return mean, variance, mean + deviation.reshape(shape)


def predict_jointly(problem: ReadoutProblem, test_features: Array) -> tuple[Array, Array]:
    r"""Mean of the function at new rows, and its covariance over them.

    The covariance is that of :func:`predict_readout`, a sum of two Gram matrices.

    Args:
        problem: the readout's.
        test_features: (m, d).

    Returns:
        Mean, (m, k), and covariance, (1, m, m) where outputs share it, (k, m, m) elsewhere.
    """

    def core(features: Array, targets: Array, variance: Array, scale: Array) -> tuple[Array, Array]:
        weights, remainder = _conditioned(features, variance, test_features * scale[:, :1].T)
        return weights @ targets, remainder @ remainder.T + variance * weights @ weights.T

    readout = jnp.zeros(problem.readout_shape, problem.targets.dtype)
    scale = as_matrix(broadcast_like(problem.prior_scale, readout))
    mean, covariance = for_each_output(core, resolved(standardise(problem.exact())), scale)
    return mean + as_matrix(test_features @ broadcast_like(problem.prior_loc, readout)), covariance


def _conditioned(features: Array, variance: Array, test: Array) -> tuple[Array, Array]:
    r"""Weights $c = K^{-1} \Psi \psi$ and $\psi - \Psi^\top c$ of each test row, (m, n) and (m, d).

    All by rows, and by the factor's inverse: products along rows, which take half the time of the solves.
    """
    if features.shape[1] <= features.shape[0]:
        inverse = inverse_lower(cholesky(features.T @ features, variance))
        solved = (test @ inverse.T) @ inverse  # ψᵀ (σ²I + ΨᵀΨ)⁻¹
        return solved @ features.T, variance * solved
    inverse = inverse_lower(cholesky(features @ features.T, variance))
    weights = ((test @ features.T) @ inverse.T) @ inverse
    return weights, test - weights @ features


def _sum_of_squares(matrix: Array) -> Array:
    """Of each row; as a product, which XLA vectorises on the CPU where it would add a row's numbers one by one."""
    return jnp.matmul(matrix**2, jnp.ones(matrix.shape[1], matrix.dtype), precision="highest")
