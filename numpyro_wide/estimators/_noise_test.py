"""Test of whether the noise depends on the inputs, on residuals that each row's own target had no part in."""

import numpy as np
from scipy.stats import chi2

LARGEST_P = 1e-3  # at which the noise is taken for one that depends on the inputs
_ROWS_A_COLUMN = 10  # at least: of fewer, the law of the statistic is another


def fewest_rows(x: np.ndarray) -> int:
    """Return the number of rows that the test needs, of inputs (n, d)."""
    return _ROWS_A_COLUMN * (x.shape[1] + 2)  # columns, and two powers of the prediction


def noise_p_value(x: np.ndarray, mean: np.ndarray, standardised: np.ndarray) -> float | None:
    r"""Return the p-value of Koenker's test: squared residuals regressed on the inputs and the prediction.

    $n R^2$ of that regression is $\chi^2$ under constant noise, whatever its kurtosis (Koenker 1981, A note on
    studentizing a test for heteroscedasticity).

    Args:
        x: standardised inputs, (n, d).
        mean: predictions of the rows, (n,).
        standardised: residuals of the rows over their predicted standard deviations, (n,).

    Returns:
        The p-value; None of too few rows.
    """
    regressors = np.column_stack([x, mean, mean**2])
    if len(x) < fewest_rows(x):
        return None
    # Logarithms of squares, which no single far row decides.
    squares = np.log(np.maximum(standardised**2, 1e-8))
    squares = squares - squares.mean()
    regressors = regressors - regressors.mean(axis=0)
    coefficients, _, rank, _ = np.linalg.lstsq(regressors, squares, rcond=None)
    explained = np.sum((regressors @ coefficients) ** 2) / np.sum(squares**2)
    return float(chi2.sf(len(x) * explained, rank))


def has_steps(targets: np.ndarray, noise_scale: float) -> bool:
    """Tell whether targets take few values that are further apart than the noise, such as marks from 3 to 8.

    A network can predict such a value exactly, and a noise by row goes to zero there, since the density has no bound.

    Args:
        targets: standardised targets, (n,) or (n, k).
        noise_scale: standard deviation of a constant noise.
    """
    by_target = (np.unique(column) for column in targets.reshape(len(targets), -1).T)
    return any(len(values) < len(targets) / 2 and np.median(np.diff(values)) > noise_scale for values in by_target)
