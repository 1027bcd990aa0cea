"""Random projections of the weights, and of the function that they parametrise."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike

from numpyro_wide import _arviz
from numpyro_wide._checks import as_floats, check_key, listing, whole_number
from numpyro_wide.diagnostics._chains import effective_sample_size


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
