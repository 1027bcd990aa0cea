"""Likelihoods that are not Gaussian, and averages of them under a Gaussian."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import helmert
from scipy.special import expit, gammaln, log_ndtr, logsumexp, ndtr

from numpyro_wide._checks import check_no_nan, check_not_negative, check_positive, is_known, whole_number

# Log density (q, n), its slope (q, n, c) and the weight (q, n), at q nodes.
Derivatives = tuple[np.ndarray, np.ndarray, np.ndarray]
Nodes = tuple[np.ndarray, np.ndarray]  # standard normals, (q, n, c) or (q, 1, 1), and weights (q,) of sum one
_NUM_QUADRATURE = 32
_BATCH = 2**21  # function values at a time


class Averages(NamedTuple):
    """Mean log likelihood and derivatives over normal function values."""

    value: np.ndarray  # mean log density, (n,)
    slope: np.ndarray  # mean slope, (n, c)
    weight: np.ndarray  # mean weight, (n,)
    matrices: np.ndarray | None = None  # minus the mean second derivatives, (n, c, c), or None


class Likelihood(ABC):
    """A likelihood of n rows, given c function values each, in float64."""

    name: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()  # keywords of ``fitted_surrogate``
    # From means and variances of function values and the parameters: probabilities, or mean and variance.
    predicted: ClassVar[Callable]

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, ArrayLike]) -> None:
        """Refuse parameters that are not positive."""
        for name, value in parameters.items():
            check_no_nan(name, value)
            check_positive(name, value)

    @classmethod
    def largest(cls, parameters: Mapping[str, ArrayLike]) -> ArrayLike | None:
        """Return the largest whole number to observe; None for real numbers."""
        return np.inf

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: Mapping[str, ArrayLike]) -> None:
        """Refuse known observations that the likelihood cannot give."""
        largest = cls.largest(parameters)
        if largest is None or not is_known(observed):
            return
        array = np.asarray(observed)
        if not np.all((array >= 0) & (array <= largest) & (array == np.round(array))):
            limit = largest if np.ndim(largest) == 0 else f"total_count, at most {np.max(largest)}"
            raise ValueError(
                f"observations of a {cls.name} likelihood must be whole numbers from 0 to {limit}, but they range from "
                f"{array.min()} to {array.max()}, or are not whole."
            )

    @property
    @abstractmethod
    def start(self) -> np.ndarray:
        """Function values to begin the fit at, (n, c)."""

    @property
    def constant(self) -> np.ndarray:
        """Terms of the log density without function values, (n,)."""
        return np.zeros(len(self.start))

    @abstractmethod
    def derivatives(self, values: np.ndarray) -> Derivatives:
        """Return log density without ``constant``, slope and weight at values (q, n, c)."""

    @abstractmethod
    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        """Average over independent normals of means (n, c) and variances (n,)."""

    def averaged(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None = None) -> Averages:
        """Average by a sum over nodes; None for Gauss and Hermite's."""
        if nodes is None:
            normals, shares = np.polynomial.hermite_e.hermegauss(_NUM_QUADRATURE)
            nodes = normals[:, None, None], shares / np.sum(shares)
        normals, shares = nodes
        scale = np.sqrt(variance)[:, None]
        totals: list[Any] = [0.0, 0.0, 0.0]
        size = max(1, _BATCH // mean.size)
        for start in range(0, len(normals), size):
            batch = slice(start, start + size)
            derivatives = self.derivatives(mean + scale * normals[batch])
            sums = (np.tensordot(shares[batch], values, 1) for values in derivatives)
            totals = [total + term for total, term in zip(totals, sums, strict=True)]
        return Averages(*totals)


@dataclass(frozen=True)
class OneValue(Likelihood):
    """A likelihood with one function value each."""

    observed: np.ndarray  # (n,)
    offset: np.ndarray  # part of the function values besides ``features @ readout``

    @property
    def start(self) -> np.ndarray:
        return (self.guess() - self.offset)[:, None]

    def derivatives(self, values: np.ndarray) -> Derivatives:
        value, slope, weight = self.along(values[..., 0] + self.offset)
        return value, slope[..., None], weight

    def guess(self) -> np.ndarray:
        """Return function values, with offset, to start at, (n,)."""
        return np.zeros_like(self.observed)

    @abstractmethod
    def along(self, f: np.ndarray) -> Derivatives:
        """Return log density, slope and weight at function values with offset, (q, n)."""


_NARROW = 0.5  # largest standard deviation of a logit for normal nodes
_NUM_NODES = 24
_LARGEST, _LOGISTIC_SPACING = 40.0, 0.25  # of the logistic variable


class LogitAverages(NamedTuple):
    """Mean values over normal logits."""

    log_normaliser: np.ndarray  # of log(1 + exp f) of one logit f; of log-sum-exp, (n,)
    probs: np.ndarray  # of 1 / (1 + exp(-f)); of the classes' probabilities p, (n, k)
    curvature: np.ndarray  # of its derivative; of diag p − p pᵀ, (n, k, k)


def logistic_averages(mean: np.ndarray, variance: np.ndarray) -> LogitAverages:
    """Average the logistic function, its integral and its derivative over normals."""
    scale = np.sqrt(variance)
    averages = np.empty((3, *mean.shape))
    narrow = scale < _NARROW
    nodes, shares = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    logits = mean[narrow, None] + scale[narrow, None] * nodes
    prob = expit(logits)
    terms = np.stack([np.logaddexp(0.0, logits), prob, prob * expit(-logits)])
    averages[:, narrow] = terms @ (shares / shares.sum())
    wide = scale[~narrow, None]
    logistics = np.arange(-_LARGEST, _LARGEST + _LOGISTIC_SPACING, _LOGISTIC_SPACING)
    shares = expit(logistics) * expit(-logistics)
    above = (mean[~narrow, None] - logistics) / wide
    density = np.exp(-0.5 * above**2) / np.sqrt(2 * np.pi)
    below = ndtr(above)
    terms = np.stack([wide * (above * below + density), below, density / wide])
    averages[:, ~narrow] = terms @ (shares / shares.sum())
    return LogitAverages(*averages)


_VARIANCE = np.pi**2 / 6  # of a Gumbel variable
# Of the table of log(−log F), straight from the second place on.
_LOWEST, _STRAIGHT, _HIGHEST, _SPACING = -7.0, 12.0, 56.0, 0.1
_NUM_SHAPES = 41  # inverse standard deviations in the table, from the normal's to Gumbel's
_FIRST, _STRIDE, _NUM_PLACES = 5, 3, 72  # of the integral, in cells of the table
_FARTHEST = 40.0  # standard deviations below the largest mean: no chance beyond
_SOFTMAX_BATCH = 2**14  # numbers in a processor's cache


def softmax_averages(mean: np.ndarray, variance: np.ndarray) -> LogitAverages:
    """Average a softmax and its logarithm over normals of means (n, k), variances (n,)."""
    size = max(1, _SOFTMAX_BATCH // (mean.shape[1] * _NUM_PLACES))
    blocks = [_softmax_block(mean[i : i + size], variance[i : i + size]) for i in range(0, len(mean), size)]
    return LogitAverages(*map(np.concatenate, zip(*blocks, strict=True)))


def _softmax_block(mean: np.ndarray, variance: np.ndarray) -> LogitAverages:
    scale = np.sqrt(variance + _VARIANCE)
    best = mean.max(axis=1)
    height, hazard = _at(np.minimum((best[:, None] - mean) / scale[:, None], _FARTHEST), 1 / scale)
    largest = np.exp(-np.sum(height, axis=1))  # distribution function of the largest sum
    step = _STRIDE * _SPACING
    probs = step * np.matmul(hazard, largest[..., None])[..., 0]
    # Minus the derivative of a chance to win by another's mean: the chance of a tie.
    curvature = -step * np.matmul(hazard * (largest / scale[:, None])[:, None], hazard.swapaxes(1, 2))
    diagonal = np.arange(mean.shape[1])
    curvature[:, diagonal, diagonal] = 0.0
    curvature[:, diagonal, diagonal] = -np.sum(curvature, axis=2)
    # The mean of the largest sum, less Euler's constant, by its distribution function.
    above = step * (np.sum(1 - largest, axis=1) - 0.5)
    return LogitAverages(best + scale * (_LOWEST + _FIRST * _SPACING + above), probs, curvature)


def _at(below: np.ndarray, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return −log F and the derivative of log F, (n, k, places)."""
    values, slopes = (table(shapes) for table in _tables())
    cells = below / _SPACING
    first = cells.astype(int)
    t = (cells - first)[..., None]  # the same in all cells
    start = first + (np.arange(len(values)) * values.shape[1])[:, None] + _FIRST
    flat = start[..., None] + _STRIDE * np.arange(_NUM_PLACES)
    left, left_slope = values.take(flat), slopes.take(flat)
    flat += 1
    rise, right_slope = values.take(flat) - left, slopes.take(flat)
    # Hermite's cubics, and their derivatives.
    height = np.exp(
        left + (3 - 2 * t) * t**2 * rise + _SPACING * t * (1 - t) * ((1 - t) * left_slope - t * right_slope)
    )
    slope = 6 / _SPACING * t * (1 - t) * rise + (1 - t) * (1 - 3 * t) * left_slope - t * (2 - 3 * t) * right_slope
    return height, -slope * height


@lru_cache(1)
def _tables() -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """Return log(−log F) and its derivative at all places, as splines of the shape."""
    from scipy.interpolate import CubicSpline  # which NumPyro has not loaded

    places = np.arange(round((_HIGHEST - _LOWEST) / _SPACING) + 1) * _SPACING + _LOWEST
    curved = places <= _STRAIGHT
    shapes = np.linspace(0, 1 / np.sqrt(_VARIANCE), _NUM_SHAPES)
    values = np.stack([_log_height(places[curved], shape) for shape in shapes])
    slopes = CubicSpline(places[curved], values, axis=1)(places[curved], 1)
    beyond = places[~curved] - places[curved][-1]
    straight = values[:, -1:] + slopes[:, -1:] * beyond
    slopes_beyond = np.broadcast_to(slopes[:, -1:], straight.shape)
    return CubicSpline(shapes, np.hstack([values, straight])), CubicSpline(shapes, np.hstack([slopes, slopes_beyond]))


def _log_height(places: np.ndarray, shape: float) -> np.ndarray:
    """Return log(−log F) of a sum, by a trapezoid rule over either variable."""
    scale = np.sqrt(max(1 - _VARIANCE * shape**2, 0.0))  # of the normal part
    if shape < 0.2:  # a wide normal part smooths Gumbel's
        gumbel = np.arange(-4.0, 45.0, 0.25)
        log_weights = -gumbel - np.exp(-gumbel) + np.log(0.25)
        at = (places[:, None] - shape * (gumbel - np.euler_gamma)) / scale
        log_below, log_above = (logsumexp(log_weights + log_ndtr(side * at), axis=1) for side in (1, -1))
    else:
        normal = np.arange(-12.0, 12.0, 0.05)
        log_weights = -0.5 * normal**2 + np.log(0.05 / np.sqrt(2 * np.pi))
        heights = np.exp(-((places[:, None] - scale * normal) / shape + np.euler_gamma))
        log_below = logsumexp(log_weights - heights, axis=1)
        log_above = logsumexp(log_weights + np.log(-np.expm1(-heights)), axis=1)
    # Without cancellation where F is almost 1.
    small = -np.log1p(-np.exp(np.minimum(log_above, -0.1)))
    return np.log(np.where(log_above < -1, small, -log_below))


@dataclass(frozen=True)
class Logistic(OneValue):
    """A likelihood of the density e^(y f) / (1 + e^(f − shift))^total."""

    @property
    def total(self) -> np.ndarray:
        """Exponent of the denominator, (n,)."""
        return np.ones_like(self.observed)

    @property
    def shift(self) -> np.ndarray:
        """Amount taken from the function values there, (n,)."""
        return np.zeros_like(self.observed)

    def along(self, f: np.ndarray) -> Derivatives:
        centred = f - self.shift
        log_density = self.observed * f - self.total * np.logaddexp(0.0, centred)
        slope = self.observed - self.total * expit(centred)
        return log_density, slope, self.total * expit(centred) * expit(-centred)

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        f = mean[:, 0] + self.offset
        averages = logistic_averages(f - self.shift, variance)
        value = self.observed * f - self.total * averages.log_normaliser
        return Averages(value, (self.observed - self.total * averages.probs)[:, None], self.total * averages.curvature)


@dataclass(frozen=True)
class Bernoulli(Logistic):
    """Outcomes 0 or 1, by their logit."""

    name = "bernoulli"

    @classmethod
    def largest(cls, parameters: Mapping[str, ArrayLike]) -> ArrayLike:
        return 1

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return logistic_averages(mean, variance).probs


@dataclass(frozen=True)
class Binomial(Logistic):
    """Successes among a number of trials, by their logit."""

    name = "binomial"
    parameters = ("total_count",)
    total_count: np.ndarray  # (n,)

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, ArrayLike]) -> None:
        count = parameters["total_count"]
        check_no_nan("total_count", count)
        check_not_negative("total_count", count)
        if np.any(np.asarray(count) != np.round(count)):
            raise ValueError(f"total_count must hold whole numbers, but got {count}.")

    @classmethod
    def largest(cls, parameters: Mapping[str, ArrayLike]) -> ArrayLike:
        return parameters["total_count"]

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray, total_count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, prob, curvature = logistic_averages(mean, variance)
        # Variance of a probability.
        between = np.maximum(prob - curvature - prob**2, 0.0)
        return total_count * prob, total_count * curvature + total_count**2 * between

    @property
    def constant(self) -> np.ndarray:
        failures = self.total_count - self.observed
        return gammaln(self.total_count + 1) - gammaln(self.observed + 1) - gammaln(failures + 1)

    @property
    def total(self) -> np.ndarray:
        return self.total_count


def _moments_of_counts(mean: np.ndarray, variance: np.ndarray, spread: Any = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of counts of variance m + spread m², log m being normal."""
    rate = np.exp(mean + variance / 2)
    return rate, rate + rate**2 * (np.expm1(variance) + spread * np.exp(variance))


@dataclass(frozen=True)
class NegativeBinomial(Logistic):
    """Counts, by the logarithm of their mean."""

    name = "negative_binomial"
    parameters = ("concentration",)
    concentration: np.ndarray  # r, (n,), of variance mean + mean² / r

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray, concentration: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _moments_of_counts(mean, variance, 1 / concentration)

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

    name = "poisson"

    predicted = staticmethod(_moments_of_counts)

    def guess(self) -> np.ndarray:
        return np.log(self.observed + 0.5)

    def along(self, f: np.ndarray) -> Derivatives:
        rate = np.exp(f)
        return self.observed * f - rate, self.observed - rate, rate

    @property
    def constant(self) -> np.ndarray:
        return -gammaln(self.observed + 1)

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        f = mean[:, 0] + self.offset
        rate = np.exp(f + variance / 2)
        return Averages(self.observed * f - rate, (self.observed - rate)[:, None], rate)


@dataclass(frozen=True)
class StudentT(OneValue):
    """Student's t about the function value."""

    name = "student_t"
    parameters = ("df", "scale")
    df: np.ndarray  # (n,)
    scale: np.ndarray  # (n,)
    is_bound: bool = True  # whether averages are of the mixture's bound

    @classmethod
    def largest(cls, parameters: Mapping[str, ArrayLike]) -> None:
        return None

    @staticmethod
    def predicted(
        mean: np.ndarray, variance: np.ndarray, df: np.ndarray, scale: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(divide="ignore"):
            noise_variance = np.where(df > 2, scale**2 * df / np.maximum(df - 2, 0.0), np.inf)
        return mean, variance + noise_variance

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

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        if not self.is_bound:
            return self.averaged(mean, variance)
        residual = self.observed - self.offset - mean[:, 0]
        square = residual**2 + variance
        weight = (self.df + 1) / (self.df * self.scale**2 + square)
        value = -0.5 * (self.df + 1) * np.log1p(square / self.scale**2 / self.df)
        return Averages(value, (weight * residual)[:, None], weight)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Class labels, by the softmax of k logits, one weight a row."""

    name = "categorical"
    parameters = ("num_classes",)
    labels: np.ndarray  # (n,)
    # (k, c) of orthonormal columns: function values are logits in it, less the offset
    basis: np.ndarray
    offset: np.ndarray  # of the logits, (n, k)

    @staticmethod
    def predicted(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        probs = softmax_averages(mean, variance).probs
        return probs / probs.sum(axis=1, keepdims=True)

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, ArrayLike]) -> None:
        whole_number("num_classes", parameters["num_classes"], 2)

    @classmethod
    def largest(cls, parameters: Mapping[str, ArrayLike]) -> ArrayLike:
        return parameters["num_classes"] - 1

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: Mapping[str, ArrayLike]) -> None:
        if observed.ndim != 1:
            is_column = observed.ndim == 2 and observed.shape[1] == 1
            remedy = "take labels[:, 0]" if is_column else "take argmax(-1) of codes"
            raise ValueError(f"class labels must have shape (n,), but got {observed.shape}; {remedy}.")
        super().check_observed(observed, parameters)

    @property
    def start(self) -> np.ndarray:
        return np.zeros((len(self.labels), self.basis.shape[1]))

    @property
    def codes(self) -> np.ndarray:
        """One-hot codes of the labels, (n, k)."""
        return np.eye(len(self.basis))[self.labels]

    def derivatives(self, values: np.ndarray) -> Derivatives:
        logits = values @ self.basis.T + self.offset
        logits -= logits.max(axis=-1, keepdims=True)
        probs = np.exp(logits)
        total = probs.sum(axis=-1, keepdims=True)
        probs /= total
        log_density = np.sum(self.codes * logits, axis=-1) - np.log(total[..., 0])
        # The trace of diag p − p pᵀ, in any basis.
        weight = (1 - np.sum(probs**2, axis=-1)) / self.basis.shape[1]
        return log_density, (self.codes - probs) @ self.basis, weight

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        # Contrasts leave a shift of all logits out.
        logits = mean @ self.basis.T + self.offset
        averages = softmax_averages(logits, variance)
        matrices = self.basis.T @ averages.curvature @ self.basis
        weight = np.trace(averages.curvature, axis1=1, axis2=2) / self.basis.shape[1]
        value = np.sum(self.codes * logits, axis=1) - averages.log_normaliser
        return Averages(value, (self.codes - averages.probs) @ self.basis, weight, matrices)


LIKELIHOODS: dict[str, type[Likelihood]] = {
    family.name: family for family in (Bernoulli, Binomial, Categorical, NegativeBinomial, Poisson, StudentT)
}


def logit_basis(num_classes: int, contrasts: bool) -> np.ndarray:
    """Return the basis of the logits, (k, c): contrasts, or each class its own."""
    return helmert(num_classes).T if contrasts else np.eye(num_classes)
