"""A model's function as a plain function of one draw of its weights."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from numpyro_wide._checks import listing
from numpyro_wide._traces import run_model
from numpyro_wide.linear_gaussian import predict_readout
from numpyro_wide.readout._collapse import CollapsedModel
from numpyro_wide.readout._sites import run_at_draw

Draw = Mapping[str, Array]


def site_function(model: Callable, site: str, *model_args: Any, **model_kwargs: Any) -> Callable[[Draw], Array]:
    """The value of one of a model's sites, as a function of a draw of the weights.

    Args:
        model: the model as it was, not wrapped.
        site: name of a deterministic site, or of a sample site, whose mean is taken: that of the observed site is
            the function without noise.
        *model_args: where to evaluate it: test inputs, without observations.
        **model_kwargs: likewise.

    Returns:
        A function of a draw, a dictionary of sites, for :func:`function_ess` and :func:`reduced`.

    Raises:
        ValueError: of the function, if the model lacks the site, or the draw a sample site that comes before it.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.readout import site_function
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(x @ w, 0.1).to_event(1), obs=y)
        >>> site_function(model, "y", jnp.eye(3)[:2])({"w": jnp.array([1.0, 2.0, 3.0])}).tolist()
        [1.0, 2.0]
    """

    def function(draw: Draw) -> Array:
        sites = run_model(model, model_args, model_kwargs, values=draw)
        if site not in sites:
            raise ValueError(f"site names {site!r}, which the model does not have; its sites are {listing(sites)}.")
        before = list(sites)[: list(sites).index(site)]
        missing = [
            name
            for name in before
            if sites[name]["type"] == "sample" and not sites[name]["is_observed"] and name not in draw
        ]
        if missing:
            raise ValueError(
                f"the draw must hold all sample sites before {site!r}, but {listing(missing)} is missing; it has "
                f"{listing(draw)}. A readout that was integrated out comes back with ReadoutPredictive, and its "
                "function with readout_function."
            )
        found = sites[site]
        return found["fn"].mean if found["type"] == "sample" else found["value"]

    return function


def readout_function(
    collapsed_model: CollapsedModel, model_args: tuple, *test_args: Any, **test_kwargs: Any
) -> Callable[[Draw], Array]:
    """The mean of a collapsed model's function given a draw of its hidden weights, the readout integrated out.

    Args:
        collapsed_model: what :func:`~numpyro_wide.collapse_readout` gave.
        model_args: what the model is fitted on, observations included.
        *test_args: where to evaluate it, without observations.
        **test_kwargs: likewise.

    Returns:
        A function of a draw, a dictionary of sites without the readout, for :func:`function_ess` and :func:`reduced`.

    Raises:
        TypeError: if the model is not a collapsed one, or ``model_args`` not a tuple.
        ValueError: of the function, if nothing is observed with ``model_args``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.readout import readout_function
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> wrapped = collapse_readout(model, readout="w", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> function = readout_function(wrapped, (x, x[:, 0]), jnp.array([[0.3], [0.7]]))
        >>> function({"hidden": jax.random.normal(jax.random.key(0), (1, 50))}).shape
        (2,)
    """
    if not isinstance(collapsed_model, CollapsedModel):
        raise TypeError(
            f"collapsed_model must come from collapse_readout, but is a {type(collapsed_model).__name__}; "
            "site_function evaluates other models."
        )
    if not isinstance(model_args, tuple | list):
        raise TypeError(
            f"model_args must be a tuple of what the model is fitted on, but got a {type(model_args).__name__}; the "
            "order is readout_function(model, (x, y), x_new)."
        )

    def function(draw: Draw) -> Array:
        fit = run_at_draw(collapsed_model.fn, collapsed_model.names, draw, tuple(model_args), {})
        if not fit.is_observed:
            raise ValueError(
                f"the observed site {collapsed_model.observed!r} is not observed with these model_args; pass what the "
                "model is fitted on, observations included."
            )
        test = run_at_draw(collapsed_model.fn, collapsed_model.names, draw, test_args, test_kwargs)
        mean, *_ = predict_readout(fit.problem(collapsed_model.readout), test.features)
        return test.loc + mean

    return function
