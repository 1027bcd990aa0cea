"""What all kernels share: setting up a chain, accepting or rejecting, adapting."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_wide.mcmc._adaptation import (
    AdaptState,
    Lesson,
    Preconditioner,
    StepSizeRule,
    init_adaptation,
    update_adaptation,
)
from numpyro_wide.mcmc._checks import check_number, check_start
from numpyro_wide.mcmc._point import Evaluate, Point, PyTree, normal_like, select, size_of
from numpyro_wide.mcmc._reference import Reference
from numpyro_wide.mcmc._state import KernelState, Proposal, acceptance, is_warming_up, point_of, share_schedule
from numpyro_wide.mcmc._step_size import AcceptanceRule, find_step_size
from numpyro_wide.mcmc._target import TargetKernel


class MetropolisKernel(TargetKernel):
    """Base of the kernels: a subclass proposes, this class does the rest.

    Its arguments, and what it raises, are those that all kernels share: see :mod:`numpyro_wide.mcmc`. A subclass knows
    the ``max_step_size``, or that there is none.
    """

    _needs_momentum = False

    def __init__(
        self,
        model: Callable[..., Any] | None,
        potential_fn: Callable[[PyTree], jax.Array] | None,
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
        return f"step size {state.step_size:.2e}, acc. prob {state.mean_accept_prob:.2f}"

    def init(
        self,
        rng_key: jax.Array,
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
                batch as its leading dimension. A ``potential_fn`` needs it; a ``model`` finds its own.
            model_args: positional arguments of the model.
            model_kwargs: keyword arguments of the model.

        Raises:
            ValueError: if there is no first position, or the potential is not a finite scalar there.
        """
        single = is_prng_key(rng_key)
        split = jax.random.split if single else jax.vmap(jax.random.split, out_axes=1)
        rng_key, key_model = split(rng_key)
        point = self._initial_point(key_model, init_params, model_args, model_kwargs)
        check_start(point)
        evaluate = self._evaluator(model_args, model_kwargs)

        def first(point: Point, key: jax.Array) -> KernelState:
            return self._first_state(point, key, num_warmup, evaluate)

        # One program: compiled one by one, its some thirty operations would take longer than the search among them.
        state = jax.jit(first if single else jax.vmap(first))(point, rng_key)
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
    def _propose(self, rng_key: jax.Array, point: Point, r: PyTree, state: KernelState, evaluate: Evaluate) -> Proposal:
        """Propose a move from ``point`` and momentum ``r`` with the step size and scale of ``state``."""

    def _trial(self, rng_key: jax.Array, state: KernelState, evaluate: Evaluate) -> Proposal:
        """Propose for the step-size search; a subclass with long trajectories takes a short one here."""
        return self._propose(rng_key, point_of(state), state.r, state, evaluate)

    def _round_step_size(self, step_size: jax.Array) -> jax.Array:
        """Move the step size to a value that the kernel can use as it is."""
        return step_size

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> tuple[Preconditioner, list[int]]:
        """Return what to start from, and the boundaries of the windows in which warmup learns it."""
        return None, []

    def _is_taken(self, drawn: jax.Array, energy_error: jax.Array, state: KernelState) -> jax.Array:
        """Tell whether a finite proposal is taken, given whether the draw of its acceptance says so."""
        if isinstance(self._rule, AcceptanceRule):
            return drawn
        # Uncorrected, a step that is still too large throws the chain away before it can be adapted.
        adapting = self._adapt_step_size & is_warming_up(state)
        return ~adapting | (energy_error < self._rule.largest_error(size_of(state.z)))

    def _draw_length(self, state: KernelState) -> jax.Array:
        """Return the steps of the integrator between two draws times their size."""
        return state.step_size

    def _first_state(self, point: Point, rng_key: jax.Array, num_warmup: int, evaluate: Evaluate) -> KernelState:
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
            rng_key=rng_key,
        )
        if self._find_heuristic_step_size:
            step_size = self._search_step_size(key_search, state, evaluate)
            adapt_state = init_adaptation(step_size, self._rule, num_warmup, *learnt)
            state = state._replace(adapt_state=adapt_state)
        return state._replace(step_size=self._round_step_size(step_size))

    def _search_step_size(self, rng_key: jax.Array, state: KernelState, evaluate: Evaluate) -> jax.Array:
        def accept_prob(key: jax.Array, step_size: jax.Array) -> jax.Array:
            proposal = self._trial(key, state._replace(step_size=step_size), evaluate)
            return acceptance(proposal)[1]

        return find_step_size(accept_prob, state.step_size, self._target_accept_prob, self._max_step_size, rng_key)

    def _step(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        evaluate = self._evaluator(model_args, model_kwargs)
        rng_key, key_propose, key_accept = jax.random.split(state.rng_key, 3)
        current, known = point_of(state), state.adapt_state.preconditioner
        if isinstance(known, Reference):
            evaluate_psi = known.in_whitened_coordinates(evaluate)
            proposal = self._propose(key_propose, known.whiten_point(current), state.r, state, evaluate_psi)
            proposal = proposal._replace(point=known.unwhiten_point(proposal.point))
        else:
            proposal = self._propose(key_propose, current, state.r, state, evaluate)
        finite, accept_prob, energy_error = acceptance(proposal)
        drawn = jax.random.uniform(key_accept, dtype=accept_prob.dtype) < accept_prob
        accepted = finite & self._is_taken(drawn, energy_error, state)
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
        square_error = jnp.square(energy_error) if proposal.square_error is None else proposal.square_error
        return self._finish_step(state, jnp.where(finite, square_error, jnp.inf) / max(1, size_of(state.z)))

    def _finish_step(self, state: KernelState, square_error: jax.Array) -> KernelState:
        """Adapt, if this was a step of warmup, and count the step."""
        num_warmup = state.adapt_state.schedule.num_warmup
        step_size, adapt_state = jax.lax.cond(
            is_warming_up(state), self._adapt, lambda s, _: (s.step_size, s.adapt_state), state, square_error
        )
        count = 1 + jnp.where(state.i < num_warmup, state.i, state.i - num_warmup)
        weight = 1 / jnp.asarray(count, state.accept_prob.dtype)
        mean = state.mean_accept_prob + weight * (state.accept_prob - state.mean_accept_prob)
        return state._replace(i=state.i + 1, mean_accept_prob=mean, step_size=step_size, adapt_state=adapt_state)

    def _adapt(self, state: KernelState, square_error: jax.Array) -> tuple[jax.Array, AdaptState]:
        lesson = Lesson(
            state.accept_prob, square_error, point_of(state), state.step_size, draw_length=self._draw_length(state)
        )
        step_size, adapt_state = update_adaptation(
            state.adapt_state, state.i, lesson, self._rule, self._adapt_step_size
        )
        return self._round_step_size(step_size), adapt_state

    def _for_each_chain(self, fn: Callable[..., KernelState], state: KernelState, *args: Any) -> KernelState:
        if is_prng_key(state.rng_key):
            return fn(state, *args)
        shared, axes = share_schedule(state)
        return jax.vmap(lambda chain: fn(chain, *args), in_axes=(axes,))(shared)
