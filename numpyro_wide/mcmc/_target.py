"""The target of a kernel: a NumPyro model or a potential function, in unconstrained space."""

import copy
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key

from numpyro_wide.mcmc._checks import check_given_start, check_scalar, check_target
from numpyro_wide.mcmc._point import Evaluate, Point, PyTree


class TargetKernel(MCMCKernel):
    """A kernel that knows its target and nothing yet about how to move."""

    sample_field = "z"
    _needs_gradient = True
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
        return self._postprocess_fn(*model_args, **(model_kwargs or {}))

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
        return {**self.__dict__, "_sample_fn": None, "_potential_fn_gen": None, "_postprocess_fn": None}

    def _forget_model(self) -> None:
        self._potential_fn_gen = self._postprocess_fn = self._sample_fn = None

    def _initial_point(
        self,
        rng_key: Array,
        init_params: PyTree,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Point:
        """Return the first point of a chain, or of a batch of chains for a batch of keys."""
        found = None
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
            found = info.param_info.z
            if not is_given:
                return _as_floats(Point(*info.param_info))
        if init_params is None:
            raise ValueError(
                "A kernel with a potential_fn needs a first position; pass init_params to MCMC.run or init."
            )
        num_chains = None if is_prng_key(rng_key) else len(rng_key)
        check_given_start(init_params, found, num_chains)
        evaluate = self._evaluator(model_args, model_kwargs)
        return jax.jit(evaluate if is_prng_key(rng_key) else jax.vmap(evaluate))(_as_floats(init_params))

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


def _as_floats(tree: PyTree) -> PyTree:
    """Give all leaves the default float type: whole numbers and weak types would change in the first step."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.result_type(float)), tree)
