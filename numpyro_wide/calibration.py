"""Calibration of posteriors on average over their own model: ranks, coverage, and tests with random points.

Simulate latents and data from the model, draw from the posterior under test given the data (:func:`from_guide`,
:func:`from_mcmc`, or any other in a :class:`Simulations`), and compare the draws with the latents that made the data.
:mod:`numpyro_wide.plots` draws the results with simultaneous bands.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.handlers import condition
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from tqdm.auto import tqdm

from numpyro_wide._arviz import effective_sample_size
from numpyro_wide._checks import (
    check_key,
    check_levels,
    check_names_known,
    check_one_of,
    kind_of,
    listing,
    whole_number,
)
from numpyro_wide._traces import Sites, run_model, sample_sites
from numpyro_wide.amortized._simulation import (
    Draws,
    check_guide,
    check_params,
    check_simulator,
    draw_from_guide,
    latent_names,
    log_density,
    run_guide,
    simulate,
    site_names,
)

__all__ = [
    "expected_coverage",
    "from_guide",
    "from_mcmc",
    "sbc_ranks",
    "tarp",
    "uniformity_p_value",
]


@dataclass(frozen=True)
class Simulations:
    """Latents that made simulated data, and draws from the posterior under test given those data.

    Latents that the posterior does not cover are marginalised: leave them out. A test quantity, such as the log
    likelihood (Modrák 2023), joins as one more name in both dictionaries.

    The arrays are copied: what is done to the caller's later changes nothing here.

    Args:
        truth: latents of each simulation by name, (num_simulations, ...).
        draws: posterior draws for each simulation by name, (num_simulations, num_draws, ...).
        observed: simulated data by name, (num_simulations, ...), if they are to be kept.
        log_density_truth: log density of the posterior under test, up to a constant for each simulation, at the
            truth, (num_simulations,), -inf outside of its support; needed for highest-density regions alone.
        log_density_draws: log density of the posterior under test at the draws, (num_simulations, num_draws).
        ess: effective sample sizes of draws by MCMC, by name, (num_simulations, ...).

    Raises:
        TypeError: if the arrays do not hold real numbers.
        ValueError: if names or shapes do not fit, or a value is NaN.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations
        >>> simulations = Simulations({"z": np.zeros((200, 2))}, {"z": np.ones((200, 99, 2))})
        >>> simulations.num_simulations, simulations.num_draws
        (200, 99)
    """

    truth: Mapping[str, ArrayLike]
    draws: Mapping[str, ArrayLike]
    observed: Mapping[str, ArrayLike] = field(default_factory=dict)
    log_density_truth: ArrayLike | None = None
    log_density_draws: ArrayLike | None = None
    ess: Mapping[str, ArrayLike] | None = None

    def __post_init__(self) -> None:
        """Check the arrays, and hold copies."""
        for name in ("truth", "draws", "observed", "ess"):
            group = getattr(self, name)
            if group is not None:
                if not isinstance(group, Mapping):
                    raise TypeError(
                        f"{name} must be a dictionary of arrays by name, but is {kind_of(group)}; write "
                        f"{name}={{'theta': ...}}."
                    )
                object.__setattr__(self, name, {site: real_array(site, values) for site, values in group.items()})
        for name in ("log_density_truth", "log_density_draws"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, real_array(name, getattr(self, name)))
        _check_names_and_shapes(self.truth, self.draws)
        _check_densities(self)

    @property
    def num_simulations(self) -> int:
        """Number of simulated data sets."""
        return len(next(iter(self.truth.values())))  # type: ignore[arg-type]

    @property
    def num_draws(self) -> int:
        """Number of posterior draws for each of them."""
        return next(iter(self.draws.values())).shape[1]  # type: ignore[union-attr]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Lay all scalar components side by side, truth (num_simulations, P) and draws (num_simulations, num_draws, P).

        Both hold floats, whatever the latents are.
        """
        shape = (self.num_simulations, self.num_draws, -1)
        truth = [np.reshape(self.truth[name], (self.num_simulations, -1)) for name in self.truth]
        draws = [np.reshape(self.draws[name], shape) for name in self.truth]
        return _as_floats(np.concatenate(truth, axis=-1)), _as_floats(np.concatenate(draws, axis=-1))


def check_simulations(value: Any, order: str) -> None:
    """Refuse anything but simulations.

    Args:
        value: argument that came.
        order: order of the arguments, for the message.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(value, Simulations):
        raise TypeError(f"simulations must be Simulations, but got {kind_of(value)}; the order is {order}.")


def real_array(name: str, values: ArrayLike) -> np.ndarray:
    """Copy real numbers into a NumPy array.

    Args:
        name: name of the array, for messages.
        values: numbers, truth values, or what NumPy makes an array of them from.

    Raises:
        TypeError: if they are complex, or no numbers.
    """
    array = np.array(values)
    if array.dtype.kind not in "fiub" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} must hold real numbers, but has the type {array.dtype}; take real parts, or functions."
        )
    return array


def _as_floats(values: np.ndarray) -> np.ndarray:
    return values if np.issubdtype(values.dtype, np.floating) else values.astype(float)


def _check_names_and_shapes(truth: Mapping[str, Any], draws: Mapping[str, Any]) -> None:
    if not truth or set(truth) != set(draws):
        raise ValueError(f"truth and draws must hold the same names, but hold {sorted(truth)} and {sorted(draws)}.")
    sizes = {(values.shape[:1], draws[name].shape[:2]) for name, values in truth.items()}
    for name, values in truth.items():
        expected = (*values.shape[:1], *draws[name].shape[1:2], *values.shape[1:])
        if values.ndim < 1 or draws[name].ndim < 2 or draws[name].shape != expected or len(sizes) != 1:
            raise ValueError(
                "truth must hold arrays (num_simulations, ...) and draws arrays (num_simulations, num_draws, ...) with "
                f"the same numbers for all names, but {name!r} has shapes {values.shape} and {draws[name].shape}."
            )
        for array, group in ((values, "truth"), (draws[name], "draws")):
            if 0 in array.shape or np.isnan(array).any():
                raise ValueError(f"{group}[{name!r}] is empty or holds NaN: leave failed simulations out of both.")


def _check_densities(simulations: Simulations) -> None:
    pair = simulations.log_density_truth, simulations.log_density_draws
    if all(array is None for array in pair):
        return
    expected = (simulations.num_simulations,), (simulations.num_simulations, simulations.num_draws)
    got = tuple(() if array is None else np.shape(array) for array in pair)
    if got != expected:
        raise ValueError(f"log_density_truth and log_density_draws must have shapes {expected}, but got {got}.")
    for name, array in zip(("log_density_truth", "log_density_draws"), pair, strict=True):
        if np.isnan(array).any():  # type: ignore[arg-type]
            raise ValueError(
                f"{name} holds NaN, which has no rank: leave failed simulations out of all arrays, and write -inf "
                "where the density is 0, as outside of its support."
            )


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


Model = Callable[..., Any]


def from_guide(
    rng_key: Array,
    model: Model,
    guide: Model,
    params: dict[str, Any],
    *model_args: Any,
    observed: str | Sequence[str],
    num_simulations: int = 500,
    num_draws: int = 99,
    batch_size: int = 50,
) -> Simulations:
    """Draw from an amortised guide for data simulated from the model.

    Latents of the model that the guide does not sample are marginalised. The guide's log densities are kept, for
    highest-density regions.

    Args:
        rng_key: a PRNG key.
        model: ``model(*model_args)``, called without data, samples every site.
        guide: ``guide(observed_values, *model_args)``, given a dictionary of the observed sites of *one* simulated data
            set, samples latents of the model.
        params: values of the guide's param and mutable sites, as a trainer returns them; {} if it has none.
        *model_args: arguments of model and guide.
        observed: name, or names, of the sample or deterministic sites that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: number of draws from the guide for each data set; num_draws + 1 with many divisors makes for even
            histograms.
        batch_size: number of data sets whose draws are made at a time.

    Returns:
        :class:`Simulations` of the guide's sites.

    Raises:
        ValueError: if the model does not simulate (it observes, has factors, param sites, subsampled plates or scaled
            densities) or lacks an observed site; if the guide draws anything but latents of the model in the model's
            shapes; or if ``params`` lacks one of the guide's sites, which would then not be the fitted guide.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.calibration import from_guide, sbc_ranks
        >>> def model():
        ...     z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(z, 1.0))
        >>> def guide(observed):  # the exact posterior
        ...     numpyro.sample("z", dist.Normal(observed["y"] / 2, 0.5**0.5))
        >>> simulations = from_guide(jax.random.key(0), model, guide, {}, observed="y", num_simulations=20)
        >>> sbc_ranks(simulations)["z"].shape
        (20,)
    """
    check_key("rng_key", rng_key, "from_guide(rng_key, model, guide, params, x, observed=...)")
    num_simulations = whole_number("num_simulations", num_simulations)
    num_draws, batch_size = whole_number("num_draws", num_draws), whole_number("batch_size", batch_size)
    simulate_key, guide_key = random.split(rng_key)
    names = site_names(observed)
    model_sites = _checked_run(model, model_args, names)
    joint = _simulate(simulate_key, model, model_args, names, num_simulations)
    data = {name: joint[name] for name in names}
    first = {name: value[0] for name, value in data.items()}
    guide_sites = check_params(guide, guide_key, params, first, model_args, {})
    check_guide(guide_sites, model_sites, names)
    truth = {name: joint[name] for name in sample_sites(guide_sites)}

    def posterior(inputs: tuple[Array, Draws, Draws]) -> tuple[Draws, Array, Array]:
        key, values, truth = inputs
        key, draw_key = random.split(key)
        at_truth = log_density(run_guide(guide, key, params, values, model_args, {}, truth))
        draw = lambda key: draw_from_guide(guide, key, params, values, model_args, {})  # noqa: E731
        draws, at_draws = jax.vmap(draw)(random.split(draw_key, num_draws))
        return draws, at_truth, at_draws

    keys = random.split(guide_key, num_simulations)
    run = jax.jit(lambda inputs: lax.map(posterior, inputs, batch_size=min(batch_size, num_simulations)))
    draws, at_truth, at_draws = run((keys, data, truth))
    return Simulations(truth, draws, data, at_truth, at_draws)


def from_mcmc(
    rng_key: Array,
    model: Model,
    make_kernel: Callable[[Model], MCMCKernel],
    *model_args: Any,
    observed: str | Sequence[str],
    num_simulations: int = 100,
    num_draws: int = 99,
    num_warmup: int = 500,
    thinning: int = 1,
    sites: Sequence[str] | None = None,
    progress_bar: bool = True,
) -> Simulations:
    """Draw by MCMC for data simulated from the model, one chain for each data set.

    Ranks among correlated draws are not uniform: thin until the draws that are kept are as good as independent
    (Talts 2018, Section 5.1). The effective sample sizes are in the result, and a warning proposes a thinning if
    they fall short. Everything is compiled once.

    Args:
        rng_key: a PRNG key.
        model: ``model(*model_args)``, called without data, samples every site.
        make_kernel: function from a model to a kernel, such as ``NUTS`` or ``partial(NUTS, target_accept_prob=0.9)``.
        *model_args: arguments of the model.
        observed: name, or names, of the sample sites that are data at inference time.
        num_simulations: number of simulated data sets.
        num_draws: number of draws that are kept of each chain; num_draws + 1 with many divisors makes for even
            histograms.
        num_warmup: number of warmup steps of each chain.
        thinning: number of steps from one draw that is kept to the next.
        sites: names of the latents to look at; None for all that the model samples.
        progress_bar: whether to show the number of chains that have run.

    Returns:
        :class:`Simulations` with ``ess``.

    Raises:
        ValueError: if the model does not simulate, as for :func:`from_guide`, or does not sample a site of the given
            names.
    """
    check_key("rng_key", rng_key, "from_mcmc(rng_key, model, make_kernel, x, observed=...)")
    num_simulations, num_draws = whole_number("num_simulations", num_simulations), whole_number("num_draws", num_draws)
    num_warmup, thinning = whole_number("num_warmup", num_warmup, least=0), whole_number("thinning", thinning)
    simulate_key, chain_key = random.split(rng_key)
    names = site_names(observed)
    model_sites = _checked_run(model, model_args, names)
    _check_have_densities(model_sites, names)
    latents = sorted(latent_names(model_sites, names))
    wanted = latents if sites is None else list(sites)
    check_names_known("sites", wanted, latents, kind="latent site")
    if not wanted:
        raise ValueError(f"sites must name some of the model's latent sites, {listing(latents)}, but names none.")
    joint = _simulate(simulate_key, model, model_args, names, num_simulations)
    data = {name: joint[name] for name in names}

    def conditioned(values: Draws, *args: Any) -> Any:
        return condition(model, data=values)(*args)

    # Under jit as a whole: MCMC compiles anew for each run, because it initialises its kernel outside.
    @jax.jit
    def run(key: Array, values: Draws) -> Draws:
        mcmc = MCMC(
            make_kernel(conditioned),
            num_warmup=num_warmup,
            num_samples=num_draws * thinning,
            thinning=thinning,
            progress_bar=False,
        )
        mcmc.run(key, values, *model_args)
        return {name: mcmc.get_samples()[name] for name in wanted}

    keys = random.split(chain_key, num_simulations)
    chains = []
    for index in tqdm(range(num_simulations), desc="chains", disable=not progress_bar):
        chains.append(jax.device_get(run(keys[index], {name: value[index] for name, value in data.items()})))
    draws = {name: np.stack([chain[name] for chain in chains]) for name in wanted}
    ess = {name: _effective_sample_sizes(values) for name, values in draws.items()}
    _warn_of_correlation(ess, num_draws, thinning)
    return Simulations({name: joint[name] for name in wanted}, draws, data, ess=ess)


def _checked_run(model: Model, model_args: tuple[Any, ...], observed: tuple[str, ...]) -> Sites:
    sites = run_model(model, model_args)
    check_simulator(sites, observed)
    return sites


def _simulate(
    rng_key: Array, model: Model, model_args: tuple[Any, ...], observed: tuple[str, ...], num_simulations: int
) -> Draws:
    """Simulate, one data set after another, all sample sites and the observed ones, (num_simulations, ...)."""
    keys = random.split(rng_key, num_simulations)
    return lax.map(lambda key: simulate(model, key, observed, model_args, {}), keys)


def _check_have_densities(model_sites: Sites, observed: tuple[str, ...]) -> None:
    without = [name for name in observed if model_sites[name]["type"] != "sample"]
    if without:
        raise ValueError(
            f"a chain needs the density of what is observed, but {listing(without)} are functions of the latents; name "
            "sample sites as observed, or see from_guide, which needs none."
        )


def _effective_sample_sizes(draws: np.ndarray) -> np.ndarray:
    """Estimate the effective sample sizes (num_simulations, ...) of single chains (num_simulations, num_draws, ...)."""
    columns = draws.reshape(draws.shape[0], draws.shape[1], -1)
    chains = np.moveaxis(columns, 0, 1)[None].astype(float)  # simulations as components of one chain
    return effective_sample_size(chains).reshape(draws.shape[:1] + draws.shape[2:])


def _warn_of_correlation(ess: dict[str, np.ndarray], num_draws: int, thinning: int) -> None:
    """Warn if the typical chain of some latent is worth far fewer draws than it has."""
    name, typical = min(
        ((name, float(np.min(np.median(values, axis=0)))) for name, values in ess.items()), key=lambda pair: pair[1]
    )
    if typical < 0.7 * num_draws:
        warnings.warn(
            f"the {num_draws} draws of {name!r} are worth {typical:.0f} independent ones in the median simulation, so "
            "that ranks are not uniform even for an exact posterior: "
            f"use thinning={math.ceil(thinning * num_draws / typical)}.",
            UserWarning,
            stacklevel=3,
        )
