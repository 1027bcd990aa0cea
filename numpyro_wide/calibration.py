"""Calibration of posteriors on average over their own model: ranks, coverage, and tests with random points.

:mod:`numpyro_wide.plots` draws the results with simultaneous bands; for chains take ``simuk.SBC``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from scipy.special import bdtr, bdtrc

from numpyro_wide._checks import (
    check_key,
    check_level,
    check_one_of,
    check_ranks,
    late_progress,
    refuse_other_than_numbers,
    whole_number,
)
from numpyro_wide._traces import run_model, sample_sites
from numpyro_wide.amortized._simulation import (
    Arrays,
    Draws,
    bound,
    check_guide,
    check_params,
    check_simulator,
    draw_from_guide,
    log_density,
    refuse_missing,
    run_guide,
    simulate,
    site_names,
)
from numpyro_wide.amortized._training_data import check_simulations

__all__ = [
    "c2st",
    "expected_coverage",
    "from_guide",
    "sbc_ranks",
    "tarp",
    "uniformity_p_value",
]


@dataclass(frozen=True)
class Simulations:
    """Latents that made simulated data, and posterior draws given those data, copied.

    Test quantities, such as the log likelihood (Modrák 2023), join by name.

    Args:
        truth: latents by name, (num_simulations, ...).
        draws: posterior draws by name, (num_simulations, num_draws, ...).
        observed: simulated data by name, (num_simulations, ...).
        log_density_truth: log density under test at the truth, up to a constant, (num_simulations,).
        log_density_draws: the same at the draws, (num_simulations, num_draws).

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations
        >>> Simulations({"z": np.zeros((200, 2))}, {"z": np.ones((200, 99, 2))}).num_draws
        99
    """

    truth: Mapping[str, ArrayLike]
    draws: Mapping[str, ArrayLike]
    observed: Mapping[str, ArrayLike] = field(default_factory=dict)
    log_density_truth: ArrayLike | None = None
    log_density_draws: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Check and copy the arrays."""
        for name in ("truth", "draws", "observed"):
            arrays = {site: real_array(site, values) for site, values in getattr(self, name).items()}
            object.__setattr__(self, name, arrays)
        for name in ("log_density_truth", "log_density_draws"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, real_array(name, getattr(self, name)))
        self._check_shapes()
        self._check_numbers()

    @property
    def num_simulations(self) -> int:
        """Number of simulated data sets."""
        return len(next(iter(self.truth.values())))  # type: ignore[arg-type]

    @property
    def num_draws(self) -> int:
        """Number of posterior draws for each of them."""
        return next(iter(self.draws.values())).shape[1]  # type: ignore[union-attr]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Return truth (simulations, P) and draws (simulations, num_draws, P)."""
        return _flat(self.truth, self.truth), _flat(self.draws, self.truth, 2)

    def _check_shapes(self) -> None:
        truth: Mapping[str, Any] = self.truth
        draws: Mapping[str, Any] = self.draws
        if not truth or set(truth) != set(draws):
            raise ValueError(f"truth and draws must hold the same names, but hold {sorted(truth)} and {sorted(draws)}.")
        sizes = next(iter(draws.values())).shape[:2]
        for name, values in truth.items():
            expected = (*sizes[:1], *values.shape[1:]), (*sizes, *values.shape[1:])
            if len(sizes) < 2 or (values.shape, draws[name].shape) != expected:
                raise ValueError(
                    "truth must hold arrays (num_simulations, ...) and draws arrays (num_simulations, num_draws, ...) "
                    f"of the same numbers, but {name!r} has shapes {values.shape} and {draws[name].shape}."
                )
        densities = self.log_density_truth, self.log_density_draws
        actual = tuple(() if array is None else np.shape(array) for array in densities)
        if actual not in (((), ()), (sizes[:1], sizes)):
            raise ValueError(
                f"log_density_truth and log_density_draws must have shapes {sizes[:1]} and {sizes}, but got {actual}."
            )

    def _check_numbers(self) -> None:
        for name in ("truth", "draws", "log_density_truth", "log_density_draws"):
            for path, array in jax.tree.leaves_with_path(getattr(self, name)):
                if array.size == 0 or np.isnan(array).any():
                    raise ValueError(
                        f"{name}{jax.tree_util.keystr(path)} is empty or holds NaN: leave failed simulations out of "
                        "all arrays, and write -inf where the density is 0."
                    )


def real_array(name: str, values: ArrayLike) -> np.ndarray:
    """Copy real numbers into an array."""
    array = np.array(values)
    refuse_other_than_numbers(name, array)
    return array


def _flat(arrays: Mapping[str, ArrayLike], names: Iterable[str], num_leading: int = 1) -> np.ndarray:
    """Join arrays by name as floats along one axis after the leading ones."""
    flat_arrays = [np.reshape(arrays[name], (*np.shape(arrays[name])[:num_leading], -1)) for name in names]
    return np.concatenate(flat_arrays, axis=-1, dtype=float)


NUM_NULL = 1000  # simulated: a standard error of 0.7 points at level 0.95


def uniformity_band(
    probabilities: ArrayLike, num_simulations: int, *, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Make a simultaneous band (m,), (m,) at increasing probabilities (m,) (Säilynoja 2022, Section 3.2; simulated)."""
    check_level(level)
    probabilities = np.asarray(probabilities, float)
    tail = np.quantile(_null_tails(probabilities, num_simulations), 1 - level) / 2
    at_most = bdtr(np.arange(num_simulations + 1)[:, None], num_simulations, probabilities)
    low, high = (np.sum(at_most < end, axis=0) / num_simulations for end in (tail, 1 - tail))
    return low, high


def uniformity_p_value(ranks: ArrayLike, num_draws: int) -> np.ndarray:
    """Return p-values of uniform ranks, (...), at least 1/1001, by the band of their distribution function.

    Args:
        ranks: whole numbers in 0, ..., num_draws, (num_simulations, ...).
        num_draws: number of posterior draws that they are ranks among.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import uniformity_p_value
        >>> ranks = np.random.default_rng(0).integers(0, 100, size=500)
        >>> bool(uniformity_p_value(ranks, 99) > 0.05), bool(uniformity_p_value(ranks // 2, 99) < 0.01)
        (True, True)
    """
    num_draws = whole_number("num_draws", num_draws)
    ranks = real_array("ranks", ranks)
    check_ranks("ranks", ranks, num_draws)
    return _rank_coverage(ranks, num_draws).p_value


def rank_grid(num_draws: int, max_points: int = 100) -> np.ndarray:
    """Spread at most ``max_points`` whole numbers evenly over 1, ..., num_draws."""
    return np.unique(np.linspace(1, num_draws, min(num_draws, max_points)).round().astype(int))


def _null_tails(probabilities: np.ndarray, num_simulations: int) -> np.ndarray:
    """Return the smallest pointwise p-value of each of many simulated exact curves."""
    masses = np.maximum(np.diff(probabilities, prepend=0, append=1), 0)
    counts = np.random.default_rng(0).multinomial(num_simulations, masses, size=NUM_NULL)
    return _smallest_tail(np.cumsum(counts, axis=1)[:, :-1], probabilities, num_simulations)


def _smallest_tail(counts: np.ndarray, probabilities: np.ndarray, num_simulations: int) -> np.ndarray:
    """Return the smallest of the p-values of counts (..., m)."""
    possible = np.arange(num_simulations + 1)[:, None]
    lower, upper = bdtr(possible, num_simulations, probabilities), bdtrc(possible - 1, num_simulations, probabilities)
    tails = np.minimum(1, 2 * np.minimum(lower, upper))
    return np.min(tails[counts, np.arange(tails.shape[1])], axis=-1)


def sbc_ranks(simulations: Simulations, *, rng_key: Array | None = None) -> dict[str, np.ndarray]:
    """Count the draws below the truth: ranks of simulation-based calibration (Talts 2018, Theorem 1).

    For the exact posterior ranks, (num_simulations, ...) by name, are uniform on 0, ..., num_draws. So they are for the
    prior, unlike :func:`tarp` with references made from data. ``rng_key`` breaks ties; None for a fixed key.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations, sbc_ranks
        >>> draws = np.tile(np.arange(9.0), (3, 1))
        >>> sbc_ranks(Simulations({"z": np.array([-1.0, 3.5, 99.0])}, {"z": draws}))["z"].tolist()
        [0, 4, 9]
    """
    rng, draws = _generator(rng_key), simulations.draws
    return {name: _rank(np.asarray(truth), np.asarray(draws[name]), rng) for name, truth in simulations.truth.items()}


def hpd_ranks(simulations: Simulations, *, rng_key: Array | None = None) -> np.ndarray:
    """Count the draws that have a higher density than the truth, (num_simulations,) (Hermans 2022)."""
    if simulations.log_density_truth is None or simulations.log_density_draws is None:
        raise ValueError("highest-density regions need log_density_truth and log_density_draws, as of from_guide.")
    truth, draws = np.asarray(simulations.log_density_truth), np.asarray(simulations.log_density_draws)
    return _rank(-truth, -draws, _generator(rng_key))


def _flat_references(references: Mapping[str, ArrayLike], truth: Mapping[str, ArrayLike]) -> np.ndarray:
    actual, expected = ({name: np.shape(values) for name, values in group.items()} for group in (references, truth))
    if actual != expected:
        raise ValueError(f"references must have the names and shapes of the truths, {expected}, but got {actual}.")
    return _check_finite("the references", _flat(references, truth))


def _check_finite(name: str, points: np.ndarray) -> np.ndarray:
    if not np.isfinite(points).all():
        raise ValueError(f"distances need finite points, but {name} hold NaN or infinite values: leave them out.")
    return points


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
        empirical: proportion of simulations inside, (..., m), the latent's axes first.
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

    Above the diagonal the posterior is too wide, below it too narrow or biased.

    Args:
        simulations: truths and draws; with log densities for ``region="hpd"``.
        region: "central" for intervals of each component, "hpd" for the joint region.
        rng_key: a PRNG key that breaks ties; a fixed key if None.

    Returns:
        :class:`~numpyro_wide.calibration.Coverage` by name; "joint" for "hpd".

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations, expected_coverage
        >>> rng = np.random.default_rng(2)
        >>> simulations = Simulations({"z": rng.normal(size=500)}, {"z": rng.normal(size=(500, 99))})
        >>> bool(expected_coverage(simulations)["z"].p_value > 0.05)
        True
    """
    num_draws = simulations.num_draws
    check_one_of("region", region, ("central", "hpd"))
    if region == "hpd":
        return {"joint": _rank_coverage(hpd_ranks(simulations, rng_key=rng_key), num_draws)}
    if num_draws < 2:
        raise ValueError("central intervals run between two draws, but there is one draw for each simulation.")
    ranks = sbc_ranks(simulations, rng_key=rng_key)
    return {name: _central_coverage(values, num_draws) for name, values in ranks.items()}


def tarp(rng_key: Array, simulations: Simulations, references: Mapping[str, ArrayLike] | None = None) -> Coverage:
    """Test accuracy with random points: the coverage of balls around reference points (Lemos 2023).

    The prior passes unless references depend on the data.

    Args:
        rng_key: a PRNG key for references and ties.
        simulations: truths and draws.
        references: reference points by name, (num_simulations, ...); None for uniform points in the truths' box.

    Returns:
        One :class:`~numpyro_wide.calibration.Coverage` of all latents.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro_wide.calibration import Simulations, tarp
        >>> rng = np.random.default_rng(0)
        >>> wide = Simulations({"z": rng.normal(size=(300, 2))}, {"z": 3 * rng.normal(size=(300, 99, 2))})
        >>> bool(tarp(jax.random.key(0), wide).p_value < 0.01)
        True
    """
    check_key("rng_key", rng_key, "(rng_key, simulations, references=None)")
    rng = _generator(rng_key)
    truth, draws = simulations.flat()
    _check_finite("the truths", truth)
    low, size = truth.min(axis=0), np.ptp(truth, axis=0)
    scale = np.where(size > 0, size, 1)
    uniform = low + scale * rng.random(truth.shape)
    points = uniform if references is None else _flat_references(references, simulations.truth)
    to_truth = np.sum(np.square((truth - points) / scale), axis=-1)
    to_draws = np.sum(np.square((draws - points[:, None]) / scale), axis=-1)
    return _rank_coverage(_rank(to_truth, to_draws, rng), simulations.num_draws)


def c2st(
    rng_key: Array, draws: ArrayLike | Mapping, reference: ArrayLike | Mapping, *, progress_bar: bool = True
) -> float:
    """Classify draws against reference draws: the accuracy, 0.5 where they cannot be told apart (a two-sample test).

    As the public benchmark sbibm scores: scikit-learn's multilayer perceptron with two layers of 10 d units, five-fold
    cross-validation, both samples standardised by the reference. More draws find smaller differences; sbibm takes
    10,000.

    Args:
        rng_key: a PRNG key for folds and first weights.
        draws: draws, (n,), (n, ...), or a dictionary of them by site.
        reference: as many draws of the exact posterior, in the same form.
        progress_bar: whether to show a bar over the folds, from the fifth second on.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro_wide.calibration import c2st
        >>> rng = np.random.default_rng(0)
        >>> draws, reference = rng.normal(size=(500, 1)), 3 + rng.normal(size=(500, 1))
        >>> round(c2st(jax.random.key(0), draws, reference), 1)
        0.9
    """
    check_key("rng_key", rng_key, "c2st(rng_key, draws, reference)")
    sample, exact_sample = _vectors("draws", draws), _vectors("reference", reference)
    names = [sorted(values) if isinstance(values, Mapping) else None for values in (draws, reference)]
    if sample.shape != exact_sample.shape or names[0] != names[1]:
        raise ValueError(
            "draws and reference must be of the same sites, sizes and number of draws, but are arrays of shapes "
            f"{sample.shape} and {exact_sample.shape}, draws in front; thin the longer one."
        )
    from sklearn.model_selection import KFold  # optional
    from sklearn.neural_network import MLPClassifier

    scale = exact_sample.std(axis=0, ddof=1)
    loc, scale = exact_sample.mean(axis=0), np.where(scale > 0, scale, 1.0)
    features = (np.concatenate([sample, exact_sample]) - loc) / scale
    labels = np.repeat([0, 1], len(sample))
    seed = int(np.asarray(jax.random.bits(rng_key, (), "uint32")))
    units = 10 * sample.shape[1]
    folds = list(KFold(n_splits=5, shuffle=True, random_state=seed).split(features))
    accuracy = []
    for train, test in late_progress(folds, shown=progress_bar, desc="classifiers"):
        classifier = MLPClassifier((units, units), max_iter=10_000, random_state=seed)
        accuracy.append(classifier.fit(features[train], labels[train]).score(features[test], labels[test]))
    return float(np.mean(accuracy))


def _vectors(name: str, draws: ArrayLike | Mapping) -> np.ndarray:
    """Return draws as floats (n, d), sites by their names."""
    arrays = draws if isinstance(draws, Mapping) else {"": draws}
    lengths = {np.shape(values)[:1] for values in arrays.values()}
    if len(lengths) != 1 or min(lengths) < (10,):
        raise ValueError(f"{name} must hold ten draws or more, along the first axis, but got lengths {list(lengths)}.")
    return _check_finite(name, _flat(arrays, sorted(arrays)))


def _rank_coverage(ranks: np.ndarray, num_draws: int) -> Coverage:
    points = rank_grid(num_draws)
    num_inside = [np.sum(ranks < point, axis=0) for point in points]
    # P(rank < r) = r/(num_draws + 1)
    return _coverage(points / (num_draws + 1), num_inside, len(ranks))


def _central_coverage(ranks: np.ndarray, num_draws: int) -> Coverage:
    """Estimate the coverage of the intervals k ≤ rank ≤ num_draws − k."""
    depths = np.flip(rank_grid(num_draws, 200))
    depths = depths[2 * depths < num_draws + 1]
    num_inside = [np.sum(np.minimum(ranks, num_draws - ranks) >= depth, axis=0) for depth in depths]
    return _coverage(1 - 2 * depths / (num_draws + 1), num_inside, len(ranks))


def _coverage(nominal: np.ndarray, num_inside: list[np.ndarray], num_simulations: int) -> Coverage:
    """Test the numbers of simulations inside of regions."""
    counts = np.stack(num_inside, axis=-1)
    null = _null_tails(nominal, num_simulations)
    observed = _smallest_tail(counts, nominal, num_simulations)
    p_value = (1 + np.sum(null <= observed[..., None] * (1 + 1e-9), axis=-1)) / (1 + len(null))
    return Coverage(nominal, counts / num_simulations, num_simulations, p_value)


def from_guide(
    rng_key: Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, object],
    *model_args: object,
    observed: str | Sequence[str],
    num_simulations: int = 500,
    num_draws: int = 99,
    batch_size: int = 50,
    simulations: Arrays | None = None,
) -> Simulations:
    """Draw from an amortised guide for data simulated from the model, or elsewhere.

    Args:
        rng_key: a PRNG key.
        model: ``model(*model_args)``, called without data, samples every site.
        guide: ``guide(observed_values, *model_args)``, for *one* data set, samples latents of the model.
        params: values of the guide's param and mutable sites, {} if it has none.
        *model_args: arguments of model and guide.
        observed: name, or names, of the sites that are data.
        num_simulations: number of simulated data sets.
        num_draws: number of draws for each data set.
        batch_size: number of data sets handled at once.
        simulations: simulations of latents and data that the guide was not trained on, {site: (n, ...)}; the first
            ``num_simulations`` are taken, and the model's own data sites need not exist.

    Returns:
        :class:`Simulations` of the guide's sites, with log densities.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.calibration import from_guide
        >>> def model():
        ...     z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(z, 1.0))
        >>> def guide(observed):  # the exact posterior
        ...     numpyro.sample("z", dist.Normal(observed["y"] / 2, 0.5**0.5))
        >>> from_guide(jax.random.key(0), model, guide, {}, observed="y", num_simulations=20).draws["z"].shape
        (20, 99)
    """
    check_key("rng_key", rng_key, "from_guide(rng_key, model, guide, params, x, observed=...)")
    num_simulations = whole_number("num_simulations", num_simulations)
    num_draws, batch_size = whole_number("num_draws", num_draws), whole_number("batch_size", batch_size)
    simulate_key, guide_key = random.split(rng_key)
    names = site_names(observed)
    model, guide = bound(model, guide, model_args, {})
    model_sites = run_model(model)
    if simulations is None:
        check_simulator(model_sites, names)
        keys = random.split(simulate_key, num_simulations)
        joint = lax.map(lambda key: simulate(model, key, names), keys)
    else:
        joint = {
            name: jnp.asarray(v[:num_simulations])
            for name, v in check_simulations(simulations, model_sites, names).items()
        }
        num_simulations = len(joint[names[0]])
    data = {name: joint[name] for name in names}
    first_data_set = {name: value[0] for name, value in data.items()}
    guide_sites = check_params(guide, guide_key, params, first_data_set)
    check_guide(guide_sites, model_sites, names)
    refuse_missing("simulations", sample_sites(guide_sites), joint, "latent site of the guide")
    truth = {name: joint[name] for name in sample_sites(guide_sites)}

    def posterior(inputs: tuple[Array, Draws, Draws]) -> tuple[Draws, Array, Array]:
        key, values, truth = inputs
        key, draw_key = random.split(key)
        at_truth = log_density(run_guide(guide, key, params, values, truth))
        keys = random.split(draw_key, num_draws)
        draws, at_draws = jax.vmap(lambda key: draw_from_guide(guide, key, params, values))(keys)
        return draws, at_truth, at_draws

    keys = random.split(guide_key, num_simulations)
    run = jax.jit(lambda inputs: lax.map(posterior, inputs, batch_size=min(batch_size, num_simulations)))
    draws, *log_densities = run((keys, data, truth))
    return Simulations(truth, draws, data, *log_densities)
