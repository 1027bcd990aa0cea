"""Regression on one-hot codes of classes, chosen and calibrated by leave-one-out (Rifkin and Klautau 2004)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax, logsumexp, softmax

from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._scale_problem import Objective, ScaleProblem, laplace, mode_of

_NODES = np.linspace(-4.0, 4.0, 17)  # of the log slope, in posterior standard deviations


def codes_of(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return one-hot codes less their mean over classes, (n, k)."""
    return np.eye(num_classes)[labels] - 1 / num_classes


class Prior(NamedTuple):
    """Normal prior of the log slope, and of the shift of each class."""

    mean: np.ndarray  # (1 + k,)
    spread: np.ndarray

    @classmethod
    def of(cls, num_classes: int, slope_spread: float = 0.5) -> "Prior":
        """Return the prior before any labels, with this standard deviation of the log slope."""
        return cls(np.append(np.log(5.0), np.zeros(num_classes)), np.append(slope_spread, np.ones(num_classes)))


@dataclass(frozen=True)
class Calibration:
    """Class probabilities softmax(slope · f + shift) of code predictions f, averaged over the slope's posterior."""

    slopes: np.ndarray  # (nodes,)
    weights: np.ndarray  # (nodes,), of sum one
    shift: np.ndarray  # (k,)

    @classmethod
    def of(cls, values: np.ndarray, labels: np.ndarray, prior: Prior | None = None) -> "Calibration":
        """Fit to predictions (n, k), or to those of draws to be averaged over (draws, n, k), of labels (n,)."""
        values = np.asarray(values, float)
        prior = Prior.of(values.shape[-1]) if prior is None else prior
        mode = calibrated(values, labels, prior, prior.mean)
        log_slope, shift = mode[0], mode[1:]
        along = lambda move: _log_posterior(np.append(log_slope + move, shift), values, labels, prior)[0]  # noqa: E731
        step = 0.05
        curvature = (2 * along(0.0) - along(step) - along(-step)) / step**2
        spread = min(prior.spread[0], 1 / np.sqrt(max(curvature, 1e-12)))
        log_posterior = np.array([along(spread * node) for node in _NODES])
        return cls(np.exp(log_slope + spread * _NODES), softmax(log_posterior), shift)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, in the shape of predictions (..., k)."""
        nodes = zip(self.slopes, self.weights, strict=True)
        return sum(weight * softmax(slope * values + self.shift, axis=-1) for slope, weight in nodes)

    @property
    def slope(self) -> float:
        """Slope in the middle of the nodes."""
        return float(self.slopes[len(self.slopes) // 2])

    def as_prior(self, spread: float) -> Prior:
        """Return the prior around this calibration."""
        mean = np.append(np.log(self.slope), self.shift)
        return Prior(mean, np.full(len(mean), spread))

    def changed(self, old: "Calibration", new: "Calibration") -> "Calibration":
        """Return this calibration, changed as ``new`` differs from ``old``."""
        return Calibration(self.slopes * (new.slope / old.slope), self.weights, self.shift + new.shift - old.shift)

    def log_probs(self, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return log probabilities of labels (n,), (n,), averaged over draws if there are."""
        probs = self(values)[..., np.arange(len(labels)), labels]
        return np.log(np.maximum(probs if probs.ndim == 1 else probs.mean(axis=0), np.finfo(float).tiny))


def calibrated(values: np.ndarray, labels: np.ndarray, prior: Prior, start: np.ndarray) -> np.ndarray:
    """Return the mode of the log slope and the shifts, (1 + k,)."""
    from scipy.optimize import minimize  # loaded late

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = _log_posterior(parameters, values, labels, prior)
        return -value, -gradient

    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-13, "gtol": 1e-6}).x


def _log_posterior(
    parameters: np.ndarray, values: np.ndarray, labels: np.ndarray, prior: Prior
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the log posterior of slope and shifts, its gradient, and that by the predictions."""
    slope, shift = np.exp(parameters[0]), parameters[1:]
    log_probs = log_softmax(slope * values + shift, axis=-1)
    by_draw = log_probs[..., np.arange(len(labels)), labels]
    residual = np.eye(len(shift))[labels] - np.exp(log_probs)
    total = np.sum(by_draw)
    if values.ndim == 3:
        by_row = logsumexp(by_draw, axis=0)
        total = np.sum(by_row - np.log(len(values)))
        residual = np.exp(by_draw - by_row)[..., None] * residual
    distance = (parameters - prior.mean) / prior.spread
    by_value = slope * residual
    by_shift = residual.reshape(-1, len(shift)).sum(axis=0)
    gradient = np.append(np.sum(by_value * values), by_shift) - distance / prior.spread
    return float(total - 0.5 * distance @ distance), gradient, by_value


class LabelScore(Objective):
    """Probabilities of labels given all others, by calibrated predictions of codes (Mathematics, :eq:`left-out`)."""

    step = 0.01

    def __init__(self, problem: ScaleProblem, labels: np.ndarray, num_classes: int):
        self.problem, self.labels, self.num_classes = problem, labels, num_classes
        self.codes, self._prior = codes_of(labels, num_classes), Prior.of(num_classes)
        self._parameters = self._prior.mean  # a start for the next

    def __getitem__(self, rows: np.ndarray) -> "LabelScore":
        return LabelScore(self.problem[rows], self.labels[rows], self.num_classes)

    def likelihood(self, covariance: np.ndarray) -> tuple[float, np.ndarray]:
        process = Conditioned(covariance, self.codes)
        value, by_prediction = self.log_prob(process)
        return value, process.left_out_slope(by_prediction)

    def log_prob(self, process: Conditioned) -> tuple[float, np.ndarray]:
        """Return the log posterior of the best calibration, and its derivative by the predictions, (n, k)."""
        self._parameters = calibrated(process.left_out, self.labels, self._prior, self._parameters)
        value, _, by_prediction = _log_posterior(self._parameters, process.left_out, self.labels, self._prior)
        return value, by_prediction


FEW_LABELS, _NUM_LABEL_FOLDS = 80, 5  # so few fit the scales chosen by them: calibrate by others in folds
_SLOPE_OF_FEW = 1.5  # prior standard deviation of the logarithm of their slope
RELEVANCE = 0.3  # prior standard deviation of the logarithms of the inputs' scales: labels say little of each


def fit_labels(
    problems: Iterable[ScaleProblem],
    labels: np.ndarray,
    num_classes: int,
    max_rows: int,
    num_rows: int,
    num_restarts: int,
    random: np.random.Generator,
) -> dict[str, Any]:
    """Choose among problems by leave-one-out probabilities of labels on some rows; calibrate on all rows."""
    subset = np.sort(of_every_class(labels, random.permutation(len(labels)), max_rows))
    rows = np.sort(of_every_class(labels[subset], np.arange(len(subset)), num_rows))
    scores = (LabelScore(problem, labels, num_classes) for problem in problems)
    ranking = _ranked(scores, subset, rows, num_restarts, random)
    _, score, logarithms = ranking[0]
    _, _, errors, _ = laplace(score[subset], logarithms)
    problem, gram = score.problem, score.problem.gram(logarithms)
    if len(subset) < len(labels):
        logarithms = _with_best_noise(score, logarithms, gram)
    process = Conditioned(gram, score.codes, problem.noise_variance(logarithms))
    # In the size of the residuals, on which probabilities do not depend.
    size = float(np.sqrt(np.mean(process.weights**2 / process.left_out_precision[:, None])))
    scales = problem.scales(logarithms)
    scales |= {name: size * scales[name] for name in ("readout_w_std", "noise_scale")}
    if len(labels) <= FEW_LABELS:
        values = _cross_fitted([score for _, score, _ in ranking], random)
        calibration = Calibration.of(values, labels, Prior.of(num_classes, _SLOPE_OF_FEW))
    else:
        values, calibration = process.left_out, Calibration.of(process.left_out, labels)
    return problem.fields(scales, errors) | {
        "log_evidence": process.log_evidence(size),
        "table": [row for row, *_ in ranking],
        "calibration": calibration,
        "held_out": calibration.log_probs(values, labels),
    }


def _ranked(
    scores: Iterable[LabelScore], subset: np.ndarray, rows: np.ndarray, num_restarts: int, random: np.random.Generator
) -> list[tuple[dict[str, Any], LabelScore, np.ndarray]]:
    """Fit scales to a subset, from starts on some of its rows; return rows of the table and logarithms, best first."""
    ranking = []
    for score in scores:
        subset_score, problem = score[subset], score.problem
        logarithms = mode_of(subset_score, rows, num_restarts, random)
        process = Conditioned(subset_score.problem.covariance(logarithms), subset_score.codes)
        by_row = Calibration.of(process.left_out, subset_score.labels).log_probs(process.left_out, subset_score.labels)
        row = problem.row() | {"noise_scale": problem.noise_variance(logarithms) ** 0.5}
        row |= {"held_out": float(np.mean(by_row)), "held_out_se": float(np.std(by_row) / np.sqrt(len(by_row)))}
        ranking.append((row, score, logarithms))
    return sorted(ranking, key=lambda entry: -entry[0]["held_out"])


def _cross_fitted(scores: list[LabelScore], random: np.random.Generator) -> np.ndarray:
    """Predict the codes of each fifth of the rows, (n, k), by what is chosen on the other rows alone."""
    labels, values = scores[0].labels, np.empty_like(scores[0].codes)
    for train, test in folds_of(labels, random.random(len(labels)), _NUM_LABEL_FOLDS):
        _, score, logarithms = _ranked(scores, train, np.arange(len(train)), 1, random)[0]
        gram, noise_variance = score.problem.gram(logarithms), score.problem.noise_variance(logarithms)
        process = Conditioned(gram[np.ix_(train, train)], score.codes[train], noise_variance)
        values[test] = process.mean(gram[np.ix_(test, train)])
    return values


def folds_of(labels: np.ndarray, order: np.ndarray, num_folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows that each fold keeps and leaves out, the same share of each class, whose rows have an order."""
    folds = np.argsort(np.lexsort((order, labels))) % num_folds
    for fold in np.unique(folds):
        yield np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)


def of_every_class(labels: np.ndarray, rows: np.ndarray, max_rows: int) -> np.ndarray:
    """Return the first rows, and one of every other class."""
    first_rows = rows[:max_rows]
    missing = np.setdiff1d(labels[rows], labels[first_rows])
    return np.concatenate([first_rows, *[rows[labels[rows] == label][:1] for label in missing]])


def _with_best_noise(score: LabelScore, logarithms: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return the logarithms with the best noise for all rows, of which each value costs a factorisation."""
    from scipy.optimize import minimize_scalar  # loaded late

    problem = score.problem
    direction = np.arange(len(logarithms)) == problem.place("noise_scale")

    def loss(move: float) -> float:
        moved = logarithms + move * direction
        try:
            process = Conditioned(gram, score.codes, problem.noise_variance(moved))
        except ValueError:  # too little noise
            return np.inf
        return problem.prior(moved) - score.log_prob(process)[0]

    optimum = minimize_scalar(loss, bounds=(-2.0, 1.0), method="bounded", options={"xatol": 0.05})
    return logarithms + optimum.x * direction
