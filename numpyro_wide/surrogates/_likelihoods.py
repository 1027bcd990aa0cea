"""Likelihoods that a surrogate can be fitted to by name: a class each, and the table of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import helmert
from scipy.special import expit

from numpyro_wide._checks import check_no_nan, check_not_negative, is_known, whole_number
from numpyro_wide.surrogates._likelihood import Derivatives, Likelihood, OneValue


@dataclass(frozen=True)
class Bernoulli(OneValue):
    """Outcomes 0 or 1, by their logit."""

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "bernoulli", 1)

    @staticmethod
    def quick(observed: Array, noise_scale: ArrayLike | None) -> tuple[Array, Array]:
        # At f = 0 the slope is y − 1/2, that of the Gaussian t / s², and the curvature 1/4.
        scale = jnp.asarray(2.0 if noise_scale is None else noise_scale, observed.dtype)
        return scale**2 * (observed - 0.5), scale

    def along(self, f: np.ndarray) -> Derivatives:
        return _logistic(f, self.observed, np.ones_like(self.observed), np.zeros_like(self.observed))


@dataclass(frozen=True)
class Binomial(OneValue):
    """Successes among a number of trials, which may be zero, by the logit of one.

    Attributes:
        total_count: number of trials, (n,).
    """

    parameters = ("total_count",)
    total_count: np.ndarray

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

    def along(self, f: np.ndarray) -> Derivatives:
        return _logistic(f, self.observed, self.total_count, np.zeros_like(self.observed))


@dataclass(frozen=True)
class NegativeBinomial(OneValue):
    """Counts, by the logarithm of their mean.

    Attributes:
        concentration: r, of which the variance is mean + mean² / r, (n,).
    """

    parameters = ("concentration",)
    concentration: np.ndarray

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        check_whole(observed, "negative_binomial", np.inf)

    def guess(self) -> np.ndarray:
        return np.log(self.observed + 0.5)

    def along(self, f: np.ndarray) -> Derivatives:
        return _logistic(f, self.observed, self.observed + self.concentration, np.log(self.concentration))


@dataclass(frozen=True)
class Poisson(OneValue):
    """Counts, by the logarithm of their rate."""

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

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        """Accept any number."""

    def guess(self) -> np.ndarray:
        return self.observed

    def along(self, f: np.ndarray) -> Derivatives:
        residual = self.observed - f
        weight = (self.df + 1) / (self.df * self.scale**2 + residual**2)
        return -0.5 * (self.df + 1) * np.log1p((residual / self.scale) ** 2 / self.df), weight * residual, weight


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


def _logistic(f: np.ndarray, successes: np.ndarray, total: np.ndarray, shift: np.ndarray) -> Derivatives:
    """Return the derivatives of the density e^(y f) / (1 + e^(f − shift))^total.

    It is a binomial's, and with log r for shift and y + r for total a negative binomial's.
    """
    centred = f - shift
    log_density = successes * f - total * np.logaddexp(0.0, centred)
    return log_density, successes - total * expit(centred), total * expit(centred) * expit(-centred)
