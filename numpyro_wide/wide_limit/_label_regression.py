"""Regression on one-hot codes of classes, chosen and calibrated by leave-one-out (Rifkin and Klautau 2004)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.linalg import lapack
from scipy.special import log_softmax, logsumexp, softmax

from numpyro_wide.wide_limit._gp import inverse_of
from numpyro_wide.wide_limit._scale_problem import ScaleProblem

# Priors: normal of the log slope, and of the shift of each class.
_LOG_SLOPE, _SPREAD, _SHIFT = np.log(5.0), 0.5, 1.0
_NODES = np.linspace(-4.0, 4.0, 17)  # of the log slope, in posterior standard deviations


def codes_of(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return one-hot codes less their mean over classes, (n, k)."""
    return np.eye(num_classes)[labels] - 1 / num_classes


@dataclass(frozen=True)
class Calibration:
    """Class probabilities softmax(slope · f + shift) of code predictions f, averaged over the slope's posterior."""

    slopes: np.ndarray  # (nodes,)
    weights: np.ndarray  # (nodes,), of sum one
    shift: np.ndarray  # (k,)

    @classmethod
    def of(cls, values: np.ndarray, labels: np.ndarray, prior_spread: float = _SPREAD) -> "Calibration":
        """Fit to predictions (n, k), or to those of draws to be averaged over (draws, n, k), of labels (n,)."""
        values = np.asarray(values, float)
        mode = calibrated(values, labels, prior_spread=prior_spread)
        log_slope, shift = mode[0], mode[1:]
        along = lambda move: _log_posterior(np.append(log_slope + move, shift), values, labels, prior_spread)[0]  # noqa: E731
        step = 0.05
        curvature = (2 * along(0.0) - along(step) - along(-step)) / step**2
        spread = min(prior_spread, 1 / np.sqrt(max(curvature, 1e-12)))
        log_posterior = np.array([along(spread * node) for node in _NODES])
        return cls(np.exp(log_slope + spread * _NODES), softmax(log_posterior), shift)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, in the shape of predictions (..., k)."""
        by_node = (softmax(slope * values + self.shift, axis=-1) for slope in self.slopes)
        return sum(weight * probs for weight, probs in zip(self.weights, by_node, strict=True))

    def log_probs(self, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return log probabilities of labels (n,), (n,), averaged over draws if there are."""
        probs = self(values)[..., np.arange(len(labels)), labels]
        return np.log(np.maximum(probs if probs.ndim == 1 else probs.mean(axis=0), np.finfo(float).tiny))


def calibrated(
    values: np.ndarray, labels: np.ndarray, start: np.ndarray | None = None, prior_spread: float = _SPREAD
) -> np.ndarray:
    """Return the mode of the log slope and the shifts, (1 + k,)."""
    from scipy.optimize import minimize  # loaded late

    if start is None:
        start = np.append(_LOG_SLOPE, np.zeros(values.shape[-1]))

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = _log_posterior(parameters, values, labels, prior_spread)
        return -value, -gradient

    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-13, "gtol": 1e-6}).x


def _log_posterior(
    parameters: np.ndarray, values: np.ndarray, labels: np.ndarray, prior_spread: float = _SPREAD
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the log posterior of slope and shifts, its gradient, and that by the predictions."""
    slope, shift = np.exp(parameters[0]), parameters[1:]
    log_probs = log_softmax(slope * values + shift, axis=-1)
    by_draw = log_probs[..., np.arange(len(labels)), labels]
    residual = np.eye(values.shape[-1])[labels] - np.exp(log_probs)
    if values.ndim == 2:
        total = np.sum(by_draw)
    else:
        by_row = logsumexp(by_draw, axis=0)
        total = np.sum(by_row - np.log(len(values)))
        residual = np.exp(by_draw - by_row)[..., None] * residual
    distance = parameters - np.append(_LOG_SLOPE, np.zeros(len(shift)))
    precision = np.append(prior_spread**-2, np.full(len(shift), _SHIFT**-2))
    by_value = slope * residual
    by_shift = residual.reshape(-1, len(shift)).sum(axis=0)
    gradient = np.append(np.sum(by_value * values), by_shift) - precision * distance
    return float(total) - 0.5 * float(precision @ distance**2), gradient, by_value


class LeftOut:
    """Leave-one-out predictions of the codes (Mathematics, :eq:`left-out`)."""

    def __init__(self, covariance: np.ndarray, codes: np.ndarray):
        """Factor a covariance, (n, n), noise included, in place; ``LinAlgError`` if it is not positive definite."""
        factor, failed = lapack.dpotrf(covariance.T, lower=1, overwrite_a=1)
        if failed:
            raise np.linalg.LinAlgError("the covariance is not positive definite")
        self.log_det = 2 * float(np.sum(np.log(np.diagonal(factor))))
        self.inverse = inverse_of(factor)
        self.weights = self.inverse @ codes
        self.precision = np.diagonal(self.inverse)
        self.residual = self.weights / self.precision[:, None]
        self.mean = codes - self.residual

    def pull_back(self, slope: np.ndarray) -> np.ndarray:
        """Return the derivative by the covariance, from that by the means (n, k)."""
        scaled = slope / self.precision[:, None]
        of_weights = self.inverse @ scaled @ self.weights.T
        of_precision = (self.inverse * np.sum(scaled * self.residual, axis=1)) @ self.inverse
        return 0.5 * (of_weights + of_weights.T) - of_precision


class LabelScore:
    """Minus the log posterior of the scales, with leave-one-out probabilities of the labels as likelihood."""

    step: ClassVar[float] = 0.01

    def __init__(self, problem: ScaleProblem, labels: np.ndarray, num_classes: int):
        self.problem, self.labels, self.num_classes = problem, labels, num_classes
        self.codes = codes_of(labels, num_classes)
        self._parameters: np.ndarray | None = None  # a start for the next

    def __getitem__(self, rows: np.ndarray) -> "LabelScore":
        return LabelScore(self.problem[rows], self.labels[rows], self.num_classes)

    def left_out(self, logarithms: np.ndarray, gram: np.ndarray | None = None) -> LeftOut:
        """Return leave-one-out predictions of the codes, with a kernel that is known."""
        covariance = self.problem.gram(logarithms) if gram is None else gram.copy()
        if not np.isfinite(covariance).all():
            raise np.linalg.LinAlgError("the covariance is not finite")
        covariance.flat[:: len(covariance) + 1] += self.problem.scales(logarithms)["noise_scale"] ** 2
        return LeftOut(covariance, self.codes)

    def value(self, logarithms: np.ndarray, gram: np.ndarray | None = None) -> float:
        """Return the value without its gradient, which takes less."""
        try:
            found = self.left_out(logarithms, gram)
        except np.linalg.LinAlgError:
            return np.inf
        self._parameters = calibrated(found.mean, self.labels, self._parameters)
        value, _, _ = _log_posterior(self._parameters, found.mean, self.labels)
        return self.problem.with_prior(logarithms, value, np.zeros_like(logarithms))[0]

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient; not finite where there is none."""
        try:
            found = self.left_out(logarithms)
        except np.linalg.LinAlgError:
            return np.inf, np.zeros_like(logarithms)
        self._parameters = calibrated(found.mean, self.labels, self._parameters)
        value, _, by_value = _log_posterior(self._parameters, found.mean, self.labels)
        slope = found.pull_back(by_value)
        pulled = self.problem.pull_back(logarithms, slope)
        place, noise_scale = self.problem.place("noise_scale"), self.problem.scales(logarithms)["noise_scale"]
        pulled[place] += 2 * noise_scale**2 * np.trace(slope)
        return self.problem.with_prior(logarithms, value, pulled)
