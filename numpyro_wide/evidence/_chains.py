"""Chains of SplitHMC on the path r(z) w(z)^β from prior to posterior (:eq:`path`), (temperature, chain, ...)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from tqdm.auto import tqdm

from numpyro_wide._checks import IN_FLOAT64
from numpyro_wide._compile import over_chains, run_program, split
from numpyro_wide.evidence._density import Position, draw, log_density
from numpyro_wide.mcmc._integrators import normal_like
from numpyro_wide.mcmc._kernel import KernelState, over_states
from numpyro_wide.mcmc._reference import Reference
from numpyro_wide.mcmc.split_hmc import SplitHMC

_CHUNK = 50  # steps between updates of the bar
WARM, _FIT, _RECORD = 0, 1, 2


class Target:
    """A model with its arguments, traced anew by each target."""

    def __init__(self, model: Callable, args: tuple, kwargs: Mapping[str, object]):
        self._model = model
        self._data, self._rebuild = split((args, kwargs))
        self._functions: dict[tuple, Callable] = {}

    def run(self, body: Callable, *arrays: object, **options: object) -> Any:
        """Return ``body(model, *arrays, **options)``, compiled."""

        def program(data: list[Array], *arrays: object) -> Any:
            args, kwargs = self._rebuild(data)
            return body(partial(self._model, *args, **kwargs), *arrays, **options)

        program = self._functions.setdefault((body, *options.items()), program)
        return run_program(program, self._data, *arrays)


def prior_weights(target: Target, keys: Array, batch_size: int) -> np.ndarray:
    """Return log w at the draw of r of each key, (draw,); minus infinity for NaN."""
    return _as_weights(target.run(_log_weights, keys, batch_size=batch_size))


def prior_positions(target: Target, keys: Array) -> Position:
    """Return the draw of r of each key, (1, chain, ...)."""
    return target.run(_positions, keys[None])


def resample(rng_key: Array, log_weights: np.ndarray, size: int) -> np.ndarray:
    """Draw indices systematically, by the weights."""
    weights = np.exp(log_weights - log_weights.max())
    points = (float(random.uniform(rng_key)) + np.arange(size)) / size
    return np.minimum(np.searchsorted(np.cumsum(weights) / weights.sum(), points), log_weights.size - 1)


def start(target: Target, rng_key: Array, betas: list[float], positions: Position, num_warmup: int) -> KernelState:
    """Return the first states at positions (temperature, chain, ...) of finite density."""
    keys = random.split(rng_key, jax.tree.leaves(positions)[0].shape[:2])
    state = target.run(_start, keys, jnp.asarray(betas, float), positions, num_warmup=num_warmup)
    if not np.all(np.isfinite(np.asarray(state.potential_energy))):
        raise ValueError(
            "the model's log density or its gradient is not finite at draws of its prior; look for a small noise or "
            f"overflow, or run {IN_FLOAT64}."
        )
    return state


def advance(
    target: Target,
    state: KernelState,
    betas: list[float],
    num_steps: int,
    bar: tqdm,
    *,
    phase: int = _RECORD,
    reference: Reference | None = None,
) -> tuple[KernelState, Reference | None, np.ndarray]:
    """Take steps of all chains, to warm up, to fit ``reference``, or to record."""
    recorded = []
    for begin in range(0, num_steps, _CHUNK):
        count = min(_CHUNK, num_steps - begin)
        state, reference, log_ratios = target.run(_advance, state, reference, jnp.asarray(betas, float), count, phase)
        recorded.append(_as_weights(log_ratios[:count]))
        bar.update(count)
    return state, reference, np.moveaxis(np.concatenate(recorded), 0, -1)


def fit_gaussian(
    target: Target, state: KernelState, num_warmup: int, num_steps: int, bar: tqdm
) -> tuple[KernelState, Reference]:
    """Fit a Gaussian to posterior draws, in three windows after a warmup."""
    reference: Any = run_program(lambda state: Reference.start(_stacked_chains(state).z), state)
    # With the Gaussian to come, for one program.
    state, reference, _ = advance(target, state, [1.0], num_warmup, bar, phase=WARM, reference=reference)
    for length in (num_steps // 4, num_steps // 4, num_steps - 2 * (num_steps // 4)):
        state, reference, _ = advance(target, state, [1.0], length, bar, phase=_FIT, reference=reference)
        reference = run_program(Reference.close, reference)
    return state, reference


def gaussian_draws(
    target: Target, rng_key: Array, reference: Reference, like: Position, num_draws: int, batch_size: int
) -> np.ndarray:
    """Return log(r w / g) at independent draws of the Gaussian g, (draw,)."""
    keys = random.split(rng_key, num_draws)
    position = jax.tree.map(lambda leaf: leaf[0, 0], like)
    return _as_weights(target.run(_gaussian_ratios, keys, reference, position, batch_size=batch_size))


def _as_weights(values: Array) -> np.ndarray:
    return np.nan_to_num(np.asarray(values, float), nan=-np.inf, posinf=-np.inf, neginf=-np.inf)


def _log_weights(model: Callable, keys: Array, batch_size: int) -> Array:
    return jax.lax.map(lambda key: draw(model, key)[1], keys, batch_size=batch_size)


def _positions(model: Callable, keys: Array) -> Position:
    return jax.vmap(jax.vmap(lambda key: draw(model, key)[0]))(keys)


def _kernel(model: Callable, beta: Array) -> SplitHMC:
    def potential_fn(z: Position) -> Array:
        density = log_density(model, z)
        gaussian = sum((0.5 * jnp.sum(leaf**2) for leaf in jax.tree.leaves(z)), jnp.zeros(()))
        return gaussian - density.start - beta * density.weight

    # Draws of neighbouring temperatures must be independent.
    return SplitHMC(potential_fn=potential_fn, persistence=0.0)


def _start(model: Callable, keys: Array, betas: Array, positions: Position, num_warmup: int) -> KernelState:
    init = over_chains(lambda keys, beta, positions: _kernel(model, beta).init(keys, num_warmup, positions))
    return init(keys, betas, positions)


def _advance(
    model: Callable, state: KernelState, reference: Reference | None, betas: Array, count: Array, phase: Array
) -> tuple[KernelState, Reference | None, Array]:
    def step(state: KernelState, beta: Array) -> KernelState:
        return _kernel(model, beta).sample(state, (), {})

    def body(i: Array, carry: tuple) -> tuple:
        state, reference, recorded = carry
        state = over_states(step, state, betas)
        if reference is not None:
            current, draws = reference, _stacked_chains(state)
            reference = jax.lax.cond(phase == _FIT, lambda: current.count_draw(draws), lambda: current)
        ratios = over_chains(over_chains(lambda z: _log_ratio(model, reference, z)))
        log_ratios = jax.lax.cond(phase == _RECORD, lambda: ratios(state.z), lambda: recorded[0])
        return state, reference, recorded.at[i].set(log_ratios)

    recorded = jnp.zeros((_CHUNK, *state.potential_energy.shape))
    return jax.lax.fori_loop(0, count, body, (state, reference, recorded))


def _log_ratio(model: Callable, reference: Reference | None, z: Position) -> Array:
    density = log_density(model, z)
    if reference is None:
        return density.weight
    return density.weight + density.start - reference.relative_log_density(z)


def _gaussian_ratios(model: Callable, keys: Array, reference: Reference, like: Position, batch_size: int) -> Array:
    def ratio(key: Array) -> Array:
        return _log_ratio(model, reference, reference.unwhiten(normal_like(key, like)))

    return jax.lax.map(ratio, keys, batch_size=batch_size)


def _stacked_chains(state: KernelState) -> KernelState:
    """Stack chains along the unit axis, so that ``Reference`` pools them."""
    return state._replace(z=jax.tree.map(_as_units, state.z), z_grad=jax.tree.map(_as_units, state.z_grad))


def _as_units(leaf: Array) -> Array:
    """Move (1, chain, ..., unit) to (..., unit times chain)."""
    last = jnp.moveaxis(leaf[0], 0, -1)
    if leaf.ndim == 2:
        return last[None]
    return last if leaf.ndim == 3 else last.reshape(*last.shape[:-2], -1)
