"""Noise of a table: constant, by row, or hidden by a grid of targets."""

import numpy as np
from scipy.stats import chi2

# Below which the noise is by row: a network that does not fit looks like it. With p-values of the race's rows between
# 0.001 and 0.05, noise by row lost 0.08 nats on other such rows (power, kin8nm, energy, bike; November 2026).
LARGEST_P = 1e-3
_ROWS_A_COLUMN = 10  # at least, for the test's distribution


def noise_p_value(x: np.ndarray, mean: np.ndarray, standardised: np.ndarray) -> float | None:
    """Return the p-value of a test of constant noise by residuals (n,) (Koenker 1981); None for few rows."""
    if len(x) < fewest_rows(x.shape[1]):
        return None
    regressors = np.column_stack([x, mean, mean**2])
    # Logarithms are robust against single rows.
    squares = np.log(np.maximum(standardised**2, 1e-8))
    squares = squares - squares.mean()
    regressors = regressors - regressors.mean(axis=0)
    coefficients, _, rank, _ = np.linalg.lstsq(regressors, squares, rcond=None)
    explained = np.sum((regressors @ coefficients) ** 2) / np.sum(squares**2)
    return float(chi2.sf(len(x) * explained, rank))


def fewest_rows(num_columns: int) -> int:
    """Return the fewest rows of the noise test."""
    return _ROWS_A_COLUMN * (num_columns + 2)  # columns, and two powers of the prediction


def has_steps(targets: np.ndarray, noise_scale: float) -> bool:
    """Tell whether targets take few values further apart than the noise."""
    by_target = (np.unique(column) for column in targets.reshape(len(targets), -1).T)
    return any(len(values) < len(targets) / 2 and np.median(np.diff(values)) > noise_scale for values in by_target)
