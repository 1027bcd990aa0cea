"""One run of a model, and what its sites say."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
from jax import Array
from numpyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution
from numpyro.handlers import block, seed, substitute, trace
from numpyro.primitives import Messenger

Sites = dict[str, dict]
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
    """Run a model once, seen by no handler outside of the call.

    Args:
        model: the model.
        args: its arguments.
        kwargs: likewise.
        values: of sample, param and mutable sites, by name. Deterministic sites among them are computed anew: draws
            hold them as they were where the model was fitted.
        rng_key: for what is not given; a fixed one where nothing random is to be read off.
        inside: handlers next to the model, the outermost first: what they do to a site comes before values and draws.

    Returns:
        The sites that no inner handler kept back, by name.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    with ExitStack() as handlers:
        handlers.enter_context(block())
        sites = handlers.enter_context(trace())
        handlers.enter_context(seed(rng_seed=key))
        if values is not None:
            handlers.enter_context(_substitute_given(values))
        for handler in inside:
            handlers.enter_context(handler)
        model(*args, **(kwargs or {}))
    return sites


def _substitute_given(values: Mapping[str, Any]) -> substitute:
    return substitute(substitute_fn=lambda msg: values.get(msg["name"]) if msg["type"] in _GIVEN_TYPES else None)


def sample_sites(sites: Sites) -> Sites:
    """The sample sites, latent and observed."""
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def latent_sites(sites: Sites) -> Sites:
    """The sample sites that are not observed."""
    return {name: site for name, site in sample_sites(sites).items() if not site["is_observed"]}


def unwrap(fn: Distribution, *, masks: bool = False) -> Distribution:
    """What ``to_event`` and ``expand`` arrange copies of; with ``masks``, what ``mask`` hides a part of, too."""
    wrappers = (Independent, ExpandedDistribution, MaskedDistribution) if masks else (Independent, ExpandedDistribution)
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn
