"""What all kernels share: target, state, steps."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key, nested_attrgetter

from numpyro_wide._checks import as_floats, is_known, is_tracing, listing
from numpyro_wide._compile import TracedProgram, is_one_by_one, over_chains
from numpyro_wide._traces import fixed_supports, is_bound, is_valid
from numpyro_wide.machine import chains_sharding
from numpyro_wide.mcmc._adaptation import (
    PROBE_FACTOR,
    AcceptanceRule,
    AdaptState,
    Lesson,
    Preconditioner,
    StepSizeRule,
    certain_error,
    find_step_size,
    init_adaptation,
    is_faint,
    is_probe,
    update_adaptation,
)
from numpyro_wide.mcmc._integrators import (
    Evaluate,
    Point,
    PyTree,
    all_finite,
    is_elsewhere,
    normal_like,
    select,
    size_of,
)
from numpyro_wide.mcmc._moves import Moves, forget_warnings


def check_target(model: Callable[..., Any] | None, potential_fn: Callable[[PyTree], Array] | None) -> None:
    """Refuse anything but exactly one function."""
    if (model is None) == (potential_fn is None):
        given = "neither" if model is None else "both"
        raise ValueError(f"Exactly one of model and potential_fn must be given, but got {given}.")
    name, value = ("model", model) if potential_fn is None else ("potential_fn", potential_fn)
    if not callable(value):
        raise TypeError(f"{name} must be a function, but got {type(value).__name__}.")


def check_start(point: Point) -> None:
    """Refuse a first point without a finite energy and gradient, unless it is being traced."""
    if not is_good_start(point):
        raise ValueError(
            "The potential energy or its gradient is not finite at the first position; "
            "pass init_params inside the support, or another init_strategy."
        )


def is_good_start(point: Point, passes: Array | bool = True) -> bool:
    """Tell whether energy and gradient are finite at a point that passes, or are being traced."""
    leaves = jax.tree.leaves((point.potential_energy, point.z_grad))
    # NumPy, since every operation of JAX on numbers that are known would be compiled first.
    is_finite = not all(map(is_known, leaves)) or all(np.all(np.isfinite(leaf)) for leaf in leaves)
    return is_finite and (not is_known(passes) or bool(passes))


def check_given_start(init_params: PyTree, expected: PyTree | None, num_chains: int | None) -> None:
    """Refuse a given first position that is not of real numbers or, for a model, does not fit its sites.

    Args:
        init_params: first position in unconstrained space, of every chain.
        expected: first position of one chain, as NumPyro found it, or None for a potential function.
        num_chains: length of the leading axis of the given one, or None for a single chain without that axis.
    """
    for place, leaf in jax.tree.leaves_with_path(init_params):
        as_floats(leaf, names=(f"init_params{jax.tree_util.keystr(place)}",))
    if expected is None:
        return
    leading = () if num_chains is None else (num_chains,)
    shapes = {name: (*leading, *np.shape(value)) for name, value in expected.items()}
    if not isinstance(init_params, Mapping):
        raise TypeError(
            "init_params of a model must be a dictionary of unconstrained values by site, but is a "
            f"{type(init_params).__name__}."
        )
    given = {name: np.shape(value) for name, value in init_params.items()}
    if given != shapes:
        raise ValueError(
            f"init_params must hold an unconstrained value of every latent site, of the shapes {shapes}, but holds "
            f"{given}. With several chains every value has their axis in front."
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


def check_tolerance(bias_tolerance: float, adjusted: bool, target_accept_prob: float | None) -> float:
    """Return the tolerance as a float; refuse an acceptance probability for a sampler that obeys none."""
    tolerance = check_number("bias_tolerance", bias_tolerance, 0.0, 1.0)
    if not adjusted and target_accept_prob is not None:
        raise ValueError(
            f"target_accept_prob is for adjusted=True, but got {target_accept_prob!r} with adjusted=False; the step of "
            "an unadjusted sampler is set by bias_tolerance."
        )
    return tolerance


def check_scalar(potential_fn: Callable[[PyTree], Array]) -> Callable[[PyTree], Array]:
    """Wrap a potential so that a result that is not a scalar is refused."""

    def checked(z: PyTree) -> Array:
        potential_energy = jnp.asarray(potential_fn(z), jnp.result_type(float))
        if potential_energy.shape != ():
            shape = potential_energy.shape
            raise ValueError(f"potential_fn must return a scalar, but returned shape {shape}; sum its terms.")
        return potential_energy

    return checked


class KernelState(NamedTuple):
    """State of a chain; every field can be named in ``extra_fields`` of :meth:`numpyro.infer.MCMC.run`.

    Attributes:
        i: number of steps taken, warmup included.
        z: position in unconstrained space, a pytree.
        z_grad: gradient of the potential energy at ``z``; None for a kernel without gradients.
        potential_energy: potential energy U at ``z``.
        r: momentum, N(0, I) distributed; None for a kernel that draws it afresh. To the microcanonical kernel only its
            direction matters.
        accept_prob: acceptance probability of the last proposal, whether or not the kernel obeys it.
        mean_accept_prob: its mean over the warmup, or over the steps after it.
        energy_error: −log of the last acceptance ratio, for the Hamiltonian kernels the error in the
            energy; inf if the proposal was not finite.
        num_grad: evaluations of the gradient (without gradients: of the potential) in the last step.
        num_nonfinite: proposals so far that were rejected because their energy or gradient was not finite.
        step_size: step size that the next step will use.
        adapt_state: :class:`AdaptState`, what warmup has learnt.
        moves: :class:`Moves`, the number of draws that are new.
        rng_key: key for the next step.
    """

    i: Array
    z: PyTree
    z_grad: PyTree
    potential_energy: Array
    r: PyTree
    accept_prob: Array
    mean_accept_prob: Array
    energy_error: Array
    num_grad: Array
    num_nonfinite: Array
    step_size: Array
    adapt_state: AdaptState
    moves: Moves
    rng_key: Array

    def __getitem__(self, place: Any) -> Any:
        """Return a field by its place; NumPyro asks by name for an extra field that is no attribute.

        Raises:
            KeyError: for a name.
        """
        if isinstance(place, str):
            raise KeyError(f"extra_fields must be among {listing(self._fields)} for this kernel, but got {place!r}.")
        return tuple.__getitem__(self, place)


def over_states(fn: Callable[..., Any], state: KernelState, *others: Any) -> Any:
    """Map a function over the states of chains and what comes with each, as :func:`over_chains` does.

    Chains of a batch are equally far, and share their step number and schedule where they move at once. With one of
    each own, what a kernel does at the end of a window would be computed in every step of every chain, and thrown away.

    Args:
        fn: function of a state and the others.
        state: states of chains, with a leading axis for them throughout.
        *others: arrays with the same leading axis.
    """
    if is_one_by_one():
        return over_chains(fn)(state, *others)
    i, schedule = jax.tree.map(lambda of_chains: of_chains[0], (state.i, state.adapt_state.schedule))
    shared = state._replace(i=i, adapt_state=state.adapt_state._replace(schedule=schedule))
    return jax.vmap(fn, in_axes=(_chain_axes(), *(0 for _ in others)))(shared, *others)


def _chain_axes() -> Any:
    """Return the axes to map over, as ``jax.vmap`` wants them, of a state whose chains share their schedule."""
    adapted: dict[str, Any] = dict.fromkeys(AdaptState._fields, 0) | {"schedule": None}
    parts: dict[str, Any] = dict.fromkeys(KernelState._fields, 0) | {"i": None, "adapt_state": AdaptState(**adapted)}
    return KernelState(**parts)


class Move(NamedTuple):
    """Settings with which a kernel makes a proposal.

    Attributes:
        step_size: step size, a scalar.
        num_steps: number of steps of the integrator.
        preconditioner: the kernel's kind of preconditioner, or None.
        renewal: share in (0, 1] of the velocity, where it lives on from step to step, that is renewed.
    """

    step_size: Array
    num_steps: int | Array
    preconditioner: Any
    renewal: float | Array = 1.0


class Proposal(NamedTuple):
    """Proposal of a kernel, with what decides on it.

    Attributes:
        point: point to go to.
        energy_error: −log of the acceptance ratio.
        r_accepted: momentum to continue with if the point is taken.
        r_rejected: momentum to continue with if it is not.
        num_grad: number of evaluations that it took.
        square_error: mean square of the energy errors of the integrator's steps; None if there was one step.
    """

    point: Point
    energy_error: Array
    r_accepted: PyTree = None
    r_rejected: PyTree = None
    num_grad: int | Array = 1
    square_error: Array | None = None


def point_of(state: KernelState) -> Point:
    """Return the position of a chain with its potential energy and gradient."""
    return Point(state.z, state.potential_energy, state.z_grad)


def is_warming_up(state: KernelState) -> Array:
    """Tell whether the next step belongs to the warmup."""
    return state.i < state.adapt_state.schedule.num_warmup


def acceptance(proposal: Proposal) -> tuple[Array, Array, Array]:
    """Tell whether a proposal is finite, its acceptance probability and its energy error."""
    point = proposal.point
    # The gradient, too: a point with a finite energy and no gradient is one that the next step could not leave.
    finite = all_finite((point.potential_energy, point.z_grad, proposal.energy_error))
    # Infinite, so that the probability is exactly zero, and the step size adapts to the refusal.
    energy_error = jnp.where(finite, proposal.energy_error, jnp.inf)
    return finite, jnp.exp(-jnp.maximum(energy_error, 0.0)), energy_error


# Energy error from which on a proposal is lost: it would have been accepted once in more than ten thousand times.
LOST = 10.0


class Errors(NamedTuple):
    """Energy errors of a proposal, inf if it is not finite.

    Attributes:
        certain: what is more of its error than the last digits of the energies.
        square: mean square of the errors of its integrator's steps, per dimension.
        raw_square: mean square of these errors, or the square of the error of the whole, with what rounding made.
    """

    certain: Array
    square: Array
    raw_square: Array

    @classmethod
    def of(cls, proposal: Proposal, current: Point, energy_error: Array, finite: Array) -> "Errors":
        """Return the errors of a proposal.

        Args:
            proposal: what a kernel proposed.
            current: point that it came from.
            energy_error: −log of the acceptance ratio, inf if the proposal is not finite.
            finite: whether it is.
        """
        certain = certain_error(energy_error, current.potential_energy, proposal.point.potential_energy)
        if proposal.square_error is None:
            square, raw = jnp.square(certain), jnp.square(energy_error)
        else:
            square = raw = proposal.square_error
        per_dimension = jnp.where(finite, square, jnp.inf) / max(1, size_of(current.z))
        return cls(jnp.where(finite, certain, jnp.inf), per_dimension, jnp.where(finite, raw, jnp.inf))

    def is_lost(self) -> Array:
        """Tell whether the proposal had no chance."""
        return self.certain > LOST


def run_chains(kernel: Any, run: Any, rng_key: Array, state: Any, init_params: Any) -> tuple[dict, Any]:
    """Run a batch of chains.

    Args:
        kernel: the kernel, a :class:`~numpyro.infer.mcmc.MCMCKernel` of ours.
        run: what NumPyro hands to a ``chain_method``: its run of one chain, a ``functools.partial`` that holds the
            arguments of the model and what is to be collected.
        rng_key: keys, one a chain.
        state: state of the chains to continue from, or None.
        init_params: first positions, or None.

    Returns:
        What was collected, by field, with leading axes (chain, draw), and the last state.
    """
    mcmc, args, kwargs = run.func.__self__, run.keywords["args"], run.keywords["kwargs"]
    if state is None or kernel._sample_fn is None:
        first = kernel.init(rng_key, mcmc.num_warmup, init_params, args, kwargs)
        state = first if state is None else state
    postprocess = mcmc.postprocess_fn or kernel.postprocess_fn(args, kwargs)
    names, left_out = run.keywords["collect_fields"], run.keywords["remove_sites"]
    bounds, thinning = mcmc._collection_params, mcmc.thinning
    lower, upper = bounds["lower"], bounds["upper"]
    num_kept = (upper - lower) // thinning
    size = num_kept if bounds["collection_size"] is None else bounds["collection_size"] // thinning
    begin = upper - num_kept * thinning

    def collected(state: Any) -> dict[str, Any]:
        found = {name: nested_attrgetter(name)(state) for name in names}
        sites = over_chains(postprocess)(found[names[0]])
        return found | {names[0]: {k: v for k, v in sites.items() if k not in left_out} if left_out else sites}

    def loop(state: Any, begin: Array, upper: Array, thinning: Array) -> tuple[dict, Any]:
        def step(i: Array, carry: tuple[Any, dict]) -> tuple[Any, dict]:
            state, kept = carry
            state = kernel.sample(state, args, kwargs)
            place, rest = (i - begin) // thinning, (i - begin) % thinning

            def keep() -> dict:
                return jax.tree.map(lambda all_, one: all_.at[place].set(one), kept, collected(state))

            return state, jax.lax.cond((i >= begin) & (rest == thinning - 1), keep, lambda: kept)

        kept = jax.tree.map(lambda one: jnp.zeros((size, *one.shape), one.dtype), jax.eval_shape(collected, state))
        state, kept = jax.lax.fori_loop(0, upper, step, (state, kept))
        return jax.tree.map(lambda draws: jnp.swapaxes(draws, 0, 1), kept), state

    # Arguments: a warmup, and runs of other lengths that keep as many draws, are the same program.
    lengths = tuple(map(jnp.int32, (begin, upper, thinning)))
    return TracedProgram(loop, state, *lengths)(state, *lengths)


# Made by `init` from a trace of the model, and good for it alone.
_OF_A_TRACE = "_potential_fn_gen", "_postprocess_fn", "_sample_fn", "_supports"


class TargetKernel(MCMCKernel):
    """A kernel that knows its target and nothing yet about how to move."""

    sample_field = "z"
    _needs_gradient = True
    # Whether the closures below hold numbers of the trace that they were made in, and serve nowhere else.
    _is_bound = False
    # Of the sites that are sampled; None before `init`, and where one depends on the values of others.
    _supports: dict[str, Constraint] | None
    _potential_fn_gen: Callable[..., Any] | None
    _postprocess_fn: Callable[..., Any] | None
    # MCMC looks at this name to learn whether `init` has run.
    _sample_fn: Callable[..., Any] | None

    def __init__(
        self,
        model: Callable[..., Any] | None,
        potential_fn: Callable[[PyTree], Array] | None,
        init_strategy: Callable[..., Any],
    ) -> None:
        check_target(model, potential_fn)
        self._model = model
        self._potential_fn = potential_fn
        self._init_strategy = init_strategy
        self._forget_model()

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
        return lambda z: TracedProgram(postprocess, z)(z)

    def get_constrain_fn(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Callable:
        """Return the map from unconstrained to constrained values alone, which other blocks of ``Gibbs`` are given.

        A model whose other sites are not conditioned cannot be run for it, and need not be.
        """
        supports = self._supports
        if supports is None:
            return self.postprocess_fn(model_args, model_kwargs)
        return lambda z: {name: biject_to(supports[name])(value) for name, value in z.items()}

    def compiled_once(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Run the chains of a batch as one program that is kept: ``MCMC(kernel, chain_method=kernel.compiled_once)``.

        It takes the place of ``chain_method="vectorized"``, whose loop NumPyro compiles at every run, and gives the
        same draws. A program is looked for by what the model computes now, and found again by another run, another
        ``MCMC``, other data of the same shapes, and other lengths of which as many draws are kept; numbers in arrays of
        JAX's, such as ``jnp.log(2.0)``, are data, and Python's and NumPy's numbers are parts of the program.

        Args:
            run: the run of a chain, as :class:`numpyro.infer.MCMC` hands it to a ``chain_method``.

        Returns:
            The run of all chains.

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
        """Return a copy of this kernel for ``wrapper(model)``, as NumPyro's ``Gibbs`` asks for.

        Raises:
            ValueError: if the kernel was built from a potential function.
        """
        if self._model is None:
            raise ValueError("wrap_model needs a kernel that was built from a model, not from a potential_fn.")
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._forget_model()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        # The closures over the model's trace are rebuilt by the next `init`.
        return {**self.__dict__, **dict.fromkeys(_OF_A_TRACE)}

    def _forget_model(self) -> None:
        self.__dict__.update(dict.fromkeys(_OF_A_TRACE))

    def _initial_point(
        self,
        rng_key: Array,
        init_params: PyTree,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> tuple[Point, Array | bool]:
        """Return the first point of a chain, or of a batch of chains for a batch of keys.

        Returns:
            The point, and whether NumPyro would let the model pass, had it seen numbers where they are traced.
        """
        found = None
        passes: Array | bool = True
        if self._model is not None:
            is_given = init_params is not None
            # NumPyro looks for a first position in any case. Where it is not asked for, one look without a gradient is
            # enough, and needs no compilation.
            info = initialize_model(
                rng_key[0] if is_given and not is_prng_key(rng_key) else rng_key,
                self._model,
                init_strategy=self._init_strategy,
                dynamic_args=True,
                model_args=model_args,
                model_kwargs=model_kwargs,
                validate_grad=self._needs_gradient and not is_given,
            )
            self._potential_fn_gen, self._postprocess_fn = info.potential_fn, info.postprocess_fn
            self._supports = fixed_supports(info.model_trace)
            self._is_bound = is_bound(info.model_trace)
            if is_given and GIBBS_SITES_KWARG in (model_kwargs or {}):
                init_params = _start_of_block(init_params, self._supports)
            found, passes = info.param_info.z, is_valid(info.model_trace) if is_tracing() else True
            if not is_given:
                return _as_floats(Point(*info.param_info)), passes
        if init_params is None:
            raise ValueError(
                "A kernel with a potential_fn needs a first position; pass init_params to MCMC.run or init."
            )
        num_chains = None if is_prng_key(rng_key) else len(rng_key)
        check_given_start(init_params, found, num_chains)
        evaluate = self._evaluator(model_args, model_kwargs)
        run = evaluate if num_chains is None else over_chains(evaluate)
        return (run if is_tracing() else jax.jit(run))(_as_floats(init_params)), passes

    def _in_one_program(self, begin: Callable[[Array], Any], rng_key: Array) -> Any:
        """Run what begins with :meth:`_initial_point` as one program, which a model that computes the same finds again.

        Operation by operation, a model of a few lines is some three hundred programs.

        Returns:
            What ``begin`` returns; None where NumPyro's closures are good for that program alone.
        """
        self._is_bound = False
        program = TracedProgram(begin, rng_key)
        return None if self._is_bound else program(rng_key)

    def _evaluator(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Evaluate:
        """Return the function from a position to its :class:`Point`, one evaluation of the potential."""
        potential_fn = check_scalar(self.get_potential_fn(model_args, model_kwargs))

        def evaluate(z: PyTree) -> Point:
            if self._needs_gradient:
                potential_energy, z_grad = jax.value_and_grad(potential_fn)(z)
            else:
                potential_energy, z_grad = potential_fn(z), None
            return Point(z, potential_energy, z_grad)

        return evaluate


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
