"""ArviZ's view of a finished run."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import seed, substitute, uncondition
from numpyro.infer import MCMC, Predictive, init_to_sample

from numpyro_wide._arviz import from_datasets
from numpyro_wide._blocks import blocks_of, is_mapped
from numpyro_wide._checks import check_key, check_names_known, kind_of, listing
from numpyro_wide._compile import combine, partition, run_compiled
from numpyro_wide._traces import (
    abstract_sites,
    independent_factors,
    latent_sites,
    log_prob_by_observation,
    observed_sites,
    run_model,
)
from numpyro_wide.readout._assumptions import conjugate_sites
from numpyro_wide.readout._limit import weights_of
from numpyro_wide.readout._model import ReadoutModel, SiteNames, base_name
from numpyro_wide.readout._predictive import refuse_mismatch
from numpyro_wide.readout._repriorise import base_transforms


def by_blocks(run: Callable[[dict[str, Any], int], Any], draws: Mapping[str, Any]) -> Any:
    """Run a function at draws (chain, draw, ...): at all of them at once, unless some are memory-mapped.

    Of draws that are memory-mapped no more than a block is in memory at a time; results are on the host then.

    Args:
        run: function of draws by site and the number of the first of them, whose results have the axes of chains and
            draws in front.
        draws: draws by site, each (chain, draw, ...).

    Returns:
        What ``run`` gives for all draws.
    """
    if not is_mapped(draws):
        return run(dict(draws), 0)
    found = [jax.tree.map(np.asarray, run(block, start)) for start, block in blocks_of(draws, axis=1)]
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)


class Group(NamedTuple):
    """One group of ArviZ's data.

    Attributes:
        values: arrays by name, with the axes of ``sample_dims`` in front.
        dims: names of the dimensions after ``sample_dims`` by name of the array, None where there is no name.
        coords: coordinates by name of the dimension.
        sample_dims: names of the leading dimensions that all arrays share.
    """

    values: Mapping[str, ArrayLike]
    dims: Mapping[str, Sequence[str | None]]
    coords: Mapping[str, Sequence] | None = None
    sample_dims: tuple[str, ...] = ("chain", "draw")


def assemble(groups: Mapping[str, Group]) -> Any:
    """Assemble an ``InferenceData``, or with ArviZ 1.x a ``DataTree``.

    Args:
        groups: groups by name.

    Returns:
        The data, with each group as a data set of its own.

    Raises:
        ValueError: if dimensions do not fit an array, coordinates belong to no dimension, or two names differ
            in "/" and "." alone.
    """
    datasets = {name: _dataset(group) for name, group in groups.items()}
    known = {str(dim) for dataset in datasets.values() for dim in dataset.dims}
    unknown = {dim for group in groups.values() for dim in group.coords or {} if dim not in known}
    if unknown:
        raise ValueError(
            f"coords names {listing(sorted(unknown))}, which is no dimension; the dimensions are "
            f"{listing(sorted(known))}."
        )
    return from_datasets(datasets)


def _dataset(group: Group) -> Any:
    import xarray as xr  # as heavy as ArviZ, which brings it

    variables: dict[str, tuple[list[str], np.ndarray]] = {}
    for site, value in group.values.items():
        array = np.asarray(jax.device_get(value))
        name = _without_slash(site)
        if name in variables:
            raise ValueError(
                f"the name {site!r} is written {name!r} for ArviZ, which another site is called; rename it."
            )
        variables[name] = (_dimensions(site, name, array, group), array)
    coords = dict(group.coords or {})
    sizes = {dim: size for dims, array in variables.values() for dim, size in zip(dims, array.shape, strict=True)}
    coordinates = {dim: coords.get(dim, np.arange(size)) for dim, size in sizes.items()}
    attributes = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
    return xr.Dataset(variables, coordinates, attributes)


def _dimensions(site: str, name: str, array: np.ndarray, group: Group) -> list[str]:
    num_own = array.ndim - len(group.sample_dims)
    given = group.dims.get(site, [None] * num_own)
    if len(given) != num_own:
        raise ValueError(
            f"dims names {len(given)} dimensions of site {site!r}, {given}, but it has {num_own} after those for "
            f"chains and draws: its shape is {array.shape}."
        )
    own = [f"{name}_dim_{i}" if dim is None else _without_slash(dim) for i, dim in enumerate(given)]
    return [*group.sample_dims, *own]


def _without_slash(name: str) -> str:
    return name.replace("/", ".")


Draws = dict[str, Array]
Arguments = tuple[tuple, Mapping[str, Any]]


class _Sites(NamedTuple):
    """Sites that one run of the unwrapped model shows.

    Attributes:
        latent: shapes of the sites that are neither observed nor deterministic.
        observed: observations by site.
        joint: names of the observed sites each of which is a single event that is not a product over rows.
        plates: names of the dimensions of each site, None where no plate is.
        shapes: shapes of all sites that have values.
    """

    latent: dict[str, tuple[int, ...]]
    observed: dict[str, ArrayLike]
    joint: list[str]
    plates: dict[str, list[str | None]]
    shapes: dict[str, tuple[int, ...]]


def check_run_and_model(function: str, mcmc: Any, model: Any) -> None:
    """Refuse anything but a run and a model, in this order, as the first arguments of a function.

    Raises:
        TypeError: if one of them is something else.
    """
    if not hasattr(mcmc, "get_samples") or not callable(model):
        raise TypeError(
            f"{function} needs an MCMC after its run, and then a model, a function, but got {kind_of(mcmc)} "
            f"and {kind_of(model)}; the order is {function}(mcmc, model, x, y)."
        )


class FinishedRun:
    """A finished MCMC, and the unwrapped model that its draws belong to.

    Args:
        mcmc: an MCMC after its run.
        model: the model that was sampled, or the one that it wraps.
        args: arguments of the model that it was fitted on.
        kwargs: keyword arguments of the model that it was fitted on.

    Attributes:
        plain: the unwrapped model.
        wrapped: the wrapped models around it, outermost first; none where it was sampled as it was.
        stored: the stored draws by site, (chain, draw, ...).
        sites: the sites of the unwrapped model.
        internal: names of the sites that are there for the sampler alone.
    """

    def __init__(self, mcmc: MCMC, model: Callable, args: tuple, kwargs: dict[str, Any]):
        wrapped, self.plain = _unwrapped(model)
        self.wrapped = wrapped or _unwrapped(getattr(mcmc.sampler, "model", None))[0]
        self.arguments = args, kwargs
        self.stored: Draws = mcmc.get_samples(group_by_chain=True)
        try:
            self.sites = _sites_of(self.plain, args, kwargs)
        except TypeError as error:
            example = "those of mcmc.run, observations included, such as to_arviz(mcmc, model, x, y)"
            refuse_mismatch(self.plain, (args, kwargs), error, "arguments", example)
            raise
        # Asked of the model as it was sampled, which has a base site, or a readout less.
        sampled: Callable = self.wrapped[0] if self.wrapped else self.plain
        self._sampled = latent_sites(abstract_sites(sampled, args, kwargs))
        unseen = {form.base for form in self.wrapped} - self.sites.shapes.keys()
        self._bases = set(base_transforms(self._sampled)) | unseen
        self.internal = self._bases | {form.features for form in self.wrapped}

    @property
    def _last_draw(self) -> dict[str, Any]:
        return {name: values[0, -1] for name, values in self.latent(self.stored).items()}

    @property
    def conjugate_sites(self) -> SiteNames | None:
        """Names of the sites with which the readout can be integrated out; None if it cannot be, or there is none."""
        return conjugate_sites(self.wrapped[0], self._last_draw, *self.arguments) if len(self.wrapped) == 1 else None

    @property
    def missing(self) -> list[str]:
        """Names of the latent sites whose draws are neither stored nor computed from those that are."""
        restored = {form.readout for form in self.wrapped}
        expected = [*self._sampled, *(name for name in self.sites.latent if name not in restored)]
        present = {*self.stored, *(base_name(name) for name in self.stored if base_name(name) in self._bases)}
        return [name for name in dict.fromkeys(expected) if name not in present]

    def with_readout(self, rng_key: Array, is_needed: bool) -> Draws:
        """Return the stored draws, with a readout that was integrated out."""
        to_restore = [form for form in self.wrapped if form.readout not in self.stored]
        missing = self.missing
        if not self.sites.observed and (is_needed or to_restore):
            unobserved = [name for name in missing if name not in {form.readout for form in to_restore}]
            if unobserved:
                raise ValueError(
                    f"with these arguments {listing(unobserved)} is not observed, and the run holds no draws of it; "
                    "pass what mcmc.run got, observations included: to_arviz(mcmc, model, x, y)."
                )
        if missing and is_needed:
            raise ValueError(
                f"log-likelihood and predictions need draws of all latent sites, but {listing(missing)} is not "
                f"stored; the stored sites are {listing(self.stored)}. Pass log_likelihood=False and ask for "
                "no predictions, or store the weights."
            )
        if missing:
            return self.stored
        draws = dict(self.stored)
        for form, key in zip(to_restore, random.split(rng_key, max(1, len(to_restore))), strict=False):
            draws = self._weights(form, key, draws)
        return draws

    def _weights(self, form: ReadoutModel, rng_key: Array, draws: Draws) -> Draws:
        """Return draws with the readout of one wrapped model besides."""
        shape = np.shape(next(iter(draws.values())))[:2]
        flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in self.latent(draws).items()}
        readout = weights_of(form, rng_key, flat, *self.arguments)[form.readout]
        return {**draws, form.readout: readout.reshape(*shape, *readout.shape[1:])}

    def latent(self, draws: Draws) -> Draws:
        """Select what the unwrapped model can be run at: deterministic sites would override what it computes."""
        return {
            name: draws[name]
            for name in draws
            if name in self.sites.latent or name in self._sampled or base_name(name) in self._bases
        }

    def log_likelihood(self, draws: Draws) -> Draws:
        """Compute the log-likelihood of every observation, (chain, draw, ...), without factors."""
        for name in self.sites.joint:
            warnings.warn(
                f"observed site {name!r} is one event of shape {np.shape(self.sites.observed[name])}, whose density is "
                "no product over its rows: its log-likelihood is that of a single observation, and arviz.loo has "
                "nothing to leave out. Write rows that are independent in a numpyro.plate; or pass "
                "log_likelihood=False.",
                UserWarning,
                stacklevel=3,
            )
        data, rest = partition(self.arguments)
        static = tuple(self.sites.observed), rest
        return by_blocks(
            lambda block, _: run_compiled(_log_likelihoods, self.plain, static, block, data), self.latent(draws)
        )

    def predict(
        self, rng_key: Array, draws: Draws, sites: list[str] | None, arguments: Arguments, *, is_observed: bool = True
    ) -> Draws:
        """Draw the observed sites, or those that are named; unless ``is_observed``, data are drawn anew."""
        sites = list(self.sites.observed) if sites is None else sites
        data, rest = partition(arguments)
        static = tuple(sites), is_observed, rest

        def run(block: Draws, start: int) -> Draws:
            return run_compiled(_predictions, self.plain, static, random.fold_in(rng_key, start), block, data)

        values = by_blocks(run, self.latent(draws))
        missing = [name for name in sites if name not in values]
        check_names_known("return_sites", missing, (name for name in self.sites.shapes if name not in missing))
        return {name: values[name] for name in sites}

    def evaluate(self, draws: Draws, names: list[str]) -> Draws:
        """Compute deterministic sites at the inputs of the fit."""
        self._refuse_unknown("include", [name for name in names if name not in self.sites.shapes])
        return self.predict(random.key(0), draws, names, self.arguments)

    def check_names(self, role: str, names: Iterable[str]) -> None:
        """Refuse names that are neither of stored draws nor of sites."""
        known = {*self.stored, *self.sites.shapes, *self.internal}
        self._refuse_unknown(role, [name for name in names if name not in known])

    def _refuse_unknown(self, role: str, unknown: list[str]) -> None:
        if unknown:
            raise ValueError(
                f"{role} names {listing(unknown)}, which is neither stored nor a site of the model; the stored sites "
                f"are {listing(self.stored)}, those of the model {listing(self.sites.shapes)}."
            )


def _log_likelihoods(model: Callable, static: tuple[tuple[str, ...], Any], draws: Draws, data: list[Any]) -> Draws:
    names, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        # Next to the model, where a readout that is repriorised inside of it is overridden as well.
        sites = run_model(model, args, kwargs, inside=(substitute(data=draw),))
        return {name: log_prob_by_observation(sites[name]) for name in names}

    return for_each_draw(single, draws)


def _predictions(
    model: Callable, static: tuple[tuple[str, ...], bool, Any], rng_key: Array, draws: Draws, data: list[Any]
) -> Draws:
    sites, is_observed, rest = static
    args, kwargs = combine(data, rest)
    model = model if is_observed else uncondition(model)
    return Predictive(model, draws, batch_ndims=2, return_sites=list(sites))(rng_key, *args, **kwargs)


def for_each_draw(single: Callable[[Draws], Draws], draws: Draws) -> Draws:
    """Map ``single`` over draws (chain, draw, ...), one after the other, and keep these two axes in front."""
    shape = next(iter(draws.values())).shape[:2]
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in draws.items()}
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in jax.lax.map(single, flat).items()}


def _unwrapped(model: Any) -> tuple[list[ReadoutModel], Any]:
    """Return the wrapped models around a model, outermost first, and the model."""
    found = []
    while isinstance(model, ReadoutModel):
        found.append(model)
        model = model.fn
    return found, model


def _sites_of(model: Callable, args: tuple, kwargs: dict[str, Any]) -> _Sites:
    # Of a prior that cannot be sampled, NumPyro finds a value to start from.
    sites = run_model(substitute(seed(model, random.key(0)), substitute_fn=init_to_sample), args, kwargs)
    observed = observed_sites(sites)
    valued = {name: site for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
    return _Sites(
        latent={name: np.shape(site["value"]) for name, site in latent_sites(sites).items()},
        observed={name: site["value"] for name, site in observed.items()},
        joint=[name for name, site in observed.items() if _is_joint(site)],
        plates={name: _plate_names(site) for name, site in valued.items()},
        shapes={name: np.shape(site["value"]) for name, site in valued.items()},
    )


def _is_joint(site: dict) -> bool:
    """Tell whether a site is one event of several entries that are not independent."""
    fn, _ = independent_factors(site["fn"])
    is_one_event = not fn.batch_shape and 0 < fn.event_dim == np.ndim(site["value"])
    return is_one_event and np.size(site["value"]) > 1


def _plate_names(site: dict) -> list[str | None]:
    """Name the axes of a site by its plates, None where there is none."""
    shape = np.shape(site["value"])
    num_batch = len(site["fn"].batch_shape) if site["type"] == "sample" else len(shape)
    names: list[str | None] = [None] * len(shape)
    for frame in site.get("cond_indep_stack", []):
        axis = num_batch + frame.dim
        if 0 <= axis < len(shape) and shape[axis] == frame.size:
            names[axis] = frame.name
    event_names = list((site.get("infer") or {}).get("event_dims", []))
    return names[: len(names) - len(event_names)] + event_names


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
