"""Exact laws of networks of linear layers at every width and depth, in float64: what studies and tests compare with.

A network without biases of L linear hidden layers of N units, and one output, is given one number Q a Gaussian process
with the kernel Q K, where K = x x' / d_in is that of its wide limit, and Q the product of L independent
Gamma(N/2, rate N/2) (Hanin and Zlokapa 2023; Bassetti et al. 2024). What is asked of the posterior is then an integral
over log Q. The trapezoidal rule takes it: of integrands that are analytic and vanish on both sides, its error is of the
order exp(-π² / step).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from numpyro_wide import collapse_readout, repriorise
from numpyro_wide.nn import FCN, bnn

NOISE_SCALE = 0.4
STEP = 0.05
LOWEST, HIGHEST = -60.0, 6.0  # of the log of one Gamma; of four units exp(-120) is left out


def log_scale_density(depth: int, width: int, step: float = STEP) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid of log Q, and the log density of log Q under the prior there."""
    grid = np.arange(round(LOWEST / step), round(HIGHEST / step) + 1)
    half = width / 2
    log_layer = half * np.log(half) - gammaln(half) + half * (grid * step - np.exp(grid * step))
    first_of_layer, layer = _seen(grid[0], np.exp(log_layer))
    first, density = first_of_layer, layer
    for _ in range(depth - 1):  # the density of a sum
        first, density = _seen(first + first_of_layer, np.convolve(density, layer) * step)
    return step * (first + np.arange(density.size)), np.log(density)


def _seen(first: int, density: np.ndarray) -> tuple[int, np.ndarray]:
    """Leave out both ends where products of densities have no digits."""
    places = np.flatnonzero(density > 1e-100)
    return first + places[0], density[places[0] : places[-1] + 1]


class LinearLaw:
    """Posterior of a linear network given data.

    Args:
        depth: number of hidden layers.
        width: number of units in each.
        x: inputs, (n, d_in).
        y: targets, (n,).
        noise_scale: standard deviation of the noise.
        step: step of the grid of log Q.

    Attributes:
        log_evidence: log density of the targets under the network.
        scales: grid of Q, (g,).
        weights: posterior probabilities of the grid's points, (g,).
    """

    def __init__(self, depth: int, width: int, x: Any, y: Any, noise_scale: float, step: float = STEP):
        self.depth, self.width, self.noise_scale, self.step = depth, width, noise_scale, step
        self.x, self.y = np.asarray(x, float), np.asarray(y, float)
        values, self._vectors = np.linalg.eigh(self.x @ self.x.T / self.x.shape[1])
        self._rotated = self._vectors.T @ self.y
        log_scales, log_prior = log_scale_density(depth, width, step)
        self.scales = np.exp(log_scales)
        self._variances = self.scales[:, None] * np.maximum(values, 0) + noise_scale**2  # of the rotated targets
        log_likelihood = -0.5 * np.sum(self._rotated**2 / self._variances + np.log(2 * np.pi * self._variances), axis=1)
        log_joint = log_prior + log_likelihood + np.log(step)
        self.log_evidence = float(logsumexp(log_joint))
        self.weights = np.exp(log_joint - self.log_evidence)

    def average(self, values: np.ndarray) -> Any:
        """Return the posterior mean of values at the grid's points, (g, ...)."""
        return np.tensordot(self.weights, values, 1)

    def _given_scale(self, x_new: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return means (g, m) and covariances (g, m, m) of the function given Q."""
        x_new = np.asarray(x_new, float)
        cross = x_new @ self.x.T / x_new.shape[1] @ self._vectors
        gains = self.scales[:, None, None] * cross / self._variances[:, None]
        prior = x_new @ x_new.T / x_new.shape[1]
        return gains @ self._rotated, self.scales[:, None, None] * (prior - gains @ cross.T)

    def predict(self, x_new: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return mean (m,) and covariance (m, m) of the function at new inputs, (m, d_in)."""
        means, covariances = self._given_scale(x_new)
        mean = self.average(means)
        around = means - mean
        return mean, self.average(covariances + around[:, :, None] * around[:, None])

    def log_density(self, x_new: Any, y_new: Any) -> np.ndarray:
        """Return the log predictive density of observations, row by row, (m,)."""
        means, covariances = self._given_scale(x_new)
        variances = np.diagonal(covariances, axis1=1, axis2=2) + self.noise_scale**2
        log_terms = -0.5 * ((y_new - means) ** 2 / variances + np.log(2 * np.pi * variances))
        return logsumexp(log_terms, axis=0, b=self.weights[:, None])

    def joint_log_density(self, x_new: Any, y_new: Any) -> float:
        """Return the log predictive density of all new rows together: of all data less that of the first."""
        x, y = np.concatenate([self.x, x_new]), np.concatenate([self.y, y_new])
        return LinearLaw(self.depth, self.width, x, y, self.noise_scale, self.step).log_evidence - self.log_evidence


class Data(NamedTuple):
    """Inputs and targets in single precision, and some more of the same."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray


def draw_data(seed: int, num_rows: int = 10, num_new: int = 3, num_inputs: int = 4, scale: float = 1.5) -> Data:
    """Draw a noisy linear function, on a scale that is not quite that of the prior."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows + num_new, num_inputs))
    y = scale * x @ rng.normal(size=num_inputs) / num_inputs**0.5 + NOISE_SCALE * rng.normal(size=len(x))
    x, y = x.astype("f"), y.astype("f")
    return Data(x[:num_rows], y[:num_rows], x[num_rows:], y[num_rows:])


def linear_network(form: str, depth: int, width: int) -> Callable[..., Any]:
    """Return a network of linear layers that is "plain", "repriorised" or "collapsed"."""
    model = bnn(FCN(depth, width, activation="identity"), num_outputs=None, noise=NOISE_SCALE)
    if form == "collapsed":
        return collapse_readout(model, readout="readout", features="features", observed="y")
    if form == "repriorised":
        return repriorise(model, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE)
    return model


def scale_and_slopes(draws: Mapping[str, Any], depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Q (...) and the slopes (..., d_in) of the function that draws of all weights give."""
    kernels = [np.asarray(draws[f"hidden.hidden_{layer}.kernel"], float) for layer in range(depth)]
    behind = np.asarray(draws["readout"], float)
    root = behind.shape[-1] ** 0.5
    for kernel in kernels[:0:-1]:
        behind = (kernel @ behind[..., None])[..., 0] / root
    slopes = (kernels[0] @ behind[..., None])[..., 0] / (root * kernels[0].shape[-2] ** 0.5)
    return np.sum(behind**2, axis=-1) / root**2, slopes
