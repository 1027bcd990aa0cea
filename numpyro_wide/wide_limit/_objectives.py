"""Objectives of a fit of scales: log evidence of Gaussian targets, or its bound for other likelihoods."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient
from jax.scipy.linalg import cho_solve

from numpyro_wide.surrogates.internal import Observations, State, VariationalFit
from numpyro_wide.wide_limit._scale_problem import ScaleProblem
from numpyro_wide.wide_limit.gp import whiten, whitened_log_evidence

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
        loss, slope = _loss_and_gradient(jnp.asarray(logarithms), self.problem, jnp.asarray(self.targets))
        return float(loss), np.asarray(slope)


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
        return np.array(_gram(jnp.asarray(logarithms), self.problem))

    def __getitem__(self, rows: np.ndarray) -> "Bound":
        return Bound(self.problem[rows], self.observations[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        logs = jnp.asarray(logarithms)
        gram = self.gram(logarithms)
        if not np.isfinite(gram).all():
            return np.inf, np.zeros_like(logarithms)
        value, slope = self._constant, np.zeros_like(gram)
        for i, column in enumerate(self._columns):
            fit = VariationalFit(column, gram, None)
            try:
                state = self._states[i] = fit.climb(self._states[i], _TOLERANCE)
            except ValueError:  # of a kernel at the end of the scales' range
                return np.inf, np.zeros_like(logarithms)
            value += state.bound
            slope += fit.kernel_slope(state)
        prior = 0.5 * np.sum((logarithms / self.problem.spreads) ** 2)
        pulled = np.asarray(_pull_back(logs, self.problem, jnp.asarray(slope)))
        return prior - value, logarithms / self.problem.spreads**2 - pulled


# Of the module, so that a fit to other rows of as many numbers compiles nothing.
@jax.jit
@jax.value_and_grad
def _loss_and_gradient(logarithms: Array, problem: ScaleProblem, targets: Array) -> Array:
    found = problem.scales(logarithms)
    noise_scale = found.pop("noise_scale")
    gram = problem.gram(found)
    prior = 0.5 * jnp.sum((logarithms / problem.spreads) ** 2)
    return prior - _evidence(gram, targets, noise_scale)


@jax.jit
def _gram(logarithms: Array, problem: ScaleProblem) -> Array:
    return problem.gram(problem.scales(logarithms))


@jax.jit
@jax.grad
def _pull_back(logarithms: Array, problem: ScaleProblem, slope: Array) -> Array:
    """Differentiate by the logarithms a function that has this derivative by the kernel."""
    return jnp.sum(slope * problem.gram(problem.scales(logarithms)))


def _evidence(gram: Array, targets: Array, noise_scale: Array) -> Array:
    r"""Return what :func:`gp_log_evidence` does, with the gradient $(\alpha \alpha^\top - k K^{-1}) / 2$ in its place.

    The gradient of a Cholesky factor takes several times as long.
    """
    factor, whitened = whiten(stop_gradient(gram), targets, stop_gradient(noise_scale))
    value = whitened_log_evidence(factor, whitened)
    inverse = cho_solve((factor, True), jnp.eye(len(gram)))
    columns = targets.reshape(len(gram), -1)
    alpha = inverse @ columns
    slope = stop_gradient(0.5 * (alpha @ alpha.T - columns.shape[1] * inverse))
    moving = jnp.sum(slope * (gram + noise_scale**2 * jnp.eye(len(gram))))
    return value + moving - stop_gradient(moving)
