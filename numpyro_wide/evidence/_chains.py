"""Chains of SplitHMC on the path from what can be drawn to the posterior, many at a time, compiled once for a model.

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

from numpyro_wide._checks import IN_FLOAT64
from numpyro_wide._compile import Recent, Static, TracedProgram, combine, complete_digest, over_chains
from numpyro_wide.evidence._density import Position, draw, log_density
from numpyro_wide.mcmc._kernel import KernelState, over_states
from numpyro_wide.mcmc._reference import Reference
from numpyro_wide.mcmc.split_hmc import SplitHMC

_CHUNK = 50  # steps between two looks at the progress bar
_WARM, _FIT, _RECORD = 0, 1, 2


# Programs by what a model computes. To trace them all takes some twenty times as long as to trace the model. They hold
# the model's constants, such as data in a closure, and so are few.
_TRACED: Recent[dict[tuple, TracedProgram]] = Recent(4)


class Target:
    """A model with its arguments, as it is now; programs are traced anew if it computes something else than before.

    Args:
        model: a NumPyro model.
        rest: the arguments of the model without their arrays.
        data: the arrays of the arguments.
    """

    def __init__(self, model: Callable, rest: Static, data: list[Any]):
        self.model, self.rest, self.data = model, rest, data
        self._programs: dict[tuple, TracedProgram] = {}
        computed = complete_digest(self._probe, data, random.key(0))
        if computed is not None:
            self._programs = _TRACED.get(computed, dict)

    def _probe(self, data: list[Any], rng_key: Array) -> Any:
        """Run all that programs ask of the model: a draw of the prior, and the density there with its gradient.

        A function in the model may have a derivative of its own making, hence the gradient.
        """
        args, kwargs = combine(data, self.rest)
        position, log_weight = draw(self.model, rng_key, args, kwargs)
        density, pull_back = jax.vjp(lambda z: tuple(log_density(self.model, z, args, kwargs)), position)
        return position, log_weight, density, pull_back(jax.tree.map(jnp.ones_like, density))

    def run(self, body: Callable, static: Any, *arrays: Any) -> Any:
        """Return ``body(model, (static, rest), data, *arrays)``, compiled."""
        leaves, structure = jax.tree.flatten(arrays)
        key = body, static, structure, tuple(map(jax.typeof, leaves))
        if key not in self._programs:

            def program(data: list[Any], *arrays: Any) -> Any:
                return body(self.model, (static, self.rest), data, *arrays)

            self._programs[key] = TracedProgram(program, self.data, *arrays)
        return self._programs[key](self.data, *arrays)


def prior_weights(target: Target, keys: Array, batch_size: int) -> np.ndarray:
    """Return log w at the draw of r that each key gives, (draw,); minus infinity where it is not a number."""
    return _as_weights(target.run(_log_weights, batch_size, keys))


def prior_positions(target: Target, keys: Array) -> Position:
    """Return the draw of r that each key gives, for chains of one temperature: (1, chain, ...)."""
    return target.run(_positions, None, keys[None])


def resample(rng_key: Array, log_weights: np.ndarray, size: int) -> np.ndarray:
    """Draw indices systematically: each has as many copies as its share of the weight says, up to one."""
    weights = np.exp(log_weights - log_weights.max())
    places = (float(random.uniform(rng_key)) + np.arange(size)) / size
    return np.minimum(np.searchsorted(np.cumsum(weights) / weights.sum(), places), log_weights.size - 1)


def start(target: Target, rng_key: Array, betas: list[float], positions: Position, num_warmup: int) -> KernelState:
    """Return the first states of chains.

    Args:
        target: the model.
        rng_key: a PRNG key.
        betas: inverse temperatures, one for each leading index of the positions.
        positions: where the chains start, (temperature, chain, ...).
        num_warmup: number of steps by which each chain will adapt.

    Raises:
        ValueError: if the density is not finite at one of them.
    """
    shape = jax.tree.leaves(positions)[0].shape[:2]
    state = target.run(_start, num_warmup, random.split(rng_key, shape), _floats(betas), positions)
    if not np.all(np.isfinite(np.asarray(state.potential_energy))):
        raise ValueError(
            "the log density of the model, or its gradient, is not finite at draws of its prior; look for a noise that "
            f"is too small, for overflow at draws far out, or run {IN_FLOAT64}."
        )
    return state


class Sweep(NamedTuple):
    """Steps of chains, and what became of them.

    Attributes:
        state: the state of the chains after them.
        reference: the Gaussian that was fitted, or None where none was asked for.
        recorded: log w at the draws, or, with a Gaussian g, the logarithm of r w over g: (temperature, chain, draw).
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
    """Take steps of all chains.

    Args:
        target: the model.
        state: the states of the chains, (temperature, chain, ...).
        betas: inverse temperatures.
        num_steps: number of steps of each chain.
        bar: a progress bar that counts them.
        phase: what the steps are for: to warm up, to fit a Gaussian to, or to be recorded.
        reference: the Gaussian g that is fitted, or that draws are compared with; None for neither.
    """
    recorded = []
    for first in range(0, num_steps, _CHUNK):
        count = min(_CHUNK, num_steps - first)
        state, reference, found = target.run(_advance, None, state, reference, _floats(betas), count, phase)
        recorded.append(_as_weights(found[:count]))
        bar.update(count)
    return Sweep(state, reference, np.moveaxis(np.concatenate(recorded), 0, -1))


def warm_up(target: Target, state: KernelState, betas: list[float], num_steps: int, bar: tqdm) -> KernelState:
    """Take the steps of warmup, which adapt."""
    return advance(target, state, betas, num_steps, bar, phase=_WARM).state


def fit_gaussian(
    target: Target, state: KernelState, num_warmup: int, num_steps: int, bar: tqdm
) -> tuple[KernelState, Reference]:
    """Fit a Gaussian to draws of all chains of the posterior, in three windows of steps after their warmup."""
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
    """Return the logarithms of r w over g at independent draws of the Gaussian g, (draw,)."""
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
        return gaussian - found.start - beta * found.weight

    # Temperatures share a program, and are told apart by draws that are independent.
    return SplitHMC(potential_fn=potential_fn, persistence=0.0)


def _start(
    model: Callable, static: tuple[int, Static], data: list[Any], keys: Array, betas: Array, positions: Position
) -> KernelState:
    num_warmup, rest = static

    def first(keys: Array, beta: Array, positions: Position) -> KernelState:
        return _kernel(model, rest, data, beta).init(keys, num_warmup, positions)

    return over_chains(first)(keys, betas, positions)


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

    def step(state: KernelState, beta: Array) -> KernelState:
        return _kernel(model, rest, data, beta).sample(state, (), {})

    def body(i: Array, carry: tuple) -> tuple:
        state, reference, recorded = carry
        state = over_states(step, state, betas)
        if reference is not None:
            known, seen = reference, _together(state)
            reference = jax.lax.cond(phase == _FIT, lambda: known.count_draw(seen), lambda: known)
        ratios = over_chains(over_chains(lambda z: _log_ratio(model, rest, data, reference, z)))
        found = jax.lax.cond(phase == _RECORD, lambda: ratios(state.z), lambda: recorded[0])
        return state, reference, recorded.at[i].set(found)

    recorded = jnp.zeros((_CHUNK, *state.potential_energy.shape))
    return jax.lax.fori_loop(0, count, body, (state, reference, recorded))


def _log_ratio(model: Callable, rest: Static, data: list[Any], reference: Reference | None, z: Position) -> Array:
    found = log_density(model, z, *combine(data, rest))
    if reference is None:
        return found.weight
    return found.weight + found.start - reference.relative_log_density(z)


def _no_gaussian(model: Callable, static: tuple[None, Static], data: list[Any], state: KernelState) -> Reference:
    return Reference.start(_together(state).z)


def _close(model: Callable, static: tuple[None, Static], data: list[Any], reference: Reference) -> Reference:
    return reference.close()


def _together(state: KernelState) -> KernelState:
    """Return the chains of one temperature as units of one position, of which a Gaussian's moments are gathered."""
    return state._replace(z=jax.tree.map(_as_units, state.z), z_grad=jax.tree.map(_as_units, state.z_grad))


def _as_units(leaf: Array) -> Array:
    """Move (1, chain, ..., unit) to (..., unit times chain), or to (..., chain) of a vector."""
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
