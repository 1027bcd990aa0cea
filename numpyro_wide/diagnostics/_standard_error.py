"""Standard errors of averages over rows."""

import numpy as np


def standard_error(by_entry: np.ndarray, degrees_lost: int = 1) -> float:
    """Compute the standard error of the mean over independent rows.

    Args:
        by_entry: numbers to be averaged, (n, ...); those of a row, which depend on each other, are averaged first.
        degrees_lost: what n is lessened by in the variance: 1, or 0 for the binomial variance of zeros and ones.

    Returns:
        The error, NaN where there are too few rows, or numbers that are not finite.
    """
    by_row = by_entry.reshape(len(by_entry), -1).mean(axis=1)
    if len(by_row) <= degrees_lost or not np.isfinite(by_row).all():
        return np.nan
    return float(by_row.std(ddof=degrees_lost) / np.sqrt(len(by_row)))
