"""Leave-one-out log densities of known rows, and a test for discrete targets."""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide.estimators._posteriors import Mixture, Moments

LARGEST_SHAPE = 0.7  # reliable Pareto shape (Vehtari et al. 2017)
_NUM_STACKING = 200  # steps of EM
_MOST_UNSURE = 0.1  # share of rows above it, with which the average is too large


class LeaveOneOut(NamedTuple):
    """Leave-one-out log densities by row."""

    by_row: np.ndarray  # (rows,)
    share_unsure: float = 0.0  # share of rows with a larger Pareto shape

    def __str__(self) -> str:
        return average(self.by_row)

    @property
    def reliability(self) -> str:
        """Clause for the report."""
        found = f"{self.share_unsure:.1%} of the rows have a Pareto shape above {LARGEST_SHAPE}"
        if self.share_unsure < _MOST_UNSURE:
            return found
        return f"{found}, for draws know them: new rows score some tenths of a nat less"


def average(by_row: np.ndarray) -> str:
    """Return the mean of (rows,) with its standard error."""
    return f"{np.mean(by_row):.4f} (standard error {np.std(by_row) / np.sqrt(len(by_row)):.2g})"


def stacking_weight(one: np.ndarray, other: np.ndarray) -> float:
    """Return the first's weight in a mixture by log densities (rows,): the posterior mean under a uniform prior."""
    weights = (np.arange(200) + 0.5) / 200
    by_weight = np.logaddexp(np.log(weights) + one[:, None], np.log1p(-weights) + other[:, None]).sum(axis=0)
    return float(softmax(by_weight) @ weights)


def chain_weights(by_chain: np.ndarray) -> np.ndarray:
    """Return weights of chains by log densities (chains, rows): halfway from equal ones to stacking (Yao 2018)."""
    equal = np.full(len(by_chain), 1 / len(by_chain))
    weights = equal
    for _ in range(_NUM_STACKING):
        weights = softmax(np.log(weights + 1e-30)[:, None] + by_chain, axis=0).mean(axis=1)
    return (equal + weights) / 2


def of_regression(function: Moments, y: np.ndarray) -> LeaveOneOut:
    """Estimate leave-one-out log densities of y (rows, k) from the posterior at the rows (Rasmussen 2006, p. 117)."""
    mean, variance, noise_variance = function
    # Rounding may make the posterior as wide as the noise.
    share = np.maximum(1 - variance / noise_variance, 1e-10)
    left_out = Mixture(y - (y - mean) / share, variance / share + noise_variance)
    return averaged(left_out.by_draw(y))


def averaged(by_draw: np.ndarray) -> LeaveOneOut:
    """Average leave-one-out log densities, (draws, rows), over draws (PSIS; Vehtari et al. 2017)."""
    if len(by_draw) == 1:
        return LeaveOneOut(by_draw[0])
    rows, num_unsure = [], 0
    for row in by_draw.T:
        log_weights, shape = pareto_smoothed(-row)
        num_unsure += np.isfinite(shape) and shape > LARGEST_SHAPE
        rows.append(logsumexp(log_weights + row) - logsumexp(log_weights))
    return LeaveOneOut(np.array(rows), num_unsure / len(rows))


def is_better(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether log densities of ten rows or more are better by two standard errors, or others not finite."""
    gain = one - other
    is_clear = len(gain) >= 10 and gain.mean() > 2 * np.std(gain) / np.sqrt(len(gain))
    return bool(is_clear or not np.isfinite(other).all())


def has_steps(targets: np.ndarray, noise_scale: float) -> bool:
    """Return whether targets take few values further apart than the noise."""
    by_target = (np.unique(column) for column in targets.reshape(len(targets), -1).T)
    return any(len(values) < len(targets) / 2 and np.median(np.diff(values)) > noise_scale for values in by_target)
