"""Effective sample sizes of chains: of dimensions, of projected weights, of functions."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from scipy import fft

from numpyro_wide import _arviz
from numpyro_wide._checks import as_floats, as_list, check_key, listing, whole_number
from numpyro_wide.diagnostics._pooling import checked_draws

_GROUPED = "use mcmc.get_samples(group_by_chain=True)"
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
        >>> effective_sample_size(jax.random.normal(jax.random.key(0), (2, 500, 3))).shape
        (3,)
    """
    if per_step and num_grad is not None:
        raise ValueError("effective_sample_size is given per_step or per gradient, not both.")
    array = checked_draws(draws)
    num_chains, num_draws, *shape = array.shape
    blocks = np.array_split(array.reshape(num_chains, num_draws, -1), 1 + array.size // _BLOCK, axis=2)
    per_draw = 1 / np.concatenate([_autocorrelation_time(block) for block in blocks]).reshape(shape)
    if per_step:
        return per_draw
    cost = 1.0 if num_grad is None else np.sum(np.asarray(num_grad, dtype=float))
    return num_chains * num_draws * per_draw / cost


def autocorrelation(draws: ArrayLike) -> np.ndarray:
    """Estimate the autocorrelations at all lags, (draw, ...), pooled over chains (Hron 2022, above equation 7)."""
    array = checked_draws(draws)
    deviations = array.astype(float)
    deviations -= deviations.mean(axis=(0, 1))
    num_draws = deviations.shape[1]
    length = fft.next_fast_len(2 * num_draws, real=True)  # padded against wrapping
    spectrum = fft.rfft(deviations, length, axis=1)
    power = np.sum(spectrum.real**2 + spectrum.imag**2, axis=0)
    sums = fft.irfft(power, length, axis=0)[:num_draws]
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
    is_counted = np.cumsum(correlation < 0, axis=0) == 0
    return 1.0 + 2.0 * np.sum(np.where(is_counted, weights * correlation, 0.0), axis=0)


def random_projections(
    rng_key: Array, sites: Iterable[str], *, num_projections: int = 100
) -> Callable[[Mapping[str, Array]], Array]:
    """Return a function that projects one draw of flattened weights onto random unit directions.

    It takes a dictionary that holds the ``sites``, projected together, and returns (num_projections,). The directions
    are fixed by key and names. For draws of chains, map it; during a run, :func:`~numpyro_wide.runs.reduced` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import random_projections
        >>> project = random_projections(jax.random.key(0), ["w"], num_projections=5)
        >>> project({"w": jnp.ones((8, 3)), "v": 1.0}).shape
        (5,)
        >>> jax.vmap(jax.vmap(project))({"w": jnp.ones((2, 50, 8, 3))}).shape  # of two chains of 50 draws
        (2, 50, 5)
    """
    check_key("rng_key", rng_key, "random_projections(rng_key, sites)")
    names = sorted(set(as_list(sites)))
    if not names:
        raise ValueError("sites must name the sites to project, but is empty.")
    return partial(_project, rng_key=rng_key, names=names, num_projections=num_projections)


def projected_ess(
    samples: Mapping[str, ArrayLike], rng_key: Array, *, num_projections: int = 100, method: str = "bulk"
) -> dict[str, float]:
    """Estimate the effective sample size of random projections of the flattened weights (Hron 2022, §4).

    Draws by site are (chain, draw, ...), such as ``mcmc.get_samples(group_by_chain=True)``. ``method`` is
    "autocorrelation" for :func:`effective_sample_size`, or a method of ArviZ's ``ess``. The result is "mean", "min" and
    "max" over the projections.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import projected_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 8, 3))}
        >>> sorted(projected_ess(samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    check_key("rng_key", rng_key, "projected_ess(samples, rng_key)")
    _check_draws(samples)
    by_draw = jax.vmap(jax.vmap(random_projections(rng_key, samples, num_projections=num_projections)))
    return _mean_and_range(by_draw({name: jnp.asarray(draws) for name, draws in samples.items()}), method)


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
    ``function`` makes an array of one draw, a dictionary of sites; ``batch_size`` draws are evaluated at once. Other
    arguments and the result are as of :func:`projected_ess`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.diagnostics import function_ess
        >>> samples = {"w": jax.random.normal(jax.random.key(0), (2, 500, 3))}
        >>> sorted(function_ess(lambda draw: jnp.tanh(draw["w"]), samples, jax.random.key(1)))
        ['max', 'mean', 'min']
    """
    check_key("rng_key", rng_key, "function_ess(function, samples, rng_key)")
    batch_size = whole_number("batch_size", batch_size)
    _check_draws(samples)
    projection = random_projections(rng_key, ["values"], num_projections=num_projections)
    project_chain = partial(jax.lax.map, lambda draw: projection({"values": function(draw)}), batch_size=batch_size)
    return _mean_and_range(jax.jit(partial(jax.lax.map, project_chain))(dict(samples)), method)


def _project(draw: Mapping[str, ArrayLike], rng_key: Array, names: list[str], num_projections: int) -> Array:
    """Project flattened sites."""
    whole_number("num_projections", num_projections)
    if missing := [name for name in names if name not in draw]:
        raise ValueError(
            f"the sites to project must be in the draw, but {listing(missing)} is missing; it has {listing(draw)}."
        )
    flat = [as_floats(draw[name], names=(f"the samples of {name!r}",))[0].ravel() for name in names]
    if not sum(value.size for value in flat):
        raise ValueError("there is nothing to project: the sites hold no numbers.")
    # Constants of a compiled step.
    with jax.ensure_compile_time_eval():
        gaussians = [
            random.normal(random.fold_in(rng_key, index), (value.size, num_projections), value.dtype)
            for index, value in enumerate(flat)
        ]
        norm = jnp.sqrt(sum(jnp.sum(gaussian**2, axis=0, keepdims=True) for gaussian in gaussians))
        directions = [gaussian / norm for gaussian in gaussians]
    return sum((value @ direction for value, direction in zip(flat, directions, strict=True)), jnp.zeros(()))


def _check_draws(samples: Mapping[str, ArrayLike]) -> None:
    """Refuse draws of different chains, and warn of more chains than draws."""
    leading = {name: np.shape(draws)[:2] for name, draws in samples.items()}
    shape, *other_shapes = set(leading.values()) or {()}
    if other_shapes or len(shape) != 2:
        raise ValueError(
            "samples must hold arrays (chain, draw, ...) with the same numbers of chains and draws, but their leading "
            f"axes are {leading}; {_GROUPED}."
        )
    if shape[0] > shape[1]:
        warnings.warn(
            f"the samples are read as {shape[0]} chains of {shape[1]} draws each; {_GROUPED}.",
            UserWarning,
            stacklevel=3,
        )


def _mean_and_range(projections: Array, method: str) -> dict[str, float]:
    values = np.asarray(jax.device_get(projections))
    ess = effective_sample_size(values) if method == "autocorrelation" else _arviz.effective_sample_size(values, method)
    return {"mean": float(ess.mean()), "min": float(ess.min()), "max": float(ess.max())}
