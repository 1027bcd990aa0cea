"""Ratio of two normalisers, from draws of both distributions: arrays in, arrays out, in float64."""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, logsumexp

from numpyro_wide import _arviz


class Bridge(NamedTuple):
    r"""Log ratio of two normalisers, as :func:`bridge` finds it.

    Attributes:
        log_ratio: $\log Z_1 - \log Z_0$.
        overlap: overlap $\int p_0 p_1 / (s_0 p_0 + s_1 p_1)$ of the two densities, 1 where they are the same.
        lower: influence of each draw of $p_0$, of the shape of the draws: an estimate's error is the mean of these,
            less that of ``upper``.
        upper: influence of each draw of $p_1$.
    """

    log_ratio: float
    overlap: float
    lower: np.ndarray
    upper: np.ndarray


def bridge(lower: np.ndarray, upper: np.ndarray, sizes: tuple[float, float] | None = None) -> Bridge:
    r"""Estimate a ratio by Meng and Wong's optimal bridge (:eq:`bridge`).

    Args:
        lower: $\log q_1 - \log q_0$, the logarithms of both densities without their normalisers, at draws of $p_0$, of
            any shape; minus infinity is allowed.
        upper: $\log q_1 - \log q_0$ at draws of $p_1$.
        sizes: effective numbers of draws of both, if not those of the arrays; right whatever they are, best if true.
    """
    num_lower, num_upper = sizes or (lower.size, upper.size)
    share = num_upper / (num_lower + num_upper)
    offset = np.log(share) - np.log1p(-share)

    def terms(log_ratio: float) -> tuple[np.ndarray, np.ndarray]:
        return expit(lower - log_ratio + offset) / share, expit(log_ratio - upper - offset) / (1 - share)

    finite = np.concatenate([x[np.isfinite(x)] for x in (lower.ravel(), upper.ravel())])
    low, high = finite.min() - 60.0, finite.max() + 60.0  # far out the terms are all 0 or all alike
    for _ in range(100):  # the first mean falls with the ratio, the second rises: halves until nothing is left
        middle = 0.5 * (low + high)
        first, second = terms(middle)
        low, high = (middle, high) if first.mean() > second.mean() else (low, middle)
    log_ratio = float(0.5 * (low + high))
    first, second = terms(log_ratio)
    overlap = max(float(second.mean()), np.finfo(float).tiny)
    return Bridge(log_ratio, overlap, first / overlap, second / overlap)


def effective_share(log_weights: np.ndarray) -> float:
    """Return what weighted draws are worth as a share of their number, 1 / (mean square of weights of mean 1)."""
    return float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / log_weights.size)


def next_temperature(beta: float, log_weights: np.ndarray, share: float) -> float:
    r"""Choose the inverse temperature at which draws of this one are worth a share of their number (:eq:`ladder`).

    Args:
        beta: inverse temperature of the draws, below 1.
        log_weights: $\log w$ at the draws; minus infinity is allowed.
        share: the share, in (0, 1), as :func:`effective_share` gives it.
    """
    finite = log_weights[np.isfinite(log_weights)]
    if effective_share((1 - beta) * finite) >= share:
        return 1.0
    low, high = np.log(1e-12), np.log(1 - beta)
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective_share(np.exp(middle) * finite) >= share else (low, middle)
    return beta + float(np.exp(low))


def effective_size(terms: np.ndarray) -> float:
    """Return the effective number of draws (chain, draw) for their mean; negative autocorrelations count as a gain."""
    if np.ptp(terms) == 0:
        return float(terms.size)
    return float(_arviz.effective_sample_size(terms, "mean"))


def rhat(values: np.ndarray) -> float:
    """Return the rank-normalised split R-hat of (chain, draw); 1 where all are equal."""
    if np.ptp(values) == 0:
        return 1.0
    return float(_arviz.rhat(values))


def squared_error(terms: np.ndarray) -> tuple[float, float]:
    """Return the squared standard error of the mean of (chain, draw), and the effective number of draws behind it."""
    size = effective_size(terms)
    return float(np.var(terms, ddof=1) / size), size
