"""Gaussian process regression with a given kernel matrix, in JAX for users and in NumPy's float64 for fits."""

import math
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from scipy.linalg import cho_factor, cho_solve, lapack

from numpyro_wide._checks import as_floats, as_not_negative, check_no_nan, is_known
from numpyro_wide.wide_limit._layer_kernels import check_shape, check_symmetric, check_targets


def gp_posterior(
    kernel_train: ArrayLike,
    kernel_cross: ArrayLike,
    kernel_test: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
) -> tuple[Array, Array]:
    """Condition a zero-mean Gaussian process on noisy values at training inputs, at test inputs.

    With M = K + σ²I, the mean is K* M⁻¹ Y and the covariance K** − K* M⁻¹ K*ᵀ (Rasmussen and Williams 2006, eqs. 2.23
    and 2.24): with the NNGP kernel the limit of a wide Bayesian network's posterior (Hron 2022, Prop. 2.2).

    Args:
        kernel_train: K (n, n), the training inputs with themselves.
        kernel_cross: K* (n_test, n), test with training inputs.
        kernel_test: K** (n_test, n_test), the test inputs with themselves.
        targets: Y, (n,), or (n, k) for k independent outputs.
        noise_scale: standard deviation σ of the noise, in the units of the targets, a number or (n,).

    Returns:
        mean, (n_test,) or (n_test, k), and covariance (n_test, n_test) of the function without noise.

    Raises:
        ValueError: for an asymmetric kernel, or one not positive definite with the noise; NaN under jit.

    Example:
        >>> import jax.numpy as jnp
        >>> x, x_test = jnp.arange(3.0)[:, None], jnp.ones((2, 1))
        >>> mean, covariance = gp_posterior(x @ x.T, x_test @ x.T, x_test @ x_test.T, 2 * x[:, 0], 0.1)
        >>> mean.shape, covariance.shape
        ((2,), (2, 2))
    """
    names = ("kernel_train", "kernel_cross", "kernel_test", "targets")
    train, cross, test, targets = as_floats(kernel_train, kernel_cross, kernel_test, targets, names=names)
    num_train, num_test = check_symmetric("kernel_train", train), check_symmetric("kernel_test", test)
    check_shape("kernel_cross", cross, (num_test, num_train), "(n_test, n_train)")
    check_no_nan("kernel_cross", cross)
    chol, whitened = whiten(train, targets, noise_scale)
    explained = solve_triangular(chol, cross.T, lower=True)
    mean = jnp.matmul(explained.T, whitened, precision="highest")
    covariance = test - jnp.matmul(explained.T, explained, precision="highest")
    return mean, covariance


def gp_log_evidence(kernel_train: ArrayLike, targets: ArrayLike, noise_scale: ArrayLike) -> Array:
    """Compute the log marginal likelihood log N(Y; 0, K + σ²I), summed over the columns of the targets.

    Rasmussen and Williams 2006, eq. 2.30: with the NNGP kernel the limit of a wide network's evidence.

    Args:
        kernel_train: K (n, n), the training inputs with themselves.
        targets: Y, (n,) or (n, k).
        noise_scale: standard deviation σ of the noise, a number or (n,).

    Returns:
        scalar; under jit minus infinity where the matrix is not positive definite, and NaN for a negative noise.

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
    log_evidence = -0.5 * jnp.sum(whitened**2) - num_columns * log_normaliser
    is_noise_right = ~jnp.isnan(as_not_negative("noise_scale", noise_scale)).any()
    return jnp.where(jnp.isnan(jnp.diagonal(chol)).any() & is_noise_right, -jnp.inf, log_evidence)


def whiten(train: Array, targets: Array, noise_scale: ArrayLike) -> tuple[Array, Array]:
    """Return L, with LLᵀ = K + σ²I, and L⁻¹Y."""
    num_train = train.shape[0]
    check_targets(targets, num_train)
    noise = as_not_negative("noise_scale", noise_scale, dtype=train.dtype)  # squared, -σ would pass for σ
    if noise.shape not in ((), (num_train,)):
        raise ValueError(
            f"noise_scale must be a number or have shape (n_train,) = {(num_train,)}, but got {noise.shape}."
        )
    chol = jnp.linalg.cholesky(train + jnp.diag(jnp.broadcast_to(noise**2, (num_train,))))
    if is_known(chol) and np.isnan(chol).any():
        raise ValueError(
            f"kernel_train + noise_scale² I is not positive definite in {train.dtype}: raise noise_scale, or compute "
            "the kernel in float64."
        )
    return chol, solve_triangular(chol, targets, lower=True)


class Conditioned:
    """A zero-mean Gaussian process given noisy targets (n, c), in float64."""

    def __init__(self, kernel: np.ndarray, targets: np.ndarray, noise_variance: float | np.ndarray = 0.0):
        """Factor kernel and noise; ``ValueError`` if their sum is not positive definite, or not finite."""
        noisy = np.array(kernel)
        noisy.flat[:: len(noisy) + 1] += noise_variance
        self._factor = cho_factor(noisy.T, lower=True, overwrite_a=True)  # in place, as it is symmetric
        self.targets, self.weights = targets, cho_solve(self._factor, targets)

    def mean(self, cross: np.ndarray) -> np.ndarray:
        """Return means (m, c) from covariances (m, n)."""
        return cross @ self.weights

    def solve(self, targets: np.ndarray) -> np.ndarray:
        """Return the inverse of the covariance times other targets (n, c)."""
        return cho_solve(self._factor, targets)

    def moments(self, cross: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means (m, c) and variances (m,) from covariances (m, n) and prior variances (m,)."""
        explained = np.sum(cross * cho_solve(self._factor, cross.T).T, axis=1)
        return self.mean(cross), np.maximum(prior - explained, 0.0)

    def covariance(self, cross: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """Return covariances (m, m) from those with the known rows (m, n) and prior ones (m, m)."""
        explained, _ = lapack.dtrtrs(self._factor[0], cross.T, lower=1)
        return prior - explained.T @ explained

    def log_evidence(self, size: float = 1.0) -> float:
        """Return the log density of the targets under the covariance times ``size`` squared."""
        num_rows, num_columns = self.targets.shape
        log_det = 2 * np.sum(np.log(size * np.diagonal(self._factor[0])))
        quadratic = np.sum(self.targets * self.weights) / size**2
        return float(-0.5 * (quadratic + num_columns * (log_det + num_rows * np.log(2 * np.pi))))

    def evidence_slope(self) -> np.ndarray:
        """Return the derivative of the log evidence by the covariance, (n, n)."""
        return 0.5 * (self.weights @ self.weights.T - self.targets.shape[1] * self.inverse)

    @cached_property
    def inverse(self) -> np.ndarray:
        """Inverse of the covariance, (n, n)."""
        return inverse_of(self._factor[0])

    @property
    def left_out_precision(self) -> np.ndarray:
        """Precision of each target given the other rows, (n,)."""
        return np.diagonal(self.inverse)

    @property
    def left_out(self) -> np.ndarray:
        """Mean of each target given the other rows, (n, c) (Rasmussen 2006, p. 117)."""
        return self.targets - self.weights / self.left_out_precision[:, None]

    def left_out_slope(self, slope: np.ndarray) -> np.ndarray:
        """Return the derivative by the covariance, (n, n), from that by ``left_out``."""
        scaled = slope / self.left_out_precision[:, None]
        weights_term = self.inverse @ scaled @ self.weights.T
        precision_term = (self.inverse * np.sum(scaled * (self.targets - self.left_out), axis=1)) @ self.inverse
        return 0.5 * (weights_term + weights_term.T) - precision_term


def inverse_of(factor: np.ndarray) -> np.ndarray:
    """Return the inverse of a matrix from its lower Cholesky factor."""
    inverse = np.tril(lapack.dpotri(factor, lower=1)[0])
    return inverse + np.tril(inverse, -1).T
