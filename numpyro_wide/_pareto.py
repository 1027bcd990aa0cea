"""Pareto-smoothed importance weights, from ArviZ of either generation."""

import numpy as np


def pareto_smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    r"""Smoothed log weights, which sum to one, and the Pareto shape $\hat k$ of their tail (Vehtari et al. 2024)."""
    import arviz  # heavy, and needed here alone

    if hasattr(arviz, "psislw"):
        log_weights, pareto_k = arviz.psislw(log_ratios)
    else:  # ArviZ 1.x, which takes log likelihoods, that is, the negative of log ratios
        from arviz_stats.base import array_stats

        log_weights, pareto_k = array_stats.psislw(-log_ratios)
    return np.asarray(log_weights), float(pareto_k)
