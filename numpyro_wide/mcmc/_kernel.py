"""The base of all kernels: states of chains, and a step of a chain by Metropolis."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.util import identity, is_prng_key

from numpyro_wide._checks import check_key, is_known, listing
from numpyro_wide._compile import is_sequential, over_chains, run_program
from numpyro_wide._traces import Sites, is_prior_large, prior_sizes, warn_of_prior_sizes
from numpyro_wide.machine import chains_sharding
from numpyro_wide.mcmc._adaptation import (
    LOST_ERROR,
    MAX_STEPS,
    MIXING_FROM,
    AcceptanceRule,
    AdaptState,
    Autocorrelation,
    EnergyRule,
    certain_error,
    window_position,
)
from numpyro_wide.mcmc._chains import run_chains
from numpyro_wide.mcmc._integrators import Evaluate, Point, PyTree, normal_like, select, size_of, total
from numpyro_wide.mcmc._target import TargetKernel, is_finite

T = TypeVar("T")


def check_number(
    name: str, value: float, low: float, high: float, *, include_low: bool = False, include_high: bool = False
) -> float:
    """Return ``value`` as a float if it lies between ``low`` and ``high``."""
    if value is None or isinstance(value, str | complex | np.complexfloating):
        raise TypeError(f"{name} must be a number, but got {value!r}.")
    above = value >= low if include_low else value > low
    below = value <= high if include_high else value < high
    if not (above and below):
        interval = f"{'[' if include_low else '('}{low:g}, {high:g}{']' if include_high else ')'}"
        raise ValueError(f"{name} must lie in {interval}, but got {value!r}.")
    return float(value)


def energy_rule(bias_tolerance: float, adjusted: bool, target_accept_prob: float | None) -> EnergyRule:
    """Return the rule of an unadjusted sampler (:eq:`bias`); refuse a target acceptance, which it has no use for."""
    tolerance = check_number("bias_tolerance", bias_tolerance, 0.0, 1.0)
    if not adjusted and target_accept_prob is not None:
        raise ValueError(
            f"target_accept_prob is for adjusted=True, but got {target_accept_prob!r} with adjusted=False; the step of "
            "an unadjusted sampler is set by bias_tolerance."
        )
    return EnergyRule(4 * tolerance**3)


class KernelState(NamedTuple):
    """State of a chain; ``numpyro_wide.mcmc`` documents the fields for users."""

    i: Array  # number of steps taken, warmup included
    z: PyTree  # unconstrained position
    z_grad: PyTree  # of the potential energy; None for a kernel without gradients
    potential_energy: Array
    # Momentum, N(0, I) distributed; None for a kernel that draws it afresh. To the microcanonical kernel only its
    # direction matters.
    r: PyTree
    accept_prob: Array
    mean_accept_prob: Array
    energy_error: Array
    num_grad: Array
    num_nonfinite: Array
    step_size: Array
    adapt_state: AdaptState
    rng_key: Array  # for the next step

    def __getitem__(self, index: Any) -> Any:
        """Return a field by its index; NumPyro asks by name for an extra field that is no attribute."""
        if isinstance(index, str):
            raise KeyError(f"extra_fields must be among {listing(self._fields)} for this kernel, but got {index!r}.")
        return tuple.__getitem__(self, index)


def over_states(fn: Callable[..., T], state: KernelState, *extras: object) -> T:
    """Map a function over states of chains, and the leading axis of ``extras``, as :func:`over_chains` does."""
    if is_sequential():
        return over_chains(fn)(state, *extras)
    # One step number for all: with one each, the end of a window would be computed in every step, and thrown away.
    i, num_warmup = state.i[0], state.adapt_state.num_warmup[0]
    shared = state._replace(i=i, adapt_state=state.adapt_state._replace(num_warmup=num_warmup))
    return jax.vmap(fn, in_axes=(_CHAIN_AXES, *(0 for _ in extras)))(shared, *extras)


_MAPPED: Any = 0
_SHARED: Any = None
_CHAIN_AXES = KernelState(*[_MAPPED] * len(KernelState._fields))._replace(
    i=_SHARED, adapt_state=AdaptState(*[_MAPPED] * len(AdaptState._fields))._replace(num_warmup=_SHARED)
)


class Noise(NamedTuple):
    """Random numbers of a step."""

    normal: PyTree  # N(0, I), like the position
    exponential: Array  # of mean 1: a proposal is accepted if its energy error is less
    uniform: Array  # in [−1, 1]
    rng_key: Array  # for a kernel that needs more

    @classmethod
    def draw(cls, rng_key: Array, z: PyTree) -> Self:
        """Draw all numbers at once: every call of a generator is a loop of its own in the program."""
        flat, unravel = ravel_pytree(z)
        dtype = jnp.result_type(flat, float)
        least = np.nextafter(np.array(-1.0, dtype), np.array(0.0, dtype))
        uniform = jax.random.uniform(rng_key, (flat.size + 2,), dtype, minval=least)
        normal = np.array(np.sqrt(2), dtype) * jax.lax.erf_inv(uniform[2:])
        return cls(unravel(jnp.asarray(normal)), -jnp.log(0.5 + 0.5 * uniform[0]), uniform[1], rng_key)


class ProposalSettings(NamedTuple):
    """Settings with which a kernel makes a proposal."""

    step_size: Array
    num_steps: int | Array
    preconditioner: Any
    persistence: float | Array = 0.0  # share in [0, 1) of the momentum that is kept from step to step


class Proposal(NamedTuple):
    """Proposal of a kernel, with all that decides on it."""

    point: Point
    energy_error: Array  # −log of the acceptance ratio
    r_accepted: PyTree = None  # momentum to continue with if the point is taken
    r_rejected: PyTree = None  # and if it is not
    num_grad: int | Array = 1
    square_error: Array | None = None  # mean square of the integrator's steps' energy errors, if there are several


def point_of(state: KernelState) -> Point:
    """Return the position of a chain with its potential energy and gradient."""
    return Point(state.z, state.potential_energy, state.z_grad)


class StepSizeOptions(NamedTuple):
    """What all kernels are told of the step size."""

    first: float
    adapts: bool  # during warmup
    target_accept_prob: float
    searches: bool  # whether warmup first doubles or halves it
    maximum: float | None = None


class MetropolisKernel(TargetKernel):
    """Base of the kernels: a subclass proposes, this class does the rest."""

    _needs_momentum = False
    _is_second_order = True  # energy errors grow like the square of the step size or faster
    # Percentages of warmup between which windows of draws renew the preconditioner.
    _windows: tuple[int, ...] = ()

    def __init__(
        self,
        model: Callable[..., object] | None,
        potential_fn: Callable[[PyTree], Array] | None,
        init_strategy: Callable[..., object],
        options: StepSizeOptions,
    ) -> None:
        super().__init__(model, potential_fn, init_strategy)
        maximum = options.maximum
        bound = math.inf if maximum is None else maximum
        first = check_number("step_size", options.first, 0.0, bound, include_high=maximum is not None)
        target = check_number("target_accept_prob", options.target_accept_prob, 0.0, 1.0)
        self._options = options._replace(first=first, target_accept_prob=target)
        self._rule: AcceptanceRule | EnergyRule = AcceptanceRule(target, maximum, self._is_second_order)

    def compiled_once(self, run: Callable) -> Callable[[tuple], tuple[dict, KernelState]]:
        """Run the chains of a batch as one program that is kept: ``MCMC(kernel, chain_method=kernel.compiled_once)``.

        It takes the place of ``chain_method="vectorized"``, whose loop NumPyro compiles at every run, and gives the
        same draws. The program is found again by another run, another ``MCMC``, other data of the same shapes, and
        other lengths of which as many draws are kept. Arrays of the model are data; Python's and NumPy's numbers are
        parts of the program.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from numpyro.infer import MCMC
            >>> from numpyro_wide.mcmc import SplitHMC
            >>> kernel = SplitHMC(potential_fn=lambda x: 0.5 * jnp.sum(x**2))
            >>> options = {"num_chains": 2, "chain_method": kernel.compiled_once, "progress_bar": False}
            >>> mcmc = MCMC(kernel, num_warmup=20, num_samples=10, **options)
            >>> mcmc.run(jax.random.key(0), init_params=jnp.ones((2, 3)))
            >>> mcmc.get_samples(group_by_chain=True).shape
            (2, 10, 3)
        """
        return lambda start: run_chains(self, run, *start)

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Describe the state for the progress bar."""
        return f"step size {state.step_size:.2e}, {self._health(state)}"

    def _health(self, state: KernelState) -> str:
        """Return the mean acceptance, and the number of proposals that were not finite."""
        lost = f", {state.num_nonfinite} not finite" if state.num_nonfinite else ""
        return f"acc. prob {state.mean_accept_prob:.2f}{lost}"

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, object] | None = None,
    ) -> KernelState:
        """Return the first state, or a batch of them for a batch of keys.

        ``init_params`` is the first position in unconstrained space, with the axis of the keys in front; a
        ``potential_fn`` needs it, a ``model`` finds its own. A block of ``Gibbs`` is given constrained values.
        """
        check_key("rng_key", rng_key, "MCMC(...).run(rng_key, x, y)", several=True)
        single = is_prng_key(rng_key)
        kwargs, sites = model_kwargs or {}, Sites()
        seen: Any = None if GIBBS_SITES_KWARG in kwargs else self._model  # a block's sizes are not its model's
        is_collapsed = getattr(seen, "is_collapsed", False)
        split = jax.random.split if single else jax.vmap(jax.random.split, out_axes=1)

        def first_point(rng_key: Array) -> tuple[Array, Point]:
            nonlocal sites
            rng_key, key_model = split(rng_key)
            point, sites = self._first_point(key_model, init_params, model_args, model_kwargs)
            return rng_key, point

        def start(rng_key: Array, point: Point) -> KernelState:
            def first_state(rng_key: Array, point: Point) -> KernelState:
                return self._first_state(point, rng_key, num_warmup)

            return (first_state if single else over_chains(first_state))(rng_key, point)

        def output_sizes(rng_key: Array) -> dict[str, tuple[Array, Array]]:
            return prior_sizes(rng_key if single else rng_key[0], seen, model_args, kwargs)

        def first_look(rng_key: Array) -> Any:
            if is_collapsed:
                # A run is two: there is one more only if the model seems to be large by the run that is made anyway.
                return is_prior_large(sites[seen.observed])
            return {} if seen is None else output_sizes(rng_key)

        sharding = None if single else chains_sharding(len(rng_key), model_args, model_kwargs)
        state = None
        if sharding is None:
            # Operation by operation, a model of a few lines would be some two hundred programs.
            state, look = run_program(lambda key: (start(*first_point(key)), first_look(key)), rng_key, quick=True)
            if all(map(is_known, jax.tree.leaves(look))):
                if is_collapsed:
                    look = run_program(output_sizes, rng_key, quick=True) if look else {}
                warn_of_prior_sizes(look)
        has_parameters = any(site["type"] in ("param", "mutable") for site in sites.values())
        # NumPyro says what is wrong with a model when it runs with numbers, and keeps parameters of its trace.
        if state is None or has_parameters or not is_finite(point_of(state)):
            rng_key, point = first_point(rng_key)
            if not is_finite(point):
                raise ValueError(
                    "The potential energy or its gradient is not finite at the first position; "
                    "pass init_params inside the support, or another init_strategy."
                )
            state = jax.jit(start, out_shardings=sharding)(rng_key, point)
        self._sample_fn, self._loop = self._step, None
        return state

    def sample(self, state: KernelState, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> KernelState:
        """Take one step of every chain in ``state``, with the potential of these model arguments."""
        adapt_state = state.adapt_state
        if adapt_state.mixing is not None and not is_prng_key(state.rng_key):
            # Chains that run together have one number of proposals: each waits for the slowest anyway.
            is_over = jnp.all(state.i >= adapt_state.num_warmup)
            mixing = select(is_over, adapt_state.mixing.pooled(), adapt_state.mixing)
            state = state._replace(adapt_state=adapt_state._replace(mixing=mixing))
        return self._for_each_chain(self._step, state, model_args, model_kwargs)

    def refresh(self, state: KernelState, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> KernelState:
        """Recompute the potential energy and its gradient for other model arguments; the chain stays put."""

        def refreshed(state: KernelState, *model_arguments: Any) -> KernelState:
            point = self._evaluator(*model_arguments)(state.z)
            return state._replace(potential_energy=point.potential_energy, z_grad=point.z_grad)

        return self._for_each_chain(refreshed, state, model_args, model_kwargs)

    @abstractmethod
    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        """Propose a place to go to from ``point`` with momentum ``r``."""

    def _num_steps(self, state: KernelState) -> int | Array:
        """Return the number of an integrator's steps between two draws."""
        return 1

    def _num_proposals(self, state: KernelState) -> int | Array:
        """Return the number of proposals between two draws."""
        return 1

    def _persistence_at(self, state: KernelState) -> float | Array:
        """Return the share, in [0, 1), of the momentum that the next step keeps."""
        return 0.0

    def _round_step_size(self, step_size: Array) -> Array:
        """Move the step size to a value that the kernel can use as it is."""
        return step_size

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> Any:
        """Return the preconditioner to start from, or None."""
        return None

    def _first_mixing(self, dtype: jnp.dtype, num_warmup: int) -> Autocorrelation | None:
        """Return empty sums of the energy for a kernel that makes use of them, or None."""
        return None

    def _close_window(self, preconditioner: Any, draw_length: Array) -> Any:
        """Return the preconditioner that a window of draws measured, ``draw_length`` apart."""
        return preconditioner.close()

    def _first_state(self, point: Point, rng_key: Array, num_warmup: int) -> KernelState:
        rng_key, key_momentum = jax.random.split(rng_key)
        zero, zero_count = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.result_type(int))
        step_size = self._round_step_size(jnp.asarray(self._options.first, zero.dtype))
        return KernelState(
            i=zero_count,
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=normal_like(key_momentum, point.z) if self._needs_momentum else None,
            accept_prob=zero,
            mean_accept_prob=zero,
            energy_error=zero,
            num_grad=zero_count,
            num_nonfinite=zero_count,
            step_size=step_size,
            adapt_state=AdaptState(
                num_warmup=zero_count + num_warmup,
                step_size_state=self._rule.start(step_size, searches=self._options.searches),
                max_steps=zero_count + 1,
                preconditioner=self._first_preconditioner(point.z, num_warmup),
                mixing=self._first_mixing(zero.dtype, num_warmup),
            ),
            rng_key=rng_key,
        )

    def _step(self, state: KernelState, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> KernelState:
        evaluate, num_proposals = self._evaluator(model_args, model_kwargs), self._num_proposals(state)
        zero = jnp.zeros_like(state.energy_error)
        state = state._replace(accept_prob=zero, num_grad=jnp.zeros_like(state.num_grad))
        if isinstance(num_proposals, int):
            state, *errors = self._transition(state, evaluate)
        else:
            state, *errors = jax.lax.fori_loop(
                0, num_proposals, lambda _, carry: self._transition(carry[0], evaluate), (state, zero, zero)
            )
        accept_prob = state.accept_prob / jnp.asarray(num_proposals, zero.dtype)
        is_warming_up = state.i < state.adapt_state.num_warmup
        count = 1 + jnp.where(is_warming_up, state.i, state.i - state.adapt_state.num_warmup)
        mean_accept_prob = state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / count.astype(zero.dtype)
        step_size, adapt_state = self._adapt(state, *errors)
        return state._replace(
            i=state.i + 1,
            accept_prob=accept_prob,
            mean_accept_prob=mean_accept_prob,
            step_size=step_size,
            adapt_state=adapt_state,
        )

    def _transition(self, state: KernelState, evaluate: Evaluate) -> tuple[KernelState, Array, Array]:
        """Take or refuse one proposal, and add up what it cost; with its certain error and its mean square error."""
        rng_key, key_noise = jax.random.split(state.rng_key)
        noise = Noise.draw(key_noise, state.z)
        is_warming_up = state.i < state.adapt_state.num_warmup
        current = point_of(state)
        proposal = self._propose(noise, current, state.r, self._settings(state, is_warming_up), evaluate)
        # Every kernel's error depends on the gradient at the end: a point without one could not be left.
        finite = jnp.isfinite(proposal.energy_error)
        # Infinite, so that the probability is exactly zero, and the step size adapts to the refusal.
        energy_error = jnp.where(finite, proposal.energy_error, jnp.inf)
        certain = certain_error(energy_error, current.potential_energy, proposal.point.potential_energy)
        certain = jnp.where(finite, certain, jnp.inf)
        is_adapting = self._options.adapts & is_warming_up
        passes_metropolis = noise.exponential >= energy_error
        accepted = finite & self._rule.accepts(
            state.adapt_state.step_size_state, passes_metropolis, certain, is_adapting, size_of(state.z)
        )
        point = select(accepted, proposal.point, current)
        square = jnp.square(certain) if proposal.square_error is None else proposal.square_error
        square = jnp.where(finite, square, jnp.inf) / max(1, size_of(state.z))
        state = state._replace(
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=select(accepted, proposal.r_accepted, proposal.r_rejected),
            accept_prob=state.accept_prob + jnp.exp(-jnp.maximum(energy_error, 0.0)),
            energy_error=energy_error,
            num_grad=state.num_grad + jnp.asarray(proposal.num_grad, state.num_grad.dtype),
            num_nonfinite=state.num_nonfinite + jnp.asarray(~finite, state.num_nonfinite.dtype),
            rng_key=rng_key,
        )
        return state, certain, square

    def _settings(self, state: KernelState, is_warming_up: Array) -> ProposalSettings:
        step_size, num_steps, adapt_state = state.step_size, self._num_steps(state), state.adapt_state
        persistence = self._persistence_at(state)
        if self._options.adapts:
            # A persistent momentum would keep the energy that a chain falls by, and turns round where steps are lost.
            is_falling = is_warming_up & (adapt_state.max_steps < num_steps)
            persistence = jnp.where(is_falling, 0.0, persistence)
            is_probe = is_warming_up & self._rule.is_probe(adapt_state.step_size_state, state.i)
            step_size = jnp.where(is_probe, self._rule.probe_step_size(step_size), step_size)
            # A number of steps that is known before the run stays so: its loop compiles to less.
            if not isinstance(num_steps, int):
                num_steps = jnp.where(is_warming_up, jnp.minimum(num_steps, adapt_state.max_steps), num_steps)
        return ProposalSettings(step_size, num_steps, adapt_state.preconditioner, persistence)

    def _adapt(self, state: KernelState, certain: Array, square_error: Array) -> tuple[Array, AdaptState]:
        """Return the next step size and the next state of the adaptation; both as they are after warmup."""
        adapt_state, step_size = state.adapt_state, state.step_size
        is_warming_up = state.i < adapt_state.num_warmup
        draw_length = jnp.asarray(self._num_steps(state), step_size.dtype) * step_size
        if self._options.adapts:
            is_probe = self._rule.is_probe(adapt_state.step_size_state, state.i)
            updated: Any = self._rule.update(adapt_state.step_size_state, certain, square_error, is_probe)
            is_short = (certain > LOST_ERROR) & ~is_probe | self._rule.is_searching(updated)
            max_steps = jnp.where(is_short, 1, jnp.minimum(2 * adapt_state.max_steps, MAX_STEPS))
            next_size = self._round_step_size(self._rule.step_size(updated, state.i + 1 == adapt_state.num_warmup))
            step_size = jnp.where(is_warming_up, next_size, step_size)
            adapt_state = adapt_state._replace(step_size_state=updated, max_steps=max_steps)
        if adapt_state.mixing is not None:
            is_late = is_warming_up & (state.i >= adapt_state.num_warmup * MIXING_FROM // 100)
            # Without the energy of N(0, I), whose share grows with the dimension and says little of the function.
            energy = state.potential_energy - 0.5 * total(jax.tree.map(jnp.square, state.z))
            added = select(is_late, adapt_state.mixing.add(energy), adapt_state.mixing)
            adapt_state = adapt_state._replace(mixing=added)
        preconditioner = adapt_state.preconditioner
        if preconditioner is None or not self._windows:
            return step_size, adapt_state
        is_counted, is_end = window_position(state.i, adapt_state.num_warmup, self._windows)
        counted = jax.lax.cond(is_counted, lambda p: p.count_draw(point_of(state)), identity, preconditioner)
        renewed = jax.lax.cond(is_end, lambda p: self._close_window(p, draw_length), identity, counted)
        step_size_state = select(is_end, self._rule.restart(adapt_state.step_size_state), adapt_state.step_size_state)
        return step_size, adapt_state._replace(step_size_state=step_size_state, preconditioner=renewed)

    def _for_each_chain(self, fn: Callable[..., KernelState], state: KernelState, *args: object) -> KernelState:
        if is_prng_key(state.rng_key):
            return fn(state, *args)
        return over_states(lambda chain: fn(chain, *args), state)
