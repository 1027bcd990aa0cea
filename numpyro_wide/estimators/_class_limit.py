"""Infinitely wide classifier: architecture and scales by the rows, probabilities averaged over the logits."""

from dataclasses import replace
from typing import Any

import numpy as np

from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._report import Report
from numpyro_wide.wide_limit import WideLimitFit, fit

_COMPARED = 300  # rows to which architectures and scales are fitted
_MOST_KNOWN = 1500  # rows that the infinitely wide network predicts from: the surrogate's fit takes n³
_ARCHITECTURES = (("erf", 1), ("relu", 1), ("gelu", 2))
_FEWEST = 50  # rows, however small the budget
_SECONDS = 100.0  # that comparison and fit take at most


class ClassLimit:
    """Infinitely wide network of classes, with probabilities of two as of more.

    Args:
        fit: the network, fitted to standardised inputs and the numbers of the classes.
    """

    def __init__(self, fit: WideLimitFit):
        self.fit = fit

    def prepare(self) -> None:
        """Find the surrogate that predictions are made with, which the fit keeps: the first would wait for it."""
        self.probabilities(self.fit.inputs[:1])

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, averaged over the logits, (m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        probs = self.fit.predict(x)
        return probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)


def choose(
    x: np.ndarray, labels: np.ndarray, num_classes: int, depth: int | None, clock: Clock, random: Any, report: Report
) -> WideLimitFit:
    """Choose architecture and scales on some rows, and predict from all that is paid for.

    Args:
        x: standardised inputs, (n, d).
        labels: numbers of the classes, (n,).
        num_classes: number of classes.
        depth: number of hidden layers, or None to choose it.
        clock: clock of the whole fit.
        random: generator of the choice of rows.
        report: report, to which a section is added.
    """
    clock.begin("scales of the infinitely wide network")
    rows = random.permutation(len(x))
    payable = min(1.0, (clock.budget / _SECONDS) ** (1 / 3))
    some = _of_every_class(labels, rows, max(_FEWEST, int(payable * _COMPARED)))
    kind: dict[str, Any] = {"likelihood": "categorical", "num_classes": num_classes}
    if num_classes == 2:
        kind = {"likelihood": "bernoulli"}
    fits = [
        fit(x[some], labels[some], activation=name, depth=depth or layers, num_restarts=1, num_rows=len(some), **kind)
        for name, layers in _ARCHITECTURES
    ]
    fits.sort(key=lambda found: -found.table[0]["held_out"])
    best = replace(fits[0], table=[row for found in fits for row in found.table])
    known = _of_every_class(labels, rows, max(_FEWEST, int(payable * _MOST_KNOWN)))
    scales = ", ".join(f"{name} {np.round(value, 3)}" for name, value in best.scales.items())
    report.add(
        "Infinitely wide network",
        "held out: log probability of a label left out, in three folds; the largest is chosen",
        str(best),
        f"scales {scales}",
        f"chosen on {len(some)} rows; predictions from {len(known)} of {len(x)}",
    )
    return replace(best, inputs=x[known], targets=labels[known])


def _of_every_class(labels: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first of the rows, and of every class that is not among them the first."""
    some = rows[:most]
    missing = np.setdiff1d(labels, labels[some])
    return np.concatenate([some, *[rows[labels[rows] == label][:1] for label in missing]])
