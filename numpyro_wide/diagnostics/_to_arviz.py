"""ArviZ's view of a finished run."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Normal
from numpyro.handlers import substitute, uncondition
from numpyro.infer import MCMC, Predictive

from numpyro_wide._arviz import from_datasets
from numpyro_wide._blocks import BLOCK_BYTES, blocks_of, is_mapped
from numpyro_wide._checks import (
    as_list,
    check_key,
    check_names_known,
    is_known,
    kind_of,
    late_progress,
    listing,
    warn_if_stuck,
)
from numpyro_wide._compile import program_of, run_with_arguments, split
from numpyro_wide._traces import (
    Sites,
    abstract_sites,
    independent_factors,
    latent_sites,
    log_prob_by_observation,
    observed_sites,
    run_model,
    startable,
    unwrap,
)
from numpyro_wide.readout._assumptions import conjugate_form, read_run
from numpyro_wide.readout._draws import weights_of
from numpyro_wide.readout._model import ReadoutModel, ReadoutRun, base_name
from numpyro_wide.readout._programs import Program
from numpyro_wide.readout._transform import base_transforms

T = TypeVar("T")
Draws = dict[str, Any]
Arguments = tuple[tuple, Mapping[str, object]]
_NUM_BLOCKS = 20  # of draws, between which a bar moves
_MOST_QUICK = 2**24  # numbers of all draws up to which a program that is compiled quickly takes less time in all


def by_blocks(fn: Callable[[Draws, int], T], draws: Draws) -> T:
    """Return ``fn(draws, 0)``, block by block for memory-mapped draws (chain, draw, ...)."""
    if not is_mapped(draws):
        return fn(dict(draws), 0)
    blocks = [jax.tree.map(np.asarray, fn(block, start)) for start, block in blocks_of(draws, axis=1)]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *blocks)


class FinishedRun:
    """A finished MCMC, the sampled model, and the unwrapped model."""

    def __init__(self, function: str, mcmc: MCMC, model: Callable, args: tuple, kwargs: Mapping[str, object] | None):
        if not hasattr(mcmc, "get_samples") or not callable(model):
            raise TypeError(
                f"{function} needs an MCMC after its run, and then a model, but got {kind_of(mcmc)} "
                f"and {kind_of(model)}; the order is {function}(mcmc, model, x, y)."
            )
        self.function = function
        wrapped, self.plain = _unwrapped(model)
        self.wrapped = wrapped or _unwrapped(getattr(mcmc.sampler, "model", None))[0]
        self.arguments: Arguments = args, dict(kwargs or {})
        self.stored: Draws = mcmc.get_samples(group_by_chain=True)
        sites = abstract_sites(self.plain, *self.arguments)
        self.sites = {name: site for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
        sampled = latent_sites(abstract_sites(self.wrapped[0] if self.wrapped else self.plain, *self.arguments))
        self._latent = sampled | latent_sites(self.sites)
        self._bases = set(base_transforms(sampled)) | {form.base for form in self.wrapped} - self.sites.keys()
        self.internal = self._bases | {form.features for form in self.wrapped}
        self.observed = observed_sites(self.sites)
        images = {base_name(name) for name in self.stored} & self._bases
        present = {*self.stored, *images, *(form.readout for form in self.wrapped)}
        # Latent sites whose draws are neither stored nor computed.
        self.missing = [name for name in self._latent if name not in present]

    def observations(self) -> Draws:
        values = {name: site["value"] for name, site in self.observed.items()}
        if all(map(is_known, values.values())):
            return values

        def program(arguments: Arguments) -> Draws:  # of those that the model computes from its arguments
            sites = run_model(startable(self.plain), *arguments)
            return {name: sites[name]["value"] for name in values}

        return run_with_arguments(program, self.arguments)

    @cached_property
    def first_draw(self) -> Draws:
        """The first draw."""
        return {name: np.asarray(values)[0, 0] for name, values in self.latent(self.stored).items()}

    @cached_property
    def conjugate(self) -> ReadoutModel | None:
        """The model out of which the readout can be integrated, or None."""
        if len(self.wrapped) > 1 or self.missing:
            return None
        forms = (conjugate_form(form, self.first_draw, *self.arguments) for form in self.wrapped or self._readouts())
        return next((form for form in forms if form is not None), None)

    def _readouts(self) -> Iterator[ReadoutModel]:
        """Yield candidate readouts of a model that is not wrapped: Normal sites that fit recorded features."""
        for features, recorded in self.sites.items():
            shape = np.shape(recorded["value"])
            if recorded["type"] != "deterministic" or len(shape) != 2:
                continue
            ancestors = self._ancestors(features)
            for readout, site in reversed(latent_sites(self.sites).items()):
                is_fit = site["fn"].shape()[:1] == shape[1:] and type(unwrap(site["fn"])) is Normal
                if is_fit and readout not in ancestors:
                    yield ReadoutModel(self.plain, readout, features)

    @cached_property
    def forms(self) -> list[ReadoutModel]:
        """Readouts and features that are known."""
        return self.wrapped or [form for form in [self.conjugate] if form is not None]

    @cached_property
    def identified(self) -> set[str]:
        """Latent sites apart from those of hidden units, which can trade places; none where no features are known."""
        hidden = {name for form in self.forms for name in (form.readout, *self._ancestors(form.features))}
        return self._latent.keys() - hidden if self.forms else set()

    def _ancestors(self, site: str) -> set[str]:
        """Return the latent sites that the value of a site depends on, given the values of them all."""

        def value(draw: Draws) -> dict[str, Array]:
            return {site: run_model(startable(self.plain), *self.arguments, values=draw)[site]["value"]}

        reads = Program(value, self.first_draw).reads(site)
        return {name for name, is_read in zip(sorted(self.first_draw), reads, strict=True) if is_read}

    def read(self, draw: Draws, args: tuple, kwargs: Mapping[str, object]) -> tuple[ReadoutRun, Any]:
        """Return a run of the conjugate model, and the readout's problem."""
        run = read_run(self.conjugate, draw, args, kwargs)  # type: ignore[arg-type]
        return run, run.problem()

    def sites_at(self, draw: Draws, args: tuple, kwargs: Mapping[str, object]) -> Sites:
        # Inside, to override a repriorised readout as well.
        return run_model(self.plain, args, kwargs, inside=(substitute(data=draw),))

    def map(self, single: Callable, draws: Draws) -> Any:
        """Return ``single(draw, args, kwargs)`` at draws (chain, draw, ...); a bar shows if it takes long."""
        draws = {name: np.asanyarray(values) for name, values in self.latent(draws).items()}
        num_chains, num_draws = np.shape(next(iter(draws.values())))[:2]
        arrays, join = split(self.arguments)
        largest = max(int(np.size(site["value"])) for site in self.sites.values())

        def map_block(arrays: list[Array], block: Draws) -> Any:
            return jax.lax.map(partial(jax.lax.map, lambda draw: single(draw, *join(arrays))), block)

        num_blocks = max(_NUM_BLOCKS, sum(values.nbytes for values in draws.values()) // BLOCK_BYTES)
        size = -(-num_draws // num_blocks)
        by_block, program = [], None
        for start in late_progress(range(0, num_draws, size), desc=self.function):
            # Blocks of one size are one program: the last begins among the draws before it.
            begin = min(start, num_draws - size)
            block = {name: jnp.asarray(values[:, begin : begin + size]) for name, values in draws.items()}
            if program is None:
                is_quick = largest * num_chains * num_draws < _MOST_QUICK
                program = program_of(map_block, arrays, block, quick=is_quick)
            results = jax.tree.map(np.asarray, program(arrays, block))
            by_block.append(jax.tree.map(lambda leaf, new=start - begin: leaf[:, new:], results))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *by_block)

    def with_readout(self, rng_key: Array, is_needed: bool = True) -> Draws:
        """Return the stored draws, and draws of an integrated readout."""
        to_restore = [form for form in self.wrapped if form.readout not in self.stored]
        if self.missing and (is_needed or (to_restore and not self.observed)):
            raise ValueError(
                f"{listing(self.missing)} is neither stored by the run nor observed with these arguments; the stored "
                f"sites are {listing(self.stored)}. Pass what mcmc.run got, to_arviz(mcmc, model, x, y), or "
                "log_likelihood=False without predictions."
            )
        if self.missing:
            return self.stored
        draws = dict(self.stored)
        for form, key in zip(to_restore, random.split(rng_key, len(to_restore)), strict=True):
            shape = np.shape(next(iter(draws.values())))[:2]
            flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in self.latent(draws).items()}
            readout = weights_of(form, key, flat, *self.arguments)[form.readout]
            draws[form.readout] = readout.reshape(*shape, *readout.shape[1:])
        return draws

    def latent(self, draws: Draws) -> Draws:
        """Select the draws of latent sites."""
        return {name: draws[name] for name in draws if name in self._latent or base_name(name) in self._bases}

    def log_likelihood(self, draws: Draws) -> Draws:
        """Compute the log-likelihood by observation, (chain, draw, ...)."""
        for name, site in self.observed.items():
            if _is_joint(site):
                warnings.warn(
                    f"observed site {name!r} is one event of shape {np.shape(site['value'])}, useless for arviz.loo. "
                    "Write independent rows in a numpyro.plate, or pass log_likelihood=False.",
                    UserWarning,
                    stacklevel=3,
                )

        def single(draw: Draws, args: tuple, kwargs: Mapping[str, object]) -> Draws:
            sites = self.sites_at(draw, args, kwargs)
            return {name: log_prob_by_observation(sites[name]) for name in self.observed}

        return self.map(single, draws)

    def predict(
        self, rng_key: Array, draws: Draws, sites: list[str] | None, arguments: Arguments, *, is_observed: bool = True
    ) -> Draws:
        sites = list(self.observed) if sites is None else sites
        check_names_known("return_sites", sites, self.sites)
        model = self.plain if is_observed else uncondition(self.plain)

        def program(arguments: Arguments, key: Array, block: Draws) -> Draws:
            args, kwargs = arguments
            return Predictive(model, block, batch_ndims=2, return_sites=sites)(key, *args, **kwargs)

        def run(block: Draws, start: int) -> Draws:
            return run_with_arguments(program, arguments, random.fold_in(rng_key, start), block)

        values = by_blocks(run, self.latent(draws))
        return {name: values[name] for name in sites}


def _unwrapped(model: Any) -> tuple[list[ReadoutModel], Any]:
    """Return the wrapped models around a model, outermost first, and the model."""
    wrapped = []
    while isinstance(model, ReadoutModel):
        wrapped.append(model)
        model = model.fn
    return wrapped, model


def _is_joint(site: dict) -> bool:
    """Whether a site is one event of several dependent entries."""
    fn, _ = independent_factors(site["fn"])
    return not fn.batch_shape and 0 < fn.event_dim == np.ndim(site["value"]) and np.size(site["value"]) > 1


def _plate_names(site: dict) -> list[str | None]:
    """Return the plates of a site's axes, None for axes without one."""
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
    *model_args: object,
    model_kwargs: Mapping[str, object] | None = None,
    rng_key: Array | None = None,
    include: Iterable[str] = (),
    drop: Iterable[str] = (),
    log_likelihood: bool = True,
    posterior_predictive: bool = False,
    predictions: tuple | Mapping[str, object] | None = None,
    return_sites: Iterable[str] | None = None,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Convert a run to ArviZ's ``InferenceData``, or with ArviZ 1.x a ``DataTree``, of the unwrapped model.

    The posterior holds the weights; an integrated readout is drawn exactly. The log-likelihood is by observation.
    Extra fields are in sample_stats, dimensions are named after plates, and "/" becomes ".".

    Args:
        mcmc: an MCMC after its run, or the result of :func:`~numpyro_wide.runs.run_in_pieces`.
        model: a model, wrapped or not.
        *model_args: arguments of the fit, observations included.
        model_kwargs: keyword arguments of the fit.
        rng_key: a PRNG key, ``jax.random.key(0)`` by default.
        include: names of sites to add to the posterior: a base, features, or deterministic site.
        drop: names of sites to leave out of the posterior.
        log_likelihood: whether to compute the log-likelihood; False after :func:`reduced`.
        posterior_predictive: whether to draw observations anew at the inputs of the fit.
        predictions: arguments of the model at new inputs, a tuple or a dictionary of keywords.
        return_sites: names of predicted sites, by default the observed ones.
        coords: coordinates by dimension, for all groups but the predictions.
        dims: names of all dimensions after chain and draw, by site.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.diagnostics import to_arviz
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model, x = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1), jnp.linspace(-1, 1, 5)[:, None]
        >>> mcmc = MCMC(NUTS(model, max_tree_depth=3), num_warmup=10, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, x[:, 0])
        >>> to_arviz(mcmc, model, x, x[:, 0], predictions=(x[:3],))["log_likelihood"]["y"].dims
        ('chain', 'draw', 'rows')
    """
    if not isinstance(predictions, tuple | list | Mapping | None):
        raise TypeError(
            "predictions must be a tuple of the model's arguments or a dictionary of its keywords, but is "
            f"{kind_of(predictions)}; pass a tuple, predictions=(x_new,)."
        )
    rng_key = random.key(0) if rng_key is None else rng_key
    check_key("rng_key", rng_key, "to_arviz(mcmc, model, x, y, rng_key=jax.random.key(0))")
    run = FinishedRun("to_arviz", mcmc, model, model_args, model_kwargs)
    warn_if_stuck(run.stored, by_chain=True)
    include, drop = as_list(include), as_list(drop)
    dims = {name: as_list(site_dims) for name, site_dims in (dims or {}).items()}
    for role, names in (("include", include), ("drop", drop), ("dims", dims)):
        check_names_known(role, names, dict.fromkeys([*run.stored, *run.sites, *run.internal]))
    is_needed = log_likelihood or posterior_predictive or predictions is not None
    draws = run.with_readout(random.fold_in(rng_key, 0), is_needed)
    plates = {name: _plate_names(site) for name, site in run.sites.items()} | dims

    left_out = (run.internal - set(include)) | set(drop)
    posterior = {name: values for name, values in draws.items() if name not in left_out}
    missing = [name for name in include if name not in posterior]
    if missing:
        posterior |= run.predict(rng_key, draws, missing, run.arguments)
    groups: dict[str, tuple[Draws, Mapping[str, Sequence]]] = {
        "posterior": (posterior, plates),
        "sample_stats": (_sample_stats(mcmc), {}),
    }
    if log_likelihood:
        values = run.log_likelihood(draws)
        groups["log_likelihood"] = values, {name: plates[name][: values[name].ndim - 2] for name in values}
    sites = None if return_sites is None else as_list(return_sites)
    if posterior_predictive:
        key = random.fold_in(rng_key, 1)
        groups["posterior_predictive"] = run.predict(key, draws, sites, run.arguments, is_observed=False), plates
    if predictions is not None:
        arguments = ((), predictions) if isinstance(predictions, Mapping) else (tuple(predictions), {})
        groups["predictions"] = run.predict(random.fold_in(rng_key, 2), draws, sites, arguments), plates
    coords = coords or {}
    datasets = {
        name: _dataset(values, group_dims, {} if name == "predictions" else coords, ("chain", "draw"))
        for name, (values, group_dims) in groups.items()
        if values
    }
    if run.observed:
        datasets["observed_data"] = _dataset(run.observations(), plates, coords, ())
    known_dims = {str(dim) for dataset in datasets.values() for dim in dataset.dims}
    check_names_known("coords", coords, sorted(known_dims), kind="dimension")
    return from_datasets(datasets)


def _dataset(values: Draws, dims: Mapping[str, Sequence], coords: Mapping[str, Sequence], leading: tuple) -> Any:
    import xarray as xr  # heavy

    variables: dict[str, xr.Variable] = {}
    for site, value in values.items():
        array = np.asarray(jax.device_get(value))
        name = site.replace("/", ".")
        if name in variables:
            raise ValueError(
                f"the name {site!r} is written {name!r} for ArviZ, which another site is called; rename it."
            )
        site_dims = dims.get(site, [None] * (array.ndim - len(leading)))
        dim_names = [f"{name}_dim_{i}" if dim is None else dim.replace("/", ".") for i, dim in enumerate(site_dims)]
        variables[name] = xr.Variable([*leading, *dim_names], array)
    attributes = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
    dataset = xr.Dataset(variables, attrs=attributes)
    return dataset.assign_coords({dim: coords.get(str(dim), np.arange(size)) for dim, size in dataset.sizes.items()})


def _sample_stats(mcmc: MCMC) -> dict[str, ArrayLike]:
    """Return the extra fields under ArviZ's names."""
    renamed = {"accept_prob": "acceptance_rate", "adapt_state.step_size": "step_size", "num_steps": "n_steps"}
    fields = {renamed.get(name, name): value for name, value in mcmc.get_extra_fields(group_by_chain=True).items()}
    stats: dict[str, ArrayLike] = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(fields)
    }
    if "potential_energy" in stats:
        stats["lp"] = -np.asarray(stats.pop("potential_energy"))
    if "n_steps" in stats:
        stats["tree_depth"] = np.log2(np.asarray(stats["n_steps"])).astype(int) + 1
    return stats
