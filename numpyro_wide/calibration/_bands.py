"""Simultaneous bands for empirical distribution functions and histograms of uniform ranks."""

from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_levels, whole_number
from numpyro_wide.calibration._simulations import real_array

NUM_NULL = 1000  # simulated null samples: a standard error of 0.7 percentage points at level 0.95


def uniformity_band(
    probabilities: ArrayLike, num_simulations: int, *, level: float = 0.95, cumulative: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Make a simultaneous band for the proportions of independent simulations at given nominal probabilities.

    The pointwise level is lowered until a whole curve of an exact posterior stays inside with probability
    ``level`` (Säilynoja 2022, Section 3.2; by simulation of the null, seeded).

    Args:
        probabilities: nominal probabilities (m,) in [0, 1]: increasing values of a distribution function, or, if not
            ``cumulative``, masses of the bins of a histogram, with sum 1.
        num_simulations: number of independent simulations.
        level: probability that the whole curve of an exact posterior is inside, in (0, 1).
        cumulative: whether the probabilities are values of a distribution function; False for masses of bins.

    Returns:
        Lower and upper proportions, each (m,).

    Raises:
        ValueError: for a level outside (0, 1) or probabilities that are none.

    Example:
        >>> from numpyro_wide.calibration.internal import uniformity_band
        >>> low, high = uniformity_band([0.25, 0.5, 0.75], num_simulations=400)
        >>> low.round(2).tolist(), high.round(2).tolist()
        ([0.2, 0.44, 0.7], [0.3, 0.56, 0.8])
    """
    num_simulations = whole_number("num_simulations", num_simulations)
    probabilities = _check(probabilities, level, cumulative)
    null = _null_tails(probabilities, num_simulations, cumulative)
    tail = np.quantile(null, 1 - level) / 2
    low = _binomial().ppf(tail, num_simulations, probabilities)
    high = _binomial().ppf(1 - tail, num_simulations, probabilities)
    return np.maximum(low, 0) / num_simulations, high / num_simulations


def uniformity_p_value(ranks: ArrayLike, num_draws: int) -> np.ndarray:
    """Test whether ranks are uniform, by the simultaneous band of their distribution function.

    Args:
        ranks: whole numbers in 0, ..., num_draws, (num_simulations, ...), as :func:`sbc_ranks` returns them.
        num_draws: number of posterior draws that they are ranks among.

    Returns:
        p-values (...), one for each scalar component, at least 1/1001. Of several, divide the level by their number.

    Raises:
        TypeError: if the ranks are not real numbers.
        ValueError: for no ranks, or ranks that are not whole numbers in 0, ..., num_draws.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import uniformity_p_value
        >>> ranks = np.random.default_rng(0).integers(0, 100, size=(500, 2))
        >>> bool(np.all(uniformity_p_value(ranks, 99) > 0.05)), bool(uniformity_p_value(ranks[:, 0] // 2, 99) < 0.01)
        (True, True)
    """
    num_draws = whole_number("num_draws", num_draws)
    ranks = real_array("ranks", ranks)
    is_rank = (ranks >= 0) & (ranks <= num_draws) & (ranks == np.rint(ranks))
    if ranks.ndim == 0 or len(ranks) == 0 or not np.all(is_rank):
        raise ValueError(
            f"ranks must be an array (num_simulations, ...) of whole numbers in 0, ..., num_draws = {num_draws}, but "
            f"got shape {ranks.shape}"
            + (f" with values {ranks.min()}, ..., {ranks.max()}." if ranks.ndim and ranks.size else ".")
        )
    points = rank_grid(num_draws)
    # P(rank <= r) = (r + 1)/(num_draws + 1)
    below = np.stack([np.mean(ranks < point, axis=0) for point in points], axis=-1)
    return p_values(points / (num_draws + 1), below, len(ranks))


def rank_grid(num_draws: int, max_points: int = 100) -> np.ndarray:
    """Spread whole numbers over 1, ..., num_draws evenly, at most ``max_points`` of them."""
    return np.unique(np.linspace(1, num_draws, min(num_draws, max_points)).round().astype(int))


def p_values(nominal: np.ndarray, empirical: np.ndarray, num_simulations: int) -> np.ndarray:
    """Test curves ``empirical`` (..., m) of expectations ``nominal`` (m,), increasing, for p-values (...)."""
    null = _null_tails(nominal, num_simulations, cumulative=True)
    counts = np.rint(np.asarray(empirical) * num_simulations).astype(int)
    observed = _smallest_tail(counts, _tails(nominal, num_simulations))
    return (1 + np.sum(null <= observed[..., None] * (1 + 1e-9), axis=-1)) / (1 + len(null))


def _null_tails(probabilities: np.ndarray, num_simulations: int, cumulative: bool) -> np.ndarray:
    """Simulate curves of an exact posterior, and find the smallest pointwise p-value of each."""
    rng = np.random.default_rng(0)
    masses = np.diff(probabilities, prepend=0, append=1) if cumulative else probabilities
    counts = rng.multinomial(num_simulations, np.maximum(masses, 0), size=NUM_NULL)
    if cumulative:
        counts = np.cumsum(counts, axis=1)[:, :-1]
    return _smallest_tail(counts, _tails(probabilities, num_simulations))


def _tails(probabilities: np.ndarray, num_simulations: int) -> np.ndarray:
    """Compute two-sided p-values (num_simulations + 1, m) of each count at each probability."""
    counts = np.arange(num_simulations + 1)[:, None]
    lower = _binomial().cdf(counts, num_simulations, probabilities)
    upper = _binomial().sf(counts - 1, num_simulations, probabilities)
    return np.minimum(1, 2 * np.minimum(lower, upper))


def _binomial() -> Any:
    import scipy.stats  # slow to import: not with the package

    return scipy.stats.binom


def _smallest_tail(counts: np.ndarray, tails: np.ndarray) -> np.ndarray:
    return np.min(tails[counts, np.arange(tails.shape[1])], axis=-1)


def _check(probabilities: ArrayLike, level: float, cumulative: bool) -> np.ndarray:
    probabilities = np.asarray(probabilities, float)
    check_levels("level", level)
    right = np.all((probabilities >= 0) & (probabilities <= 1)) and probabilities.ndim == 1
    right = right and (np.all(np.diff(probabilities) >= 0) if cumulative else np.isclose(np.sum(probabilities), 1))
    if not right:
        kind = "an increasing sequence within [0, 1]" if cumulative else "masses of bins with sum 1"
        raise ValueError(f"probabilities must be {kind}, but got {probabilities}.")
    return probabilities
