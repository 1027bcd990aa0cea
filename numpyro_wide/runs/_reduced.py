"""Kernels that store projections and function values of the weights instead of the weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from jax import Array
from numpyro.infer.mcmc import MCMCKernel

from numpyro_wide._checks import as_list, check_names_known, kind_of, listing


def reduced(
    kernel: MCMCKernel,
    *,
    drop: Iterable[str],
    functions: Mapping[str, Callable[[dict[str, Array]], Array]] | None = None,
) -> "ReducedKernel":
    """Return a kernel that leaves sites out of the stored draws, and stores functions of every draw instead.

    Args:
        kernel: an MCMC kernel, built from a model.
        drop: names of sites that are not stored; both readout and base site of a repriorised model are wide.
        functions: functions of one draw, a dictionary of all sites, by the name of their stored values, such as
            :func:`random_projections`, :func:`site_function` and :func:`readout_function` return.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.diagnostics import random_projections
        >>> from numpyro_wide.runs import reduced
        >>> from numpyro_wide.readout import site_function
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(x @ w, 0.1).to_event(1), obs=y)
        >>> functions = {
        ...     "projections": random_projections(jax.random.key(0), ["w"]),
        ...     "predictions": site_function(model, "y", jnp.ones((2, 3))),
        ... }
        >>> kernel = reduced(NUTS(model), drop=["w"], functions=functions)
        >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), jnp.eye(3), jnp.ones(3))
        >>> {name: draws.shape for name, draws in mcmc.get_samples().items()}
        {'predictions': (10, 2), 'projections': (10, 100)}
    """
    if not isinstance(kernel, MCMCKernel):
        raise TypeError(f"kernel must be an MCMC kernel, but is {kind_of(kernel)}; wrap the kernel, not the model.")
    functions = dict(functions or {})
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"functions[{name!r}] must be a function of a draw, but is {kind_of(function)}.")
    return ReducedKernel(kernel, tuple(as_list(drop)), functions)


@MCMCKernel.register  # and no subclass: what it inherited would hide what the kernel has
@dataclass(eq=False)
class ReducedKernel:
    """Kernel that takes the steps of another one, and stores other values."""

    kernel: MCMCKernel
    drop: tuple[str, ...]
    functions: dict[str, Callable]

    def wrap_model(self, wrapper: Callable) -> Self:
        """Return a copy for ``wrapper(model)``."""
        return replace(self, kernel=self.kernel.wrap_model(wrapper))

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, object] | None) -> Callable:
        """Return the map from a draw to its stored values."""
        to_sites = self.kernel.postprocess_fn(model_args, model_kwargs)

        def to_stored(draw: object) -> dict[str, Array]:
            sites = to_sites(draw)
            if not isinstance(sites, dict):
                raise ValueError(f"draws must be dictionaries of sites to be reduced, but are {type(sites).__name__}.")
            check_names_known("drop", self.drop, sites)
            stored = {name: value for name, value in sites.items() if name not in self.drop}
            clashing = [name for name in self.functions if name in stored]
            if clashing:
                raise ValueError(f"functions has {listing(clashing)}, the name of a stored site; choose another name.")
            return {**stored, **{name: function(sites) for name, function in self.functions.items()}}

        return to_stored

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "kernel":  # for copies and pickles
            raise AttributeError(name)
        return getattr(self.kernel, name)
