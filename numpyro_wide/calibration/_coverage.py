"""Expected coverage: how often credible regions hold the truth."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide.calibration._bands import p_values, rank_grid
from numpyro_wide.calibration._ranks import hpd_ranks, sbc_ranks, tarp_ranks
from numpyro_wide.calibration._simulations import Simulations


class Coverage(NamedTuple):
    """Nominal and empirical probability that credible regions hold the truth."""

    nominal: np.ndarray
    """Credibility levels (m,), increasing."""
    empirical: np.ndarray
    """The proportion of simulations whose truth is inside, (..., m), the latent's own axes first."""
    num_simulations: int
    """How many simulations there are."""
    p_value: np.ndarray
    """Of the simultaneous test that both agree, (...)."""


def expected_coverage(
    simulations: Simulations, *, region: str = "central", rng_key: jax.Array | None = None
) -> dict[str, Coverage]:
    """Coverage of credible regions, averaged over the model's own data (Hermans 2022, eq. 7).

    Central intervals run between order statistics of the draws, and highest-density regions are where the density
    under test exceeds that of a draw, so that the coverage of the exact posterior is the nominal one for any number
    of draws, with no approximation. Above the diagonal the posterior is too wide, below it too narrow or biased.

    Args:
        simulations: truths and draws; with log densities for ``region="hpd"``.
        region: "central" for intervals of each scalar component, "hpd" for the region of all latents together.
        rng_key: breaks ties at random (discrete latents); a fixed key if None.

    Returns:
        name -> :class:`Coverage`; for "hpd" the one name is "joint".

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
    if region == "hpd":
        return {"joint": _of_ranks(hpd_ranks(simulations, rng_key=rng_key), num_draws)}
    if region != "central":
        raise ValueError(f"region must be 'central' or 'hpd', but got {region!r}.")
    if num_draws < 2:
        raise ValueError(
            "central intervals run between two draws, but there is one draw for each simulation; make more draws, or "
            "see uniformity_p_value of sbc_ranks."
        )
    ranks = sbc_ranks(simulations, rng_key=rng_key)
    return {name: _of_central_intervals(values, num_draws) for name, values in ranks.items()}


def tarp(rng_key: jax.Array, simulations: Simulations, references: Mapping[str, ArrayLike] | None = None) -> Coverage:
    """Tests of accuracy with random points: coverage of balls around reference points (Lemos 2023).

    A ball around the reference that holds a fraction α of the draws holds the truth with probability α. It sees
    all latents at once, and with them wrong correlations, which no scalar rank does.

    Args:
        rng_key: for the references, and for ties.
        simulations: truths and draws.
        references: name -> reference points (num_simulations, ...), such as functions of the data; None for uniform
            points in the box of the truths. See :func:`tarp_ranks`.

    Returns:
        One :class:`Coverage` of all latents together.

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
    """Coverage of the regions that grow with the rank."""
    points = rank_grid(num_draws)
    inside = [np.mean(ranks < point, axis=0) for point in points]
    return _coverage(points / (num_draws + 1), np.stack(inside, -1), ranks)


def _of_central_intervals(ranks: np.ndarray, num_draws: int) -> Coverage:
    """Coverage of the intervals between the k-th draws from both ends, k ≤ rank ≤ num_draws − k."""
    depths = np.flip(rank_grid(num_draws, 200))
    depths = depths[2 * depths < num_draws + 1]
    inside = [np.mean((ranks >= depth) & (ranks <= num_draws - depth), axis=0) for depth in depths]
    return _coverage(1 - 2 * depths / (num_draws + 1), np.stack(inside, -1), ranks)


def _coverage(nominal: np.ndarray, empirical: np.ndarray, ranks: np.ndarray) -> Coverage:
    return Coverage(nominal, empirical, len(ranks), p_values(nominal, empirical, len(ranks)))
