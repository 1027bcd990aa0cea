"""Networks whose parameters are sample sites, at all rows at once or by blocks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import linen, nnx
from jax import Array
from jax.tree_util import GetAttrKey, keystr
from numpyro.primitives import apply_stack

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import check_names_known, kind_of, whole_number
from numpyro_wide._compile import operations
from numpyro_wide.linear_gaussian._row_blocks import RowFeatures


def random_network(name: str, module: linen.Module | nnx.Module, *args: object) -> Callable:
    """Make a network with a standard normal prior over all parameters, one site each.

    A site is called ``name`` and the parameter's path, joined by ".", and has the parameter's shape.
    :func:`network_parameters` is the way back.

    Args:
        name: beginning of the sites' names.
        module: module of ``flax.linen`` or ``flax.nnx``, without state such as batch normalisation's.
        *args: example inputs for a linen module.

    Returns:
        Function of the module's inputs.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> from numpyro.handlers import seed, trace
        >>> from numpyro_wide.nn import FCN, random_network
        >>> def model(x):
        ...     network = random_network("net", FCN(depth=2, width=30), x)
        ...     numpyro.deterministic("features", network(x))
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(jnp.ones((5, 3)))
        >>> {name: site["value"].shape for name, site in sites.items()}
        {'net.hidden_0.kernel': (3, 30), 'net.hidden_1.kernel': (30, 30), 'features': (5, 30)}
    """
    shapes, network = _shapes_and_network(module, args)
    values = [
        numpyro.sample(site, dist.Normal(0, 1).expand(leaf.shape).to_event(len(leaf.shape)))
        for site, leaf in zip(_sites(name, shapes), jax.tree.leaves(shapes), strict=True)
    ]
    return network(jax.tree.unflatten(jax.tree.structure(shapes), values))


def network_parameters(draws: Mapping[str, Array], name: str, module: linen.Module | nnx.Module, *args: object) -> Any:
    """Return a module's parameters from draws of the sites of :func:`random_network`, with its other arguments.

    ``draws`` are by site, with any leading axes, such as ``mcmc.get_samples()``. The parameters have these axes, in the
    module's structure: a dictionary for linen, a state for NNX.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import NTKDense, network_parameters
        >>> draws = {"net.kernel": jnp.ones((20, 3, 2)), "net.bias": jnp.zeros((20, 2)), "readout": jnp.ones((20, 2))}
        >>> params = network_parameters(draws, "net", NTKDense(2, b_std=0.1), jnp.ones((1, 3)))
        >>> {name: values.shape for name, values in params.items()}
        {'bias': (20, 2), 'kernel': (20, 3, 2)}
    """
    shapes, _ = _shapes_and_network(module, args)
    sites = _sites(name, shapes)
    check_names_known("name", sites, draws, remedy="Pass the name and the module that random_network was given.")
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(draws[site]) for site in sites])


def is_module(candidate: object) -> bool:
    return isinstance(candidate, linen.Module | nnx.Module)


def _shapes_and_network(module: linen.Module | nnx.Module, args: tuple) -> tuple[Any, Callable]:
    """Return the parameters' shapes, in the module's structure, and the map from parameters to a network."""
    if isinstance(module, linen.Module):
        variables = jax.eval_shape(module.init, jax.random.key(0), *args)
        _refuse_state(module, [collection for collection in variables if collection != "params"])
        return variables.get("params", {}), lambda parameters: partial(module.apply, {"params": parameters})
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be a flax.linen or flax.nnx module, but is {kind_of(module)}.")
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    parameters, keys, state = states
    variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    _refuse_state(module, sorted({type(variable).__name__ for variable in variables}))

    def network(parameters: nnx.State) -> Callable:
        return lambda *inputs, **options: nnx.merge(graph, parameters, keys, state, copy=True)(*inputs, **options)

    return parameters, network


def _sites(name: str, parameters: object) -> list[str]:
    """Return the names of the parameters' sites, in leaf order."""
    # NNX holds an array as its variable's attribute "value".
    keys = [
        tuple(key for key in path if key != GetAttrKey("value")) for path, _ in jax.tree.leaves_with_path(parameters)
    ]
    return [f"{name}.{keystr(path, simple=True, separator='.')}" for path in keys]


def _refuse_state(module: linen.Module | nnx.Module, state: list[str]) -> None:
    if state:
        raise ValueError(
            f"the module {type(module).__name__} has state besides its parameters, {', '.join(state)}, which no prior "
            "describes; WideResNet needs none."
        )


# Hidden units of a block under "auto": 256 MB in float32.
AUTO_NUMBERS = 2**26


def by_row_blocks(
    network: Callable[[Array], Array], block_size: int | str | None = "auto", *, site: str | None = None
) -> Callable:
    """Compute a network by blocks of rows, with the hidden units of one block in memory at a time.

    Gradients compute each block once more. Leave it out for rows sharded over devices.

    Args:
        network: function of inputs (n, ...) to (n, d), row by row.
        block_size: rows at a time; "auto" for at most 64 million numbers; None for all.
        site: name of a deterministic site for the result; a collapsed model then sums over blocks, and uses it as
            ``features @ readout`` alone.

    Returns:
        Function of the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.nn import by_row_blocks
        >>> w = jnp.ones((3, 20))
        >>> by_row_blocks(lambda x: jnp.tanh(x @ w), block_size=2)(jnp.ones((5, 3))).shape
        (5, 20)
    """
    fixed_size = None if block_size in (None, "auto") else whole_number("block_size", block_size)

    def blocked(x: Array) -> Array | RowFeatures:
        x = jnp.asarray(x)
        num_rows = x.shape[0]
        size = max(1, AUTO_NUMBERS // _numbers_per_row(network, x)) if block_size == "auto" else fixed_size or num_rows
        if site is None:
            return in_row_blocks(lambda start, size: network(take_rows(x, start, size)), num_rows, size)
        if size >= num_rows:
            return numpyro.deterministic(site, network(x))
        features = RowFeatures.of(network, x, size)
        # A handler of the function must not compute the numbers; unread numbers are free within jit.
        # No name: the site has it.
        message = apply_stack({"type": "row_features", "site": site, "value": False, "cond_indep_stack": []})
        numpyro.deterministic(site, features if message["value"] else jnp.asarray(features))
        return features

    return blocked


def _numbers_per_row(network: Callable, x: Array) -> int:
    """Count the numbers of the network's operations for one more row."""

    def count(num_rows: int) -> int:
        rows = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
        jaxpr = jax.make_jaxpr(network)(rows).jaxpr
        return sum(variable.aval.size for operation in operations(jaxpr) for variable in operation.outvars)

    return max(1, count(2) - count(1))
