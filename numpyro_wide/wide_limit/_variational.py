"""Variational fit of a surrogate to a likelihood under a Gaussian process prior, in NumPy's float64."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky
from scipy.linalg.lapack import dtrtri

from numpyro_wide._checks import late_progress
from numpyro_wide.machine import set_blas_threads
from numpyro_wide.wide_limit._gp import inverse_of
from numpyro_wide.wide_limit._likelihoods import Likelihood

_MAX_STEPS = 300
_ROW_STEPS = 20
_SHARE, _MAX_SOLVE = 0.1, 30  # of conjugate gradients: error as a share, and steps
_SMALLEST_STEP = 2.0**-30
_TOLERANCE = 3e-4  # of means in standard deviations, and of log weights
_ALLOWANCE = 1e-3  # largest fall of the bound in a step, as a share: averages over drawn nodes are inexact
_LEAST_WEIGHT = 1e-3  # as a share of the prior precision


class State(NamedTuple):
    """Gaussian function values, of mean K α and covariance (K⁻¹ + diag w)⁻¹ in each column."""

    alpha: np.ndarray  # α, (n, c)
    weights: np.ndarray  # w, (n,)
    mean: np.ndarray  # K α, (n, c)
    variance: np.ndarray  # marginal variances, (n,)
    slope: np.ndarray  # mean slope, (n, c)
    curvature: np.ndarray  # mean weight, (n,)
    matrices: np.ndarray | None  # minus the mean second derivatives, (n, c, c), or None
    factor: np.ndarray  # Cholesky factor of B = I + √w K √w
    bound: float  # the ELBO, or minus infinity
    moved: float = np.inf  # size of the step to it


class VariationalFit(NamedTuple):
    """Search for the Gaussian likelihood of the best Gaussian posterior (Mathematics, :eq:`sites`)."""

    likelihood: Likelihood
    kernel: np.ndarray  # K, (n, n)

    def climb(self, start: State | None = None, tolerance: float = _TOLERANCE, progress_bar: bool = False) -> State:
        """Maximise the bound by natural-gradient steps, from the Gaussian likelihood of another state if given."""
        steps = late_progress(range(_MAX_STEPS), shown=progress_bar, desc="surrogate")
        # BLAS libraries hinder each other.
        with set_blas_threads(1), steps:
            warm = None if start is None else self._from(start)
            state, step = warm or self._start(), 1.0
            for _ in steps:
                new = self._towards(state, step)
                if not new.bound >= state.bound - _ALLOWANCE * (1 + abs(state.bound)):
                    step /= 2
                    if step < _SMALLEST_STEP:
                        break
                    continue
                new = new._replace(moved=_movement(state, new) / step)
                # Against oscillation.
                step = min(1.0, 2 * step) if new.moved < state.moved else max(step / 2, 0.1)
                state = new
                if state.moved < tolerance:
                    break
        return state

    def kernel_slope(self, state: State) -> np.ndarray:
        """Return the bound's derivative by the kernel, (n, n) (Mathematics, :eq:`bound-slope`)."""
        root = np.sqrt(state.weights)
        inverse = inverse_of(state.factor)
        return 0.5 * (state.alpha @ state.alpha.T - state.alpha.shape[1] * root[:, None] * inverse * root)

    def sites(self, state: State, total_weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Return targets (n, c) and variances (n,) of a Gaussian likelihood; Σ w K_ii is at most ``total_weight``."""
        weights = np.minimum(state.weights, total_weight / (len(state.weights) * self._prior))
        # With the likelihood's slope at the mean.
        return state.mean + state.slope / weights[:, None], 1 / weights

    @property
    def _prior(self) -> np.ndarray:
        """The prior variances, (n,), those of next to nothing raised."""
        variances = np.diagonal(self.kernel)
        return np.maximum(variances, 1e-6 * np.max(variances))

    def _start(self) -> State:
        """Return the state by each row's derivatives, or with a mean of zero."""
        start, slope, weight = self._row_by_row()
        weights = self._bounded_below(weight)
        alpha = self._alpha(_factor(self.kernel, weights), weights, weights[:, None] * start + slope)
        for candidate in (alpha, np.zeros_like(start)):
            state = self._at(candidate, weights)
            if np.isfinite(state.bound):
                return state
        raise ValueError(
            "the mean log likelihood is not finite under the kernel's prior; check its diagonal, up to "
            f"{np.max(np.diagonal(self.kernel)):.3g}, or pass an offset."
        )

    def _from(self, source: State) -> State | None:
        """Return the posterior under another state's Gaussian likelihood; None if not finite."""
        weights = self._bounded_below(source.weights)
        natural = weights[:, None] * source.mean + source.slope
        state = self._at(self._alpha(_factor(self.kernel, weights), weights, natural), weights)
        return state if np.isfinite(state.bound) else None

    def _row_by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each row's approximate mode, slope and weight, by cut Newton steps."""
        values, prior = self.likelihood.start, self._prior[:, None]
        for _ in range(_ROW_STEPS):
            with np.errstate(all="ignore"):
                _, slope, weight = (array[0] for array in self.likelihood.derivatives(values[None]))
            if not (np.isfinite(slope).all() and np.isfinite(weight).all()):
                raise ValueError(
                    "the derivatives of the log likelihood must be finite at every function value; give another "
                    "likelihood, or an offset."
                )
            step = (slope - values / prior) / (np.maximum(weight, 0.0)[:, None] + 1 / prior)
            step = np.clip(step, -np.sqrt(prior), np.sqrt(prior))
            values = values + step
        return values - step, slope, weight

    def _at(self, alpha: np.ndarray, weights: np.ndarray) -> State:
        factor = _factor(self.kernel, weights)
        inverse, _ = dtrtri(factor, lower=1)
        explained = np.sum(inverse**2, axis=0)  # the diagonal of B⁻¹
        # The covariance is K − K √w B⁻¹ √w K.
        variance = np.clip((1 - explained) / weights, 0.0, np.diagonal(self.kernel))
        mean = self.kernel @ alpha
        log_det = 2 * np.sum(np.log(np.diagonal(factor)))
        divergence = 0.5 * (mean.shape[1] * (log_det + np.sum(explained) - len(mean)) + np.sum(alpha * mean))
        with np.errstate(all="ignore"):
            value, slope, weight, matrices = self.likelihood.expected(mean, variance)
            bound = float(np.sum(value) - divergence)
        is_finite = np.isfinite(bound) and np.isfinite(slope).all() and np.isfinite(weight).all()
        curvature = self._bounded_below(weight) if is_finite else weights
        bound = bound if is_finite else -np.inf
        return State(alpha, weights, mean, variance, slope, curvature, matrices, factor, bound)

    def _towards(self, state: State, step: float) -> State:
        """Step towards the posterior given the current weights, and the weights at its moments."""
        # Weights shared among function values oscillate at full steps.
        share = step if state.matrices is None else step / 2
        weights = (1 - share) * state.weights + share * state.curvature
        return self._at(state.alpha + step * self._newton(state), weights)

    def _newton(self, state: State) -> np.ndarray:
        """Return Newton's step of α, (I + H K)⁻¹ (s − α), with −H the mean second derivatives."""
        residual = state.slope - state.alpha
        step = self._alpha(state.factor, state.weights, residual)
        if state.matrices is None:
            return step
        solution, direction, last_size = np.zeros_like(step), np.zeros_like(step), np.inf
        image = self.kernel @ residual  # K times the residual
        tolerance = _SHARE**2 * np.sum(image * step)
        for _ in range(_MAX_SOLVE):
            size = np.sum(image * step)
            if not size > tolerance:
                break
            direction = step + size / last_size * direction
            image_direction = self.kernel @ direction
            curved = np.matmul(state.matrices, image_direction[..., None])[..., 0] + direction
            length = size / np.sum(image_direction * curved)
            solution, residual = solution + length * direction, residual - length * curved
            last_size = size
            image = self.kernel @ residual
            step = self._alpha(state.factor, state.weights, residual)
        return solution

    def _alpha(self, factor: np.ndarray, weights: np.ndarray, natural: np.ndarray) -> np.ndarray:
        root = np.sqrt(weights)[:, None]
        return natural - root * cho_solve((factor, True), root * (self.kernel @ natural))

    def _bounded_below(self, weight: np.ndarray) -> np.ndarray:
        return np.maximum(weight, _LEAST_WEIGHT / self._prior)


def _factor(kernel: np.ndarray, weights: np.ndarray) -> np.ndarray:
    root = np.sqrt(weights)
    matrix = root[:, None] * kernel * root
    matrix[np.diag_indices_from(matrix)] += 1.0
    try:
        return cholesky(matrix, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite, but has negative eigenvalues; compute it in double precision."
        ) from error


def _movement(old: State, new: State) -> float:
    scale = np.sqrt(new.variance + 1e-12 * np.max(new.variance))[:, None]
    means = np.max(np.abs(new.mean - old.mean) / scale)
    return float(max(means, np.max(np.abs(new.weights - old.weights) * new.variance)))
