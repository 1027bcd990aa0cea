"""Likelihoods whose density is a power of the logistic function: outcomes, successes, negative binomial counts."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.special import expit, gammaln

from numpyro_wide._checks import check_no_nan, check_not_negative
from numpyro_wide.surrogates._likelihood import Averages, Derivatives, Nodes, OneValue, check_whole
from numpyro_wide.surrogates._logistic_averages import logistic_averages


@dataclass(frozen=True)
class Logistic(OneValue):
    """A likelihood of the density e^(y f) / (1 + e^(f − shift))^total: a binomial's, and a negative binomial's."""

    @property
    @abstractmethod
    def total(self) -> np.ndarray:
        """Exponent of the denominator, (n,)."""

    @property
    def shift(self) -> np.ndarray:
        """Amount taken from the function values there, (n,)."""
        return np.zeros_like(self.observed)

    def along(self, f: np.ndarray) -> Derivatives:
        centred = f - self.shift
        log_density = self.observed * f - self.total * np.logaddexp(0.0, centred)
        slope = self.observed - self.total * expit(centred)
        return log_density, slope, self.total * expit(centred) * expit(-centred)

    def expected(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None) -> Averages:
        if nodes is not None:
            return super().expected(mean, variance, nodes)
        f = mean[:, 0] + self.offset
        found = logistic_averages(f - self.shift, variance)
        value = self.observed * f - self.total * found.log_normaliser
        return Averages(value, (self.observed - self.total * found.prob)[:, None], self.total * found.curvature)


@dataclass(frozen=True)
class Bernoulli(Logistic):
    """Outcomes 0 or 1, by their logit."""

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return logistic_averages(mean, variance).prob

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "bernoulli", 1)

    @staticmethod
    def quick(observed: Array, noise_scale: ArrayLike | None) -> tuple[Array, Array]:
        # At f = 0 the slope is y − 1/2, that of the Gaussian t / s², and the curvature 1/4.
        scale = jnp.asarray(2.0 if noise_scale is None else noise_scale, observed.dtype)
        return scale**2 * (observed - 0.5), scale

    @property
    def total(self) -> np.ndarray:
        return np.ones_like(self.observed)


@dataclass(frozen=True)
class Binomial(Logistic):
    """Successes among a number of trials, which may be zero, by the logit of one.

    Attributes:
        total_count: number of trials, (n,).
    """

    parameters = ("total_count",)
    total_count: np.ndarray

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray, total_count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, prob, curvature = logistic_averages(mean, variance)
        # The variance of a probability p is the mean of p less that of p (1 − p), less its squared mean.
        between = np.maximum(prob - curvature - prob**2, 0.0)
        return total_count * prob, total_count * curvature + total_count**2 * between

    @classmethod
    def check_parameters(cls, given: dict[str, Any]) -> None:
        count = given["total_count"]
        check_no_nan("total_count", count)
        check_not_negative("total_count", count)
        if np.any(np.asarray(count) != np.round(count)):
            raise ValueError(f"total_count must hold whole numbers, but got {count}.")

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "binomial", parameters["total_count"])

    @property
    def constant(self) -> np.ndarray:
        return (
            gammaln(self.total_count + 1) - gammaln(self.observed + 1) - gammaln(self.total_count - self.observed + 1)
        )

    @property
    def total(self) -> np.ndarray:
        return self.total_count


@dataclass(frozen=True)
class NegativeBinomial(Logistic):
    """Counts, by the logarithm of their mean.

    Attributes:
        concentration: r, of which the variance is mean + mean² / r, (n,).
    """

    parameters = ("concentration",)
    concentration: np.ndarray

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray, concentration: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rate = np.exp(mean + variance / 2)
        return rate, rate + rate**2 * (np.expm1(variance) + np.exp(variance) / concentration)

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "negative_binomial", np.inf)

    def guess(self) -> np.ndarray:
        return np.log(self.observed + 0.5)

    @property
    def constant(self) -> np.ndarray:
        r, y = self.concentration, self.observed
        return gammaln(y + r) - gammaln(r) - gammaln(y + 1) - y * np.log(r)

    @property
    def total(self) -> np.ndarray:
        return self.observed + self.concentration

    @property
    def shift(self) -> np.ndarray:
        return np.log(self.concentration)
