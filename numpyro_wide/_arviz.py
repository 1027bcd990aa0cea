"""Weights and effective sizes: estimators of ArviZ, behind one interface for its two generations, 0.x and 1.x.

ArviZ takes a second to import, so each function imports it when it is first called.
"""

import warnings
from types import ModuleType
from typing import Any

import numpy as np
from scipy.special import logsumexp

_MIN_DRAWS = 25  # PSIS fits a two-parameter tail to the top fifth: at least five of 25 draws


def _import_arviz() -> ModuleType:
    """Import ArviZ without its notice of a new generation, which is not for users of this package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
    return arviz


def pareto_smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Smooth and normalise log weights, and estimate their Pareto shape (Vehtari et al. 2024)."""
    unsmoothed = log_ratios - logsumexp(log_ratios), np.inf
    if len(log_ratios) < _MIN_DRAWS:
        return unsmoothed
    arviz = _import_arviz()

    if hasattr(arviz, "psislw"):
        with np.errstate(over="ignore"):  # of a weight's inverse
            log_weights, pareto_k = arviz.psislw(log_ratios)
    else:  # ArviZ 1.x, which takes log likelihoods, that is, the negative of log ratios
        from arviz_stats.base import array_stats

        try:
            log_weights, pareto_k = array_stats.psislw(-log_ratios)
        except ValueError:  # all the same
            return unsmoothed
    return np.asarray(log_weights), float(pareto_k)


def effective_share(log_weights: np.ndarray) -> float:
    return float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / log_weights.size)


def next_temperature(beta: float, log_weights: np.ndarray, share: float) -> float:
    """Choose the inverse temperature of a given effective share of draws (:eq:`ladder`)."""
    finite = log_weights[np.isfinite(log_weights)]
    if effective_share((1 - beta) * finite) >= share:
        return 1.0
    low, high = np.log(1e-12), np.log(1 - beta)
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective_share(np.exp(middle) * finite) >= share else (low, middle)
    return beta + float(np.exp(low))


def effective_sample_size(values: np.ndarray, method: str = "bulk") -> np.ndarray:
    """Estimate the effective number of draws (chain, draw, ...), for each entry, by a method of ArviZ's."""
    arviz = _import_arviz()

    return np.asarray(arviz.ess({"x": np.asarray(values)}, method=method)["x"], dtype=float)


def rhat(values: np.ndarray) -> np.ndarray:
    """Estimate the rank-normalised split R-hat (Vehtari et al. 2021) of (chain, draw, ...), for each entry."""
    arviz = _import_arviz()

    return np.asarray(arviz.rhat({"x": np.asarray(values)})["x"], dtype=float)


def from_datasets(datasets: dict[str, Any]) -> Any:
    """Assemble ArviZ's data from one ``xarray.Dataset`` a group: an ``InferenceData``, or with 1.x a ``DataTree``."""
    arviz = _import_arviz()

    if int(arviz.__version__.split(".")[0]) >= 1:
        from xarray import DataTree

        return DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)
