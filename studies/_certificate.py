"""Certificate of a posterior: what the chains of two samplers must agree in. Thresholds were set before any run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

import _chains
from score_references import c2st

MOST_RHAT = 1.01  # of every observable, of either sampler
LEAST_ESS = 1000  # of the same but for a sampler's own potential energy
MOST_Z = 4.0  # between the samplers, of means and shares below quantiles
MOST_C2ST = 0.52  # between draws of the function
LEAST_P = 1e-3  # of ranks under simulation-based calibration, times their number
THRESHOLDS = ("MOST_RHAT", "LEAST_ESS", "MOST_Z", "MOST_C2ST", "LEAST_P")

NUM_PROJECTIONS = 100
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_COMPARED = 2000  # draws of each that the classifier sees
OWN = ("potential",)
NOT_LOOKED_AT = ("gradients", "accepts", "seconds")

Draws = Mapping[str, np.ndarray]


def certify(first: Draws, second: Draws) -> dict[str, float]:
    """Compute the diagnostics of two runs: observables (chain, draw, ...) by name."""
    shared = [name for name in first if name in second and name not in (*OWN, *NOT_LOOKED_AT)]
    shared = [name for name in shared if not is_constant(first[name])]
    found = {}
    for number, run in enumerate((first, second), start=1):
        looked_at = [*shared, *(name for name in OWN if name in run)]
        found[f"rhat_{number}"] = max(float(np.max(_chains.rhat(run[name]))) for name in looked_at)
        found[f"ess_{number}"] = min(float(np.min(_chains.bulk_ess(run[name]))) for name in shared)
    scalars, arrays = ([n for n in shared if (first[n].ndim == 2) is is_scalar] for is_scalar in (True, False))
    projected = projections([np.concatenate([flat(run[name]) for name in arrays], -1) for run in (first, second)])
    compared = [
        np.concatenate([values, *(run[name][..., None] for name in scalars)], -1)
        for values, run in zip(projected, (first, second), strict=True)
    ]
    found["z"] = float(np.max(np.abs(z_scores(*compared))))
    found["c2st"] = c2st(*(thinned(run["function"], MOST_COMPARED) for run in (first, second)))
    return found


def checks(diagnostics: Mapping[str, float]) -> dict[str, bool]:
    """Compare diagnostics with the thresholds."""
    made = {
        "rhat": max(diagnostics["rhat_1"], diagnostics["rhat_2"]) <= MOST_RHAT,
        "ess": min(diagnostics["ess_1"], diagnostics["ess_2"]) >= LEAST_ESS,
        "z": diagnostics["z"] <= MOST_Z,
        "c2st": diagnostics["c2st"] <= MOST_C2ST,
    }
    if "calibration_p" in diagnostics:
        made["calibration"] = diagnostics["calibration_p"] >= LEAST_P
    return made


def p_value(ranks: np.ndarray, num_ranked: int) -> float:
    """Return the least p-value of uniform ranks 0, ..., num_ranked, (n, quantities), by tenths, times their number."""
    # Those of calibration.uniformity_p_value are at least 1/1001, which times their number is above LEAST_P.
    tenths = 10 * ranks // (num_ranked + 1)
    counts = np.sum(tenths == np.arange(10)[:, None, None], axis=1)
    p_values = stats.chisquare(counts).pvalue
    return float(min(1.0, p_values.min() * p_values.size))


def is_constant(values: np.ndarray) -> bool:
    """Whether an observable is the same in all draws, as a known noise is."""
    return not np.ptp(values.reshape(-1, *values.shape[2:]), axis=0).any()


def flat(values: np.ndarray) -> np.ndarray:
    """Return observables (chain, draw, p)."""
    return values.reshape(*values.shape[:2], -1).astype(float)


def projections(runs: list[np.ndarray]) -> list[np.ndarray]:
    """Project observables (chain, draw, p), in units of their deviations, on 100 fixed random directions."""
    pooled = np.concatenate([run.reshape(-1, run.shape[-1]) for run in runs])
    varies = np.ptp(pooled, axis=0) > 0
    loc, scale = pooled[:, varies].mean(0), pooled[:, varies].std(0)
    directions = np.random.default_rng(0).normal(size=(varies.sum(), NUM_PROJECTIONS)) / varies.sum() ** 0.5
    return [(run[..., varies] - loc) / scale @ directions for run in runs]


def z_scores(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compare means, and shares below quantiles of the pool, of (chain, draw, p), in their Monte Carlo errors."""
    pooled = np.concatenate([run.reshape(-1, run.shape[-1]) for run in (first, second)])
    levels = np.quantile(pooled, LEVELS, axis=0)
    cases = [(first, second), *((first < level, second < level) for level in levels)]
    differences = []
    for pair in cases:
        means, variances = zip(*(mean_and_variance(values.astype(float)) for values in pair), strict=True)
        differences.append((means[0] - means[1]) / np.sqrt(np.maximum(variances[0] + variances[1], 1e-300)))
    return np.concatenate(differences)


def mean_and_variance(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means (p,) of (chain, draw, p), and the squares of their errors."""
    sizes = _chains.arviz.ess({"draws": values}, method="mean")["draws"].values
    return values.mean((0, 1)), values.var((0, 1)) / np.where(np.isnan(sizes), 1.0, sizes)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many draws (draw, p) of (chain, draw, ...), evenly."""
    pooled = flat(values).reshape(-1, int(np.prod(values.shape[2:])))
    return pooled[np.linspace(0, len(pooled) - 1, min(most, len(pooled))).astype(int)]


def verdict(diagnostics: Mapping[str, float]) -> dict[str, Any]:
    """Return the checks and whether all are passed."""
    made = checks(diagnostics)
    return {"checks_made": made, "certified": all(made.values())}
