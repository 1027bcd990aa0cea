"""Reports on whether several chains are one posterior, an ensemble, or neither, by what they predict."""

from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy.special import logsumexp

from numpyro_wide.diagnostics._chains import rhat_squared
from numpyro_wide.diagnostics._regression import log_predictive_density

_LEVEL = 0.9  # the level of the quantile over predictions: the largest of hundreds is noise
_MOST_SUBSETS = 100  # the most subsets of the chains that are averaged over, for each size


class PoolingReport(NamedTuple):
    r"""Findings of :func:`pooling`. Printing them gives a table.

    Attributes:
        within: for each chain, $\hat R$ of the predictions between its first and its second half, (chains,); infinite
            for a chain that does not move.
        between: $\hat R$ of the predictions between the chains.
        largest: the largest of any entry of y between the chains; ``between`` is what nine tenths of them are below.
        by_chain: mean log predictive density of each chain alone, (chains,).
        by_number: mean log predictive density of the pool of 1, 2, ... chains, averaged over which ones, (chains,).
        limit: largest $\hat R$ of draws that agree.
    """

    within: np.ndarray
    between: float
    largest: float
    by_chain: np.ndarray
    by_number: np.ndarray
    limit: float

    @property
    def unsettled(self) -> list[int]:
        """Numbers of the chains whose halves disagree, or that do not move."""
        return [int(chain) for chain in np.flatnonzero(~(self.within <= self.limit))]

    @property
    def advice(self) -> str:
        """Advice on whether the pool of all chains is a posterior or an ensemble."""
        if self.unsettled:
            return f"not settled: chains {self.unsettled} still move, or never did; run longer, and judge the pool then"
        if self.between <= self.limit:
            return "one posterior: the chains agree, and their pool is one long chain"
        return "an ensemble: every chain has settled, in a place of its own; say so, and do not call it a posterior"

    def __str__(self) -> str:
        lines = [" chain  R-hat of its halves  log density alone"]
        for chain, (rhat, density) in enumerate(zip(self.within, self.by_chain, strict=True)):
            lines.append(f"{chain:6d}  {rhat:18.3f}  {density:17.4f}")
        pooled = ", ".join(f"{number}: {density:.4f}" for number, density in enumerate(self.by_number, 1))
        lines.append(f"log density by number of chains pooled: {pooled}")
        lines.append(f"R-hat between chains: {self.between:.3f}, the largest of a prediction {self.largest:.3f}")
        return "\n".join([*lines, self.advice])


def pooling(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, rhat_limit: float = 1.05) -> PoolingReport:
    r"""Tell whether chains may be pooled, by what they predict, numbers with Gaussian noise.

    $\hat R$ is taken of the function and the noise at the rows that are predicted, and not of the weights, which cannot
    agree where hidden units trade places. Chains that each have settled, and disagree, sit in modes of their own: their
    equal-weight mixture is an ensemble, often with better scores than any of its members, but its weights are not the
    posterior's, and its spread is no posterior's either. A chain that has not settled belongs to neither.

    $\hat R$ is the classical one, of the means and of the logarithms of the variances; over entries of y that is taken
    which nine tenths are below. Chains of few independent draws, fewer than about fifty, look unsettled by chance.

    Args:
        y: observations at the rows that are predicted, (n,), or (n, k) for k outputs.
        mean: means of the predictions, (chains, draws, n) or (chains, draws, n, k).
        variance: their variances with the noise, in squared units of y, of the shape of ``mean``.
        rhat_limit: largest $\hat R$ of draws that agree, more than 1.

    Returns:
        A :class:`PoolingReport`, to print, with ``advice``.

    Raises:
        TypeError: for what does not hold numbers.
        ValueError: if shapes do not fit, there are fewer than 2 chains or 4 draws, there is NaN or infinity, a variance
            is not positive, or the limit not above 1.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import pooling
        >>> mean = 0.1 * np.random.default_rng(0).normal(size=(4, 100, 20))
        >>> report = pooling(np.zeros(20), mean, np.ones((4, 100, 20)))
        >>> report.advice.split(":")[0], report.by_number.shape
        ('one posterior', (4,))
    """
    means, variances = np.asarray(mean), np.asarray(variance)
    if means.ndim != np.ndim(y) + 2 or means.shape != variances.shape or means.shape[0] < 2 or means.shape[1] < 4:
        raise ValueError(
            "mean and variance must have shape (chains, draws, *y.shape), with at least 2 chains of 4 draws, but y has "
            f"shape {np.shape(y)}, mean {means.shape} and variance {variances.shape}; where draws of chains follow one "
            "another, as from ReadoutPredictive, write mean.reshape(num_chains, -1, *y.shape)."
        )
    if not isinstance(rhat_limit, int | float) or not rhat_limit > 1:
        raise ValueError(f"rhat_limit must be a number above 1, but is {rhat_limit!r}.")
    # Checks the numbers too.
    densities = np.stack(
        [
            np.asarray(log_predictive_density(y, *of_chain, pointwise=True)).ravel()
            for of_chain in zip(means, variances, strict=True)
        ]
    )
    predicted = np.stack([means, np.log(variances)], axis=-1).astype(float)
    half = means.shape[1] // 2
    within = []
    for chain in predicted:
        is_stuck = not np.ptp(chain, axis=0).any()
        within.append(np.inf if is_stuck else _quantile(_rhats(np.stack([chain[:half], chain[-half:]]))))
    rhats = _rhats(predicted)
    return PoolingReport(
        within=np.array(within),
        between=_quantile(rhats),
        largest=float(rhats.max()),
        by_chain=densities.mean(axis=1),
        by_number=np.array([_of_pools(densities, number) for number in range(1, len(densities) + 1)]),
        limit=rhat_limit,
    )


def _rhats(draws: np.ndarray) -> np.ndarray:
    """Return R-hat by entry of y: the classical one, of the worse of its two moments; 1 where no draw moves it."""
    num_chains, num_draws = draws.shape[:2]
    excess = (rhat_squared(draws) - 1) * num_chains / (num_chains - 1)  # the relation in rhat_squared's docstring
    squared = np.nan_to_num((num_draws - 1) / num_draws * (1 + excess), nan=1.0, posinf=np.inf)
    return np.sqrt(squared).max(axis=-1).ravel()


def _quantile(rhats: np.ndarray) -> float:
    return float(np.quantile(rhats, _LEVEL, method="lower"))  # the others cannot tell infinities apart


def _of_pools(densities: np.ndarray, number: int) -> float:
    """Average over pools of so many chains; ``densities`` are logarithms, (chains, entries)."""
    num_chains = len(densities)
    if comb(num_chains, number) <= _MOST_SUBSETS:
        pools = [list(pool) for pool in combinations(range(num_chains), number)]
    else:
        random = np.random.default_rng(0)
        pools = [random.choice(num_chains, number, replace=False).tolist() for _ in range(_MOST_SUBSETS)]
    return float(np.mean([logsumexp(densities[pool], axis=0) - np.log(number) for pool in pools]))
