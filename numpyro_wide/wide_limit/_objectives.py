"""Objectives of a fit of scales: log evidence of Gaussian targets, or its bound for other likelihoods."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.linalg import lapack

from numpyro_wide.surrogates.internal import Observations, State, VariationalFit
from numpyro_wide.wide_limit._scale_gram import gram, pull_back
from numpyro_wide.wide_limit._scale_problem import ScaleProblem

_TOLERANCE = 2e-3  # of means and weights at the largest bound: it is level there, and its gradient is as good as this


class Objective(ABC):
    """Minus a log posterior of scales, but for a constant, as a function of their logarithms over their medians.

    Attributes:
        problem: architecture, inputs and priors.
    """

    problem: ScaleProblem
    step: ClassVar[float]  # of the logarithms, over which differences of gradients tell the curvature

    @abstractmethod
    def __getitem__(self, rows: np.ndarray) -> "Objective":
        """Return the objective of some of the rows."""

    @abstractmethod
    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient; not finite where there is none."""

    def _with_prior(self, logarithms: np.ndarray, value: float, slope: np.ndarray) -> tuple[float, np.ndarray]:
        """Return what is minimised, and its gradient, from a log evidence and its own."""
        spreads = self.problem.spreads
        prior = 0.5 * np.sum((logarithms / spreads) ** 2)
        return prior - value, logarithms / spreads**2 - slope


@dataclass(frozen=True)
class Evidence(Objective):
    """Log evidence of targets with Gaussian noise.

    Attributes:
        problem: architecture, inputs and priors.
        targets: targets, (n,) or (n, k).
    """

    problem: ScaleProblem
    targets: np.ndarray
    step: ClassVar[float] = 1e-3

    def __getitem__(self, rows: np.ndarray) -> "Evidence":
        return Evidence(self.problem[rows], self.targets[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        noise_variance = self.problem.scales(logarithms)["noise_scale"] ** 2
        covariance = gram(self.problem, logarithms)
        covariance.flat[:: len(covariance) + 1] += noise_variance
        found = _evidence(covariance, self.targets.reshape(len(covariance), -1))
        if found is None:
            return np.inf, np.zeros_like(logarithms)
        value, slope = found
        pulled = pull_back(self.problem, logarithms, slope)
        pulled[self.problem.noise] += 2 * noise_variance * np.trace(slope)
        return self._with_prior(logarithms, value, pulled)


class Bound(Objective):
    """Variational bound on the log evidence of observations that are not Gaussian (Mathematics, :eq:`bound-slope`).

    Every call begins where the last one ended, which saves most of its steps.

    Args:
        problem: architecture, inputs and priors.
        observations: observations and their likelihood.
    """

    step = 0.03

    def __init__(self, problem: ScaleProblem, observations: Observations):
        self.problem, self.observations = problem, observations
        self._columns = observations.columns()
        self._constant = sum(float(np.sum(column.constant)) for column in self._columns)
        self._states: list[State | None] = [None] * len(self._columns)

    @property
    def is_of_classes(self) -> bool:
        """Whether the observations are labels of classes."""
        return self.observations.likelihood in ("bernoulli", "categorical")

    def gram(self, logarithms: np.ndarray) -> np.ndarray:
        """Return the kernel, (n, n)."""
        return gram(self.problem, logarithms)

    def __getitem__(self, rows: np.ndarray) -> "Bound":
        return Bound(self.problem[rows], self.observations[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        covariance = self.gram(logarithms)
        if not np.isfinite(covariance).all():
            return np.inf, np.zeros_like(logarithms)
        value, slope = self._constant, np.zeros_like(covariance)
        for i, column in enumerate(self._columns):
            fit = VariationalFit(column, covariance, None)
            try:
                state = self._states[i] = fit.climb(self._states[i], _TOLERANCE)
            except ValueError:  # of a kernel at the end of the scales' range
                return np.inf, np.zeros_like(logarithms)
            value += state.bound
            slope += fit.kernel_slope(state)
        return self._with_prior(logarithms, value, pull_back(self.problem, logarithms, slope))


def _evidence(covariance: np.ndarray, columns: np.ndarray) -> tuple[float, np.ndarray] | None:
    r"""Return what :func:`gp_log_evidence` does, and $(\alpha \alpha^\top - k K^{-1}) / 2$, its derivative by K.

    By LAPACK's own inverse of a factored matrix, which takes half as long as one by triangular solves.

    Args:
        covariance: $K$, the noise's variance included, (n, n); it is overwritten.
        columns: targets, (n, k).

    Returns:
        value and derivative, (n, n); None if the covariance is not positive definite, or not finite.
    """
    num_rows, num_columns = columns.shape
    if not np.isfinite(covariance).all():
        return None
    factor, failed = lapack.dpotrf(covariance.T, lower=1, overwrite_a=1)
    if failed:
        return None
    alpha = lapack.dpotrs(factor, columns, lower=1)[0]
    log_det = 2 * np.sum(np.log(np.diagonal(factor)))
    value = -0.5 * (np.sum(columns * alpha) + num_columns * (log_det + num_rows * np.log(2 * np.pi)))
    inverse = lapack.dpotri(factor, lower=1, overwrite_c=1)[0]  # its lower triangle
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    return float(value), 0.5 * (alpha @ alpha.T - num_columns * inverse)
