"""Leave-one-out log densities of fitted models, from what they say of the rows that they were fitted to."""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide.estimators._posteriors import Mixture

_LARGEST_SHAPE = 0.7  # of the weights of one row, above which its estimate is not to be trusted (Vehtari et al. 2017)


class LeaveOneOut(NamedTuple):
    """Log densities of rows, each given all others.

    Attributes:
        by_row: log densities, (rows,).
        share_unsure: share of the rows whose Pareto shape is above 0.7.
    """

    by_row: np.ndarray
    share_unsure: float

    def __str__(self) -> str:
        error = np.std(self.by_row) / np.sqrt(len(self.by_row))
        return f"{np.mean(self.by_row):.4f} (standard error {error:.2g})"


def cavity(mean: np.ndarray, variance: np.ndarray, y: np.ndarray, noise_variance: np.ndarray) -> tuple:
    r"""Take each row's own observation out of a Gaussian posterior of the function there.

    With the posterior $N(m, v)$ of the function at the row, and the Gaussian noise $s^2$, the posterior given all other
    rows has the precision $1/v - 1/s^2$ (Rasmussen 2006, eq. 3.56 and p. 117).

    Args:
        mean: posterior means m of the function, (..., rows, k).
        variance: posterior variances v, which broadcast against the means.
        y: observations, (rows, k).
        noise_variance: noise variances s², which broadcast against the means.

    Returns:
        Means and variances of the function given all other rows.
    """
    # The posterior is narrower than the noise; rounding may make it as wide.
    share = np.maximum(1 - variance / noise_variance, 1e-10)
    return y - (y - mean) / share, variance / share


def of_regression(mean: np.ndarray, variance: np.ndarray, y: np.ndarray, noise_variance: np.ndarray) -> LeaveOneOut:
    """Estimate leave-one-out log densities of Gaussian observations, exactly for a single draw.

    Args:
        mean: means of the function given each draw and all rows, (draws, rows, k).
        variance: its variances, (draws, rows, k).
        y: observations, (rows, k).
        noise_variance: variances of the noise, (draws, rows, k).
    """
    others, spread = cavity(mean, variance, y, noise_variance)
    return averaged(Mixture(others, spread + noise_variance).by_draw(y))


def averaged(by_draw: np.ndarray) -> LeaveOneOut:
    r"""Average log densities of rows, each given the others and a draw, over draws of the posterior given all rows.

    The draws know the row that is left out, so each has the weight 1/p, smoothed (PSIS; Vehtari, Gelman, Gabry 2017).

    Args:
        by_draw: log densities, (draws, rows).
    """
    if len(by_draw) == 1:
        return LeaveOneOut(by_draw[0], 0.0)
    rows, num_unsure = [], 0
    for row in by_draw.T:
        log_weights, shape = pareto_smoothed(-row)
        num_unsure += np.isfinite(shape) and shape > _LARGEST_SHAPE
        rows.append(logsumexp(log_weights + row) - logsumexp(log_weights))
    return LeaveOneOut(np.array(rows), num_unsure / len(rows))


def is_better(one: LeaveOneOut, other: LeaveOneOut) -> tuple[bool, str]:
    """Tell whether one model predicts rows better than another by more than two standard errors of the difference.

    Args:
        one: log densities of one.
        other: log densities of the other, of the same rows.

    Returns:
        The answer, and a sentence with the numbers. A model under which a row has no finite density is worse.
    """
    gain = one.by_row - other.by_row
    error = np.std(gain) / np.sqrt(len(gain))
    is_better = not np.isfinite(other.by_row).all() or gain.mean() > 2 * error
    return bool(is_better), f"{gain.mean():+.4f} nats a row (standard error {error:.2g})"
