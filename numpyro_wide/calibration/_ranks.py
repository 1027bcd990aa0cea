"""Ranks of the truth among posterior draws, all uniform on 0, ..., num_draws for the exact posterior."""

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_key, kind_of, listing
from numpyro_wide.calibration._simulations import Simulations, check_simulations, real_array

_TARP = "(rng_key, simulations, references=None)"


def sbc_ranks(simulations: Simulations, *, rng_key: Array | None = None) -> dict[str, np.ndarray]:
    """Count the draws that lie below the truth: ranks of simulation-based calibration (Talts 2018, Theorem 1).

    For independent draws from the exact posterior each is uniform on 0, ..., num_draws. A histogram that bulges in
    the middle tells of posteriors that are too wide, one with horns of posteriors too narrow, a slope of bias. A
    posterior that ignores the data and returns the prior passes: see :func:`tarp` with references made from data.

    Args:
        simulations: truths and draws.
        rng_key: a PRNG key that breaks ties (of discrete latents) at random; a fixed key if None.

    Returns:
        Ranks by name, (num_simulations, ...), one for each scalar component.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations, sbc_ranks
        >>> draws = np.tile(np.arange(9.0), (3, 1))
        >>> sbc_ranks(Simulations({"z": np.array([-1.0, 3.5, 99.0])}, {"z": draws}))["z"].tolist()
        [0, 4, 9]
    """
    check_simulations(simulations, "sbc_ranks(simulations, rng_key=...)")
    rng = _generator(rng_key)
    return {
        name: _rank(np.asarray(values), np.asarray(simulations.draws[name]), rng)
        for name, values in simulations.truth.items()
    }


def hpd_ranks(simulations: Simulations, *, rng_key: Array | None = None) -> np.ndarray:
    """Count the draws that have a higher density than the truth: ranks of highest-density regions (Hermans 2022).

    Args:
        simulations: truths and draws, with ``log_density_truth`` and ``log_density_draws``.
        rng_key: a PRNG key that breaks ties at random; a fixed key if None.

    Returns:
        Ranks (num_simulations,), uniform on 0, ..., num_draws for the exact posterior.

    Raises:
        ValueError: if the simulations hold no log densities.
    """
    check_simulations(simulations, "hpd_ranks(simulations, rng_key=...)")
    if simulations.log_density_truth is None or simulations.log_density_draws is None:
        raise ValueError(
            "highest-density regions need log_density_truth and log_density_draws, which from_guide computes. "
            "Without them, see expected_coverage(..., region='central') and tarp."
        )
    truth, draws = np.asarray(simulations.log_density_truth), np.asarray(simulations.log_density_draws)
    return _rank(-truth, -draws, _generator(rng_key))


def tarp_ranks(
    rng_key: Array, simulations: Simulations, references: Mapping[str, ArrayLike] | None = None
) -> np.ndarray:
    """Count the draws that are nearer to a reference point than the truth is (Lemos 2023, Theorem 3).

    All latents are seen at once, each scaled to the unit interval by the range of its truths. Where the references
    are drawn independently of the data, a posterior that returns the prior passes as it does in :func:`sbc_ranks`;
    with references that depend on the data, uniform ranks for all of them are sufficient for the exact posterior.

    Args:
        rng_key: a PRNG key for the references, and for ties.
        simulations: truths and draws.
        references: reference points by name, (num_simulations, ...); None for uniform points in the box of truths.

    Returns:
        Ranks (num_simulations,), uniform on 0, ..., num_draws for the exact posterior.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if the references' names or shapes are not those of the truths, or one of either is not finite.
    """
    check_key("rng_key", rng_key, _TARP)
    check_simulations(simulations, _TARP)
    rng = _generator(rng_key)
    for name, values in simulations.truth.items():
        _check_finite("truth", name, values)
    truth, draws = simulations.flat()
    low, high = truth.min(axis=0), truth.max(axis=0)
    scale = np.where(high > low, high - low, 1)
    uniform = low + scale * rng.random(truth.shape)
    points = uniform if references is None else _flat_references(references, simulations)
    distance = np.sum(np.square((truth - points) / scale), axis=-1)
    return _rank(distance, np.sum(np.square((draws - points[:, None]) / scale), axis=-1), rng)


def _flat_references(references: Mapping[str, ArrayLike], simulations: Simulations) -> np.ndarray:
    if not isinstance(references, Mapping):
        raise TypeError(
            f"references must be a dictionary of arrays by name, but is {kind_of(references)}; the names are "
            f"{listing(simulations.truth)}."
        )
    references = {name: real_array(f"references[{name!r}]", values) for name, values in references.items()}
    expected = {name: np.shape(values) for name, values in simulations.truth.items()}
    got = {name: np.shape(values) for name, values in references.items()}
    if got != expected:
        raise ValueError(f"references must have the names and shapes of the truths, {expected}, but got {got}.")
    for name, values in references.items():
        _check_finite("references", name, values)
    return np.concatenate([np.reshape(references[name], (simulations.num_simulations, -1)) for name in expected], -1)


def _check_finite(group: str, name: str, values: ArrayLike) -> None:
    """Refuse a point that has no distance from others, for its rank would be 0 whatever the draws are."""
    if not np.isfinite(values).all():
        raise ValueError(
            f"distances need finite points, but {group}[{name!r}] holds NaN or infinite values: leave these "
            "simulations out, or look at a finite function of the latent."
        )


def _generator(rng_key: Array | None) -> np.random.Generator:
    key = jax.random.key(0) if rng_key is None else rng_key
    check_key("rng_key", key, "rng_key=jax.random.key(0)")
    return np.random.default_rng(np.asarray(jax.random.bits(key, (4,), "uint32")))


def _rank(truth: np.ndarray, draws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rank ``truth`` (S, ...) among ``draws`` (S, L, ...), with ties broken at random."""
    below = np.sum(draws < truth[:, None], axis=1)
    return below + rng.integers(0, np.sum(draws == truth[:, None], axis=1), endpoint=True)
