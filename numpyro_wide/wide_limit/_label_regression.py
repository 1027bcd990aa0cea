"""Regression on one-hot codes of classes, chosen and calibrated by leave-one-out (Rifkin and Klautau 2004)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.linalg import lapack
from scipy.special import log_softmax, logsumexp, softmax

from numpyro_wide.wide_limit._gp import Conditioned, inverse_of
from numpyro_wide.wide_limit._scale_problem import ScaleProblem, laplace, mode_of

_NODES = np.linspace(-4.0, 4.0, 17)  # of the log slope, in posterior standard deviations


def codes_of(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return one-hot codes less their mean over classes, (n, k)."""
    return np.eye(num_classes)[labels] - 1 / num_classes


class Prior(NamedTuple):
    """Normal priors of the log slope, and of the shift of each class."""

    log_slope: float = float(np.log(5.0))
    spread: float = 0.5
    shift: np.ndarray | float = 0.0
    shift_spread: float = 1.0


_PRIOR = Prior()


@dataclass(frozen=True)
class Calibration:
    """Class probabilities softmax(slope · f + shift) of code predictions f, averaged over the slope's posterior."""

    slopes: np.ndarray  # (nodes,)
    weights: np.ndarray  # (nodes,), of sum one
    shift: np.ndarray  # (k,)

    @classmethod
    def of(cls, values: np.ndarray, labels: np.ndarray, prior: Prior = _PRIOR) -> "Calibration":
        """Fit to predictions (n, k), or to those of draws to be averaged over (draws, n, k), of labels (n,)."""
        values = np.asarray(values, float)
        mode = calibrated(values, labels, prior=prior)
        log_slope, shift = mode[0], mode[1:]
        along = lambda move: _log_posterior(np.append(log_slope + move, shift), values, labels, prior)[0]  # noqa: E731
        step = 0.05
        curvature = (2 * along(0.0) - along(step) - along(-step)) / step**2
        spread = min(prior.spread, 1 / np.sqrt(max(curvature, 1e-12)))
        log_posterior = np.array([along(spread * node) for node in _NODES])
        return cls(np.exp(log_slope + spread * _NODES), softmax(log_posterior), shift)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, in the shape of predictions (..., k)."""
        by_node = (softmax(slope * values + self.shift, axis=-1) for slope in self.slopes)
        return sum(weight * probs for weight, probs in zip(self.weights, by_node, strict=True))

    @property
    def slope(self) -> float:
        """Slope in the middle of the nodes."""
        return float(self.slopes[len(self.slopes) // 2])

    def as_prior(self, spread: float) -> Prior:
        """Return priors around this calibration."""
        return Prior(float(np.log(self.slope)), spread, self.shift, spread)

    def changed(self, one: "Calibration", other: "Calibration") -> "Calibration":
        """Return this calibration, changed as the second differs from the first."""
        return Calibration(self.slopes * (other.slope / one.slope), self.weights, self.shift + other.shift - one.shift)

    def log_probs(self, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return log probabilities of labels (n,), (n,), averaged over draws if there are."""
        probs = self(values)[..., np.arange(len(labels)), labels]
        return np.log(np.maximum(probs if probs.ndim == 1 else probs.mean(axis=0), np.finfo(float).tiny))


def calibrated(
    values: np.ndarray, labels: np.ndarray, start: np.ndarray | None = None, prior: Prior = _PRIOR
) -> np.ndarray:
    """Return the mode of the log slope and the shifts, (1 + k,)."""
    from scipy.optimize import minimize  # loaded late

    if start is None:
        start = np.append(prior.log_slope, np.zeros(values.shape[-1]) + prior.shift)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = _log_posterior(parameters, values, labels, prior)
        return -value, -gradient

    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-13, "gtol": 1e-6}).x


def _log_posterior(
    parameters: np.ndarray, values: np.ndarray, labels: np.ndarray, prior: Prior = _PRIOR
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
    distance = parameters - np.append(prior.log_slope, np.zeros(len(shift)) + prior.shift)
    precision = np.append(prior.spread**-2, np.full(len(shift), prior.shift_spread**-2))
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


# The choice of an architecture, of its scales and of the calibration.

_FEW_LABELS, _NUM_LABEL_FOLDS = 80, 5  # rows, up to which calibration is by labels that the scales have not seen
_OF_FEW = Prior(spread=1.5)  # of their calibration
_RELEVANCE = 0.3  # prior standard deviation of the logarithms of the inputs' scales: labels say little of each


def fit_labels(
    problems: Iterable[ScaleProblem],
    labels: np.ndarray,
    num_classes: int,
    most: int,
    num_rows: int,
    num_restarts: int,
    random: np.random.Generator,
) -> dict[str, Any]:
    """Choose among problems by leave-one-out probabilities of labels on some rows; calibrate on all rows."""
    # All rows in their order, where they are few.
    some = np.sort(of_every_class(labels, random.permutation(len(labels)), most))
    rows = np.sort(of_every_class(labels[some], np.arange(len(some)), num_rows))
    tried = _tried(map(_with_narrow_relevance, problems), labels, num_classes, some, rows, num_restarts, random)
    _, problem, score, logarithms, left_out = tried[0]
    _, _, errors = laplace(score, logarithms)
    if len(some) < len(labels):
        score = LabelScore(problem, labels, num_classes)
        gram = problem.gram(logarithms)
        logarithms = _with_best_noise(score, logarithms, gram)
        left_out = score.left_out(logarithms, gram)
    # Function and noise in the size that the residuals have: probabilities do not depend on it.
    size = float(np.sqrt(np.mean(left_out.residual**2 * left_out.precision[:, None])))
    scales = problem.scales(logarithms)
    scales |= {name: size * scales[name] for name in ("readout_w_std", "noise_scale")}
    quadratic, count = np.sum(left_out.weights * score.codes) / size**2, len(score.codes)
    log_evidence = -0.5 * quadratic - 0.5 * num_classes * (left_out.log_det + count * np.log(2 * np.pi * size**2))
    if len(labels) <= _FEW_LABELS:
        values = _cross_fitted([problem for _, problem, *_ in tried], labels, num_classes, random)
        calibration = Calibration.of(values, labels, _OF_FEW)
    else:
        values, calibration = left_out.mean, Calibration.of(left_out.mean, labels)
    return problem.fields(scales, errors) | {
        "log_evidence": float(log_evidence),
        "table": [row for row, *_ in tried],
        "calibration": calibration,
        "held_out": calibration.log_probs(values, labels),
    }


def _tried(
    problems: Iterable[ScaleProblem],
    labels: np.ndarray,
    num_classes: int,
    some: np.ndarray,
    rows: np.ndarray,
    num_restarts: int,
    random: np.random.Generator,
) -> list[tuple]:
    """Fit each problem to some rows; return row of the table, problem, score, logarithms and LeftOut, best first."""
    tried = []
    for problem in problems:
        score = LabelScore(problem[some], labels[some], num_classes)
        logarithms = mode_of(score, rows, num_restarts, random)
        left_out = score.left_out(logarithms)
        by_row = Calibration.of(left_out.mean, score.labels).log_probs(left_out.mean, score.labels)
        row = problem.row() | {"held_out": float(np.mean(by_row)), "held_out_se": _standard_error(by_row)}
        row["noise_scale"] = float(problem.scales(logarithms)["noise_scale"])
        tried.append((row, problem, score, logarithms, left_out))
    return sorted(tried, key=lambda one: -one[0]["held_out"])


def _cross_fitted(
    problems: list[ScaleProblem], labels: np.ndarray, num_classes: int, random: np.random.Generator
) -> np.ndarray:
    """Predict the codes of each fifth of the rows, (n, k), by what is chosen on the other rows alone.

    Scales that are chosen by the leave-one-out probabilities of few labels fit these labels.
    """
    order = np.lexsort((random.random(len(labels)), labels))
    folds = np.argsort(order) % _NUM_LABEL_FOLDS  # of every class about a fifth
    values = np.empty((len(labels), num_classes))
    for fold in np.unique(folds):
        kept, out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        _, problem, score, logarithms, _ = _tried(problems, labels, num_classes, kept, np.arange(len(kept)), 1, random)[
            0
        ]
        gram, noise_variance = problem.gram(logarithms), problem.scales(logarithms)["noise_scale"] ** 2
        known = Conditioned(gram[np.ix_(kept, kept)], score.codes, noise_variance)
        values[out] = known.mean(gram[np.ix_(out, kept)])
    return values


def _with_narrow_relevance(problem: ScaleProblem) -> ScaleProblem:
    spreads = problem.spreads.copy()
    spreads[len(spreads) - problem.medians.get("input_scale", np.empty(0)).size :] = _RELEVANCE
    return replace(problem, spreads=spreads)


def of_every_class(labels: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first rows, and one of every other class."""
    some = rows[:most]
    missing = np.setdiff1d(labels[rows], labels[some])
    return np.concatenate([some, *[rows[labels[rows] == label][:1] for label in missing]])


def _standard_error(by_row: np.ndarray) -> float:
    return float(np.std(by_row) / np.sqrt(len(by_row)))


def _with_best_noise(score: LabelScore, logarithms: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return the logarithms with the best noise for all rows, of which each value costs a factorisation."""
    from scipy.optimize import minimize_scalar  # loaded late

    place = score.problem.place("noise_scale")
    moved = lambda move: logarithms + move * (np.arange(len(logarithms)) == place)  # noqa: E731
    found = minimize_scalar(
        lambda move: score.value(moved(move), gram), bounds=(-2.0, 1.0), method="bounded", options={"xatol": 0.05}
    )
    return moved(found.x)
