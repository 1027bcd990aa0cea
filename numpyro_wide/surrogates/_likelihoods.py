"""Likelihoods that a surrogate can be fitted to by name: a class each, and the table of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import helmert
from scipy.special import gammaln

from numpyro_wide._checks import whole_number
from numpyro_wide.surrogates._likelihood import Averages, Derivatives, Likelihood, Nodes, OneValue, check_whole
from numpyro_wide.surrogates._logistic_likelihoods import Bernoulli, Binomial, NegativeBinomial
from numpyro_wide.surrogates._softmax_averages import softmax_averages


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
