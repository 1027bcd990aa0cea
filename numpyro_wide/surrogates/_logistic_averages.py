"""Mean values of the logistic function over a normal logit, whatever its variance."""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, ndtr

_NARROW = 0.5  # standard deviation of a logit below which the sum is over its normal, else over a logistic variable
_NUM_NODES = 24
_LARGEST, _SPACING = 40.0, 0.25  # of the logistic variable


class LogisticAverages(NamedTuple):
    """Mean values over normal logits f, in the shape of their means.

    Attributes:
        log_normaliser: mean of log(1 + exp f).
        prob: mean of 1 / (1 + exp(-f)), the probability of 1.
        curvature: mean of its derivative, prob · (1 − prob) at f.
    """

    log_normaliser: np.ndarray
    prob: np.ndarray
    curvature: np.ndarray


def logistic_averages(mean: np.ndarray, variance: np.ndarray) -> LogisticAverages:
    """Average the logistic function and its integral over normal logits.

    The logistic function is a distribution function, of a logistic variable u: its mean is that of P(u < f) over u,
    whose terms are smooth however large the variance of f is.

    Args:
        mean: means of the logits, (n,).
        variance: their variances, (n,).
    """
    scale = np.sqrt(variance)
    found = np.empty((3, len(mean)))
    narrow = scale < _NARROW
    nodes, shares = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    logits = mean[narrow, None] + scale[narrow, None] * nodes
    prob = expit(logits)
    terms = np.stack([np.logaddexp(0.0, logits), prob, prob * expit(-logits)])
    found[:, narrow] = terms @ (shares / shares.sum())
    wide = scale[~narrow, None]
    logistics = np.arange(-_LARGEST, _LARGEST + _SPACING, _SPACING)
    shares = expit(logistics) * expit(-logistics)
    above = (mean[~narrow, None] - logistics) / wide
    density = np.exp(-0.5 * above**2) / np.sqrt(2 * np.pi)
    below = ndtr(above)
    terms = np.stack([wide * (above * below + density), below, density / wide])
    found[:, ~narrow] = terms @ (shares / shares.sum())
    return LogisticAverages(*found)
