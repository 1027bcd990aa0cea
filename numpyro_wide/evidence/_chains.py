"""Chains of SplitHMC on the path from what can be drawn to the posterior, many at a time, compiled once a model.

At the inverse temperature β the target is r(z) w(z)^β (:eq:`path`). States have two leading axes: one for the
temperatures that run together, one for the chains of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from tqdm.auto import tqdm

from numpyro_wide._programs import Static, combine, run_compiled
from numpyro_wide.evidence._density import Position, draw, log_density
from numpyro_wide.mcmc import KernelState, Reference, SplitHMC

_CHUNK = 50  # steps between two looks at the progress bar
_WARM, _FIT, _RECORD = 0, 1, 2


class Target(NamedTuple):
    """A model with its arguments, arrays apart.

    Attributes:
        model: the model.
        rest: of the arguments, what is no array.
        data: the arrays.
    """

    model: Callable
    rest: Static
    data: list[Any]

    def run(self, body: Callable, static: Any, *arrays: Any) -> Any:
        """``body(model, (static, rest), data, *arrays)``, compiled."""
        return run_compiled(body, self.model, (static, self.rest), self.data, *arrays)


def reference_draws(target: Target, rng_key: Array, num_draws: int, batch_size: int) -> np.ndarray:
    """Logarithms of w at independent draws of r, (draws,); minus infinity where it is not a number."""
    keys = random.split(rng_key, num_draws)
    return _as_weights(target.run(_log_weights, batch_size, keys))


def first_positions(target: Target, rng_key: Array, log_weights: np.ndarray, num_chains: int, beta: float) -> Position:
    """As many of the draws that this key gave as there are chains, chosen with weight w^β: (1, chain, ...)."""
    chosen = resample(random.fold_in(rng_key, 1), beta * log_weights, num_chains)
    return target.run(_positions, None, random.split(rng_key, log_weights.size)[chosen][None])


def resample(rng_key: Array, log_weights: np.ndarray, size: int) -> np.ndarray:
    """Systematic resampling: indices with numbers of copies that are their shares of the weight, up to one."""
    weights = np.exp(log_weights - log_weights.max())
    places = (float(random.uniform(rng_key)) + np.arange(size)) / size
    return np.minimum(np.searchsorted(np.cumsum(weights) / weights.sum(), places), log_weights.size - 1)


def start(target: Target, rng_key: Array, betas: list[float], positions: Position, num_warmup: int) -> KernelState:
    """The first states of chains at these positions.

    Raises:
        ValueError: if the density is not finite at one of them.
    """
    shape = jax.tree.leaves(positions)[0].shape[:2]
    state = target.run(_start, num_warmup, random.split(rng_key, shape), _floats(betas), positions)
    if not np.all(np.isfinite(np.asarray(state.potential_energy))):
        raise ValueError(
            "the log density of the model, or its gradient, is not finite at draws of its prior; look for a noise that "
            "is too small, for overflow at draws far out, or run in float64 "
            "(jax.config.update('jax_enable_x64', True))."
        )
    return state


class Sweep(NamedTuple):
    """Steps of chains, and what became of them.

    Attributes:
        state: of the chains.
        reference: the Gaussian that was fitted, if one was asked for.
        recorded: log w at the draws, or, with a Gaussian g, log of r w over g: (temperature, chain, draw).
    """

    state: KernelState
    reference: Reference | None
    recorded: np.ndarray


def advance(
    target: Target,
    state: KernelState,
    betas: list[float],
    num_steps: int,
    bar: tqdm,
    *,
    phase: int = _RECORD,
    reference: Reference | None = None,
) -> Sweep:
    """Take steps of all chains: of warmup, to fit a Gaussian to, or to be recorded."""
    recorded = []
    for first in range(0, num_steps, _CHUNK):
        count = min(_CHUNK, num_steps - first)
        state, reference, found = target.run(_advance, None, state, reference, _floats(betas), count, phase)
        recorded.append(_as_weights(found[:count]))
        bar.update(count)
    return Sweep(state, reference, np.moveaxis(np.concatenate(recorded), 0, -1))


def warm_up(target: Target, state: KernelState, betas: list[float], num_steps: int, bar: tqdm) -> KernelState:
    """Take the steps that adapt."""
    return advance(target, state, betas, num_steps, bar, phase=_WARM).state


def fit_gaussian(
    target: Target, state: KernelState, num_warmup: int, num_steps: int, bar: tqdm
) -> tuple[KernelState, Reference]:
    """Warm up chains of the posterior, and fit a Gaussian to draws of all of them, in three windows of steps."""
    reference = target.run(_no_gaussian, None, state)
    # With the Gaussian to come, so that one program serves for all phases.
    state, reference, _ = advance(target, state, [1.0], num_warmup, bar, phase=_WARM, reference=reference)
    for length in (num_steps // 4, num_steps // 4, num_steps - 2 * (num_steps // 4)):
        state, reference, _ = advance(target, state, [1.0], length, bar, phase=_FIT, reference=reference)
        reference = target.run(_close, None, reference)
    return state, reference


def gaussian_draws(
    target: Target, rng_key: Array, reference: Reference, like: Position, num_draws: int, batch_size: int
) -> np.ndarray:
    """Logarithms of r w over g at independent draws of the Gaussian g, (draws,)."""
    keys = random.split(rng_key, num_draws)
    one = jax.tree.map(lambda leaf: leaf[0, 0], like)
    return _as_weights(target.run(_gaussian_ratios, batch_size, keys, reference, one))


def _as_weights(values: Array) -> np.ndarray:
    found = np.asarray(values, dtype=float)
    return np.where(np.isnan(found) | (found == np.inf), -np.inf, found)


def _floats(betas: list[float]) -> np.ndarray:
    return np.asarray(betas, dtype=jnp.result_type(float))


def _log_weights(model: Callable, static: tuple[int, Static], data: list[Any], keys: Array) -> Array:
    batch_size, rest = static
    args, kwargs = combine(data, rest)
    return jax.lax.map(lambda key: draw(model, key, args, kwargs)[1], keys, batch_size=batch_size)


def _positions(model: Callable, static: tuple[None, Static], data: list[Any], keys: Array) -> Position:
    args, kwargs = combine(data, static[1])
    return jax.vmap(jax.vmap(lambda key: draw(model, key, args, kwargs)[0]))(keys)


def _kernel(model: Callable, rest: Static, data: list[Any], beta: Array) -> SplitHMC:
    args, kwargs = combine(data, rest)

    def potential_fn(z: Position) -> Array:
        found = log_density(model, z, args, kwargs)
        gaussian = sum((0.5 * jnp.sum(leaf**2) for leaf in jax.tree.leaves(z)), jnp.zeros(()))
        return gaussian - found.reference - beta * found.weight

    return SplitHMC(potential_fn=potential_fn)


def _start(
    model: Callable, static: tuple[int, Static], data: list[Any], keys: Array, betas: Array, positions: Position
) -> KernelState:
    num_warmup, rest = static

    def first(keys: Array, beta: Array, positions: Position) -> KernelState:
        return _kernel(model, rest, data, beta).init(keys, num_warmup, positions)

    state = jax.vmap(first)(keys, betas, positions)
    # All chains are equally far: what happens at the end of a window is then computed there alone.
    schedule = jax.tree.map(lambda leaf: leaf[0], state.adapt_state.schedule)
    return state._replace(i=state.i[0], adapt_state=state.adapt_state._replace(schedule=schedule))


def _advance(
    model: Callable,
    static: tuple[None, Static],
    data: list[Any],
    state: KernelState,
    reference: Reference | None,
    betas: Array,
    count: Array,
    phase: Array,
) -> tuple[KernelState, Reference | None, Array]:
    rest = static[1]
    axes = state.without_schedule(0)

    def step(state: KernelState, beta: Array) -> KernelState:
        return _kernel(model, rest, data, beta).sample(state, (), {})

    def body(i: Array, carry: tuple) -> tuple:
        state, reference, recorded = carry
        state = jax.vmap(step, in_axes=(axes, 0), out_axes=axes)(state, betas)
        if reference is not None:
            known, seen = reference, _together(state)
            reference = jax.lax.cond(phase == _FIT, lambda: known.count_draw(seen), lambda: known)
        ratios = jax.vmap(jax.vmap(lambda z: _log_ratio(model, rest, data, reference, z)))
        found = jax.lax.cond(phase == _RECORD, lambda: ratios(state.z), lambda: recorded[0])
        return state, reference, recorded.at[i].set(found)

    recorded = jnp.zeros((_CHUNK, *state.potential_energy.shape))
    return jax.lax.fori_loop(0, count, body, (state, reference, recorded))


def _log_ratio(model: Callable, rest: Static, data: list[Any], reference: Reference | None, z: Position) -> Array:
    found = log_density(model, z, *combine(data, rest))
    if reference is None:
        return found.weight
    return found.weight + found.reference - reference.relative_log_density(z)


def _no_gaussian(model: Callable, static: tuple[None, Static], data: list[Any], state: KernelState) -> Reference:
    return Reference.start(_together(state).z)


def _close(model: Callable, static: tuple[None, Static], data: list[Any], reference: Reference) -> Reference:
    return reference.close()


def _together(state: KernelState) -> KernelState:
    """The chains of one temperature as units of one position, of which a Gaussian's moments are gathered."""
    return state._replace(z=jax.tree.map(_as_units, state.z), z_grad=jax.tree.map(_as_units, state.z_grad))


def _as_units(leaf: Array) -> Array:
    """(1, chain, ..., unit) to (..., unit times chain), or to (..., chain) of a vector."""
    last = jnp.moveaxis(leaf[0], 0, -1)
    if leaf.ndim == 2:
        return last[None]
    return last if leaf.ndim == 3 else last.reshape(*last.shape[:-2], -1)


def _gaussian_ratios(
    model: Callable, static: tuple[int, Static], data: list[Any], keys: Array, reference: Reference, like: Position
) -> Array:
    batch_size, rest = static
    leaves, structure = jax.tree.flatten(like)

    def ratio(key: Array) -> Array:
        keys = random.split(key, len(leaves))
        psi = [random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        z = reference.unwhiten(jax.tree.unflatten(structure, psi))
        return _log_ratio(model, rest, data, reference, z)

    return jax.lax.map(ratio, keys, batch_size=batch_size)
