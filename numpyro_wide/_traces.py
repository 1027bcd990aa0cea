"""Single runs of a model, and the sites that they show."""

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution, Normal, Unit
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.primitives import Messenger

from numpyro_wide._checks import listing

Sites = dict[str, dict]
# NumPyro's stack of handlers is one for all threads: a model that runs in one must not see the handlers of another.
STACK_LOCK = threading.RLock()
_SUBSTITUTED_TYPES = ("sample", "param", "mutable")


def run_model(
    model: Callable,
    args: tuple = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    values: Mapping[str, object] | None = None,
    rng_key: Array | None = None,
    inside: tuple[Messenger, ...] = (),
    outside: AbstractContextManager | None = None,
) -> Sites:
    """Run a model once, unseen by outer handlers but those that ``outside`` leaves."""
    key = jax.random.key(0) if rng_key is None else rng_key
    substitution = substitute(
        substitute_fn=lambda msg: values.get(msg["name"]) if values and msg["type"] in _SUBSTITUTED_TYPES else None
    )
    with STACK_LOCK, outside or block(), trace() as sites, seed(rng_seed=key), substitution, ExitStack() as handlers:
        for handler in inside:
            handlers.enter_context(handler)
        try:
            model(*args, **(kwargs or {}))
        except TypeError as error:
            if "required positional argument" in str(error):
                error.add_note("The model runs here with the arguments that came with it; pass those of the fit, too.")
            raise
    return sites


def abstract_sites(
    model: Callable, args: tuple, kwargs: Mapping[str, object], values: Mapping[str, object] | None = None
) -> Sites:
    """Return the sites of a run without numbers."""
    sites: Sites = {}

    # The key is an argument, so that draws are traced where JAX evaluates what depends on constants alone.
    def run(key: Array) -> None:
        sites.update(run_model(startable(model, key), args, kwargs, values=values, rng_key=key))

    jax.eval_shape(run, jax.random.key(0))
    return sites


def startable(model: Callable, rng_key: Array | None = None) -> Callable:
    """Return a model that runs where some priors have no draws: there NumPyro finds initial values."""

    def initial_value(site: dict) -> Array | None:
        # NumPyro warns of sites that have a value.
        return init_to_sample(site) if site["value"] is None else None

    rng_key = jax.random.key(0) if rng_key is None else rng_key
    return substitute(seed(model, rng_key), substitute_fn=initial_value)


def sample_sites(sites: Sites) -> Sites:
    """Return the sample sites, latent and observed."""
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def values_of_type(sites: Sites, *types: str) -> dict[str, Any]:
    """Return the values, by name, of sites of the given types."""
    return {name: site["value"] for name, site in sites.items() if site["type"] in types}


def latent_sites(sites: Sites) -> Sites:
    """Return the sample sites without observations."""
    return {name: site for name, site in sample_sites(sites).items() if not site["is_observed"]}


def fixed_supports(sites: Sites) -> dict[str, Constraint] | None:
    """Return supports of the latent sites; None if they may depend on other sites."""
    supports = {name: site["fn"].support for name, site in latent_sites(sites).items()}
    # A JAX array may be a constant or a value.
    return None if any(isinstance(bound, Array) for bound in jax.tree.leaves(supports)) else supports


def observed_sites(sites: Sites) -> Sites:
    """Return the observed sites, without factors."""
    return {
        name: site
        for name, site in sample_sites(sites).items()
        if site["is_observed"] and not isinstance(site["fn"], Unit)
    }


def refuse_unobserved(sites: Sites, reason: str) -> None:
    """Refuse a run without observed sites."""
    samples = sample_sites(sites)
    if not any(site["is_observed"] for site in samples.values()):
        raise ValueError(
            f"{reason}, but the model observes nothing with these arguments; pass the observations too. Its sample "
            f"sites are {listing(samples)}."
        )


def log_prob_by_observation(site: dict) -> Array:
    """Return an observed site's log density by batch entry, or by row of its event."""
    if site["fn"].batch_shape or site["fn"].event_dim == 0:
        return site["fn"].log_prob(site["value"])
    fn, mask = independent_factors(site["fn"])
    log_prob = scale_and_mask(fn.log_prob(site["value"]), mask=mask)
    return jnp.sum(log_prob, axis=tuple(range(1, log_prob.ndim)))


def independent_factors(fn: Distribution) -> tuple[Distribution, bool | Array | None]:
    """Return the distribution of an event's independent entries, and its mask or None."""
    mask: bool | Array = True
    while not fn.batch_shape and isinstance(fn, Independent | ExpandedDistribution | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            mask = jnp.logical_and(mask, fn._mask)
        fn = fn.base_dist
    return fn, None if mask is True else mask


def refuse_subsampled(plate: dict, reason: str) -> None:
    """Refuse a plate of a part of the rows."""
    size, subsample_size = plate["args"]
    if subsample_size not in (None, size):
        raise ValueError(
            f"the plate {plate['name']!r} takes {subsample_size} of {size} rows, but {reason}; drop subsample_size."
        )


_NUM_PRIOR_DRAWS = 5
TOO_LARGE = 4.0  # of outputs against observations


def prior_sizes(
    rng_key: Array, model: Callable, args: tuple, kwargs: Mapping[str, object]
) -> dict[str, tuple[Array, Array]]:
    """Return the size of each observed site's mean under the prior, and of its observations: root mean squares.

    A median over prior draws, of a wrapped model those of the model itself; nothing is said of improper priors.
    """
    unwrapped = getattr(model, "fn", model) if hasattr(model, "is_collapsed") else model
    if getattr(unwrapped, "is_scaled", False):  # by scales that are meant, as fitted ones are
        return {}
    random = np.random.default_rng(0)

    def prior_draw(index: Array, msg: dict) -> Array | None:
        """Return a draw of NumPy's: JAX's generators would be most of what is compiled."""
        if msg["type"] != "sample" or msg["is_observed"] or type(prior := unwrap(msg["fn"])) is not Normal:
            return None
        draws = random.standard_normal((_NUM_PRIOR_DRAWS, *msg["fn"].shape()), np.float32)
        return prior.loc + prior.scale * jnp.asarray(draws, jnp.result_type(float))[index]

    def squares(index: Array) -> dict[str, tuple[Array, Array]]:
        inside = (substitute(substitute_fn=partial(prior_draw, index)),)
        sites = observed_sites(
            run_model(unwrapped, args, kwargs, rng_key=jax.random.fold_in(rng_key, index), inside=inside)
        )
        return {
            name: (jnp.mean(jnp.square(site["fn"].mean)), jnp.mean(jnp.square(site["value"])))
            for name, site in sites.items()
            if type(unwrap(site["fn"])) is Normal
        }

    try:
        squares_by_draw = jax.vmap(squares)(jnp.arange(_NUM_PRIOR_DRAWS))
    except NotImplementedError:  # of the method `sample`
        return {}
    return jax.tree.map(lambda squares: jnp.sqrt(jnp.median(squares)), squares_by_draw)


def is_prior_large(site: dict) -> Array:
    """Return whether an observed site is much larger than its observations by one draw of the other sites."""
    fn = site["fn"]
    size, observed = jnp.mean(jnp.square(fn.mean) + fn.variance), jnp.mean(jnp.square(site["value"]))
    return size >= TOO_LARGE**2 * observed.astype(size.dtype)


def warn_of_prior_sizes(sizes: Mapping[str, tuple[float | Array, float | Array]]) -> None:
    """Warn of a model whose outputs are a priori much larger than the observations."""
    for name, pair in sizes.items():
        prior, observed = map(float, pair)
        if observed > 0 and prior >= TOO_LARGE * observed:
            warnings.warn(
                f"outputs of the model are about {prior:.2g} a priori, and the observations of site {name!r} "
                f"{observed:.2g} (root mean squares): chains move badly. Features that grow with the width? "
                "Scale every layer by 1/sqrt(inputs) and the features by 1/sqrt(width); standardise the observations, "
                "or give their size as the readout's prior scale.",
                UserWarning,
                stacklevel=1,  # once, however often NumPyro runs the model
            )


def unwrap(fn: Distribution, *, masks: bool = False) -> Distribution:
    """Return the distribution inside ``to_event`` and ``expand``, and ``mask`` with ``masks``."""
    wrappers = (Independent, ExpandedDistribution, MaskedDistribution) if masks else (Independent, ExpandedDistribution)
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn
