"""Convergence of chains: R-hat, effective sample sizes, pooling."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from scipy import fft

from numpyro_wide import _arviz
from numpyro_wide._checks import as_floats, check_key, listing, whole_number
from numpyro_wide._mixture import log_average
from numpyro_wide.diagnostics._scores import log_predictive_density

_BLOCK = 2**22  # numbers transformed at once


def effective_sample_size(draws: ArrayLike, *, per_step: bool = False, num_grad: ArrayLike | None = None) -> np.ndarray:
    """Estimate the effective sample size of every dimension (Hron 2022, equation 7; Mathematics, :eq:`ess`).

    The sum stops before the first negative autocorrelation, unlike in ArviZ's ``ess``.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.
        per_step: whether to divide by the total number of draws.
        num_grad: number of gradients to divide by, the total or the extra field ``num_grad`` or ``num_steps``.

    Returns:
        The size, (...), at most the number of draws; NaN where all draws are equal.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import effective_sample_size
        >>> independent = jax.random.normal(jax.random.key(0), (2, 500, 3))
        >>> effective_sample_size(independent).shape
        (3,)
        >>> bool(effective_sample_size(independent, num_grad=4000).max() < 0.3)
        True
    """
    if per_step and num_grad is not None:
        raise ValueError("effective_sample_size is given per_step or per gradient, not both.")
    array = _checked(draws)
    flat = array.reshape(*array.shape[:2], -1)
    num_chains, num_draws, num_columns = flat.shape
    if num_columns == 0:
        return np.empty(array.shape[2:])
    block = max(1, _BLOCK // (num_chains * num_draws))
    columns = [slice(start, start + block) for start in range(0, num_columns, block)]
    total = num_chains * num_draws
    ess = np.concatenate([total / _autocorrelation_time(flat[..., column]) for column in columns])
    if per_step:
        ess = ess / total
    elif num_grad is not None:
        ess = ess / np.sum(np.asarray(num_grad, dtype=float))
    return ess.reshape(array.shape[2:])


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
    array = _checked(draws)
    # Against rounding of constants; NaN stays.
    within = np.where(np.ptp(array, axis=1) == 0, 0.0, array.var(axis=1, dtype=float)).mean(axis=0)
    between = np.where(np.ptp(array, axis=(0, 1)) == 0, 0.0, array.mean(axis=1, dtype=float).var(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 + between / within)


def autocorrelation(draws: ArrayLike) -> np.ndarray:
    """Estimate the autocorrelations at all lags, (draw, ...), pooled over chains (Hron 2022, above equation 7)."""
    array = _checked(draws)
    deviations = array.astype(float)
    deviations -= deviations.mean(axis=(0, 1))
    num_draws = deviations.shape[1]
    # Padded against wrapping.
    spectrum = fft.rfft(deviations, fft.next_fast_len(2 * num_draws, real=True), axis=1)
    power = np.sum(spectrum.real**2 + spectrum.imag**2, axis=0)
    sums = fft.irfft(power, fft.next_fast_len(2 * num_draws, real=True), axis=0)[:num_draws]
    num_pairs = np.arange(num_draws, 0, -1).reshape(-1, *[1] * (array.ndim - 2))
    # 0/0 for constants, in spite of rounding.
    variance = np.where(np.ptp(array, axis=(0, 1)) > 0, sums[0] / num_draws, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(variance > 0, sums / num_pairs / variance, np.nan)


def _autocorrelation_time(draws: np.ndarray) -> np.ndarray:
    """Compute the denominator of equation 7 by column."""
    correlation = autocorrelation(draws)[1:]
    num_draws = draws.shape[1]
    weights = 1.0 - np.arange(1, num_draws)[:, None] / num_draws
    kept = np.cumsum(correlation < 0, axis=0) == 0
    return 1.0 + 2.0 * np.sum(np.where(kept, weights * correlation, 0.0), axis=0)


def _checked(draws: ArrayLike) -> np.ndarray:
    array = np.asarray(draws)
    if array.ndim < 2 or array.shape[1] < 2 or array.shape[0] < 1:
        raise ValueError(
            f"draws must have shape (chain, draw, ...) with at least two draws, but got {array.shape}; "
            "use mcmc.get_samples(group_by_chain=True)."
        )
    # Differences fail for booleans, and wrap for small integers.
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(float)


def project(samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100) -> Array:
    """Project draws of the flattened weights onto random unit directions, fixed by key and site names.

    Args:
        samples: draws by site, (chain, draw, ...), such as ``mcmc.get_samples(group_by_chain=True)``.
        rng_key: a PRNG key.
        num_projections: number of directions.

    Returns:
        The projections, (chain, draw, num_projections).

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import project
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 50, 8, 3))}
        >>> project(samples, jax.random.key(1), num_projections=5).shape
        (2, 50, 5)
    """
    check_key("rng_key", rng_key, "project(samples, rng_key)")
    _num_draws(samples)
    return _project(samples, rng_key, sorted(samples), num_projections, 2)


def random_projections(
    rng_key: Array, sites: Iterable[str], *, num_projections: int = 100
) -> Callable[[Mapping[str, Array]], Array]:
    """Return a function that projects one draw as :func:`project` does, for :func:`~numpyro_wide.runs.reduced`.

    Args:
        rng_key: a PRNG key.
        sites: names of the sites to project together.
        num_projections: number of directions.

    Returns:
        A function from a dictionary of sites to the projections, (num_projections,).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import random_projections
        >>> random_projections(jax.random.key(0), ["w"], num_projections=5)({"w": jnp.ones((8, 3)), "v": 1.0}).shape
        (5,)
    """
    check_key("rng_key", rng_key, "random_projections(rng_key, sites)")
    names = sorted({sites} if isinstance(sites, str) else set(sites))
    if not names:
        raise ValueError("sites must name the sites to project, but is empty.")
    whole_number("num_projections", num_projections)
    return partial(_project, rng_key=rng_key, names=names, num_projections=num_projections)


def projected_ess(
    samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100, method: str = "bulk"
) -> dict[str, float]:
    """Estimate the effective sample size of random projections of the flattened weights (Hron 2022, §4).

    Args:
        samples: draws by site, (chain, draw, ...).
        rng_key: a PRNG key.
        num_projections: number of directions.
        method: "autocorrelation" for :func:`effective_sample_size`, or a method of ArviZ's ``ess``.

    Returns:
        "mean", "min" and "max" over the projections.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import projected_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 8, 3))}
        >>> sorted(projected_ess(samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    check_key("rng_key", rng_key, "projected_ess(samples, rng_key)")
    _num_draws(samples)
    return _mean_and_range(_project(samples, rng_key, sorted(samples), num_projections, 2), method)


def function_ess(
    function: Callable[[dict[str, Array]], Array],
    samples: Mapping[str, ArrayLike],
    rng_key: Array,
    *,
    num_projections: int = 100,
    method: str = "bulk",
    batch_size: int = 1,
) -> dict[str, float]:
    """Estimate the effective sample size of random projections of a function at test inputs (Hron 2022, §4).

    To compare kernels take :func:`readout_function`: readouts drawn anew raise the size of a :func:`site_function`.

    Args:
        function: function from one draw, a dictionary of sites, to an array.
        samples: draws by site, (chain, draw, ...).
        rng_key: a PRNG key.
        num_projections: number of directions.
        method: as for :func:`projected_ess`.
        batch_size: number of draws evaluated at once.

    Returns:
        "mean", "min" and "max" over the projections.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import function_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 3))}
        >>> x_test = jnp.linspace(-1, 1, 30).reshape(10, 3)
        >>> sorted(function_ess(lambda draw: jnp.tanh(x_test @ draw["w"]), samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    check_key("rng_key", rng_key, "function_ess(function, samples, rng_key)")
    batch_size = whole_number("batch_size", batch_size)
    shape = _num_draws(samples)
    projection = random_projections(rng_key, ["values"], num_projections=num_projections)
    flat = {name: jnp.reshape(draws, (-1, *np.shape(draws)[2:])) for name, draws in samples.items()}

    @jax.jit
    def projections(flat: dict[str, Array]) -> Array:
        return jax.lax.map(lambda draw: projection({"values": function(draw)}), flat, batch_size=batch_size)

    return _mean_and_range(projections(flat).reshape(*shape, num_projections), method)


def _project(
    samples: Mapping[str, Any], rng_key: Array, names: list[str], num_projections: int, num_leading: int = 0
) -> Array:
    """Project sites, flattened after their leading axes."""
    whole_number("num_projections", num_projections)
    missing = [name for name in names if name not in samples]
    if missing:
        raise ValueError(
            f"the sites to project must be in the draw, but {listing(missing)} is missing; it has {listing(samples)}."
        )
    values = [as_floats(samples[name], names=(f"the samples of {name!r}",))[0] for name in names]
    flat = [value.reshape(*value.shape[:num_leading], -1) for value in values]
    if not sum(value.shape[-1] for value in flat):
        raise ValueError("there is nothing to project: the sites hold no numbers.")
    # Constants of a compiled step.
    with jax.ensure_compile_time_eval():
        parts = [
            random.normal(random.fold_in(rng_key, index), (value.shape[-1], num_projections), value.dtype)
            for index, value in enumerate(flat)
        ]
        norm = jnp.sqrt(sum(jnp.sum(part**2, axis=0, keepdims=True) for part in parts))
        directions = [part / norm for part in parts]
    return sum((value @ part for value, part in zip(flat, directions, strict=True)), jnp.zeros(()))


def _num_draws(samples: Mapping[str, ArrayLike]) -> tuple[int, ...]:
    """Return the numbers of chains and draws, or warn."""
    leading = {name: np.shape(draws)[:2] for name, draws in samples.items()}
    if len(set(leading.values())) != 1 or len(next(iter(leading.values()))) != 2:
        raise ValueError(
            "samples must hold arrays (chain, draw, ...) with the same numbers of chains and draws, "
            f"but their leading axes are {leading}; use mcmc.get_samples(group_by_chain=True)."
        )
    num_chains, num_draws = next(iter(leading.values()))
    if num_chains > num_draws:
        warnings.warn(
            f"the samples are read as {num_chains} chains of {num_draws} draws each; "
            "use mcmc.get_samples(group_by_chain=True).",
            UserWarning,
            stacklevel=3,
        )
    return num_chains, num_draws


def _mean_and_range(projections: Array, method: str) -> dict[str, float]:
    values = np.asarray(jax.device_get(projections))
    ess = effective_sample_size(values) if method == "autocorrelation" else _arviz.effective_sample_size(values, method)
    return {"mean": float(ess.mean()), "min": float(ess.min()), "max": float(ess.max())}


_LEVEL = 0.9  # quantile over predictions: the largest is noise
_MOST_SUBSETS = 100  # of chains, for each size


class PoolingReport(NamedTuple):
    r"""Result of :func:`pooling`, to print.

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
        pooled = ", ".join(f"{number}: {density:.4f}" for number, density in enumerate(self.by_number, 1))
        return "\n".join(
            [
                pandas.DataFrame(chains).to_string(index=False, float_format="{:.3f}".format),
                f"log density by number of chains pooled: {pooled}",
                f"R-hat between chains: {self.between:.3f}, the largest of a prediction {self.largest:.3f}",
                self.advice,
            ]
        )


def pooling(y: ArrayLike, mean: ArrayLike, variance: ArrayLike, *, rhat_limit: float = 1.05) -> PoolingReport:
    r"""Judge by their predictions whether chains may be pooled, for Gaussian noise.

    Settled chains that disagree are an ensemble, not the posterior. Fewer than about fifty independent draws a chain
    look unsettled by chance.

    Args:
        y: observations, (n,) or (n, k).
        mean: predicted means, (chains, draws, *y.shape).
        variance: predicted variances with the noise, of the shape of ``mean``.
        rhat_limit: largest $\hat R$ of chains that agree, above 1.

    Returns:
        A :class:`PoolingReport`, to print.

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
            f"shape {np.shape(y)}, mean {means.shape} and variance {variances.shape}."
        )
    if not rhat_limit > 1:
        raise ValueError(f"rhat_limit must be above 1, but is {rhat_limit!r}.")
    scores = [log_predictive_density(y, *chain, pointwise=True) for chain in zip(means, variances, strict=True)]
    densities = np.stack([np.ravel(score) for score in scores])
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
        by_number=np.array([_mean_of_pools(densities, number) for number in range(1, len(densities) + 1)]),
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


def _mean_of_pools(densities: np.ndarray, number: int) -> float:
    """Return the mean log density of pools of ``number`` chains."""
    num_chains = len(densities)
    if comb(num_chains, number) <= _MOST_SUBSETS:
        pools = [list(pool) for pool in combinations(range(num_chains), number)]
    else:
        random = np.random.default_rng(0)
        pools = [random.choice(num_chains, number, replace=False).tolist() for _ in range(_MOST_SUBSETS)]
    return float(np.mean([log_average(densities[pool]) for pool in pools]))
