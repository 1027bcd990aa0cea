"""The base of the kernels: setting up a chain, accepting or rejecting, adapting.

How to write a kernel. A subclass of :class:`MetropolisKernel` implements ``_propose``: from a point, a momentum and a
:class:`Move`, which holds the step size, it makes a :class:`Proposal`, which holds the point to go to and −log of the
acceptance ratio. It may override

- ``_needs_gradient``, ``_needs_momentum``: what a state has to hold;
- ``_renewal``: how much of a velocity that lives on from step to step is renewed by one;
- ``_first_preconditioner``: what warmup learns beside the step size, and in which windows;
- ``_rule``, set after the constructor of this class has run: how the step size is found;
- ``_count``, ``_is_capped``, ``_round_step_size``: the number of an integrator's steps in a proposal, whether it should
  be larger, and step sizes that fit it;
- ``_adapt``: what a step of warmup teaches;
- ``get_diagnostics_str``: what the progress bar shows.

The steps of the integrators are pure functions, in files of their own; a kernel is their arguments and a few lines.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_wide._over_chains import over_chains
from numpyro_wide.machine import chains_sharding
from numpyro_wide.mcmc._adaptation import (
    AdaptState,
    Lesson,
    Preconditioner,
    StepSizeRule,
    init_adaptation,
    update_adaptation,
)
from numpyro_wide.mcmc._checks import check_number, check_start, is_good_start
from numpyro_wide.mcmc._errors import Errors
from numpyro_wide.mcmc._moves import Moves, forget_warnings
from numpyro_wide.mcmc._point import Evaluate, Point, PyTree, is_elsewhere, normal_like, select, size_of
from numpyro_wide.mcmc._rounding import PROBE_FACTOR, is_faint, is_probe
from numpyro_wide.mcmc._state import (
    KernelState,
    Move,
    Proposal,
    acceptance,
    is_warming_up,
    over_states,
    point_of,
)
from numpyro_wide.mcmc._step_size import AcceptanceRule, find_step_size
from numpyro_wide.mcmc._target import TargetKernel


class MetropolisKernel(TargetKernel):
    """Base of the kernels: a subclass proposes, this class does the rest.

    Args:
        model: NumPyro model, or None.
        potential_fn: function from a pytree to the potential energy U = −log p up to a constant, a scalar, or None.
        step_size: step size to start from, positive.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1).
        find_heuristic_step_size: whether to double or halve ``step_size`` before warmup until the acceptance of one
            trial crosses ``target_accept_prob``.
        init_strategy: NumPyro's strategy for the first position of a ``model``.
        max_step_size: upper bound of the step size, or None.

    Raises:
        ValueError: if not exactly one of ``model`` and ``potential_fn`` is given, or a number is out of its range.
        TypeError: if an argument that must be a function or a number is not one.
    """

    _needs_momentum = False
    # Whether some steps of a warmup are so small that their energy errors are those of rounding alone.
    _measures_rounding = False

    def __init__(
        self,
        model: Callable[..., Any] | None,
        potential_fn: Callable[[PyTree], Array] | None,
        *,
        step_size: float,
        adapt_step_size: bool,
        target_accept_prob: float,
        find_heuristic_step_size: bool,
        init_strategy: Callable[..., Any] = init_to_uniform,
        max_step_size: float | None = None,
    ) -> None:
        super().__init__(model, potential_fn, init_strategy)
        self._max_step_size = max_step_size
        bound = math.inf if max_step_size is None else max_step_size
        self._step_size = check_number("step_size", step_size, 0.0, bound, include_high=max_step_size is not None)
        self._target_accept_prob = check_number("target_accept_prob", target_accept_prob, 0.0, 1.0)
        self._rule: StepSizeRule = AcceptanceRule(self._target_accept_prob, max_step_size)
        self._adapt_step_size = adapt_step_size
        self._find_heuristic_step_size = find_heuristic_step_size

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Describe the state for the progress bar."""
        return f"step size {state.step_size:.2e}, {self._health(state)}"

    def _health(self, state: KernelState) -> str:
        """Return the mean acceptance, and a complaint if the chain has a fault."""
        complaint = state.moves.complaint()
        return f"acc. prob {state.mean_accept_prob:.2f}" + (f", {complaint}" if complaint else "")

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree = None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> KernelState:
        """Return the first state, or a batch of them for a batch of keys.

        Args:
            rng_key: one key, or an array of keys, one a chain.
            num_warmup: number of steps that adapt.
            init_params: first position in unconstrained space; with a batch of keys, every leaf has that
                batch as its leading dimension. A ``potential_fn`` needs it; a ``model`` finds its own. In a block of
                NumPyro's ``Gibbs`` these are constrained values, draws of the prior where none are given.
            model_args: positional arguments of the model.
            model_kwargs: keyword arguments of the model.

        Raises:
            ValueError: if there is no first position, or the potential is not a finite scalar there; if chains cannot
                be shared out evenly to the groups of devices of :func:`~numpyro_wide.shard_rows`.
        """
        forget_warnings()
        single = is_prng_key(rng_key)
        split = jax.random.split if single else jax.vmap(jax.random.split, out_axes=1)

        def arrive(rng_key: Array) -> tuple[Array, Point, Array | bool]:
            rng_key, key_model = split(rng_key)
            return rng_key, *self._initial_point(key_model, init_params, model_args, model_kwargs)

        def start(rng_key: Array, point: Point) -> KernelState:
            evaluate = self._evaluator(model_args, model_kwargs)
            first = partial(self._first_state, num_warmup=num_warmup, evaluate=evaluate)
            return (first if single else over_chains(first))(point, rng_key)

        def begin(rng_key: Array) -> tuple[KernelState, Array | bool]:
            rng_key, point, passes = arrive(rng_key)
            return start(rng_key, point), passes

        place = None if single else chains_sharding(len(rng_key), model_args, model_kwargs)
        state, passes = (place is None and self._in_one_program(begin, rng_key)) or (None, False)
        # What is wrong is told by a run that sees numbers.
        if state is None or not is_good_start(point_of(state), passes):
            rng_key, point, _ = arrive(rng_key)
            check_start(point)
            state = jax.jit(start, out_shardings=place)(rng_key, point)
        self._sample_fn = self._step
        return state

    def sample(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        """Take one step of every chain in ``state``, with the potential of these model arguments."""
        return self._for_each_chain(self._step, state, model_args, model_kwargs)

    def refresh(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        """Recompute the potential energy and its gradient for other model arguments; the chain stays put."""

        def refreshed(state: KernelState, *model_arguments: Any) -> KernelState:
            point = self._evaluator(*model_arguments)(state.z)
            return state._replace(potential_energy=point.potential_energy, z_grad=point.z_grad)

        return self._for_each_chain(refreshed, state, model_args, model_kwargs)

    @abstractmethod
    def _propose(self, rng_key: Array, point: Point, r: PyTree, move: Move, evaluate: Evaluate) -> Proposal:
        """Propose a place to go to from ``point`` with momentum ``r``."""

    def _count(self, state: KernelState) -> int | Array:
        """Return the number of an integrator's steps between two draws."""
        return 1

    def _is_capped(self, state: KernelState) -> Array:
        """Tell whether a proposal should have more of an integrator's steps than it may."""
        return jnp.zeros((), bool)

    def _renewal(self, state: KernelState) -> float | Array:
        """Return the share, in (0, 1], of a velocity that lives on which the next step renews."""
        return 1.0

    def _round_step_size(self, step_size: Array) -> Array:
        """Move the step size to a value that the kernel can use as it is."""
        return step_size

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> tuple[Preconditioner | None, list[int]]:
        """Return the preconditioner to start from, and the boundaries of the windows in which warmup learns it."""
        return None, []

    def _first_state(self, point: Point, rng_key: Array, *, num_warmup: int, evaluate: Evaluate) -> KernelState:
        rng_key, key_momentum, key_search = jax.random.split(rng_key, 3)
        r = normal_like(key_momentum, point.z) if self._needs_momentum else None
        zero, none = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.result_type(int))
        step_size = jnp.asarray(self._step_size, zero.dtype)
        learnt = self._first_preconditioner(point.z, num_warmup)
        state = KernelState(
            i=none,
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=r,
            accept_prob=zero,
            mean_accept_prob=zero,
            energy_error=zero,
            num_grad=none,
            num_nonfinite=none,
            step_size=step_size,
            adapt_state=init_adaptation(step_size, self._rule, num_warmup, *learnt),
            moves=Moves.start(step_size, jax.random.bits(rng_key)),
            rng_key=rng_key,
        )
        if self._find_heuristic_step_size:
            step_size = self._search_step_size(key_search, state, evaluate)
            adapt_state = init_adaptation(step_size, self._rule, num_warmup, *learnt)
            state = state._replace(adapt_state=adapt_state)
        step_size = self._round_step_size(step_size)
        return state._replace(step_size=step_size, moves=Moves.start(step_size, state.moves.run))

    def _search_step_size(self, rng_key: Array, state: KernelState, evaluate: Evaluate) -> Array:
        def accept_prob(key: Array, step_size: Array) -> Array:
            move = Move(step_size, 1, state.adapt_state.preconditioner)
            return acceptance(self._propose(key, point_of(state), state.r, move, evaluate))[1]

        return find_step_size(accept_prob, state.step_size, self._target_accept_prob, self._max_step_size, rng_key)

    def _step(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        evaluate = self._evaluator(model_args, model_kwargs)
        rng_key, key_propose, key_accept = jax.random.split(state.rng_key, 3)
        current = point_of(state)
        move = self._move(state)
        proposal = self._propose(key_propose, current, state.r, move, evaluate)
        finite, accept_prob, energy_error = acceptance(proposal)
        is_drawn = jax.random.uniform(key_accept, dtype=accept_prob.dtype) < accept_prob
        is_adapting = self._adapt_step_size & is_warming_up(state)
        accepted = finite & self._rule.takes(
            is_drawn, energy_error, state.adapt_state.rounding, is_adapting, size_of(state.z)
        )
        if self._adapt_step_size and not self._rule.probes:
            # An uncorrected chain would go where a step that is too large leads it.
            is_refused = is_adapting & is_probe(state.i)
            accepted &= ~is_refused
            proposal = proposal._replace(r_rejected=select(is_refused, state.r, proposal.r_rejected))
        point = select(accepted, proposal.point, current)
        state = state._replace(
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=select(accepted, proposal.r_accepted, proposal.r_rejected),
            accept_prob=accept_prob,
            energy_error=energy_error,
            num_grad=jnp.asarray(proposal.num_grad, state.num_grad.dtype),
            num_nonfinite=state.num_nonfinite + jnp.asarray(~finite, state.num_nonfinite.dtype),
            rng_key=rng_key,
        )
        is_capped = self._is_capped(state)
        state = self._finish_step(state, Errors.of(proposal, current, energy_error, finite))
        num_draws = jnp.maximum(state.i - state.adapt_state.schedule.num_warmup, 0)
        moved = is_elsewhere(point.z, current.z)
        return state._replace(moves=state.moves.count(moved, is_capped, num_draws, state.step_size))

    def _move(self, state: KernelState) -> Move:
        move = Move(state.step_size, self._count(state), state.adapt_state.preconditioner, self._renewal(state))
        if not self._adapt_step_size:
            return move
        probes = is_warming_up(state) & is_probe(state.i) & (self._rule.probes or self._measures_rounding)
        bound = jnp.inf if self._max_step_size is None else self._max_step_size
        step_size = jnp.where(probes, jnp.minimum(PROBE_FACTOR * state.step_size, bound), state.step_size)
        is_whisper = is_warming_up(state) & is_faint(state.i) & self._measures_rounding
        if self._measures_rounding:
            step_size = jnp.where(is_whisper, state.step_size / PROBE_FACTOR, step_size)
        # A number of steps that is known before the run stays so: its loop compiles to less.
        num_steps = move.num_steps
        if not isinstance(num_steps, int):
            reached = jnp.minimum(num_steps, state.adapt_state.reach)
            reached = jnp.where(probes, jnp.maximum(reached // PROBE_FACTOR, 1), reached)
            num_steps = jnp.where(is_warming_up(state), reached, num_steps)
        return move._replace(step_size=step_size, num_steps=num_steps)

    def _finish_step(self, state: KernelState, errors: Errors) -> KernelState:
        """Adapt, if this was a step of warmup, and count the step."""
        num_warmup = state.adapt_state.schedule.num_warmup
        step_size, adapt_state = jax.lax.cond(
            is_warming_up(state), self._adapt, lambda s, *_: (s.step_size, s.adapt_state), state, errors
        )
        count = 1 + jnp.where(state.i < num_warmup, state.i, state.i - num_warmup)
        weight = 1 / jnp.asarray(count, state.accept_prob.dtype)
        mean = state.mean_accept_prob + weight * (state.accept_prob - state.mean_accept_prob)
        return state._replace(i=state.i + 1, mean_accept_prob=mean, step_size=step_size, adapt_state=adapt_state)

    def _adapt(self, state: KernelState, errors: Errors) -> tuple[Array, AdaptState]:
        draw_length = jnp.asarray(self._count(state), state.step_size.dtype) * state.step_size
        bound = jnp.inf if self._max_step_size is None else self._max_step_size
        lesson = Lesson(
            accept_prob=jnp.exp(-jnp.maximum(errors.certain, 0.0)),
            is_lost=errors.is_lost(),
            square_error=errors.square,
            raw_square_error=errors.raw_square,
            is_probed=PROBE_FACTOR * state.step_size <= bound,
            point=point_of(state),
            step_size=state.step_size,
            draw_length=draw_length,
        )
        step_size, adapt_state = update_adaptation(
            state.adapt_state, state.i, lesson, self._rule, self._adapt_step_size, self._measures_rounding
        )
        return self._round_step_size(step_size), adapt_state

    def _for_each_chain(self, fn: Callable[..., KernelState], state: KernelState, *args: Any) -> KernelState:
        if is_prng_key(state.rng_key):
            return fn(state, *args)
        return over_states(lambda chain: fn(chain, *args), state)
