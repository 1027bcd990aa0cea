"""Networks with a standard normal prior over all their parameters, as one site of a NumPyro model."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen, nnx


def random_network(name: str, module: Any, *args: Any) -> Callable[..., Any]:
    r"""A network with a standard normal prior over all its parameters, which are one vector, the site ``name``.

    What ``random_flax_module(name, module, dist.Normal(), ...)`` and ``random_nnx_module(...)`` give as a site for each
    parameter, under names such as "net/layer.kernel" that ArviZ 1.x refuses. One vector is also the fastest. Get the
    parameters back from its draws with :func:`unflatten`.

    Args:
        name: of the site.
        module: a ``flax.linen`` module, or one of ``flax.nnx``, whose parameters' values are not used.
        *args: example inputs for a linen module, which takes its parameters' shapes from them; a batch will do.

    Returns:
        A function of the module's inputs.

    Raises:
        TypeError: if ``module`` is not a flax module.
        ValueError: if the module has no parameters, or state besides them, such as the averages of batch
            normalisation; or is a linen module without example inputs.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> from numpyro_wide.nn import FCN, random_network
        >>> def model(x, y=None):
        ...     network = random_network("hidden", FCN(depth=2, width=30), x)
        ...     features = numpyro.deterministic("features", network(x))
        ...     readout = numpyro.sample("readout", dist.Normal(0, 1).expand([30]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(jnp.ones((5, 3)))
        >>> {name: site["value"].shape for name, site in sites.items()}
        {'hidden': (990,), 'features': (5, 30), 'readout': (30,), 'y': (5,)}
    """
    shapes = _parameter_shapes(module, *args)
    flat = numpyro.sample(name, dist.Normal(0, 1).expand([shapes.size]).to_event(1))
    return shapes.network(shapes.unflatten(flat))


def unflatten(flat: jax.Array, module: Any, *args: Any) -> Any:
    """The parameters of a module, from the vector that :func:`random_network` samples.

    Args:
        flat: (..., number of parameters), any number of leading axes, such as those of chains and draws.
        module: as given to :func:`random_network`.
        *args: likewise.

    Returns:
        The parameters as the module has them, each with the leading axes of ``flat``: for a linen module a dictionary,
        for ``module.apply({"params": ...}, x)``; for an NNX module its state.

    Raises:
        TypeError: if ``module`` is not a flax module.
        ValueError: as :func:`random_network` does, and if the vector has another length.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import NTKDense, unflatten
        >>> unflatten(jnp.arange(8.0), NTKDense(2, b_std=0.1), jnp.ones((1, 3)))["bias"]
        Array([0., 1.], dtype=float32)
    """
    shapes = _parameter_shapes(module, *args)
    flat = jnp.asarray(flat)
    if flat.ndim == 0 or flat.shape[-1] != shapes.size:
        raise ValueError(f"flat must have shape (..., {shapes.size}), the module's parameters, but got {flat.shape}.")
    return shapes.unflatten(flat)


class _ParameterShapes(NamedTuple):
    """The shapes of a module's parameters, and what makes a function of the module and its parameters."""

    shapes: list[tuple[int, ...]]
    structure: Any
    network: Callable[[Any], Callable[..., Any]]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def unflatten(self, flat: jax.Array) -> Any:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = jnp.split(flat, ends[:-1], axis=-1)
        leaves = [part.reshape(flat.shape[:-1] + shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


def is_module(candidate: Any) -> bool:
    """Whether it is a flax module, of one kind or the other."""
    return isinstance(candidate, linen.Module | nnx.Module)


def _parameter_shapes(module: Any, *args: Any) -> _ParameterShapes:
    if isinstance(module, linen.Module):
        parameters, network = _of_linen(module, args)
    elif isinstance(module, nnx.Module):
        parameters, network = _of_nnx(module)
    else:
        raise TypeError(f"module must be a flax.linen or flax.nnx module, but is a {type(module).__name__}.")
    leaves, structure = jax.tree.flatten(parameters)
    if not leaves:
        raise ValueError(f"the module {type(module).__name__} has no parameters to put a prior on.")
    return _ParameterShapes([tuple(leaf.shape) for leaf in leaves], structure, network)


def _of_linen(module: linen.Module, args: tuple) -> tuple[Any, Callable]:
    if not args:
        raise ValueError(f"the linen module {type(module).__name__} needs example inputs, for its parameters' shapes.")
    variables = jax.eval_shape(module.init, jax.random.key(0), *args)
    _refuse_state(module, [collection for collection in variables if collection != "params"])

    def network(parameters: Any) -> Callable[..., Any]:
        return lambda *inputs, **options: module.apply({"params": parameters}, *inputs, **options)

    return variables.get("params", {}), network


def _of_nnx(module: nnx.Module) -> tuple[Any, Callable]:
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    parameters, keys, rest = states
    _refuse_state(module, sorted({type(variable).__name__ for variable in jax.tree.leaves(rest, is_leaf=_is_variable)}))

    def network(parameters: Any) -> Callable[..., Any]:
        return lambda *inputs, **options: nnx.merge(graph, parameters, keys, rest, copy=True)(*inputs, **options)

    return parameters, network


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _refuse_state(module: Any, state: list[str]) -> None:
    if state:
        raise ValueError(
            f"the module {type(module).__name__} has state besides its parameters, {', '.join(state)}, which no prior "
            "describes; normalisers that average over batches do not fit a Bayesian network, and WideResNet needs none."
        )
