"""Likelihoods that a surrogate can be fitted to by name: a class each, and the table of them."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import helmert
from scipy.special import expit, gammaln

from numpyro_wide._checks import check_no_nan, check_not_negative, is_known, whole_number
from numpyro_wide.surrogates._likelihood import Averages, Derivatives, Likelihood, Nodes, OneValue
from numpyro_wide.surrogates._logistic_averages import logistic_averages
from numpyro_wide.surrogates._softmax_averages import softmax_averages


@dataclass(frozen=True)
class Logistic(OneValue):
    """A likelihood of the density e^(y f) / (1 + e^(f − shift))^total: a binomial's, and a negative binomial's."""

    @property
    @abstractmethod
    def total(self) -> np.ndarray:
        """Exponent of the denominator, (n,)."""

    @property
    def shift(self) -> np.ndarray:
        """What is taken from the function values there, (n,)."""
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


@dataclass(frozen=True)
class Poisson(OneValue):
    """Counts, by the logarithm of their rate."""

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rate = np.exp(mean + variance / 2)
        return rate, rate + rate**2 * np.expm1(variance)

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "poisson", np.inf)

    @staticmethod
    def quick(observed: Array, noise_scale: ArrayLike | None) -> tuple[Array, Array]:
        # At f = log(y + 1/2), near the mode, the slope is −1/2 and the curvature y + 1/2.
        log_rate = jnp.log(observed + 0.5)
        scale = jnp.exp(-0.5 * log_rate)
        return log_rate - 0.5 * scale**2, scale if noise_scale is None else jnp.asarray(noise_scale, scale.dtype)

    def guess(self) -> np.ndarray:
        return np.log(self.observed + 0.5)

    def along(self, f: np.ndarray) -> Derivatives:
        rate = np.exp(f)
        return self.observed * f - rate, self.observed - rate, rate

    @property
    def constant(self) -> np.ndarray:
        return -gammaln(self.observed + 1)

    def expected(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None) -> Averages:
        if nodes is not None:
            return super().expected(mean, variance, nodes)
        f = mean[:, 0] + self.offset
        rate = np.exp(f + variance / 2)
        return Averages(self.observed * f - rate, (self.observed - rate)[:, None], rate)


@dataclass(frozen=True)
class StudentT(OneValue):
    """Student's t about the function value.

    It is not log-concave. The weight is that of the normal whose log density touches this one's from below (that of the
    E-step for t as a scale mixture): positive, small for outliers, whose targets it keeps near what was observed.

    Attributes:
        df: degrees of freedom, (n,).
        scale: scale, (n,).
    """

    parameters = ("df", "scale")
    df: np.ndarray
    scale: np.ndarray

    @staticmethod
    def predicted(
        mean: np.ndarray, variance: np.ndarray, df: np.ndarray, scale: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(divide="ignore"):
            of_noise = np.where(df > 2, scale**2 * df / np.maximum(df - 2, 0.0), np.inf)
        return mean, variance + of_noise

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        """Accept any number."""

    def guess(self) -> np.ndarray:
        return self.observed

    def along(self, f: np.ndarray) -> Derivatives:
        residual = self.observed - f
        weight = (self.df + 1) / (self.df * self.scale**2 + residual**2)
        return -0.5 * (self.df + 1) * np.log1p((residual / self.scale) ** 2 / self.df), weight * residual, weight

    @property
    def constant(self) -> np.ndarray:
        half = self.df / 2
        return gammaln(half + 0.5) - gammaln(half) - 0.5 * np.log(self.df * np.pi * self.scale**2)

    def expected(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None) -> Averages:
        if nodes is not None:
            return super().expected(mean, variance, nodes)
        # Of the bound with the precision of the scale mixture as a second factor: its weights are its derivatives, too.
        residual = self.observed - self.offset - mean[:, 0]
        square = residual**2 + variance
        weight = (self.df + 1) / (self.df * self.scale**2 + square)
        value = -0.5 * (self.df + 1) * np.log1p(square / self.scale**2 / self.df)
        return Averages(value, (weight * residual)[:, None], weight)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Class labels, by the softmax of k logits, all with one weight a row.

    Attributes:
        labels: classes from 0, (n,).
        basis: orthonormal columns that span the logits up to a shift of all, (k, c): the function values are the logits
            in that basis, less the offset.
        offset: what the logits have besides, (n, k).
    """

    parameters = ("num_classes",)
    labels: np.ndarray
    basis: np.ndarray
    offset: np.ndarray

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        probs = softmax_averages(mean, variance).probs
        return probs / probs.sum(axis=1, keepdims=True)

    @classmethod
    def check_parameters(cls, given: dict[str, Any]) -> None:
        whole_number("num_classes", given["num_classes"], 2)

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        if observed.ndim != 1:
            # The argmax of a column would make every label 0.
            is_column = observed.ndim == 2 and observed.shape[1] == 1
            mend = "take labels[:, 0]" if is_column else "take argmax(-1) of codes"
            raise ValueError(f"class labels must have shape (n,), but got {observed.shape}; {mend}.")
        check_whole(observed, "categorical", parameters["num_classes"] - 1)

    @staticmethod
    def quick(
        observed: Array, noise_scale: ArrayLike | None, num_classes: int, basis: Array | None = None
    ) -> tuple[Array, Array]:
        # At f = 0, where the classes are alike, the slope is the code less its mean, and the curvature 1/k across them.
        deviation = jax.nn.one_hot(observed, num_classes) - 1.0 / num_classes
        deviation = deviation if basis is None else deviation @ basis
        scale = jnp.asarray(np.sqrt(num_classes) if noise_scale is None else noise_scale, deviation.dtype)
        return scale**2 * deviation, scale

    @property
    def start(self) -> np.ndarray:
        return np.zeros((len(self.labels), self.basis.shape[1]))

    def derivatives(self, values: np.ndarray) -> Derivatives:
        codes = np.eye(len(self.basis))[self.labels]
        logits = values @ self.basis.T + self.offset
        logits -= logits.max(axis=-1, keepdims=True)
        probs = np.exp(logits)
        total = probs.sum(axis=-1, keepdims=True)
        probs /= total
        log_density = np.sum(codes * logits, axis=-1) - np.log(total[..., 0])
        # The trace of diag p − p pᵀ, which the basis leaves as it is.
        weight = (1 - np.sum(probs**2, axis=-1)) / self.basis.shape[1]
        return log_density, (codes - probs) @ self.basis, weight

    def expected(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None) -> Averages:
        if nodes is not None:
            return super().expected(mean, variance, nodes)
        # Logits in the basis of contrasts differ from independent ones by what moves all of them together.
        logits, codes = mean @ self.basis.T + self.offset, np.eye(len(self.basis))[self.labels]
        found = softmax_averages(logits, variance)
        matrices = self.basis.T @ found.curvature @ self.basis
        weight = np.trace(found.curvature, axis1=1, axis2=2) / self.basis.shape[1]
        return Averages(
            np.sum(codes * logits, axis=1) - found.log_normaliser, (codes - found.probs) @ self.basis, weight, matrices
        )


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "bernoulli": Bernoulli,
    "binomial": Binomial,
    "categorical": Categorical,
    "negative_binomial": NegativeBinomial,
    "poisson": Poisson,
    "student_t": StudentT,
}


def logit_basis(num_classes: int, contrasts: bool) -> np.ndarray:
    """Return the basis of the logits that the function values are in, (k, c): contrasts, or each class its own."""
    return helmert(num_classes).T if contrasts else np.eye(num_classes)


def check_whole(observed: Array | np.ndarray, likelihood: str, largest: ArrayLike) -> None:
    """Refuse observations that are not whole numbers from 0 to the largest, where they are known already.

    Args:
        observed: observations, of any shape.
        likelihood: its name, for the message.
        largest: a number, or one for each observation: the number of trials.

    Raises:
        ValueError: for anything else.
    """
    if not is_known(observed):
        return
    array = np.asarray(observed)
    if not np.all((array >= 0) & (array <= largest) & (array == np.round(array))):
        most = largest if np.ndim(largest) == 0 else f"total_count, at most {np.max(largest)}"
        raise ValueError(
            f"observations of a {likelihood} likelihood must be whole numbers from 0 to {most}, but they range from "
            f"{array.min()} to {array.max()}, or are not whole."
        )
