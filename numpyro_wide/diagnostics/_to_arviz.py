"""A run of MCMC as ArviZ's data, whatever form of the model was sampled."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.infer import MCMC

from numpyro_wide._checks import check_key, kind_of
from numpyro_wide.diagnostics._finished_run import FinishedRun, check_run_and_model
from numpyro_wide.diagnostics._groups import Group, assemble


def to_arviz(
    mcmc: MCMC,
    model: Callable,
    *model_args: Any,
    model_kwargs: dict[str, Any] | None = None,
    rng_key: Array | None = None,
    include: Iterable[str] = (),
    drop: Iterable[str] = (),
    log_likelihood: bool = True,
    posterior_predictive: bool = False,
    predictions: tuple | dict[str, Any] | None = None,
    return_sites: Iterable[str] | None = None,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    pred_coords: Mapping[str, Sequence] | None = None,
) -> Any:
    r"""Convert a run to what ArviZ works with: an ``InferenceData``, or with ArviZ 1.x a ``DataTree``.

    Whether the model was sampled unwrapped, repriorised or collapsed, the result is that of the unwrapped model. The
    posterior holds the weights, and none of the base sites, features and factors that are there
    for the sampler. A readout that was integrated out is drawn anew, exactly, given each draw of the rest. The
    log-likelihood is by observation and from the unwrapped model, so that ``arviz.loo`` is right: a marginal over
    the readout has no pointwise parts. Observations are the entries of the batch, such as those of plates. Where rows
    are in the event instead, as after ``.to_event``, each entry along the event's first axis is one.

    Groups: posterior, sample_stats (all ``extra_fields`` of the run under ArviZ's names, fields that are trees leaf by
    leaf), log_likelihood, observed_data, and on request posterior_predictive and predictions. Dimensions are named
    after the plates of the model, and a "/" in a name becomes a ".", since ArviZ 1.x allows none.

    The model is read anew in every call; a second one that computes the same, of data and draws of the same
    shapes, compiles nothing. Of a run in pieces, the draws stay on disk and are read a block at a time; what is in
    memory is what is computed: a readout a draw where it was integrated out, and a number for each observation and
    draw.

    Args:
        mcmc: an MCMC after its run, or the result of :func:`~numpyro_wide.runs.run_in_pieces`.
        model: a model, wrapped or not.
        *model_args: arguments of the model that it was fitted on, observations included.
        model_kwargs: keyword arguments of the model that it was fitted on.
        rng_key: a PRNG key for readouts and predictions; ``jax.random.key(0)`` by default.
        include: names of sites to add to the posterior: a base site, the features (computed for each draw where they
            were not stored), or a deterministic site that integrating the readout out has hidden.
        drop: names of sites to leave out of the posterior.
        log_likelihood: whether to compute the log-likelihood.
        posterior_predictive: whether to draw observations anew at the inputs of the fit.
        predictions: arguments of the model at other inputs, without observations: a tuple, or a dictionary of
            keywords.
        return_sites: names of the sites of the two predictive groups; by default the observed ones.
        coords: coordinates of dimensions by name.
        dims: names of all dimensions after chain and draw, by site.
        pred_coords: coordinates of dimensions by name, in the predictions.

    Returns:
        An ``arviz.InferenceData`` or ``xarray.DataTree``.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, the model not callable, ``rng_key`` not a PRNG key, or ``predictions``
            neither a tuple nor a dictionary.
        ValueError: if a site that is named does not exist, ``dims`` do not fit it, observations are missing, or draws
            that were not stored are needed: with :func:`reduced`, turn ``log_likelihood`` off.

    Warns:
        UserWarning: if an event cannot be split into observations, as with a multivariate normal over all rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide import repriorise
        >>> from numpyro_wide.diagnostics import to_arviz
        >>> from numpyro_wide.mcmc import PreconditionedCrankNicolson
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> mcmc = MCMC(PreconditionedCrankNicolson(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, y)
        >>> idata = to_arviz(mcmc, wrapped, x, y, predictions=(jnp.zeros((3, 1)),))
        >>> sorted(idata["posterior"].data_vars), idata["log_likelihood"]["y"].dims
        (['hidden.hidden_0.kernel', 'readout'], ('chain', 'draw', 'rows'))
    """
    check_run_and_model("to_arviz", mcmc, model)
    if not isinstance(predictions, tuple | list | Mapping | None):
        raise TypeError(
            "predictions must be a tuple of the model's arguments at other inputs, or a dictionary of keywords, but is "
            f"{kind_of(predictions)}; pass a tuple, predictions=(x_new,)."
        )
    rng_key = random.key(0) if rng_key is None else rng_key
    check_key("rng_key", rng_key, "to_arviz(mcmc, model, x, y, rng_key=jax.random.key(0))")
    include, drop = _names("include", include), _names("drop", drop)
    run = FinishedRun(mcmc, model, model_args, dict(model_kwargs or {}))
    is_needed = log_likelihood or posterior_predictive or predictions is not None
    draws = run.with_readout(random.fold_in(rng_key, 0), is_needed=is_needed)
    dims = {name: _names(f"dims[{name!r}]", names) for name, names in (dims or {}).items()}
    run.check_names("drop", drop)
    run.check_names("dims", dims)
    plates = run.sites.plates | dims

    kept = {name: values for name, values in draws.items() if name not in (run.internal - set(include)) | set(drop)}
    missing = [name for name in include if name not in kept]
    if missing:
        kept |= run.evaluate(draws, missing)
    groups = {
        "posterior": Group(kept, plates, coords),
        "sample_stats": Group(_sample_stats(mcmc), {}, coords),
    }
    if log_likelihood:
        values = run.log_likelihood(draws)
        batch = {name: plates[name][: values[name].ndim - 2] for name in values}
        groups["log_likelihood"] = Group(values, batch, coords)
    sites = None if return_sites is None else _names("return_sites", return_sites)
    if posterior_predictive:
        values = run.predict(random.fold_in(rng_key, 1), draws, sites, run.arguments, is_observed=False)
        groups["posterior_predictive"] = Group(values, plates, coords)
    if predictions is not None:
        arguments = ((), predictions) if isinstance(predictions, Mapping) else (tuple(predictions), {})
        values = run.predict(random.fold_in(rng_key, 2), draws, sites, arguments)
        groups["predictions"] = Group(values, plates, pred_coords)
    groups["observed_data"] = Group(run.sites.observed, plates, coords, sample_dims=())
    return assemble({name: group for name, group in groups.items() if group.values})


def _sample_stats(mcmc: MCMC) -> dict[str, ArrayLike]:
    """Return the extra fields under ArviZ's names."""
    renamed = {
        "accept_prob": "acceptance_rate",
        "adapt_state.step_size": "step_size",
        "num_steps": "n_steps",
    }
    stats: dict[str, ArrayLike] = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            keys = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
            name = ".".join([renamed.get(field, field), *keys])
            stats[name] = leaf
    if "potential_energy" in stats:
        stats["lp"] = -np.asarray(stats.pop("potential_energy"))
    if "n_steps" in stats:
        stats["tree_depth"] = np.log2(np.asarray(stats["n_steps"])).astype(int) + 1
    return stats


def _names(role: str, names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        return [names]
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{role} must be names of sites, but got {listed!r}.")
    return listed
