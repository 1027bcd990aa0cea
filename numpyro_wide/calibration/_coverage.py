"""Expected coverage: the proportion of simulations whose credible regions hold the truth."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_one_of
from numpyro_wide.calibration._bands import p_values, rank_grid
from numpyro_wide.calibration._ranks import hpd_ranks, sbc_ranks, tarp_ranks
from numpyro_wide.calibration._simulations import Simulations


class Coverage(NamedTuple):
    """Nominal and empirical probability that credible regions hold the truth.

    Attributes:
        nominal: credibility levels (m,), increasing.
        empirical: proportion of simulations whose truth is inside, (..., m), the latent's own axes first.
        num_simulations: number of simulations.
        p_value: p-value of the simultaneous test that both agree, (...).
    """

    nominal: np.ndarray
    empirical: np.ndarray
    num_simulations: int
    p_value: np.ndarray


def expected_coverage(
    simulations: Simulations, *, region: str = "central", rng_key: Array | None = None
) -> dict[str, Coverage]:
    """Estimate the coverage of credible regions, averaged over the model's own data (Hermans 2022, equation 7).

    Central intervals run between order statistics of the draws, and highest-density regions are where the density
    under test exceeds that of a draw, so that the coverage of the exact posterior is the nominal one for any number
    of draws, with no approximation. Above the diagonal the posterior is too wide, below it too narrow or biased.

    Args:
        simulations: truths and draws; with log densities for ``region="hpd"``.
        region: "central" for intervals of each scalar component, "hpd" for the region of all latents together.
        rng_key: a PRNG key that breaks ties (of discrete latents) at random; a fixed key if None.

    Returns:
        :class:`~numpyro_wide.calibration.Coverage` by name; for "hpd" the one name is "joint".

    Raises:
        ValueError: for another region, "hpd" without log densities, or "central" with a single draw each.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations, expected_coverage
        >>> rng = np.random.default_rng(2)
        >>> y = rng.normal(size=500)  # a posterior N(y, 1)
        >>> truth, draws = y + rng.normal(size=500), y[:, None] + rng.normal(size=(500, 99))
        >>> coverage = expected_coverage(Simulations({"z": truth}, {"z": draws}))["z"]
        >>> coverage.nominal[[9, 44]].round(2).tolist(), bool(coverage.p_value > 0.05)
        ([0.2, 0.9], True)
    """
    num_draws = simulations.num_draws
    check_one_of("region", region, ("central", "hpd"))
    if region == "hpd":
        return {"joint": _of_ranks(hpd_ranks(simulations, rng_key=rng_key), num_draws)}
    if num_draws < 2:
        raise ValueError(
            "central intervals run between two draws, but there is one draw for each simulation; make more draws, or "
            "see uniformity_p_value of sbc_ranks."
        )
    ranks = sbc_ranks(simulations, rng_key=rng_key)
    return {name: _of_central_intervals(values, num_draws) for name, values in ranks.items()}


def tarp(rng_key: Array, simulations: Simulations, references: Mapping[str, ArrayLike] | None = None) -> Coverage:
    """Test accuracy with random points: the coverage of balls around reference points (Lemos 2023).

    A ball around the reference that holds a fraction α of the draws holds the truth with probability α. It sees
    all latents at once, and with them wrong correlations, which no scalar rank does.

    Args:
        rng_key: a PRNG key for the references, and for ties.
        simulations: truths and draws.
        references: reference points by name, (num_simulations, ...), such as functions of the data; None for uniform
            points in the box of the truths, each latent scaled by the range of its truths.

    Returns:
        One :class:`~numpyro_wide.calibration.Coverage` of all latents together.

    Raises:
        ValueError: if the references' names or shapes are not those of the truths.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro_wide.calibration import Simulations, tarp
        >>> rng = np.random.default_rng(0)
        >>> prior = Simulations({"z": rng.normal(size=(300, 2))}, {"z": 3 * rng.normal(size=(300, 99, 2))})
        >>> bool(tarp(jax.random.key(0), prior).p_value < 0.01)  # draws that are three times too wide
        True
    """
    return _of_ranks(tarp_ranks(rng_key, simulations, references), simulations.num_draws)


def _of_ranks(ranks: np.ndarray, num_draws: int) -> Coverage:
    """Estimate the coverage of the regions that grow with the rank."""
    points = rank_grid(num_draws)
    inside = [np.mean(ranks < point, axis=0) for point in points]
    return _coverage(points / (num_draws + 1), np.stack(inside, -1), ranks)


def _of_central_intervals(ranks: np.ndarray, num_draws: int) -> Coverage:
    """Estimate the coverage of the intervals between the k-th draws from both ends, k ≤ rank ≤ num_draws − k."""
    depths = np.flip(rank_grid(num_draws, 200))
    depths = depths[2 * depths < num_draws + 1]
    inside = [np.mean((ranks >= depth) & (ranks <= num_draws - depth), axis=0) for depth in depths]
    return _coverage(1 - 2 * depths / (num_draws + 1), np.stack(inside, -1), ranks)


def _coverage(nominal: np.ndarray, empirical: np.ndarray, ranks: np.ndarray) -> Coverage:
    return Coverage(nominal, empirical, len(ranks), p_values(nominal, empirical, len(ranks)))
