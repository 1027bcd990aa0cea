"""Targets of kernels: a model, or a potential energy, its first position, and the way back to its sites."""

import copy
from collections.abc import Callable, Mapping
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key

from numpyro_wide._checks import as_floats, is_known, listing
from numpyro_wide._compile import over_chains, run_program
from numpyro_wide._traces import Sites, fixed_supports
from numpyro_wide.mcmc._chains import Loop
from numpyro_wide.mcmc._integrators import Evaluate, Point, PyTree


def check_target(model: Callable[..., object] | None, potential_fn: Callable[[PyTree], Array] | None) -> None:
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


# Made by `init` from a trace of the model, and good for it alone.
_TRACE_ATTRIBUTES = "_loop", "_potential_fn_gen", "_postprocess_fn", "_sample_fn", "_supports"


class TargetKernel(MCMCKernel):
    """Kernel as far as its target goes: what it samples from, and nothing of how."""

    sample_field = "z"
    _needs_gradient = True
    # Of the sites that are sampled; None before `init`, and where one depends on the values of others.
    _supports: dict[str, Constraint] | None
    _loop: Loop | None
    _potential_fn_gen: Callable[..., Callable[[PyTree], Array]] | None
    _postprocess_fn: Callable[..., Callable] | None
    # MCMC looks at this name to learn whether `init` has run.
    _sample_fn: Callable[..., object] | None

    def __init__(
        self,
        model: Callable[..., object] | None,
        potential_fn: Callable[[PyTree], Array] | None,
        init_strategy: Callable[..., object],
    ) -> None:
        check_target(model, potential_fn)
        self._model, self._potential_fn, self._init_strategy = model, potential_fn, init_strategy
        self._forget_model()

    @property
    def model(self) -> Callable[..., object] | None:
        """The NumPyro model, or None if the kernel was built from a potential function."""
        return self._model

    def get_potential_fn(
        self, model_args: tuple = (), model_kwargs: Mapping[str, object] | None = None
    ) -> Callable[[PyTree], Array]:
        """Return the potential energy of the model for the given arguments, in unconstrained space."""
        if self._potential_fn is not None:
            return self._potential_fn
        if self._potential_fn_gen is None:
            raise RuntimeError("The potential function is known once `init` has seen the model; call `init` first.")
        return self._potential_fn_gen(*model_args, **(model_kwargs or {}))

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> Callable:
        """Return the map from unconstrained to constrained values and deterministic sites."""
        if self._postprocess_fn is None:
            return identity
        postprocess = self._postprocess_fn(*model_args, **(model_kwargs or {}))
        # MCMC asks for it outside of its compiled loop as well: one program instead of one an operation.
        return lambda z: run_program(postprocess, z, quick=True)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> Callable:
        """Return the map to constrained values alone; the model of a block of ``Gibbs`` cannot be run for it."""
        supports = self._supports
        if supports is None:
            return self.postprocess_fn(model_args, model_kwargs)
        return lambda z: {name: biject_to(supports[name])(value) for name, value in z.items()}

    def wrap_model(self, wrapper: Callable[[Callable], Callable]) -> Self:
        """Return a copy of this kernel for ``wrapper(model)``, as NumPyro's ``Gibbs`` asks for."""
        if self._model is None:
            raise ValueError("wrap_model needs a kernel that was built from a model, not from a potential_fn.")
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._forget_model()
        return kernel

    def __getstate__(self) -> dict[str, object]:
        # The closures over the model's trace are rebuilt by the next `init`.
        return {**self.__dict__, **dict.fromkeys(_TRACE_ATTRIBUTES)}

    def _forget_model(self) -> None:
        self.__dict__.update(dict.fromkeys(_TRACE_ATTRIBUTES))

    def _first_point(
        self, rng_key: Array, init_params: PyTree, model_args: tuple, model_kwargs: Mapping[str, object] | None
    ) -> tuple[Point, Sites]:
        """Return the first point of a chain, or of each of several keys, and the sites of a run of the model."""
        num_chains = None if is_prng_key(rng_key) else len(rng_key)
        expected, sites, is_given = None, {}, init_params is not None
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
            sites = info.model_trace
            self._supports = fixed_supports(sites)
            if not is_given:
                return _as_floats(Point(*info.param_info)), sites
            expected = info.param_info.z
            if GIBBS_SITES_KWARG in (model_kwargs or {}):
                init_params = _start_of_block(init_params, self._supports)
        if not is_given:
            raise ValueError(
                "A kernel with a potential_fn needs a first position; pass init_params to MCMC.run or init."
            )
        check_init_params(init_params, expected, num_chains)
        evaluate = self._evaluator(model_args, model_kwargs)
        return (evaluate if num_chains is None else over_chains(evaluate))(_as_floats(init_params)), sites

    def _evaluator(self, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> Evaluate:
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


def _start_of_block(values: dict[str, Array], supports: dict[str, Constraint] | None) -> dict[str, Array]:
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


def is_finite(point: Point) -> bool:
    """Whether energy and gradient are finite, or being traced."""
    leaves = jax.tree.leaves((point.potential_energy, point.z_grad))
    # NumPy, since every operation of JAX on known numbers would be compiled first.
    return not all(map(is_known, leaves)) or all(np.all(np.isfinite(leaf)) for leaf in leaves)
