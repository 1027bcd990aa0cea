"""Convergence of chains: R-hat and effective sample sizes, of projections and of functions."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import substitute
from scipy import fft
from scipy.special import logsumexp

from numpyro_wide import _arviz
from numpyro_wide._checks import as_floats, check_key, listing, whole_number
from numpyro_wide._compile import combine, partition, run_compiled
from numpyro_wide._traces import run_model
from numpyro_wide.diagnostics._scores import log_predictive_density
from numpyro_wide.diagnostics._to_arviz import Draws, FinishedRun, by_blocks, for_each_draw
from numpyro_wide.readout._assumptions import read_run
from numpyro_wide.readout._predictions import moments_of

_BLOCK = 2**22  # numbers transformed at once: keeps the memory beside the draws bounded


def effective_sample_size(draws: ArrayLike, *, per_step: bool = False, num_grad: ArrayLike | None = None) -> np.ndarray:
    r"""Estimate the effective sample size of every dimension (Hron 2022, equation 7; Mathematics, :eq:`ess`).

    With $M$ chains of $S$ draws and the autocorrelations $\hat\rho_k$ about the mean of all chains,

    .. math:: \mathrm{ESS} = \frac{M S}{1 + 2\sum_{k=1}^{S-1} (1 - k/S)\, \hat\rho_k}

    where the sum stops before the first negative $\hat\rho_k$, as TensorFlow Probability's does. Chains that
    disagree about the mean show up as autocorrelation at every lag. ArviZ's ``ess`` sums pairs of autocorrelations
    and splits every chain; the two agree within Monte Carlo error for chains that mix and have no negative
    autocorrelations, which only ArviZ's counts as a gain.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.
        per_step: whether to divide by the number of draws, $M S$; for thinned draws, divide by ``thinning`` too.
        num_grad: number of gradients that the draws took, to give the effective sample size of one gradient: their
            total, or an array that is summed, such as the extra field ``num_grad`` of this package's kernels, and
            ``num_steps`` of NUTS. With thinning, the extra fields hold only the kept steps.

    Returns:
        The size, of shape (...), from 1 / (number of lags) of a chain that hardly moves to $M S$; NaN where all draws
        are equal.

    Raises:
        ValueError: if the draws do not have axes for chains and draws, or both normalisations are asked for.

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
        raise ValueError("effective_sample_size is given per_step or per gradient, not both; drop one of the two.")
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

    1 where the chains agree; the variances are those of the given draws, without a correction for their number
    (Mathematics, :eq:`ess`). With $M$ chains of $S$ draws, the classical $\hat R$ (ArviZ's
    ``rhat(method="identity")``) is related to it by
    $\hat R^2_{(6)} - 1 = \frac{M-1}{M} \frac{S}{S-1} (\hat R^2 - \frac{S-1}{S})$.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.

    Returns:
        The ratio, of shape (...): NaN where all draws are equal, inf where chains differ that do not move.

    Raises:
        ValueError: if the draws do not have axes for chains and draws.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import rhat_squared
        >>> chain = np.array([-1.0, 1.0, -1.0, 1.0])
        >>> float(rhat_squared(np.stack([chain, chain + 2])))  # 1 within the chains, 1 between their means
        2.0
    """
    array = _checked(draws)
    # The variance of a constant is rounding, where it must come out as 0; a NaN must stay one.
    within = np.where(np.ptp(array, axis=1) == 0, 0.0, array.var(axis=1, dtype=float)).mean(axis=0)
    between = np.where(np.ptp(array, axis=(0, 1)) == 0, 0.0, array.mean(axis=1, dtype=float).var(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 + between / within)


def autocorrelation(draws: ArrayLike, *, max_lag: int | None = None) -> np.ndarray:
    r"""Estimate the autocorrelations $\hat\rho_k$ of every dimension, pooled over chains (Hron 2022, above equation 7).

    Products of deviations from the mean of all chains, averaged over the $M (S - k)$ pairs at lag $k$ and divided by
    the variance of all draws.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.
        max_lag: largest lag; by default the number of draws less one.

    Returns:
        The autocorrelations, (max_lag + 1, ...), 1 at lag 0; NaN where all draws are equal.

    Raises:
        ValueError: if the draws do not have axes for chains and draws, or ``max_lag`` is negative.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics.internal import autocorrelation
        >>> autocorrelation(np.array([[-1.0, 1.0, -1.0, 1.0]])).tolist()
        [1.0, -1.0, 1.0, -1.0]
    """
    array = _checked(draws)
    num_lags = array.shape[1] if max_lag is None else min(whole_number("max_lag", max_lag, 0) + 1, array.shape[1])
    deviations = array.astype(float)
    deviations -= deviations.mean(axis=(0, 1))
    num_draws = deviations.shape[1]
    # Padded with as many zeros, the circular correlation is the plain one.
    spectrum = fft.rfft(deviations, fft.next_fast_len(2 * num_draws, real=True), axis=1)
    power = np.sum(spectrum.real**2 + spectrum.imag**2, axis=0)
    sums = fft.irfft(power, fft.next_fast_len(2 * num_draws, real=True), axis=0)[:num_lags]
    num_pairs = np.arange(num_draws, num_draws - num_lags, -1).reshape(-1, *[1] * (array.ndim - 2))
    # Rounding leaves a residue in the transform of a constant: it must come out as 0/0.
    variance = np.where(np.ptp(array, axis=(0, 1)) > 0, sums[0] / num_draws, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(variance > 0, sums / num_pairs / variance, np.nan)


def _autocorrelation_time(draws: np.ndarray) -> np.ndarray:
    """Compute the denominator of equation 7, of each column of (chain, draw, column)."""
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
            "use mcmc.get_samples(group_by_chain=True), and draws[None] for a single chain."
        )
    # Differences of draws are not defined for booleans, and wrap around for small integers.
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(float)


def project(samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100) -> Array:
    r"""Project draws of the flattened weights onto random unit directions.

    Args:
        samples: draws by site, each (chain, draw, ...); ``mcmc.get_samples(group_by_chain=True)``, or a part of it.
        rng_key: a PRNG key. The same key and sites give the same directions.
        num_projections: number of directions.

    Returns:
        The projections, (chain, draw, num_projections).

    Raises:
        ValueError: if there are no sites or no weights, or the sites' numbers of chains and draws differ.

    Warns:
        UserWarning: if there are more chains than draws, as where the samples are not grouped by chain.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import project
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 50, 8, 3))}
        >>> project(samples, jax.random.key(1), num_projections=5).shape
        (2, 50, 5)
    """
    check_key("rng_key", rng_key, "project(samples, rng_key)")
    _num_draws(samples)
    return _project(samples, rng_key, whole_number("num_projections", num_projections))


def random_projections(
    rng_key: Array, sites: Iterable[str], *, num_projections: int = 100
) -> Callable[[Mapping[str, Array]], Array]:
    """Make a function that projects one draw onto the directions that :func:`project` takes for the same key and sites.

    It is one for :func:`~numpyro_wide.runs.reduced`. The directions, one number for every weight and projection, are
    made once and kept.

    Args:
        rng_key: a PRNG key.
        sites: names of the sites whose flattened weights are projected together.
        num_projections: number of directions.

    Returns:
        A function of a draw, a dictionary of sites, that gives the projections, (num_projections,).

    Raises:
        ValueError: if no sites are named; of the function, if the draw lacks one of them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import random_projections
        >>> random_projections(jax.random.key(0), ["w"], num_projections=5)({"w": jnp.ones((8, 3)), "v": 1.0}).shape
        (5,)
    """
    check_key("rng_key", rng_key, "random_projections(rng_key, sites)")
    names = tuple(sorted({sites} if isinstance(sites, str) else set(sites)))
    if not names:
        raise ValueError("sites must name the sites to project, but is empty; name the weights, such as ['hidden'].")
    return _RandomProjections(rng_key, names, whole_number("num_projections", num_projections))


def projected_ess(
    samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100, method: str = "bulk"
) -> dict[str, float]:
    """Estimate the effective sample size of random projections of the flattened weights (Hron 2022, §4).

    It counts the draws of the weights. Where hidden units trade places, the function that the weights parametrise may
    have many more: :func:`function_ess` counts those.

    Args:
        samples: draws by site, each (chain, draw, ...).
        rng_key: a PRNG key.
        num_projections: number of random unit directions.
        method: "autocorrelation" for :func:`effective_sample_size`, the paper's; or the name of a method of ArviZ's
            ``ess``, such as "bulk" or "mean".

    Returns:
        "mean", "min" and "max" of the effective sample size over the projections.

    Raises:
        ValueError: if there are no sites or nothing to project, or the sites' numbers of chains and draws differ.

    Warns:
        UserWarning: if there are more chains than draws, as where the samples are not grouped by chain.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import projected_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 8, 3))}
        >>> sorted(projected_ess(samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    check_key("rng_key", rng_key, "projected_ess(samples, rng_key)")
    _num_draws(samples)
    return _summary(_project(samples, rng_key, whole_number("num_projections", num_projections)), method)


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

    It counts effective draws of the function that is given, at the inputs that it holds. There are two kinds:

    - of the *mean function*, the readout integrated out, by :func:`readout_function`: how fast the hidden weights'
      prediction decorrelates. It is the one to compare kernels by, and the one that :func:`summary` takes.
    - of *function values with a readout*, by :func:`site_function`. Readouts that
      :class:`~numpyro_wide.ReadoutPredictive` puts back are independent given the rest: their spread hides how the
      hidden weights move, and any frequent draw looks new.

    The values are projected draw by draw, and never held for all draws.

    Args:
        function: function from one draw, a dictionary of sites, to the values that are counted, an array of any shape;
            :func:`site_function` and :func:`readout_function` make one from a model. It is compiled.
        samples: draws by site, each (chain, draw, ...); for a model whose readout was integrated out and a
            :func:`site_function`, with the readout put back by :class:`~numpyro_wide.ReadoutPredictive`.
        rng_key: a PRNG key, for the directions.
        num_projections: number of random unit directions.
        method: "autocorrelation" for :func:`effective_sample_size`, the paper's; or the name of a method of ArviZ's
            ``ess``, such as "bulk" or "mean".
        batch_size: number of draws whose function values are computed at once.

    Returns:
        "mean", "min" and "max" over the projections of the effective sample size of what ``function`` gives: of the
        mean function, or of function values with a readout.

    Raises:
        ValueError: if there are no sites or nothing to project, or the sites' numbers of chains and draws differ.

    Warns:
        UserWarning: if there are more chains than draws, as where the samples are not grouped by chain.

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

    return _summary(projections(flat).reshape(*shape, num_projections), method)


class _RandomProjections:
    """Function of a draw that :func:`random_projections` gives."""

    def __init__(self, rng_key: Array, names: tuple[str, ...], num_projections: int):
        self.rng_key = rng_key
        self.names = names
        self.num_projections = num_projections
        self._made: dict[tuple, list[Array]] = {}

    def __call__(self, draw: Mapping[str, Array]) -> Array:
        missing = [name for name in self.names if name not in draw]
        if missing:
            raise ValueError(
                f"the sites to project must be in the draw, but {listing(missing)} is missing; it has {listing(draw)}."
            )
        flat = [jnp.ravel(as_floats(draw[name])[0]) for name in self.names]
        directions = self._unit_directions(tuple((values.size, values.dtype) for values in flat))
        return sum((values @ part for values, part in zip(flat, directions, strict=True)), jnp.zeros(()))

    def _unit_directions(self, sizes: tuple[tuple[int, Any], ...]) -> list[Array]:
        _check_not_empty(sum(size for size, _ in sizes))
        if sizes not in self._made:
            # In the midst of a compilation, too, these are numbers: a step must not draw them anew.
            with jax.ensure_compile_time_eval():
                parts = [_directions(self.rng_key, i, n, self.num_projections, d) for i, (n, d) in enumerate(sizes)]
                norm = jnp.sqrt(sum(jnp.sum(part**2, axis=0, keepdims=True) for part in parts))
                self._made[sizes] = [part / norm for part in parts]
        return self._made[sizes]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}


def _directions(rng_key: Array, index: int, size: int, num_projections: int, dtype: Any) -> Array:
    """Draw one site's part of the directions, not yet of unit length."""
    return random.normal(random.fold_in(rng_key, index), (size, num_projections), dtype)


def _project(samples: Mapping[str, ArrayLike], rng_key: Array, num_projections: int) -> Array:
    """Project samples that are checked already."""
    total: Array = jnp.zeros(())
    squared_norm: Array = jnp.zeros(())
    num_weights = 0
    # Site by site, so that the flattened weights are never held a second time.
    for index, name in enumerate(sorted(samples)):
        (draws,) = as_floats(samples[name], names=(f"the samples of {name!r}",))  # which may be of discrete latents
        flat = draws.reshape(*draws.shape[:2], -1)
        directions = _directions(rng_key, index, flat.shape[-1], num_projections, flat.dtype)
        total = total + flat @ directions
        squared_norm = squared_norm + jnp.sum(directions**2, axis=0)
        num_weights += flat.shape[-1]
    _check_not_empty(num_weights)
    return total / jnp.broadcast_to(jnp.sqrt(squared_norm), total.shape)


def _check_not_empty(num_weights: int) -> None:
    if num_weights == 0:
        raise ValueError("there is nothing to project: the sites hold no numbers; name sites that do.")


def _num_draws(samples: Mapping[str, ArrayLike]) -> tuple[int, ...]:
    """Return the numbers of chains and draws, and warn the caller's caller where one looks like the other."""
    leading = {name: np.shape(draws)[:2] for name, draws in samples.items()}
    if len(set(leading.values())) != 1 or len(next(iter(leading.values()))) != 2:
        raise ValueError(
            "samples must hold arrays (chain, draw, ...) with the same numbers of chains and draws, "
            f"but their leading axes are {leading}; use mcmc.get_samples(group_by_chain=True)."
        )
    num_chains, num_draws = next(iter(leading.values()))
    if num_chains > num_draws:
        warnings.warn(
            f"the samples are read as {num_chains} chains of {num_draws} draws each; if they are draws without an axis "
            "for the chains, use mcmc.get_samples(group_by_chain=True).",
            UserWarning,
            stacklevel=3,
        )
    return num_chains, num_draws


def _summary(projections: Array, method: str) -> dict[str, float]:
    values = np.asarray(jax.device_get(projections))
    ess = effective_sample_size(values) if method == "autocorrelation" else _arviz.effective_sample_size(values, method)
    return {"mean": float(ess.mean()), "min": float(ess.min()), "max": float(ess.max())}


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


def function_values(run: FinishedRun, rng_key: Array, most: int) -> np.ndarray:
    """Compute what the observed sites' distributions are about, at the inputs of the fit.

    Where the readout can be integrated out, that is the mean given the hidden weights; else the observed distribution's
    mean at all weights, or the probabilities of its classes.

    Args:
        run: a finished run, with observations among its arguments.
        rng_key: a PRNG key for readouts that have to be drawn.
        most: largest number of entries to return, evenly spaced among all.

    Returns:
        The values, (chain, draw, entry).
    """
    data, rest = partition(run.arguments)
    names = run.conjugate_sites
    if names is not None:
        body, model, draws = _integrated, run.wrapped[0], run.latent(run.stored)
        static: tuple = names, most, rest
    else:
        body, model, draws = _at_weights, run.plain, run.latent(run.with_readout(rng_key, is_needed=True))
        static = tuple(run.sites.observed), most, rest
    found = by_blocks(lambda block, _: run_compiled(body, model, static, block, data), draws)
    return np.asarray(found["values"])


def evidence_error(run: FinishedRun) -> float | None:
    """Estimate how far rounding moves the log density that was sampled, at the last draw of each chain.

    A noise that is sampled is known only now: where it is small, single precision may not resolve it.

    Args:
        run: a finished run, with observations among its arguments.

    Returns:
        The largest error in nats, infinite where the density is NaN; None where the readout cannot be integrated out.
    """
    names = run.conjugate_sites
    if names is None:
        return None
    data, rest = partition(run.arguments)
    last = {name: np.asarray(values)[:, -1:] for name, values in run.latent(run.stored).items()}
    found = run_compiled(_evidence_errors, run.wrapped[0], (names, rest), last, data)
    return float(np.max(found["error"]))


def _evidence_errors(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    names, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        return {"error": read_run(model.fn, names, draw, args, kwargs)[0].problem(model.variant).evidence_error()}

    return for_each_draw(single, draws)


def _integrated(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    names, most, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        fit: Any = read_run(model.fn, names, draw, args, kwargs)[0]
        mean, *_ = fit.problem(model.variant).predict(fit.features)
        return {"values": _some(jnp.ravel(fit.loc + mean), most)}

    return for_each_draw(single, draws)


def _at_weights(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    observed, most, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        # Next to the model, where a readout that is repriorised inside of it is overridden as well.
        sites = run_model(model, args, kwargs, inside=(substitute(data=draw),))
        moments = [moments_of(sites[name]["fn"]) for name in observed]
        values = [jnp.ravel(found["probs"] if "probs" in found else found["mean"]) for found in moments]
        return {"values": _some(jnp.concatenate(values), most)}

    return for_each_draw(single, draws)


def _some(values: Array, most: int) -> Array:
    """Return all values, or ``most`` of them, evenly spaced."""
    return values[np.unique(np.linspace(0, values.size - 1, min(most, values.size)).round().astype(int))]
