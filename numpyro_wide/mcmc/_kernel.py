"""The base of all kernels: targets, chains' states, a step of a chain, and runs whose program is kept."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key, nested_attrgetter

from numpyro_wide._checks import as_floats, check_key, is_known, is_tracing, listing
from numpyro_wide._compile import is_sequential, over_chains, program_of, run_program
from numpyro_wide._traces import fixed_supports, prior_sizes, warn_of_prior_sizes
from numpyro_wide.machine import chains_sharding
from numpyro_wide.mcmc._adaptation import (
    LOST_ERROR,
    MAX_STEPS,
    AcceptanceRule,
    AdaptState,
    EnergyRule,
    certain_error,
    window_position,
)
from numpyro_wide.mcmc._integrators import Evaluate, Point, PyTree, normal_like, select, size_of


def check_target(model: Callable[..., Any] | None, potential_fn: Callable[[PyTree], Array] | None) -> None:
    """Refuse anything but exactly one function."""
    if (model is None) == (potential_fn is None):
        passed = "neither" if model is None else "both"
        raise ValueError(f"Exactly one of model and potential_fn must be given, but got {passed}.")
    name, value = ("model", model) if potential_fn is None else ("potential_fn", potential_fn)
    if not callable(value):
        raise TypeError(f"{name} must be a function, but got {type(value).__name__}.")


def check_init_params(init_params: PyTree, expected: PyTree | None, num_chains: int | None) -> None:
    """Refuse a first position, of several chains or of one, without real numbers or unlike a model's latent sites."""
    for path, leaf in jax.tree.leaves_with_path(init_params):
        as_floats(leaf, names=(f"init_params{jax.tree_util.keystr(path)}",))
    if expected is None:
        return
    batch_shape = () if num_chains is None else (num_chains,)
    shapes = {name: (*batch_shape, *np.shape(value)) for name, value in expected.items()}
    if not isinstance(init_params, Mapping):
        raise TypeError(
            "init_params of a model must be a dictionary of unconstrained values by site, but is a "
            f"{type(init_params).__name__}."
        )
    actual = {name: np.shape(value) for name, value in init_params.items()}
    if actual != shapes:
        raise ValueError(
            f"init_params must hold an unconstrained value of every latent site, of the shapes {shapes}, but holds "
            f"{actual}. With several chains every value has their axis in front."
        )


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


def over_states(fn: Callable[..., Any], state: KernelState, *extras: Any) -> Any:
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


def run_chains(kernel: Any, run: Any, rng_key: Array, state: Any, init_params: Any) -> tuple[dict, Any]:
    """Run a batch of chains, or continue from a state: return fields by name, (chain, draw, …), and the last state.

    ``run`` is NumPyro's run of one chain, a ``functools.partial`` that holds the model's arguments and what to collect.
    """
    mcmc, args, kwargs = run.func.__self__, run.keywords["args"], run.keywords["kwargs"]
    if state is None or kernel._sample_fn is None:
        first_state = kernel.init(rng_key, mcmc.num_warmup, init_params, args, kwargs)
        state = first_state if state is None else state
    postprocess = mcmc.postprocess_fn or kernel.postprocess_fn(args, kwargs)
    field_names, removed_sites = run.keywords["collect_fields"], run.keywords["remove_sites"]
    bounds, thinning = mcmc._collection_params, mcmc.thinning
    lower, upper = bounds["lower"], bounds["upper"]
    num_kept = (upper - lower) // thinning
    size = num_kept if bounds["collection_size"] is None else bounds["collection_size"] // thinning
    begin = upper - num_kept * thinning

    def collect(state: Any) -> dict[str, Any]:
        fields = {name: nested_attrgetter(name)(state) for name in field_names}
        sites = over_chains(postprocess)(fields[field_names[0]])
        stored = {k: v for k, v in sites.items() if k not in removed_sites} if removed_sites else sites
        return fields | {field_names[0]: stored}

    def loop(state: Any, begin: Array, upper: Array, thinning: Array) -> tuple[dict, Any]:
        def step(i: Array, carry: tuple[Any, dict]) -> tuple[Any, dict]:
            state, buffers = carry
            state = kernel.sample(state, args, kwargs)
            index, remainder = (i - begin) // thinning, (i - begin) % thinning

            def keep() -> dict:
                return jax.tree.map(lambda buffer, value: buffer.at[index].set(value), buffers, collect(state))

            return state, jax.lax.cond((i >= begin) & (remainder == thinning - 1), keep, lambda: buffers)

        buffers = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), jax.eval_shape(collect, state))
        state, buffers = jax.lax.fori_loop(0, upper, step, (state, buffers))
        return jax.tree.map(lambda draws: jnp.swapaxes(draws, 0, 1), buffers), state

    # Lengths are arguments: a warmup, and runs of other lengths that keep as many draws, are the same program.
    loop_arguments = state, *map(jnp.int32, (begin, upper, thinning))
    leaves, structure = jax.tree.flatten((args, kwargs))
    if is_tracing() or not all(isinstance(leaf, Array) and is_known(leaf) for leaf in leaves):
        return run_program(loop, *loop_arguments)  # other arguments than JAX's arrays may be changed in place
    types = [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding) for leaf in jax.tree.leaves(state)
    ]
    signature = structure, jax.tree.structure(state), types, size, field_names, removed_sites, mcmc.postprocess_fn
    # A run that goes on with the arguments of the one before needs no tracing, which would take longer than it does.
    if kernel._loop is None or kernel._loop.signature != signature or not all(map(is_, kernel._loop.leaves, leaves)):
        kernel._loop = _Loop(signature, leaves, program_of(loop, *loop_arguments))
    return kernel._loop.program(*loop_arguments)


class _Loop(NamedTuple):
    """Program of a kernel's latest run, with the arguments of the model that it holds."""

    signature: tuple
    leaves: list[Array]
    program: Callable


# Made by `init` from a trace of the model, and good for it alone.
_TRACE_ATTRIBUTES = "_loop", "_potential_fn_gen", "_postprocess_fn", "_sample_fn", "_supports"


class MetropolisKernel(MCMCKernel):
    """Base of the kernels: a subclass proposes, this class does the rest; ``max_step_size`` is a bound, or None."""

    sample_field = "z"
    _needs_gradient = True
    _needs_momentum = False
    _is_second_order = True  # energy errors grow like the square of the step size or faster
    # Percentages of warmup between which windows of draws renew the preconditioner.
    _windows: tuple[int, ...] = ()
    # Of the sites that are sampled; None before `init`, and where one depends on the values of others.
    _supports: dict[str, Constraint] | None
    _loop: _Loop | None
    _potential_fn_gen: Callable[..., Any] | None
    _postprocess_fn: Callable[..., Any] | None
    # MCMC looks at this name to learn whether `init` has run.
    _sample_fn: Callable[..., Any] | None

    def __init__(
        self,
        model: Callable[..., Any] | None,
        potential_fn: Callable[[PyTree], Array] | None,
        *,
        step_size: float,
        adapt_step_size: bool,
        target_accept_prob: float,
        find_heuristic_step_size: bool,
        init_strategy: Callable[..., Any],
        max_step_size: float | None = None,
    ) -> None:
        check_target(model, potential_fn)
        self._model, self._potential_fn, self._init_strategy = model, potential_fn, init_strategy
        self._forget_model()
        bound = math.inf if max_step_size is None else max_step_size
        self._step_size = check_number("step_size", step_size, 0.0, bound, include_high=max_step_size is not None)
        target = check_number("target_accept_prob", target_accept_prob, 0.0, 1.0)
        self._rule: AcceptanceRule | EnergyRule = AcceptanceRule(target, max_step_size, self._is_second_order)
        self._adapt_step_size = adapt_step_size
        self._searches = find_heuristic_step_size

    @property
    def model(self) -> Callable[..., Any] | None:
        """The NumPyro model, or None if the kernel was built from a potential function."""
        return self._model

    def get_potential_fn(
        self, model_args: tuple[Any, ...] = (), model_kwargs: dict[str, Any] | None = None
    ) -> Callable[[PyTree], Array]:
        """Return the potential energy of the model for the given arguments, in unconstrained space."""
        if self._potential_fn is not None:
            return self._potential_fn
        if self._potential_fn_gen is None:
            raise RuntimeError("The potential function is known once `init` has seen the model; call `init` first.")
        return self._potential_fn_gen(*model_args, **(model_kwargs or {}))

    def postprocess_fn(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Callable:
        """Return the map from unconstrained to constrained values and deterministic sites."""
        if self._postprocess_fn is None:
            return identity
        postprocess = self._postprocess_fn(*model_args, **(model_kwargs or {}))
        # MCMC asks for it outside of its compiled loop as well: one program instead of one an operation.
        return lambda z: run_program(postprocess, z, quick=True)

    def get_constrain_fn(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Callable:
        """Return the map to constrained values alone; the model of a block of ``Gibbs`` cannot be run for it."""
        supports = self._supports
        if supports is None:
            return self.postprocess_fn(model_args, model_kwargs)
        return lambda z: {name: biject_to(supports[name])(value) for name, value in z.items()}

    def compiled_once(self, run: Callable[..., Any]) -> Callable[..., Any]:
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

    def wrap_model(self, wrapper: Callable[..., Any]) -> Self:
        """Return a copy of this kernel for ``wrapper(model)``, as NumPyro's ``Gibbs`` asks for."""
        if self._model is None:
            raise ValueError("wrap_model needs a kernel that was built from a model, not from a potential_fn.")
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._forget_model()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        # The closures over the model's trace are rebuilt by the next `init`.
        return {**self.__dict__, **dict.fromkeys(_TRACE_ATTRIBUTES)}

    def _forget_model(self) -> None:
        self.__dict__.update(dict.fromkeys(_TRACE_ATTRIBUTES))

    def _first_point(
        self, rng_key: Array, init_params: PyTree, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> tuple[Point, bool]:
        """Return the first point of a chain, or of each of several keys, and whether the model has parameters."""
        num_chains = None if is_prng_key(rng_key) else len(rng_key)
        expected, has_parameters, is_given = None, False, init_params is not None
        if self._model is not None:
            # NumPyro finds a first position in any case. Where one is given, a single try without a gradient is enough,
            # and needs no compilation.
            info = initialize_model(
                rng_key[0] if is_given and num_chains is not None else rng_key,
                self._model,
                init_strategy=self._init_strategy,
                dynamic_args=True,
                model_args=model_args,
                model_kwargs=model_kwargs,
                validate_grad=self._needs_gradient and not is_given,
            )
            self._potential_fn_gen, self._postprocess_fn = info.potential_fn, info.postprocess_fn
            self._supports = fixed_supports(info.model_trace)
            has_parameters = any(site["type"] in ("param", "mutable") for site in info.model_trace.values())
            if not is_given:
                return _as_floats(Point(*info.param_info)), has_parameters
            expected = info.param_info.z
            if GIBBS_SITES_KWARG in (model_kwargs or {}):
                init_params = _start_of_block(init_params, self._supports)
        if not is_given:
            raise ValueError(
                "A kernel with a potential_fn needs a first position; pass init_params to MCMC.run or init."
            )
        check_init_params(init_params, expected, num_chains)
        evaluate = self._evaluator(model_args, model_kwargs)
        return (evaluate if num_chains is None else over_chains(evaluate))(_as_floats(init_params)), has_parameters

    def _evaluator(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Evaluate:
        """Return the function from a position to its :class:`Point`, one evaluation of the potential."""
        potential_fn = self.get_potential_fn(model_args, model_kwargs)

        def checked(z: PyTree) -> Array:
            energy = jnp.asarray(potential_fn(z), jnp.result_type(float))
            if energy.shape != ():
                raise ValueError(
                    f"potential_fn must return a scalar, but returned shape {energy.shape}; sum its terms."
                )
            return energy

        if not self._needs_gradient:
            return lambda z: Point(z, checked(z), None)
        return lambda z: Point(z, *jax.value_and_grad(checked)(z))

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
        model_args: tuple[Any, ...] = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> KernelState:
        """Return the first state, or a batch of them for a batch of keys.

        ``init_params`` is the first position in unconstrained space, with the axis of the keys in front; a
        ``potential_fn`` needs it, a ``model`` finds its own. A block of ``Gibbs`` is given constrained values.
        """
        check_key("rng_key", rng_key, "MCMC(...).run(rng_key, x, y)", several=True)
        single, has_parameters = is_prng_key(rng_key), False
        split = jax.random.split if single else jax.vmap(jax.random.split, out_axes=1)

        def first_point(rng_key: Array) -> tuple[Array, Point]:
            nonlocal has_parameters
            rng_key, key_model = split(rng_key)
            point, has_parameters = self._first_point(key_model, init_params, model_args, model_kwargs)
            return rng_key, point

        def start(rng_key: Array, point: Point) -> KernelState:
            def first_state(rng_key: Array, point: Point) -> KernelState:
                return self._first_state(point, rng_key, num_warmup)

            return (first_state if single else over_chains(first_state))(rng_key, point)

        def output_sizes(rng_key: Array) -> dict[str, tuple[Array, Array]]:
            kwargs = model_kwargs or {}
            if self._model is None or GIBBS_SITES_KWARG in kwargs:
                return {}
            return prior_sizes(rng_key if single else rng_key[0], self._model, model_args, kwargs)

        sharding = None if single else chains_sharding(len(rng_key), model_args, model_kwargs)
        state = None
        if sharding is None:
            # Operation by operation, a model of a few lines would be some two hundred programs.
            state, sizes = run_program(lambda key: (start(*first_point(key)), output_sizes(key)), rng_key, quick=True)
            if all(map(is_known, jax.tree.leaves(sizes))):
                warn_of_prior_sizes(sizes)
        # NumPyro says what is wrong with a model when it runs with numbers, and keeps parameters of its trace.
        if state is None or has_parameters or not _is_finite(point_of(state)):
            rng_key, point = first_point(rng_key)
            if not _is_finite(point):
                raise ValueError(
                    "The potential energy or its gradient is not finite at the first position; "
                    "pass init_params inside the support, or another init_strategy."
                )
            state = jax.jit(start, out_shardings=sharding)(rng_key, point)
        self._sample_fn, self._loop = self._step, None
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
    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        """Propose a place to go to from ``point`` with momentum ``r``."""

    def _num_steps(self, state: KernelState) -> int | Array:
        """Return the number of an integrator's steps between two draws."""
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

    def _close_window(self, preconditioner: Any, draw_length: Array) -> Any:
        """Return the preconditioner that a window of draws measured, ``draw_length`` apart."""
        return preconditioner.close()

    def _first_state(self, point: Point, rng_key: Array, num_warmup: int) -> KernelState:
        rng_key, key_momentum = jax.random.split(rng_key)
        zero, zero_count = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.result_type(int))
        step_size = self._round_step_size(jnp.asarray(self._step_size, zero.dtype))
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
                step_size_state=self._rule.start(step_size, searches=self._searches),
                max_steps=zero_count + 1,
                preconditioner=self._first_preconditioner(point.z, num_warmup),
            ),
            rng_key=rng_key,
        )

    def _step(
        self, state: KernelState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> KernelState:
        evaluate = self._evaluator(model_args, model_kwargs)
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
        is_adapting = self._adapt_step_size & is_warming_up
        passes_metropolis = noise.exponential >= energy_error
        accepted = finite & self._rule.accepts(
            state.adapt_state.step_size_state, passes_metropolis, certain, is_adapting, size_of(state.z)
        )
        point = select(accepted, proposal.point, current)
        accept_prob = jnp.exp(-jnp.maximum(energy_error, 0.0))
        count = 1 + jnp.where(is_warming_up, state.i, state.i - state.adapt_state.num_warmup)
        weight = 1 / jnp.asarray(count, accept_prob.dtype)
        state = state._replace(
            z=point.z,
            z_grad=point.z_grad,
            potential_energy=point.potential_energy,
            r=select(accepted, proposal.r_accepted, proposal.r_rejected),
            accept_prob=accept_prob,
            mean_accept_prob=state.mean_accept_prob + weight * (accept_prob - state.mean_accept_prob),
            energy_error=energy_error,
            num_grad=jnp.asarray(proposal.num_grad, state.num_grad.dtype),
            num_nonfinite=state.num_nonfinite + jnp.asarray(~finite, state.num_nonfinite.dtype),
            rng_key=rng_key,
        )
        square = jnp.square(certain) if proposal.square_error is None else proposal.square_error
        square = jnp.where(finite, square, jnp.inf) / max(1, size_of(state.z))
        step_size, adapt_state = self._adapt(state, certain, square)
        return state._replace(i=state.i + 1, step_size=step_size, adapt_state=adapt_state)

    def _settings(self, state: KernelState, is_warming_up: Array) -> ProposalSettings:
        step_size, num_steps, adapt_state = state.step_size, self._num_steps(state), state.adapt_state
        persistence = self._persistence_at(state)
        if self._adapt_step_size:
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
        if self._adapt_step_size:
            is_probe = self._rule.is_probe(adapt_state.step_size_state, state.i)
            updated: Any = self._rule.update(adapt_state.step_size_state, certain, square_error, is_probe)
            is_short = (certain > LOST_ERROR) & ~is_probe | self._rule.is_searching(updated)
            max_steps = jnp.where(is_short, 1, jnp.minimum(2 * adapt_state.max_steps, MAX_STEPS))
            next_size = self._round_step_size(self._rule.step_size(updated, state.i + 1 == adapt_state.num_warmup))
            step_size = jnp.where(is_warming_up, next_size, step_size)
            adapt_state = adapt_state._replace(step_size_state=updated, max_steps=max_steps)
        preconditioner = adapt_state.preconditioner
        if preconditioner is None or not self._windows:
            return step_size, adapt_state
        is_counted, is_end = window_position(state.i, adapt_state.num_warmup, self._windows)
        counted = jax.lax.cond(is_counted, lambda p: p.count_draw(point_of(state)), identity, preconditioner)
        renewed = jax.lax.cond(is_end, lambda p: self._close_window(p, draw_length), identity, counted)
        step_size_state = select(is_end, self._rule.restart(adapt_state.step_size_state), adapt_state.step_size_state)
        return step_size, adapt_state._replace(step_size_state=step_size_state, preconditioner=renewed)

    def _for_each_chain(self, fn: Callable[..., KernelState], state: KernelState, *args: Any) -> KernelState:
        if is_prng_key(state.rng_key):
            return fn(state, *args)
        return over_states(lambda chain: fn(chain, *args), state)


def _start_of_block(values: dict[str, Any], supports: dict[str, Constraint] | None) -> dict[str, Array]:
    """Return the first position of a block of ``Gibbs``, which hands over values of the sites, not positions."""
    if supports is None:
        raise ValueError(
            f"The bounds of a site of this block of Gibbs, which has {listing(values)}, are arrays. Those may depend "
            "on the sites of other blocks, and must be numbers: sample a Uniform(0, 1), and scale it in the model."
        )
    return {name: biject_to(supports[name]).inv(value) for name, value in values.items()}


def _as_floats(tree: PyTree) -> PyTree:
    """Give all leaves the default float type: whole numbers and weak types would change in the first step."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.result_type(float)), tree)


def _is_finite(point: Point) -> bool:
    """Whether energy and gradient are finite, or being traced."""
    leaves = jax.tree.leaves((point.potential_energy, point.z_grad))
    # NumPy, since every operation of JAX on known numbers would be compiled first.
    return not all(map(is_known, leaves)) or all(np.all(np.isfinite(leaf)) for leaf in leaves)
