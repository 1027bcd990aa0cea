"""Pareto-smoothed importance weights, from ArviZ of either generation."""

import numpy as np
from scipy.special import logsumexp

_FEWEST = 25  # draws, a fifth of which are the tail, of which a law of two parameters is fitted to five at least


def pareto_smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    r"""Smoothed log weights, which sum to one, and the Pareto shape $\hat k$ of their tail (Vehtari et al. 2024).

    Where the tail has fewer than five draws, or draws that are all the same, the weights stay as they are, and the
    shape is infinite: it is not known.
    """
    as_they_are = log_ratios - logsumexp(log_ratios), np.inf
    if len(log_ratios) < _FEWEST:
        return as_they_are
    import arviz  # heavy, and needed here alone

    if hasattr(arviz, "psislw"):
        log_weights, pareto_k = arviz.psislw(log_ratios)
    else:  # ArviZ 1.x, which takes log likelihoods, that is, the negative of log ratios
        from arviz_stats.base import array_stats

        try:
            log_weights, pareto_k = array_stats.psislw(-log_ratios)
        except ValueError:  # all the same
            return as_they_are
    return np.asarray(log_weights), float(pareto_k)
