"""Functions of one draw of a model's weights."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jax import Array

from numpyro_wide._checks import check_names_known, listing
from numpyro_wide._traces import abstract_sites, latent_sites, run_model
from numpyro_wide.readout._assumptions import conjugate_form, read_run
from numpyro_wide.readout._model import ReadoutModel, as_call, check_fit_observed, check_wrapped

Draw: TypeAlias = Mapping[str, Array]


def site_function(model: Callable, site: str, *model_args: object, **model_kwargs: object) -> Callable[[Draw], Array]:
    """Return the value of one of a model's sites as a function of a draw of the weights.

    Args:
        model: the unwrapped model.
        site: name of a deterministic site, or of a sample site, whose mean is taken: that of the observed site is
            the function without noise.
        *model_args: arguments at which to evaluate it: test inputs, without observations.
        **model_kwargs: the same by keyword.

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
        check_names_known("site", site, sites)
        earlier = list(sites)[: list(sites).index(site)]
        _check_draw(draw, [name for name in latent_sites(sites) if name in earlier])
        target = sites[site]
        return target["fn"].mean if target["type"] == "sample" else target["value"]

    return function


def readout_function(
    model: ReadoutModel,
    model_args: tuple,
    *test_args: object,
    model_kwargs: Mapping[str, object] | None = None,
    **test_kwargs: object,
) -> Callable[[Draw], Array]:
    """Return the mean of a wrapped model's function, the readout integrated out, as a function of the hidden weights.

    Args:
        model: result of :func:`~numpyro_wide.collapse_readout`, or of :func:`~numpyro_wide.repriorise` for a model with
            a Normal likelihood.
        model_args: arguments that the model is fitted with, observations included.
        *test_args: arguments at which to evaluate it, without observations.
        model_kwargs: keyword arguments that the model is fitted with.
        **test_kwargs: keyword arguments at which to evaluate it.

    Returns:
        A function as that of :func:`site_function`, of a draw without the readout.

    Raises:
        ValueError: if the likelihood is not Normal, or nothing is observed with the arguments of the fit; of the
            function, if the draw lacks a latent site.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout, nn
        >>> from numpyro_wide.readout import readout_function
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> function = readout_function(collapsed, (x, x[:, 0]), jnp.array([[0.3], [0.7]]))
        >>> function({"hidden.hidden_0.kernel": jax.random.normal(jax.random.key(0), (1, 50))}).shape
        (2,)
    """
    check_wrapped(model, "site_function evaluates other models")
    args, kwargs = as_call(model_args, model_kwargs, "readout_function(model, (x, y), x_new)")
    form = conjugate_form(model, {}, args, kwargs)
    if form is None:
        raise ValueError(
            f"the readout {model.readout!r} cannot be integrated out of this model: no observed site is Normal with a "
            "mean linear in it; take site_function of the unwrapped model."
        )

    latent = latent_sites(abstract_sites(model.fn, args, kwargs))
    check_fit_observed(form.observed, latent)

    def function(draw: Draw) -> Array:
        fit = read_run(form, draw, args, kwargs)
        _check_draw(draw, [name for name in latent if name != model.readout])
        test = read_run(form, draw, test_args, test_kwargs)
        mean, *_ = fit.problem().solved().predict(test.features)
        return test.loc + mean

    return function


def _check_draw(draw: Draw, needed: list[str]) -> None:
    """Refuse a draw without the sites that the function depends on: they would come from their prior."""
    missing = [name for name in needed if name not in draw]
    if missing:
        raise ValueError(
            f"the draw must hold the latent sites {listing(needed)}, but {listing(missing)} is missing; it has "
            f"{listing(draw)}. The function of a readout that was integrated out is that of readout_function."
        )
