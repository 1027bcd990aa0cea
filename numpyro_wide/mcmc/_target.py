"""The target of a kernel: a NumPyro model or a potential function, in unconstrained space."""

import copy
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key

from numpyro_wide._checks import is_tracing, listing
from numpyro_wide._over_chains import over_chains
from numpyro_wide._programs import TracedProgram
from numpyro_wide._traces import fixed_supports
from numpyro_wide._validity import is_bound, is_valid
from numpyro_wide.mcmc._checks import check_given_start, check_scalar, check_target
from numpyro_wide.mcmc._once import run_chains
from numpyro_wide.mcmc._point import Evaluate, Point, PyTree

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
