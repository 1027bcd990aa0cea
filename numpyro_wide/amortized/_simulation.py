"""Runs of a simulating model and of a guide, and the checks of both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from numpyro_wide._checks import check_finite, check_names_known, kind_of, listing
from numpyro_wide._traces import Sites, refuse_subsampled, run_model, sample_sites, values_of_type

Arrays = Mapping[str, Array | np.ndarray]
Draws = dict[str, Array]


def site_names(value: str | Sequence[str], role: str = "observed") -> tuple[str, ...]:
    """Return names of sites as a tuple."""
    names = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{role} must be the name of a site, or a sequence of names, but is {value!r}.")
    return names


def bound(
    model: Callable, guide: Callable, args: tuple, kwargs: Mapping[str, object]
) -> tuple[Callable[[], object], Callable[[Draws], Draws]]:
    """Return model and guide with their arguments, but for the guide's first."""
    return partial(model, *args, **kwargs), lambda observed_values: guide(observed_values, *args, **kwargs)


def simulate(model: Callable, rng_key: Array, observed: tuple[str, ...]) -> Draws:
    """Run the model once for its sample and observed sites."""
    sites = run_model(model, rng_key=rng_key)
    return {
        name: site["value"]
        for name, site in sites.items()
        if site["type"] == "sample" or (site["type"] == "deterministic" and name in observed)
    }


def run_guide(
    guide: Callable,
    rng_key: Array,
    params: Mapping[str, object],
    observed_values: Mapping[str, ArrayLike],
    latents: Draws | None = None,
) -> Sites:
    """Run the guide for one data set, its latents given or drawn."""
    # Guides write mutable state into their containers.
    params = jax.tree.map(lambda leaf: leaf, dict(params))
    return run_model(guide, (dict(observed_values),), values={**params, **(latents or {})}, rng_key=rng_key)


def draw_from_guide(
    guide: Callable, rng_key: Array, params: Mapping[str, object], observed_values: Draws
) -> tuple[Draws, Array]:
    """Draw the guide's latents, with their log density."""
    sites = run_guide(guide, rng_key, params, observed_values)
    return values_of_type(sites, "sample"), log_density(sites)


def log_density(sites: Sites) -> Array:
    """Sum the log densities of the sample sites of one run, at their values."""
    terms = [jnp.sum(site["fn"].log_prob(site["value"])) for site in sample_sites(sites).values()]
    return sum(terms[1:], start=terms[0])


def latent_names(model_sites: Sites, observed: tuple[str, ...]) -> list[str]:
    """Return the names of the model's sample sites that are not data."""
    return [name for name in sample_sites(model_sites) if name not in observed]


def check_simulator(sites: Sites, observed: tuple[str, ...]) -> None:
    """Refuse a model that does not simulate the observed sites."""
    candidates = values_of_type(sites, "sample", "deterministic")
    remedy = "What is simulated elsewhere is given as simulations=, of fit, run, typicality and from_guide."
    check_names_known("observed", observed, candidates, kind="sample or deterministic site", remedy=remedy)
    fixed = [name for name, site in sample_sites(sites).items() if site["is_observed"]]
    if fixed:
        raise ValueError(
            f"the model must simulate every site, but {listing(fixed)} have given values (obs=..., or a factor). "
            "Give its argument for the data the default None, and pass obs=None on."
        )
    if names := values_of_type(sites, "param", "mutable"):
        raise ValueError(
            f"the model is simulated, not learnt, but has the param or mutable sites {listing(names)}; fix them with "
            "numpyro.handlers.substitute(model, data=params)."
        )
    _check_plates_and_scales("model", sites)


def check_data_set(values: Mapping[str, ArrayLike], examples: Mapping[str, ArrayLike]) -> None:
    """Refuse what is not finite in one data set, and other shapes than a simulated one's, with which all broadcast."""
    for name, example in examples.items():
        check_finite(f"observed_values[{name!r}]", values[name])
        if jnp.shape(values[name]) != jnp.shape(example):
            raise ValueError(
                f"observed_values[{name!r}] must have the shape of one simulated data set, {jnp.shape(example)}, but "
                f"has {jnp.shape(values[name])}."
            )


def check_guide(sites: Sites, model_sites: Sites, observed: tuple[str, ...]) -> None:
    """Refuse a guide whose density is not one of latents of the model."""
    latents = latent_names(model_sites, observed)
    samples = sample_sites(sites)
    scored = [name for name, site in samples.items() if name in observed or site["is_observed"]]
    if scored:
        raise ValueError(
            f"the guide must score latents alone, but it has the observed sites {listing(scored)}; read data from its "
            f"first argument, a dictionary with the keys {listing(observed)}."
        )
    # Auxiliary variables have no simulated values.
    check_names_known("the guide", samples, latents, kind="latent site")
    if not samples:
        raise ValueError(
            f"the guide has no sample site; give it one for some of the model's latent sites {listing(latents)}."
        )
    _check_plates_and_scales("guide", sites)
    for name, site in samples.items():
        kind, expected = _kind(site), _kind(model_sites[name])
        if kind != expected:
            raise ValueError(
                f"the guide's site {name!r} must be {expected}, as the model's is, but is {kind}; for another shape "
                "use a plate or .expand(...)."
            )


def _kind(site: dict) -> str:
    """Return the kind and the shape of a site's values."""
    kind = "discrete" if site["fn"].support.is_discrete else "continuous"
    return f"{kind} of shape {jnp.shape(site['value'])}"


def _check_plates_and_scales(where: str, sites: Sites) -> None:
    for name, site in sites.items():
        if site["type"] == "plate":
            refuse_subsampled(site, f"the {where} must run on all rows of a simulation")
        if site["type"] == "sample" and site["scale"] is not None:
            raise ValueError(
                f"the {where}'s site {name!r} has a scaled log density (handlers.scale); remove the scale."
            )


def check_params(
    guide: Callable, rng_key: Array, params: Mapping[str, object], observed_values: Mapping[str, ArrayLike]
) -> Sites:
    """Run the guide once, and refuse parameters that lack a site."""
    kind, remedy = "param and mutable sites of the guide", "Pass a trainer's run(...).params or get_params(state)."
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a dictionary of the {kind}, but got {kind_of(params)}. {remedy}")
    recorder = Recorder(guide)
    try:
        sites = run_guide(recorder, rng_key, params, observed_values)
    except Exception:
        # Such as NumPyro's assertion on a flax module's parameters and state.
        refuse_missing("params", recorder.values, params, kind, remedy)
        raise
    recorded = [name for name, value in recorder.values.items() if value is not None]
    refuse_missing("params", recorded, params, kind, remedy)
    return sites


class Recorder(Messenger):
    """Recorder of the values of param and mutable sites that a guide comes to, before it writes into them."""

    def __init__(self, fn: Callable):
        super().__init__(fn)
        self.values: dict[str, object] = {}

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] in ("param", "mutable"):
            self.values[msg["name"]] = jax.tree.map(lambda leaf: leaf, msg["value"])


def refuse_missing(role: str, names: Iterable[str], values: Any, kind: str = "observed site", remedy: str = "") -> None:
    """Refuse anything but a dictionary with the named sites."""
    is_dictionary = isinstance(values, Mapping)
    if missing := [name for name in names if not is_dictionary or name not in values]:
        received = listing(values) if is_dictionary else kind_of(values)
        message = f"{role} must be a dictionary with the {kind} {listing(missing)}, but got {received}. {remedy}"
        raise ValueError(message.rstrip())
