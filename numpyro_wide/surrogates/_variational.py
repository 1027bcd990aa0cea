"""Variational fit of a surrogate to a likelihood under a Gaussian process prior, in NumPy's float64."""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky
from scipy.linalg.lapack import dtrtri

from numpyro_wide.machine import set_blas_threads
from numpyro_wide.surrogates._likelihood import Likelihood

_MAX_STEPS = 300
_SMALLEST_STEP = 2.0**-30
_TOLERANCE = 3e-4  # of means, in posterior standard deviations, and of the logarithms of weights
# How much the bound may fall, as a share of it: nodes that are drawn are not those of one exact bound, and a step that
# overshoots loses far more.
_ALLOWANCE = 1e-3
# Of the precision of a function value a priori: the least that an observation adds to it. It moves no sampler, and can
# be divided by where the likelihood's own weight underflows, or is negative.
_LEAST_WEIGHT = 1e-3


class GaussianLikelihood(NamedTuple):
    """A Gaussian likelihood N(targets; f, 1 / weights) of function values f, (n, c).

    Attributes:
        targets: values that it takes for observed, (n, c).
        weights: precisions, (n,), which the function values of a row share.
    """

    targets: np.ndarray
    weights: np.ndarray


class _State(NamedTuple):
    """A Gaussian of function values: mean K α, covariance (K⁻¹ + diag w)⁻¹ in each column.

    Attributes:
        alpha: α, (n, c).
        weights: w, (n,).
        mean: K α, (n, c).
        variance: marginal variances, (n,).
        slope: mean slope of the log likelihood, (n, c).
        curvature: mean weight of the log likelihood, (n,).
        factor: Cholesky factor of B = I + √w K √w.
        bound: the ELBO; minus infinity where something is not finite.
    """

    alpha: np.ndarray
    weights: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray
    factor: np.ndarray
    bound: float


class VariationalFit(NamedTuple):
    r"""The problem of which Gaussian likelihood gives the best Gaussian posterior (Mathematics, :eq:`sites`).

    Attributes:
        likelihood: likelihood of n rows with c function values each.
        kernel: K, the prior covariance in each column, (n, n).
        nodes: standard normals, (q, n, c) or (q, 1, 1).
        shares: weights of the nodes, (q,), which sum to one.
    """

    likelihood: Likelihood
    kernel: np.ndarray
    nodes: np.ndarray
    shares: np.ndarray

    def fit(self, total_weight: float) -> GaussianLikelihood:
        """Take natural-gradient steps until means and weights stand still.

        Args:
            total_weight: most that the sum of w K_ii may come to in the end, about.
        """
        # The threads of several BLAS libraries, at work in turns here, lose more to each other than they gain.
        with set_blas_threads(1):
            state, moved = self._climb()
        if not moved < 1e-2:
            warnings.warn(
                f"the surrogate's means and weights still move by {moved:.2g} (of a standard deviation, of their size) "
                "after all steps; it can be used, and the posterior stays exact, but a kernel of the right size may "
                "give a better one: look at the variances on its diagonal, and pass an offset where function values "
                "are far from zero.",
                RuntimeWarning,
                stacklevel=4,
            )
        weights = np.minimum(state.weights, total_weight / (len(state.weights) * self._prior))
        # The slope at the mean is the likelihood's, whatever the limits of the weight.
        return GaussianLikelihood(state.mean + state.slope / weights[:, None], weights)

    @property
    def _prior(self) -> np.ndarray:
        """The prior variances, (n,), those of next to nothing raised."""
        variances = np.diagonal(self.kernel)
        return np.maximum(variances, 1e-6 * np.max(variances))

    def _climb(self) -> tuple[_State, float]:
        state, step, moved = self._start(), 1.0, np.inf
        for _ in range(_MAX_STEPS):
            new = self._towards(state, step)
            if not new.bound >= state.bound - _ALLOWANCE * (1 + abs(state.bound)):
                step /= 2
                if step < _SMALLEST_STEP:
                    break
                continue
            before, moved = moved, _movement(state, new) / step
            # What swings to and fro takes shorter steps.
            state, step = new, (min(1.0, 2 * step) if moved < before else max(step / 2, 0.1))
            if moved < _TOLERANCE:
                break
        return state, moved

    def _start(self) -> _State:
        """Return the state with the likelihood's derivatives row by row; with a mean of zero if that leads nowhere."""
        start, slope, weight = self._row_by_row()
        weights = self._kept_up(weight)
        alpha = self._alpha(_factor(self.kernel, weights), weights, weights[:, None] * start + slope)
        state = self._at(alpha, weights)
        if np.isfinite(state.bound):
            return state
        state = self._at(np.zeros_like(start), weights)
        if np.isfinite(state.bound):
            return state
        raise ValueError(
            "the mean log likelihood is not finite under the prior that the kernel describes; check the kernel's "
            f"diagonal, which goes up to {np.max(np.diagonal(self.kernel)):.3g}, or pass an offset."
        )

    def _row_by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return about the mode of every row by itself, and slope and weight there, by Newton's steps.

        A step is one prior standard deviation at most.
        """
        values, prior = self.likelihood.start, self._prior[:, None]
        for _ in range(_ROW_STEPS):
            with np.errstate(all="ignore"):
                _, slope, weight = self.likelihood.expected(values, np.zeros(len(values)), *_AT_THE_MEAN)
            if not (np.isfinite(slope).all() and np.isfinite(weight).all()):
                raise ValueError(
                    "the derivatives of the log likelihood must be finite at the function values that the kernel lets "
                    "one expect, but are not; give a likelihood that has a density at every value, or an offset."
                )
            step = (slope - values / prior) / (np.maximum(weight, 0.0)[:, None] + 1 / prior)
            step = np.clip(step, -np.sqrt(prior), np.sqrt(prior))
            values = values + step
        return values - step, slope, weight

    def _at(self, alpha: np.ndarray, weights: np.ndarray) -> _State:
        factor = _factor(self.kernel, weights)
        inverse, _ = dtrtri(factor, lower=1)
        explained = np.sum(inverse**2, axis=0)  # the diagonal of B⁻¹
        # The covariance is K − K √w B⁻¹ √w K, and √w times it times √w is I − B⁻¹.
        variance = np.clip((1 - explained) / weights, 0.0, np.diagonal(self.kernel))
        mean = self.kernel @ alpha
        log_det = 2 * np.sum(np.log(np.diagonal(factor)))
        divergence = 0.5 * (mean.shape[1] * (log_det + np.sum(explained) - len(mean)) + np.sum(alpha * mean))
        with np.errstate(all="ignore"):
            value, slope, weight = self.likelihood.expected(mean, variance, self.nodes, self.shares)
            bound = float(np.sum(value) - divergence)
        is_finite = np.isfinite(bound) and np.isfinite(slope).all() and np.isfinite(weight).all()
        curvature = self._kept_up(weight) if is_finite else weights
        return _State(alpha, weights, mean, variance, slope, curvature, factor, bound if is_finite else -np.inf)

    def _towards(self, state: _State, step: float) -> _State:
        """Move a share of the way to the posterior given the weights at hand, and to the weights at its moments."""
        natural = state.weights[:, None] * state.mean + state.slope
        alpha = self._alpha(state.factor, state.weights, natural)
        weights = (1 - step) * state.weights + step * state.curvature
        return self._at((1 - step) * state.alpha + step * alpha, weights)

    def _alpha(self, factor: np.ndarray, weights: np.ndarray, natural: np.ndarray) -> np.ndarray:
        root = np.sqrt(weights)[:, None]
        return natural - root * cho_solve((factor, True), root * (self.kernel @ natural))

    def _kept_up(self, weight: np.ndarray) -> np.ndarray:
        return np.maximum(weight, _LEAST_WEIGHT / self._prior)


_ROW_STEPS = 20
_AT_THE_MEAN = (np.zeros((1, 1, 1)), np.ones(1))


def _factor(kernel: np.ndarray, weights: np.ndarray) -> np.ndarray:
    root = np.sqrt(weights)
    matrix = root[:, None] * kernel * root
    matrix[np.diag_indices_from(matrix)] += 1.0
    try:
        return cholesky(matrix, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite, but has negative eigenvalues; compute it in double precision, or "
            "take mean_kernel."
        ) from error


def _movement(old: _State, new: _State) -> float:
    scale = np.sqrt(new.variance + 1e-12 * np.max(new.variance))[:, None]
    means = np.max(np.abs(new.mean - old.mean) / scale)
    return float(max(means, np.max(np.abs(np.log(new.weights / old.weights)))))
