"""Gaussian process regression with a given kernel matrix."""

import math

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, as_not_negative, check_no_nan, is_known_true
from numpyro_wide.wide_limit._layer_kernels import check_shape, check_symmetric, check_targets


def gp_posterior(
    kernel_train: ArrayLike,
    kernel_cross: ArrayLike,
    kernel_test: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
) -> tuple[Array, Array]:
    """Condition a zero-mean Gaussian process on noisy values at training inputs, at test inputs.

    With M = K + σ²I, the mean is K* M⁻¹ Y and the covariance K** − K* M⁻¹ K*ᵀ (Rasmussen and Williams 2006,
    eqs. 2.23 and 2.24). With the NNGP kernel this is the limit of the posterior of a wide Bayesian network
    (Hron 2022, Prop. 2.2).

    Args:
        kernel_train: K (n, n), the training inputs with themselves.
        kernel_cross: K* (n_test, n), rows for the test inputs, columns for the training inputs.
        kernel_test: K** (n_test, n_test), the test inputs with themselves.
        targets: Y, (n,), or (n, k) for k independent outputs with the same kernel.
        noise_scale: standard deviation σ of the observation noise, in the units of the targets: a number, or
            (n,), one for each row.

    Returns:
        mean, (n_test,) or (n_test, k), and covariance (n_test, n_test) of the function without noise, which all outputs
        share.

    Raises:
        ValueError: for shapes that do not fit, a negative noise scale, NaN, or a kernel matrix that is not symmetric,
            or not positive definite once the noise is added. Under jit, where numbers are not known, the results are
            NaN for a noise scale that is negative, and for a matrix that is not positive definite.

    Example:
        >>> import jax.numpy as jnp
        >>> x, x_test = jnp.arange(3.0)[:, None], jnp.ones((2, 1))
        >>> mean, covariance = gp_posterior(x @ x.T, x_test @ x.T, x_test @ x_test.T, 2 * x[:, 0], 0.1)
        >>> mean.shape, covariance.shape
        ((2,), (2, 2))
    """
    train, cross, test, targets = as_floats(
        kernel_train,
        kernel_cross,
        kernel_test,
        targets,
        names=("kernel_train", "kernel_cross", "kernel_test", "targets"),
    )
    num_train, num_test = check_symmetric("kernel_train", train), check_symmetric("kernel_test", test)
    check_shape("kernel_cross", cross, (num_test, num_train), "(n_test, n_train)")
    check_no_nan("kernel_cross", cross)
    check_no_nan("kernel_test", test)
    chol, whitened = whiten(train, targets, noise_scale)
    explained = solve_triangular(chol, cross.T, lower=True)
    mean = jnp.matmul(explained.T, whitened, precision="highest")
    covariance = test - jnp.matmul(explained.T, explained, precision="highest")
    return mean, covariance


def gp_log_evidence(kernel_train: ArrayLike, targets: ArrayLike, noise_scale: ArrayLike) -> Array:
    """Compute the log marginal likelihood log N(Y; 0, K + σ²I), summed over the columns of the targets.

    Rasmussen and Williams 2006, eq. 2.30. With the NNGP kernel it is the limit of a wide network's evidence,
    and can be differentiated with respect to the scales of the prior and of the noise.

    Args:
        kernel_train: K (n, n), the training inputs with themselves.
        targets: Y, (n,) or (n, k).
        noise_scale: standard deviation σ of the observation noise, a number or (n,), one for each row.

    Returns:
        scalar; under jit minus infinity where the matrix is not positive definite, and NaN for a negative noise.

    Raises:
        ValueError: for what :func:`gp_posterior` refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> gp_log_evidence(jnp.eye(3), jnp.zeros(3), 0.1).shape
        ()
    """
    train, targets = as_floats(kernel_train, targets, names=("kernel_train", "targets"))
    check_symmetric("kernel_train", train)
    chol, whitened = whiten(train, targets, noise_scale)
    num_columns = math.prod(whitened.shape[1:])
    log_normaliser = jnp.sum(jnp.log(jnp.diagonal(chol))) + 0.5 * chol.shape[0] * math.log(2 * math.pi)
    found = -0.5 * jnp.sum(whitened**2) - num_columns * log_normaliser
    is_noise_right = ~jnp.isnan(as_not_negative("noise_scale", noise_scale)).any()
    return jnp.where(jnp.isnan(jnp.diagonal(chol)).any() & is_noise_right, -jnp.inf, found)


def whiten(train: Array, targets: Array, noise_scale: ArrayLike) -> tuple[Array, Array]:
    """Return L, with LLᵀ = K + σ²I, and L⁻¹Y."""
    num_train = train.shape[0]
    check_targets(targets, num_train)
    check_no_nan("kernel_train", train)
    noise = as_not_negative("noise_scale", noise_scale, dtype=train.dtype)  # squared, -σ would pass for σ
    if noise.shape not in ((), (num_train,)):
        raise ValueError(
            f"noise_scale must be a number or have shape (n_train,) = {(num_train,)}, but got {noise.shape}."
        )
    chol = jnp.linalg.cholesky(train + jnp.diag(jnp.broadcast_to(noise**2, (num_train,))))
    if is_known_true(jnp.isnan(chol)):
        raise ValueError(
            f"kernel_train + noise_scale² I is not positive definite in {train.dtype}: "
            f"raise noise_scale, drop repeated inputs, or compute the kernel in float64."
        )
    return chol, solve_triangular(chol, targets, lower=True)
