"""The ratio of two normalisers, from draws of both distributions: arrays in, arrays out, in float64."""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, logsumexp


class Bridge(NamedTuple):
    r"""What :func:`bridge` finds.

    Attributes:
        log_ratio: $\log Z_1 - \log Z_0$.
        overlap: $\int p_0 p_1 / (s_0 p_0 + s_1 p_1)$ of the two densities, 1 where they are the same.
        lower: influence of each draw of $p_0$: an estimate's error is the mean of these, less that of ``upper``.
        upper: of each draw of $p_1$.
    """

    log_ratio: float
    overlap: float
    lower: np.ndarray
    upper: np.ndarray


def bridge(lower: np.ndarray, upper: np.ndarray, sizes: tuple[float, float] | None = None) -> Bridge:
    r"""Meng and Wong's optimal bridge (:eq:`bridge`).

    Args:
        lower: $\log q_1 - \log q_0$, the logarithms of both densities without their normalisers, at draws of $p_0$, of
            any shape; minus infinity is allowed.
        upper: the same at draws of $p_1$.
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
    """Effective number of weighted draws as a share of all, 1 / (mean of squares of weights whose mean is 1)."""
    return float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / log_weights.size)


def next_temperature(beta: float, log_weights: np.ndarray, share: float) -> float:
    r"""The inverse temperature at which draws of this one are worth a share of their number (:eq:`ladder`).

    Args:
        beta: inverse temperature of the draws, below 1.
        log_weights: $\log w$ at the draws; minus infinity is allowed.
        share: as :func:`effective_share` gives it.
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
    """Effective number of draws (chain, draw) for their mean, negative autocorrelations counted as a gain."""
    if np.ptp(terms) == 0:
        return float(terms.size)
    import arviz  # heavy, and needed in few places

    return float(arviz.ess({"x": terms}, method="mean")["x"])


def rhat(values: np.ndarray) -> float:
    """Rank-normalised split R-hat of (chain, draw); 1 where all are equal."""
    if np.ptp(values) == 0:
        return 1.0
    import arviz

    return float(arviz.rhat({"x": values})["x"])


def squared_error(terms: np.ndarray) -> tuple[float, float]:
    """Squared standard error of the mean of (chain, draw), and the effective number of draws behind it."""
    size = effective_size(terms)
    return float(np.var(terms, ddof=1) / size), size
