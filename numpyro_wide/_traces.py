"""Single runs of a model, and the sites that they show."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution, Unit
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.primitives import Messenger

from numpyro_wide._checks import listing

Sites = dict[str, dict]
# NumPyro's stack of handlers is one for all threads: a model that runs in one must not see the handlers of another.
STACK_LOCK = threading.RLock()
_GIVEN_TYPES = ("sample", "param", "mutable")


def run_model(
    model: Callable,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    rng_key: Array | None = None,
    inside: tuple[Messenger, ...] = (),
) -> Sites:
    """Run a model once, seen by no handler outside of the call."""
    key = jax.random.key(0) if rng_key is None else rng_key
    with STACK_LOCK, ExitStack() as handlers:
        handlers.enter_context(block())
        sites = handlers.enter_context(trace())
        handlers.enter_context(seed(rng_seed=key))
        if values is not None:
            handlers.enter_context(_substitute_given(values))
        for handler in inside:
            handlers.enter_context(handler)
        model(*args, **(kwargs or {}))
    return sites


def abstract_sites(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> Sites:
    """Return the sites of a run without numbers, of a model some of whose priors may not be sampled."""
    found: Sites = {}

    def run() -> None:
        # Of a prior that cannot be sampled, NumPyro finds a value to start from.
        startable = substitute(seed(model, jax.random.key(0)), substitute_fn=init_to_sample)
        found.update(run_model(startable, args, kwargs, values=values))

    jax.eval_shape(run)
    return found


def _substitute_given(values: Mapping[str, Any]) -> substitute:
    return substitute(substitute_fn=lambda msg: values.get(msg["name"]) if msg["type"] in _GIVEN_TYPES else None)


def sample_sites(sites: Sites) -> Sites:
    """Return the sample sites, latent and observed."""
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def latent_sites(sites: Sites) -> Sites:
    """Return the sample sites that are not observed."""
    return {name: site for name, site in sample_sites(sites).items() if not site["is_observed"]}


def fixed_supports(sites: Sites) -> dict[str, Constraint] | None:
    """Return where the latent sites may be; None if a bound may depend on the values of other sites."""
    supports = {name: site["fn"].support for name, site in latent_sites(sites).items()}
    # A bound that is an array of JAX's may be a constant, but nothing tells it from a value.
    return None if any(isinstance(bound, Array) for bound in jax.tree.leaves(supports)) else supports


def observed_sites(sites: Sites) -> Sites:
    """Return the observed sites; a factor observes nothing."""
    return {
        name: site
        for name, site in sample_sites(sites).items()
        if site["is_observed"] and not isinstance(site["fn"], Unit)
    }


def refuse_unobserved(sites: Sites, reason: str) -> None:
    """Refuse a run in which no sample site is observed."""
    samples = sample_sites(sites)
    if not any(site["is_observed"] for site in samples.values()):
        raise ValueError(
            f"{reason}, but the model observes nothing with these arguments; pass the observations too. Its sample "
            f"sites are {listing(samples)}."
        )


def log_prob_by_observation(site: dict) -> Array:
    """Return the log density of an observed site by entry of its batch; without a batch, by row of its event."""
    if site["fn"].batch_shape or site["fn"].event_dim == 0:
        return site["fn"].log_prob(site["value"])
    fn, mask = independent_factors(site["fn"])
    log_prob = scale_and_mask(fn.log_prob(site["value"]), mask=mask)
    return jnp.sum(log_prob, axis=tuple(range(1, log_prob.ndim)))


def independent_factors(fn: Distribution) -> tuple[Distribution, Any]:
    """Return the distribution of the independent entries of an event, and the mask of the event; None for no mask."""
    mask: Any = True
    while not fn.batch_shape and isinstance(fn, Independent | ExpandedDistribution | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            mask = jnp.logical_and(mask, fn._mask)
        fn = fn.base_dist
    return fn, None if mask is True else mask


def refuse_subsampled(plate: dict, reason: str) -> None:
    """Refuse a plate site that takes a part of the rows only."""
    size, subsample_size = plate["args"]
    if subsample_size not in (None, size):
        raise ValueError(
            f"the plate {plate['name']!r} takes {subsample_size} of {size} rows, but {reason}; drop subsample_size."
        )


def unwrap(fn: Distribution, *, masks: bool = False) -> Distribution:
    """Return what ``to_event`` and ``expand`` arrange copies of; with ``masks``, what ``mask`` hides a part of, too."""
    wrappers = (Independent, ExpandedDistribution, MaskedDistribution) if masks else (Independent, ExpandedDistribution)
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn
