"""A finished run of MCMC, and the model as it was before it was wrapped."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import seed, substitute, uncondition
from numpyro.infer import MCMC, Predictive, init_to_sample

from numpyro_wide._checks import listing
from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import latent_sites, run_model, sample_sites
from numpyro_wide.diagnostics._stored import by_blocks
from numpyro_wide.readout import CollapsedModel, ReadoutPredictive, RepriorisedModel, readout_transform

Draws = dict[str, Array]
Arguments = tuple[tuple, Mapping[str, Any]]


class _Sites(NamedTuple):
    """What one run of the unwrapped model shows."""

    latent: list[str]
    observed: dict[str, ArrayLike]
    joint: list[str]  # observed sites, each a single event that is not a product over rows
    bases: set[str]
    plates: dict[str, list[str | None]]
    names: list[str]


class FinishedRun:
    """A finished MCMC, and the unwrapped model that its draws belong to."""

    def __init__(self, mcmc: MCMC, model: Callable, args: tuple, kwargs: dict[str, Any]):
        wrappers = _wrappers(model) + _wrappers(getattr(mcmc.sampler, "model", None))
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
        """Draws of the observed sites, or of those that are named; unless ``is_observed``, data are drawn anew."""
        sites = list(self.sites.observed) if sites is None else sites
        data, rest = partition(arguments)
        static = tuple(sites), is_observed, rest

        def run(block: Draws, start: int) -> Draws:
            key = random.fold_in(rng_key, start) if start else rng_key
            return run_compiled(_predictions, self.plain, static, key, block, data)

        values = by_blocks(run, self.latent(draws))
        unknown = [name for name in sites if name not in values]
        if unknown:
            raise ValueError(
                f"return_sites names {listing(unknown)}, which the model does not have; its sites are "
                f"{listing(self.sites.names)}."
            )
        return {name: values[name] for name in sites}

    def evaluate(self, draws: Draws, names: list[str]) -> Draws:
        """Deterministic sites at the inputs of the fit."""
        self._refuse_unknown("include", [name for name in names if name not in self.sites.names])
        return self.predict(random.key(0), draws, names, self.arguments)

    def check_names(self, role: str, names: Iterable[str]) -> None:
        """Refuse names that are neither of stored draws nor of sites."""
        known = {*self.stored, *self.sites.names, *self.internal}
        self._refuse_unknown(role, [name for name in names if name not in known])

    def _refuse_unknown(self, role: str, unknown: list[str]) -> None:
        if unknown:
            raise ValueError(
                f"{role} names {listing(unknown)}, which is neither stored nor a site of the model; the stored sites "
                f"are {listing(self.stored)}, those of the model {listing(self.sites.names)}."
            )


def _log_likelihoods(model: Callable, static: tuple[tuple[str, ...], Any], draws: Draws, data: list[Any]) -> Draws:
    names, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        # Next to the model, where a readout that is repriorised inside of it is overridden as well.
        sites = run_model(model, args, kwargs, inside=(substitute(data=draw),))
        return {name: _by_observation(sites[name]) for name in names}

    return _for_each_draw(single, draws)


def _predictions(
    model: Callable, static: tuple[tuple[str, ...], bool, Any], rng_key: Array, draws: Draws, data: list[Any]
) -> Draws:
    sites, is_observed, rest = static
    args, kwargs = combine(data, rest)
    model = model if is_observed else uncondition(model)
    return Predictive(model, draws, batch_ndims=2, return_sites=list(sites))(rng_key, *args, **kwargs)


def _for_each_draw(single: Callable[[Draws], Draws], draws: Draws) -> Draws:
    """What ``single`` gives for draws (chain, draw, ...), one after the other, with these two axes."""
    shape = next(iter(draws.values())).shape[:2]
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in draws.items()}
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in jax.lax.map(single, flat).items()}


def _by_observation(site: dict) -> Array:
    """Log density of an observed site by entry of its batch; without one, by row of its event."""
    if site["fn"].batch_shape or site["fn"].event_dim == 0:
        return site["fn"].log_prob(site["value"])
    fn, mask = _factors(site["fn"])
    log_prob = scale_and_mask(fn.log_prob(site["value"]), mask=mask)
    return jnp.sum(log_prob, axis=tuple(range(1, log_prob.ndim)))


def _factors(fn: dist.Distribution) -> tuple[dist.Distribution, Any]:
    """The distribution of the independent entries of an event, and whether the event as a whole is masked."""
    mask: Any = True
    while not fn.batch_shape and isinstance(fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.logical_and(mask, fn._mask)
        fn = fn.base_dist
    return fn, None if mask is True else mask


def _wrappers(model: Any) -> list[RepriorisedModel | CollapsedModel]:
    found = []
    while isinstance(model, RepriorisedModel | CollapsedModel):
        found.append(model)
        model = model.fn
    return found


def _sites_of(model: Callable, args: tuple, kwargs: dict[str, Any]) -> _Sites:
    # Of a prior that cannot be sampled, NumPyro finds a value to start from.
    sites = run_model(substitute(seed(model, random.key(0)), substitute_fn=init_to_sample), args, kwargs)
    latent = latent_sites(sites)
    observed = {
        name: site
        for name, site in sample_sites(sites).items()
        if site["is_observed"] and not isinstance(site["fn"], dist.Unit)  # a factor observes nothing
    }
    joint = [name for name, site in observed.items() if _is_joint(site)]
    values = {name: site["value"] for name, site in observed.items()}
    bases = {name for name, site in latent.items() if readout_transform(site) is not None}
    named = {name: _plate_names(site) for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
    return _Sites(list(latent), values, joint, bases, named, list(sites))


def _is_joint(site: dict) -> bool:
    """Whether a site is one event of several entries that are not independent."""
    fn, _ = _factors(site["fn"])
    is_one_event = not fn.batch_shape and 0 < fn.event_dim == np.ndim(site["value"])
    return is_one_event and np.size(site["value"]) > 1


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
