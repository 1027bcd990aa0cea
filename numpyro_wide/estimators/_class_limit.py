"""Infinitely wide classifier: a Gaussian surrogate of the likelihood, probabilities averaged over its logits."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit, softmax

from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._report import Report
from numpyro_wide.machine import double_precision
from numpyro_wide.surrogates import fitted_surrogate
from numpyro_wide.wide_limit import fcn_kernel

_COMPARED = 300  # rows on which architectures and readout scales are compared
_MOST_KNOWN = 1500  # rows that the infinitely wide network predicts from: the surrogate's fit takes n³
_READOUT_SCALES = (1.0, 3.0, 10.0, 30.0, 100.0)
_ARCHITECTURES = (("erf", 1), ("relu", 1), ("gelu", 1), ("gelu", 2))
_B_STD = 0.5
_NUM_FOLDS = 3
_FEW_NODES = 32  # of the surrogate's fit where it is one of many, and of several classes
_FEWEST = 50  # rows, however small the budget
_SECONDS = 100.0  # that comparison and fit take at most
_NUM_NORMALS = 256  # draws of the logits, in antithetic pairs
_BLOCK = 256  # rows predicted at a time


@dataclass(frozen=True)
class ClassScales:
    """An architecture and its scales.

    Attributes:
        activation: name of the activation.
        depth: number of hidden layers.
        readout_scale: factor of the readout's scale over the one that keeps the variance at one.
    """

    activation: str
    depth: int
    readout_scale: float

    def keywords(self) -> dict[str, Any]:
        """Return the scales as keywords of :func:`fcn_kernel` and of a network."""
        from numpyro_wide.nn import FCN

        found = FCN(self.depth, 1, self.activation, b_std=_B_STD).scales()
        found["readout_w_std"] = self.readout_scale * float(found["readout_w_std"])
        del found["input_scale"]
        return found


@dataclass(frozen=True)
class ClassLimit:
    """Posterior of the logits under a fitted surrogate, a Gaussian process for each.

    Attributes:
        scales: the network.
        inputs: standardised inputs of the fit, (n, d).
        labels: numbers of the classes, (n,).
        targets: the surrogate's targets, (n, c), one column for two classes.
        noise_variance: the surrogate's noise variances, (n,).
    """

    scales: ClassScales
    inputs: np.ndarray
    labels: np.ndarray
    targets: np.ndarray
    noise_variance: np.ndarray

    @classmethod
    def fit(cls, scales: ClassScales, x: np.ndarray, labels: np.ndarray, num_classes: int) -> "ClassLimit":
        """Fit the surrogate at the wide limit.

        Args:
            scales: the network.
            x: standardised inputs, (n, d).
            labels: numbers of the classes, (n,).
            num_classes: number of classes.
        """
        targets, noise_variance = _surrogate(_gram(scales, x), labels, num_classes)
        return cls(scales, x, labels, targets, noise_variance)

    def logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean, (m, c), and variance, (m,), of the logits, those of one row independent.

        Args:
            x: standardised inputs, (m, d).
        """
        parts = []
        condition = _conditional(_gram(self.scales, self.inputs), self.targets, self.noise_variance)
        kernel = fcn_kernel(self.scales.depth, self.scales.activation, **self.scales.keywords())
        for start in range(0, len(x), _BLOCK):
            rows = x[start : start + _BLOCK]
            with double_precision():
                cross, prior = (np.asarray(found[0]) for found in (kernel(rows, self.inputs), kernel(rows)))
            parts.append(condition(cross, np.diagonal(prior)))
        means, variances = zip(*parts, strict=True)
        return np.concatenate(means), np.concatenate(variances)

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, averaged over the logits, (m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        mean, variance = self.logits(x)
        return _averaged(mean, variance)


def choose(
    x: np.ndarray, labels: np.ndarray, num_classes: int, depth: int | None, clock: Clock, random: Any, report: Report
) -> ClassLimit:
    """Choose readout scale and architecture by the log probability of rows left out, and fit to all that is paid for.

    The surrogate knows the labels that it was fitted to, and rows left out of its posterior alone would make large
    scales look better than they are: so folds are left out of its fit.

    Args:
        x: standardised inputs, (n, d).
        labels: numbers of the classes, (n,).
        num_classes: number of classes.
        depth: number of hidden layers, or None to choose it.
        clock: clock of the whole fit.
        random: generator of the choice of rows.
        report: report, to which a section is added.
    """
    rows = random.permutation(len(x))
    payable = min(1.0, (clock.budget / _SECONDS) ** (1 / 3))
    some = _of_every_class(labels, rows, max(_FEWEST, int(payable * _COMPARED)))
    data = labels[some], num_classes
    activations = _ARCHITECTURES if depth is None else tuple((name, depth) for name, layers in _ARCHITECTURES[:3])
    unit = ClassScales(*activations[0], 1.0)
    gram = _gram(unit, x[some])
    scores = {replace(unit, readout_scale=scale): _left_out(scale**2 * gram, *data) for scale in _READOUT_SCALES}
    best_scale = max(scores, key=lambda scales: scores[scales]).readout_scale
    for kind in activations[1:]:
        other = ClassScales(*kind, best_scale)
        scores[other] = _left_out(_gram(other, x[some]), *data)
    best = max(scores, key=lambda scales: scores[scales])
    heading = f"activation  depth  readout scale  log probability of a label left out, {_NUM_FOLDS} folds"
    report.add("Infinitely wide network", heading)
    for scales, score in sorted(scores.items(), key=lambda pair: -pair[1]):
        line = f"{scales.activation:>10}  {scales.depth:>5}  {scales.readout_scale:>13g}  {score:.4f}"
        report.add("Infinitely wide network", line)
    known = _of_every_class(labels, rows, max(_FEWEST, int(payable * _MOST_KNOWN)))
    report.add("Infinitely wide network", f"chosen on {len(some)} rows; predictions from {len(known)} of {len(x)}")
    return ClassLimit.fit(best, x[known], labels[known], num_classes)


def _gram(scales: ClassScales, x: np.ndarray) -> np.ndarray:
    """Return the covariance of a logit between rows, in float64."""
    with double_precision():
        return np.array(fcn_kernel(scales.depth, scales.activation, **scales.keywords())(x)[0])


def _surrogate(
    gram: np.ndarray, labels: np.ndarray, num_classes: int, num_nodes: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return targets, (n, c), and noise variances, (n,), of the surrogate of the labels."""
    kind: dict[str, Any] = {"num_classes": num_classes, "num_nodes": num_nodes} if num_classes > 2 else {}
    with double_precision(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the surrogate's means and weights still move")
        found = fitted_surrogate(labels, "categorical" if kind else "bernoulli", gram, **kind)
    targets = np.asarray(found.targets, float).reshape(len(gram), -1)
    return targets, np.asarray(found.noise_scale, float).reshape(len(gram)) ** 2


def _conditional(gram: np.ndarray, targets: np.ndarray, noise_variance: np.ndarray) -> Callable[..., tuple]:
    """Return the moments of the logits at other rows as a function of their covariances with these, and variances."""
    factor = cho_factor(gram + np.diag(noise_variance), lower=True)
    weights = cho_solve(factor, targets)

    def moments(cross: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        explained = np.sum(cross * cho_solve(factor, cross.T).T, axis=1)
        return cross @ weights, np.maximum(prior - explained, 0.0)

    return moments


def _left_out(gram: np.ndarray, labels: np.ndarray, num_classes: int) -> float:
    """Return the mean log probability of labels, each given the folds that it is not in; folds share classes out."""
    folds = np.empty(len(gram), int)
    folds[np.argsort(labels, kind="stable")] = np.arange(len(gram)) % _NUM_FOLDS
    found = []
    for fold in np.unique(folds):
        kept, out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        known = gram[np.ix_(kept, kept)]
        condition = _conditional(known, *_surrogate(known, labels[kept], num_classes, _FEW_NODES))
        probs = _averaged(*condition(gram[np.ix_(out, kept)], np.diagonal(gram)[out]))
        found.append(np.log(np.maximum(probs[np.arange(len(probs)), labels[out]], 1e-300)))
    return float(np.mean(np.concatenate(found)))


def _of_every_class(labels: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first of the rows, and of every class that is not among them the first."""
    some = rows[:most]
    missing = np.setdiff1d(labels, labels[some])
    return np.concatenate([some, *[rows[labels[rows] == label][:1] for label in missing]])


def _averaged(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Average probabilities over independent Gaussian logits, (m, c) and (m,)."""
    scale = np.sqrt(variance)[:, None]
    if mean.shape[1] == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        ones = expit(mean + scale * nodes) @ (weights / weights.sum())
        return np.stack([1 - ones, ones], axis=1)
    half = np.random.default_rng(0).normal(size=(_NUM_NORMALS // 2, mean.shape[1]))
    total = np.zeros_like(mean)
    for normals in (*half, *-half):
        total += softmax(mean + scale * normals, axis=1)
    return total / _NUM_NORMALS
