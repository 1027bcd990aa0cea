"""What all kernels share: setting up a chain, accepting or rejecting, adapting."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_wide.mcmc._adaptation import AdaptState, find_step_size, init_adaptation, update_adaptation
from numpyro_wide.mcmc._checks import check_number, check_start
from numpyro_wide.mcmc._integrators import Evaluate, Point
from numpyro_wide.mcmc._reference import in_whitened_coordinates, unwhiten, whiten
from numpyro_wide.mcmc._state import KernelState, Proposal, judge, point_of, share_clock
from numpyro_wide.mcmc._target import TargetKernel
from numpyro_wide.mcmc._tree import PyTree, normal_like, select


class MetropolisKernel(TargetKernel):
    """Base of the kernels: a subclass proposes, this class does the rest.

    Args:
        model: NumPyro model, or None.
        potential_fn: function of a pytree that returns the potential energy −log p, a scalar, or None.
        step_size: step size to start from.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at.
        find_heuristic_step_size: whether to double or halve ``step_size`` before warmup until the
            acceptance of one trial crosses ``target_accept_prob``.
        init_strategy: initialisation strategy of NumPyro for a ``model``.

    Raises:
        ValueError: if not exactly one of ``model`` and ``potential_fn`` is given, or a number is out of
            range.
        TypeError: if ``model`` or ``potential_fn`` is not callable.
    """

    _needs_momentum = False
    _adapt_mass_matrix = False
    _adapt_reference = False

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

        def first(point: Point, key: jax.Array) -> KernelState:
            return self._first_state(point, key, num_warmup, model_args, model_kwargs)

        state = (first if single else jax.vmap(first))(point, rng_key)
        check_start(state)
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

    def _initial_scale(self, z: PyTree) -> PyTree:
        """Return the square root of the inverse diagonal mass to start from, or None for the identity."""
        return None

    def _obeys_acceptance(self, state: KernelState) -> jax.Array:
        """Tell whether a finite proposal may be rejected in this step."""
        return jnp.array(True)

    def _first_state(
        self,
        point: Point,
        rng_key: jax.Array,
        num_warmup: int,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> KernelState:
        rng_key, key_momentum, key_search = jax.random.split(rng_key, 3)
        r = normal_like(key_momentum, point.z) if self._needs_momentum else None
        zero, none = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.result_type(int))
        step_size = jnp.asarray(self._step_size, zero.dtype)
        adapt = self._first_adapt_state(step_size, num_warmup, point.z)
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
            adapt_state=adapt,
            rng_key=rng_key,
        )
        if self._find_heuristic_step_size:
            evaluate = self._evaluator(model_args, model_kwargs)
            search = jax.jit(lambda key, state: self._search_step_size(key, state, evaluate))
            step_size = search(key_search, state)
            adapt = self._first_adapt_state(step_size, num_warmup, point.z)
        return state._replace(step_size=self._round_step_size(step_size), adapt_state=adapt)

    def _first_adapt_state(self, step_size: jax.Array, num_warmup: int, z: PyTree) -> AdaptState:
        return init_adaptation(
            step_size,
            self._max_step_size,
            num_warmup,
            z,
            self._initial_scale(z),
            self._adapt_mass_matrix,
            self._adapt_reference,
        )

    def _search_step_size(self, rng_key: jax.Array, state: KernelState, evaluate: Evaluate) -> jax.Array:
        def accept_prob(key: jax.Array, step_size: jax.Array) -> jax.Array:
            proposal = self._trial(key, state._replace(step_size=step_size), evaluate)
            return judge(proposal)[1]

        return find_step_size(accept_prob, state.step_size, self._target_accept_prob, self._max_step_size, rng_key)

    def _step(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        evaluate = self._evaluator(model_args, model_kwargs)
        rng_key, key_propose, key_accept = jax.random.split(state.rng_key, 3)
        current, reference = point_of(state), state.adapt_state.reference
        if reference is None:
            proposal = self._propose(key_propose, current, state.r, state, evaluate)
        else:
            evaluate_psi = in_whitened_coordinates(evaluate, reference)
            proposal = self._propose(key_propose, whiten(reference, current), state.r, state, evaluate_psi)
            proposal = proposal._replace(point=unwhiten(reference, proposal.point))
        finite, accept_prob, energy_error = judge(proposal)
        drawn = jax.random.uniform(key_accept, dtype=accept_prob.dtype) < accept_prob
        accepted = finite & (drawn | ~self._obeys_acceptance(state))
        point = select(accepted, proposal.point, current)
        state = state._replace(
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=select(accepted, proposal.r_accepted, proposal.r_rejected),
            accept_prob=accept_prob,
            energy_error=energy_error,
            num_grad=jnp.asarray(proposal.num_grad, state.num_grad.dtype),
            num_nonfinite=state.num_nonfinite + ~finite,
            rng_key=rng_key,
        )
        return self._finish_step(state)

    def _finish_step(self, state: KernelState) -> KernelState:
        """Adapt, if this was a step of warmup, and count the step."""
        num_warmup = state.adapt_state.num_warmup
        step_size, adapt_state = jax.lax.cond(
            state.i < num_warmup, self._adapt, lambda s: (s.step_size, s.adapt_state), state
        )
        count = 1 + jnp.where(state.i < num_warmup, state.i, state.i - num_warmup)
        mean = state.mean_accept_prob + (state.accept_prob - state.mean_accept_prob) / count
        return state._replace(i=state.i + 1, mean_accept_prob=mean, step_size=step_size, adapt_state=adapt_state)

    def _adapt(self, state: KernelState) -> tuple[jax.Array, AdaptState]:
        step_size, adapt_state = update_adaptation(
            state.adapt_state,
            state.i,
            self._target_accept_prob - state.accept_prob,
            state.z,
            state.z_grad,
            state.step_size,
            self._max_step_size,
            self._adapt_step_size,
        )
        return self._round_step_size(step_size), adapt_state

    def _for_each_chain(self, fn: Callable[..., KernelState], state: KernelState, *args: Any) -> KernelState:
        if is_prng_key(state.rng_key):
            return fn(state, *args)
        shared, axes = share_clock(state)
        return jax.vmap(lambda chain: fn(chain, *args), in_axes=(axes,))(shared)
