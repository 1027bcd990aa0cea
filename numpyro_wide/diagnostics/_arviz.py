"""A run of MCMC as ArviZ's data, whatever form of the model was sampled."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import seed, substitute, trace, uncondition
from numpyro.infer import MCMC, Predictive, init_to_sample
from numpyro.infer import log_likelihood as log_likelihood_of

from numpyro_wide._conjugate import listing
from numpyro_wide._wrapped_models import CollapsedModel, RepriorisedModel
from numpyro_wide.diagnostics._datasets import Group, assemble
from numpyro_wide.draws import _readout_transform
from numpyro_wide.predictive import ReadoutPredictive

Draws = dict[str, Array]


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

    Whether the model was sampled as it was, repriorised or with its readout integrated out, the result is that of the
    model as it was. The posterior holds the weights, and none of the base sites, features and factors that are there
    for the sampler. A readout that was integrated out is drawn anew, exactly, given each draw of the rest. The
    log-likelihood is by observation and from the unwrapped model, so that ``arviz.loo`` is right: a marginal over
    the readout has no pointwise parts.

    Groups: posterior, sample_stats (all ``extra_fields`` of the run under ArviZ's names, fields that are trees leaf by
    leaf), log_likelihood, observed_data, and on request posterior_predictive and predictions. Dimensions are named
    after the plates of the model, and a "/" in a name becomes a ".", since ArviZ 1.x allows none.

    Args:
        mcmc: after its run.
        model: the model, wrapped or not.
        *model_args: what it was fitted on, observations included.
        model_kwargs: likewise.
        rng_key: a PRNG key for readouts and predictions; ``jax.random.key(0)`` by default.
        include: sites to add to the posterior: a base site, the features (computed for each draw where they
            were not stored), or a deterministic site that integrating the readout out has hidden.
        drop: sites to leave out of the posterior.
        log_likelihood: whether to compute it.
        posterior_predictive: whether to draw observations anew at the inputs of the fit.
        predictions: arguments of the model at other inputs, without observations: a tuple, or a dictionary of
            keywords.
        return_sites: sites of the two predictive groups; by default the observed ones.
        coords: coordinates of dimensions by name.
        dims: by site, names of all its dimensions after chain and draw.
        pred_coords: coordinates in the predictions.

    Returns:
        An ``arviz.InferenceData`` or ``xarray.DataTree``.

    Raises:
        TypeError: if ``mcmc`` is no MCMC, the model not callable, or ``predictions`` neither a tuple nor a dictionary.
        ValueError: if a site to include does not exist, observations are missing, or draws that were not stored are
            needed: with :func:`reduced`, turn ``log_likelihood`` off.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide import repriorise
        >>> from numpyro_wide.diagnostics import to_arviz
        >>> from numpyro_wide.mcmc import PreconditionedCrankNicolson
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     with numpyro.plate("rows", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(features @ w, 0.1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.1)
        >>> mcmc = MCMC(PreconditionedCrankNicolson(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, y)
        >>> idata = to_arviz(mcmc, wrapped, x, y, predictions=(jnp.zeros((3, 1)),))
        >>> sorted(idata["posterior"].data_vars), idata["log_likelihood"]["y"].dims
        (['hidden', 'w'], ('chain', 'draw', 'rows'))
    """
    if not hasattr(mcmc, "get_samples") or not callable(model):
        raise TypeError(
            "to_arviz needs an MCMC after its run, and then a model, a function, but got a "
            f"{type(mcmc).__name__} and a {type(model).__name__}; the order is to_arviz(mcmc, model, x, y)."
        )
    if not isinstance(predictions, tuple | list | Mapping | None):
        raise TypeError(
            "predictions must be a tuple of the model's arguments at other inputs, or a dictionary of keywords, but is "
            f"a {type(predictions).__name__}; pass a tuple, predictions=(x_new,)."
        )
    rng_key = random.key(0) if rng_key is None else rng_key
    include, drop = _names("include", include), _names("drop", drop)
    run = _Run(mcmc, model, model_args, dict(model_kwargs or {}))
    is_needed = log_likelihood or posterior_predictive or predictions is not None
    draws = run.with_readout(random.fold_in(rng_key, 0), is_needed=is_needed)
    dims = {name: list(names) for name, names in (dims or {}).items()}
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
        batch = {name: dims.get(name, run.sites.plates.get(name, []))[: values[name].ndim - 2] for name in values}
        groups["log_likelihood"] = Group(values, batch, coords)
    sites = None if return_sites is None else _names("return_sites", return_sites)
    if posterior_predictive:
        values = run.predict(random.fold_in(rng_key, 1), draws, sites, uncondition(run.plain), *run.arguments)
        groups["posterior_predictive"] = Group(values, plates, coords)
    if predictions is not None:
        arguments = ((), predictions) if isinstance(predictions, Mapping) else (tuple(predictions), {})
        values = run.predict(random.fold_in(rng_key, 2), draws, sites, run.plain, *arguments)
        groups["predictions"] = Group(values, plates, pred_coords)
    groups["observed_data"] = Group(run.sites.observed, plates, coords, sample_dims=())
    return assemble({name: group for name, group in groups.items() if group.values})


class _Sites(NamedTuple):
    """What one run of the unwrapped model shows."""

    latent: list[str]
    observed: dict[str, ArrayLike]
    bases: set[str]
    plates: dict[str, list[str | None]]
    names: list[str]


class _Run:
    """A finished MCMC, and the unwrapped model that its draws belong to."""

    def __init__(self, mcmc: MCMC, model: Callable, args: tuple, kwargs: dict[str, Any]):
        wrappers = _wrappers(model) + _wrappers(mcmc.sampler.model)
        self.plain = model
        while isinstance(self.plain, RepriorisedModel | CollapsedModel):
            self.plain = self.plain.fn
        self.arguments = args, kwargs
        self.collapsed = next((wrapper for wrapper in wrappers if isinstance(wrapper, CollapsedModel)), None)
        self.stored: Draws = mcmc.get_samples(group_by_chain=True)
        self.sites = _sites_of(self.plain, args, kwargs)
        wrapped_bases = {f"{w.readout}_base" for w in wrappers if isinstance(w, RepriorisedModel)}
        self.bases = self.sites.bases | wrapped_bases
        self.internal = self.bases | {wrapper.features for wrapper in wrappers}

    def with_readout(self, rng_key: Array, is_needed: bool) -> Draws:
        """The stored draws, with a readout that was integrated out."""
        expected = [name for name in self.sites.latent if self.collapsed is None or name != self.collapsed.readout]
        missing = [name for name in expected if name not in self.stored]
        is_unobserved = self.collapsed is not None and self.collapsed.observed in missing
        if is_unobserved or (missing and is_needed and not self.sites.observed):
            raise ValueError(
                f"with these arguments {listing(missing)} is not observed, and the run holds no draws of it; pass what "
                "mcmc.run got, observations included: to_arviz(mcmc, model, x, y)."
            )
        if missing and is_needed:
            raise ValueError(
                f"log-likelihood and predictions need draws of all latent sites, but {listing(missing)} is not "
                f"stored; the stored sites are {listing(self.stored)}. Pass log_likelihood=False and ask for "
                "no predictions, or store the weights."
            )
        if missing or self.collapsed is None or self.collapsed.readout in self.stored:
            return self.stored
        shape = np.shape(self.stored[expected[0]])[:2]
        flat = {name: self.stored[name].reshape(-1, *self.stored[name].shape[2:]) for name in expected}
        readouts = ReadoutPredictive(self.collapsed, flat, *self.arguments).readout(rng_key)
        return {**self.stored, self.collapsed.readout: readouts.reshape(*shape, *readouts.shape[1:])}

    def latent(self, draws: Draws) -> Draws:
        """Draws that the unwrapped model can be run at: deterministic sites would override what it computes."""
        readouts = {base.removesuffix("_base") for base in self.sites.bases}
        return {name: draws[name] for name in draws if name in {*self.sites.latent, *readouts}}

    def log_likelihood(self, draws: Draws) -> Draws:
        """Log-likelihood of every observation, (chain, draw, ...), without factors."""
        args, kwargs = self.arguments
        model = seed(self.plain, random.key(0))  # the key goes into nothing but plates and networks that ask for one
        values = log_likelihood_of(model, self.latent(draws), *args, batch_ndims=2, **kwargs)
        return {name: values[name] for name in self.sites.observed}

    def predict(
        self, rng_key: Array, draws: Draws, sites: list[str] | None, model: Callable, args: tuple, kwargs: dict
    ) -> Draws:
        """Draws of the observed sites, or of those that are named."""
        sites = list(self.sites.observed) if sites is None else sites
        predictive = Predictive(model, self.latent(draws), batch_ndims=2, return_sites=sites)
        values = predictive(rng_key, *args, **kwargs)
        unknown = [name for name in sites if name not in values]
        if unknown:
            raise ValueError(
                f"return_sites names {listing(unknown)}, which the model does not have; its sites are "
                f"{listing(self.sites.names)}."
            )
        return {name: values[name] for name in sites}

    def evaluate(self, draws: Draws, names: list[str]) -> Draws:
        """Deterministic sites at the inputs of the fit."""
        unknown = [name for name in names if name not in self.sites.names]
        if unknown:
            raise ValueError(
                f"include names {listing(unknown)}, which is neither stored nor a site of the model; the stored sites "
                f"are {listing(self.stored)}, those of the model {listing(self.sites.names)}."
            )
        args, kwargs = self.arguments
        return self.predict(random.key(0), draws, names, self.plain, args, kwargs)


def _wrappers(model: Any) -> list[RepriorisedModel | CollapsedModel]:
    found = []
    while isinstance(model, RepriorisedModel | CollapsedModel):
        found.append(model)
        model = model.fn
    return found


def _sites_of(model: Callable, args: tuple, kwargs: dict[str, Any]) -> _Sites:
    run = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
    sites = trace(run).get_trace(*args, **kwargs)
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    latent = {name: site for name, site in samples.items() if not site["is_observed"]}
    observed = {
        name: site["value"]
        for name, site in samples.items()
        if site["is_observed"] and not isinstance(site["fn"], dist.Unit)  # a factor observes nothing
    }
    bases = {name for name, site in latent.items() if _readout_transform(site) is not None}
    named = {name: _plate_names(site) for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
    return _Sites(list(latent), observed, bases, named, list(sites))


def _plate_names(site: dict) -> list[str | None]:
    """Names of a site's plates at the axes where they are, and None elsewhere."""
    shape = np.shape(site["value"])
    num_batch = len(site["fn"].batch_shape) if site["type"] == "sample" else len(shape)
    names: list[str | None] = [None] * len(shape)
    for frame in site.get("cond_indep_stack", []):
        axis = num_batch + frame.dim
        if 0 <= axis < len(shape) and shape[axis] == frame.size:
            names[axis] = frame.name
    event_names = list((site.get("infer") or {}).get("event_dims", []))
    return names[: len(names) - len(event_names)] + event_names


def _sample_stats(mcmc: MCMC) -> dict[str, ArrayLike]:
    """The extra fields under ArviZ's names."""
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
