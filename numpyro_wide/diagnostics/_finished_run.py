"""Finished runs of MCMC, and the models as they were before they were wrapped."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import seed, substitute, uncondition
from numpyro.infer import MCMC, Predictive, init_to_sample

from numpyro_wide._checks import check_names_known, kind_of, listing
from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import (
    abstract_sites,
    independent_factors,
    latent_sites,
    log_prob_by_observation,
    observed_sites,
    run_model,
)
from numpyro_wide.diagnostics._stored import by_blocks
from numpyro_wide.readout.internal import ReadoutModel, SiteNames, base_name, base_transforms, refuse_mismatch

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
            refuse_mismatch(self.plain, args, kwargs, error, "arguments", example)
            raise
        # Asked of the model as it was sampled, which has a base site, or a readout less.
        sampled: Callable = self.wrapped[0] if self.wrapped else self.plain
        self._sampled = latent_sites(abstract_sites(sampled, args, kwargs))
        unseen = {form.base for form in self.wrapped} - self.sites.shapes.keys()
        self._bases = set(base_transforms(self._sampled)) | unseen
        self.internal = self._bases | {form.features for form in self.wrapped}

    @property
    def conjugate_sites(self) -> SiteNames | None:
        """Names of the sites with which the readout can be integrated out; None if it cannot be, or there is none."""
        return self.wrapped[0].conjugate_sites(*self.arguments) if len(self.wrapped) == 1 else None

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
        readout = form.weights(rng_key, flat, *self.arguments)[form.readout]
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
