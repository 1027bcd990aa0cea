"""Agreement of chains: R-hat, and pooling by their predictions."""

from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_wide import _mixture

_LEVEL = 0.9  # quantile over predictions: the largest is noise
_MOST_SUBSETS = 100  # of chains, for each size


def rhat_squared(draws: ArrayLike) -> np.ndarray:
    r"""Compute $\hat R^2$ of every dimension (Hron 2022, equation 6): all variance over the mean within chains.

    With $M$ chains of $S$ draws and the classical $\hat R$,
    $\hat R^2_{(6)} - 1 = \frac{M-1}{M} \frac{S}{S-1} (\hat R^2 - \frac{S-1}{S})$.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.

    Returns:
        The ratio, (...), 1 where chains agree; NaN where all draws are equal, inf for different constant chains.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import rhat_squared
        >>> chain = np.array([-1.0, 1.0, -1.0, 1.0])
        >>> float(rhat_squared(np.stack([chain, chain + 2])))  # 1 within the chains, 1 between their means
        2.0
    """
    array = checked_draws(draws)
    # Against rounding of constants; NaN stays.
    within = np.where(np.ptp(array, axis=1) == 0, 0.0, array.var(axis=1, dtype=float)).mean(axis=0)
    between = np.where(np.ptp(array, axis=(0, 1)) == 0, 0.0, array.mean(axis=1, dtype=float).var(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 + between / within)


def checked_draws(draws: ArrayLike) -> np.ndarray:
    array = np.asarray(draws)
    if array.ndim < 2 or array.shape[1] < 2 or array.shape[0] < 1:
        raise ValueError(
            f"draws must have shape (chain, draw, ...) with at least two draws, but got {array.shape}; "
            "use mcmc.get_samples(group_by_chain=True)."
        )
    # Differences fail for booleans, and wrap for small integers.
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(float)


class PoolingReport(NamedTuple):
    r"""Result of :func:`pooling`.

    Attributes:
        within: $\hat R$ between the halves of each chain, (chains,); inf for a constant chain.
        between: $\hat R$ between chains, the 90 % quantile over entries of y.
        largest: largest $\hat R$ between chains of any entry.
        by_chain: mean log predictive density of each chain, (chains,).
        by_number: mean log predictive density of pools of 1, 2, ... chains, (chains,).
        limit: largest $\hat R$ of chains that agree.
    """

    within: np.ndarray
    between: float
    largest: float
    by_chain: np.ndarray
    by_number: np.ndarray
    limit: float

    @property
    def unsettled(self) -> list[int]:
        """Chains whose halves disagree, or that do not move."""
        return [int(chain) for chain in np.flatnonzero(~(self.within <= self.limit))]

    @property
    def advice(self) -> str:
        """Whether the pool of all chains is a posterior or an ensemble."""
        if self.unsettled:
            return f"not settled: chains {self.unsettled} still move, or never did; run longer, then judge the pool"
        if self.between <= self.limit:
            return "one posterior: the chains agree, and their pool is one long chain"
        return "an ensemble: every chain has settled in a mode of its own; the pool is not the posterior"

    def __str__(self) -> str:
        import pandas

        chains = {"chain": range(len(self.within)), "R-hat of its halves": self.within, "log density": self.by_chain}
        table = pandas.DataFrame(chains).to_string(index=False, float_format="{:.3f}".format)
        pooled = ", ".join(f"{size}: {density:.4f}" for size, density in enumerate(self.by_number, 1))
        return (
            f"{table}\nlog density by number of chains pooled: {pooled}\n"
            f"R-hat between chains: {self.between:.3f}, the largest of a prediction {self.largest:.3f}\n{self.advice}"
        )


def pooling(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, rhat_limit: float = 1.05) -> PoolingReport:
    r"""Judge by their predictions whether chains may be pooled, for Gaussian noise: a :class:`PoolingReport` to print.

    Settled chains that disagree are an ensemble, not the posterior. Chains of fewer than about fifty independent draws
    look unsettled by chance.

    Args:
        y: observations, (n,) or (n, k).
        mean: predicted means, ``(chains, draws, *y.shape)``.
        variance: predicted variances with the noise, of the shape of ``mean``.
        rhat_limit: largest $\hat R$ of chains that agree, above 1.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import pooling
        >>> mean = 0.1 * np.random.default_rng(0).normal(size=(4, 100, 20))
        >>> pooling(np.zeros(20), mean, np.ones((4, 100, 20))).advice
        'one posterior: the chains agree, and their pool is one long chain'
    """
    means, variances = np.asarray(mean), np.asarray(variance)
    if means.ndim != np.ndim(y) + 2 or means.shape != variances.shape or means.shape[0] < 2 or means.shape[1] < 4:
        raise ValueError(
            "mean and variance must have shape (chains, draws, *y.shape), with at least 2 chains of 4 draws, but y has "
            f"shape {np.shape(y)}, mean {means.shape} and variance {variances.shape}."
        )
    if not rhat_limit > 1:
        raise ValueError(f"rhat_limit must be above 1, but is {rhat_limit!r}.")
    flat = np.ravel(y)
    by_chain = zip(means, variances, strict=True)
    densities = np.stack([_mixture.in_blocks(_mixture.log_density, flat, *chain) for chain in by_chain])
    predicted = np.stack([means, np.log(variances)], axis=-1).astype(float)
    half = means.shape[1] // 2
    is_stuck = ~np.ptp(predicted, axis=1).reshape(len(means), -1).any(axis=1)
    halves = [_quantile(_rhats(np.stack([chain[:half], chain[-half:]]))) for chain in predicted]
    rhats = _rhats(predicted)
    return PoolingReport(
        within=np.where(is_stuck, np.inf, halves),
        between=_quantile(rhats),
        largest=float(rhats.max()),
        by_chain=densities.mean(axis=1),
        by_number=np.array([_mean_of_pools(densities, index + 1) for index in range(len(densities))]),
        limit=rhat_limit,
    )


def _rhats(draws: np.ndarray) -> np.ndarray:
    """Return the larger R-hat of both moments by entry of y; 1 for constant draws."""
    num_chains, num_draws = draws.shape[:2]
    excess = (rhat_squared(draws) - 1) * num_chains / (num_chains - 1)  # as in rhat_squared
    squared = np.nan_to_num((num_draws - 1) / num_draws * (1 + excess), nan=1.0, posinf=np.inf)
    return np.sqrt(squared).max(axis=-1).ravel()


def _quantile(rhats: np.ndarray) -> float:
    return float(np.quantile(rhats, _LEVEL, method="lower"))  # the others fail for infinities


def _mean_of_pools(densities: np.ndarray, pool_size: int) -> float:
    num_chains = len(densities)
    if comb(num_chains, pool_size) <= _MOST_SUBSETS:
        pools = [list(pool) for pool in combinations(range(num_chains), pool_size)]
    else:
        random = np.random.default_rng(0)
        pools = [random.choice(num_chains, pool_size, replace=False).tolist() for _ in range(_MOST_SUBSETS)]
    return float(np.mean([_mixture.log_average(densities[pool]) for pool in pools]))
