"""Networks with a standard normal prior over all their parameters, each of which is a site of a NumPyro model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import linen, nnx
from jax import Array
from jax.tree_util import GetAttrKey, keystr

from numpyro_wide._checks import kind_of, listing


def random_network(name: str, module: Any, *args: Any) -> Callable[..., Any]:
    r"""Make a network with a standard normal prior over all its parameters, each of which is a site.

    A parameter's site is called ``name`` and its path in the module, joined by "." (ArviZ 1.x refuses "/"), and has its
    shape: diagnostics read layer by layer, and :class:`~numpyro_wide.mcmc.SplitHMC` learns what the units of a layer
    share. Get the module's parameters back from draws with :func:`network_parameters`.

    Args:
        name: beginning of the names of the sites.
        module: module of ``flax.linen``, or of ``flax.nnx``, whose parameters' values are not used.
        *args: example inputs for a linen module, which takes its parameters' shapes from them; a batch will do.

    Returns:
        A function of the module's inputs.

    Raises:
        TypeError: if ``module`` is not a flax module.
        ValueError: if the module has no parameters, or two that would share a name, or state besides them, such as the
            averages of batch normalisation; or is a linen module without example inputs.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> from numpyro_wide.nn import FCN, random_network
        >>> def model(x, y=None):
        ...     network = random_network("net", FCN(depth=2, width=30), x)
        ...     features = numpyro.deterministic("features", network(x))
        ...     readout = numpyro.sample("readout", dist.Normal(0, 1).expand([30]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(jnp.ones((5, 3)))
        >>> {name: site["value"].shape for name, site in sites.items() if name.startswith("net.")}
        {'net.hidden_0.kernel': (3, 30), 'net.hidden_1.kernel': (30, 30)}
    """
    shapes, network = _of_module(module, args)
    values = [
        numpyro.sample(site, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        for site, shape in _sites(name, module, shapes).items()
    ]
    return network(jax.tree.unflatten(jax.tree.structure(shapes), values))


def network_parameters(draws: Mapping[str, Array], name: str, module: Any, *args: Any) -> Any:
    """Return the parameters of a module, from draws of the sites that :func:`random_network` gives it.

    Args:
        draws: draws by name of the site, with any number of leading axes, such as those of chains and draws; what
            ``mcmc.get_samples()`` gives. Sites of other names are ignored.
        name: beginning of the sites' names that :func:`random_network` was given.
        module: module that :func:`random_network` was given.
        *args: example inputs that :func:`random_network` was given.

    Returns:
        The parameters as the module has them, each with the leading axes of its draws: for a linen module a dictionary,
        for ``module.apply({"params": ...}, x)``; for an NNX module its state.

    Raises:
        TypeError: if ``module`` is not a flax module.
        ValueError: for modules that :func:`random_network` refuses, and if a site is missing or has another shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import NTKDense, network_parameters
        >>> draws = {"net.kernel": jnp.ones((20, 3, 2)), "net.bias": jnp.zeros((20, 2)), "readout": jnp.ones((20, 2))}
        >>> params = network_parameters(draws, "net", NTKDense(2, b_std=0.1), jnp.ones((1, 3)))
        >>> {name: values.shape for name, values in params.items()}
        {'bias': (20, 2), 'kernel': (20, 3, 2)}
    """
    shapes, _ = _of_module(module, args)
    sites = _sites(name, module, shapes)
    missing = [site for site in sites if site not in draws]
    if missing:
        raise ValueError(
            f"draws must hold every parameter of {type(module).__name__}, but {listing(missing)} is missing; it has "
            f"{listing(draws)}. Pass the name and the module that random_network was given."
        )
    values = [jnp.asarray(draws[site]) for site in sites]
    for (site, shape), value in zip(sites.items(), values, strict=True):
        if value.shape[max(0, value.ndim - len(shape)) :] != shape:
            raise ValueError(
                f"draws[{site!r}] must have shape (..., {', '.join(map(str, shape))}), but has {value.shape}; pass the "
                "module and example inputs that random_network was given."
            )
    return jax.tree.unflatten(jax.tree.structure(shapes), values)


def is_module(candidate: Any) -> bool:
    """Tell whether it is a flax module, of linen or NNX."""
    return isinstance(candidate, linen.Module | nnx.Module)


def _of_module(module: Any, args: tuple) -> tuple[Any, Callable]:
    """Return the parameters' shapes, in the module's own structure, and the map from parameters to a network."""
    if isinstance(module, linen.Module):
        parameters, network = _of_linen(module, args)
    elif isinstance(module, nnx.Module):
        parameters, network = _of_nnx(module)
    else:
        raise TypeError(f"module must be a flax.linen or flax.nnx module, but is {kind_of(module)}.")
    if not jax.tree.leaves(parameters):
        raise ValueError(f"the module {type(module).__name__} has no parameters to put a prior on.")
    return parameters, network


def _sites(name: str, module: Any, parameters: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters' sites, in the order of the leaves."""
    sites: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree.leaves_with_path(parameters):
        # NNX holds an array as the attribute "value" of its variable, which is no key of the module's.
        keys = tuple(key for key in path if key != GetAttrKey("value"))
        site = f"{name}.{keystr(keys, simple=True, separator='.')}"
        if site in sites:
            raise ValueError(
                f"two parameters of the module {type(module).__name__} would both be the site {site!r}; rename one of "
                'them, or the layer that holds it, without "." in its name.'
            )
        sites[site] = tuple(leaf.shape)
    return sites


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
