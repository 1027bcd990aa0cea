"""Joint density of a model in unconstrained coordinates, as a weight w on top of a prior r (:eq:`weight`)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_wide._checks import kind_of, listing
from numpyro_wide._traces import latent_sites, refuse_subsampled, refuse_unobserved, run_model, unwrap
from numpyro_wide.readout._draws import StandardNormalBase, log_weight
from numpyro_wide.readout._transform import base_transforms

Position = dict[str, Array]


class LogDensity(NamedTuple):
    """Joint density at a position z, in two terms against rounding."""

    start: Array  # log r(z) − log N(z; 0, I)
    weight: Array  # log w(z)


def draw(model: Callable, rng_key: Array) -> tuple[Position, Array]:
    """Return an unconstrained draw from r, and log w there."""
    sites = run_model(model, rng_key=rng_key, inside=(StandardNormalBase(),))
    position = {name: biject_to(site["fn"].support).inv(site["value"]) for name, site in latent_sites(sites).items()}
    return position, log_weight(sites)


def log_density(model: Callable, position: Position) -> LogDensity:
    coordinates = _Unconstrained(position)
    sites = run_model(model, inside=(coordinates,))
    bases = base_transforms(sites)
    terms = [
        _relative_prior(site, position[name], coordinates.log_dets[name])
        for name, site in latent_sites(sites).items()
        if name not in bases
    ]
    return LogDensity(sum(terms, jnp.zeros(())), log_weight(sites))


class _Unconstrained(Messenger):
    """Handler that sets latent sites by unconstrained coordinates, and keeps log determinants."""

    def __init__(self, position: Position):
        self.position = position
        self.log_dets: Position = {}
        super().__init__()

    def process_message(self, msg: dict) -> None:
        name = msg.get("name")
        if msg["type"] != "sample" or msg["value"] is not None or name not in self.position:
            return
        transform, coordinate = biject_to(msg["fn"].support), self.position[name]
        msg["value"] = transform(coordinate)
        self.log_dets[name] = jnp.sum(transform.log_abs_det_jacobian(coordinate, msg["value"]))


def _relative_prior(site: dict, coordinate: Array, log_det: Array) -> Array:
    """Return a site's term of log r(z) − log N(z; 0, I)."""
    log_prob = unwrap(site["fn"]).log_prob(site["value"])
    standard = dist.Normal(0.0, 1.0).log_prob(coordinate)
    if log_prob.shape == coordinate.shape:  # by entry, exactly 0 for N(0, 1)
        return jnp.sum(log_prob - standard) + log_det
    return jnp.sum(log_prob) - jnp.sum(standard) + log_det


def check_model(model: Callable, rng_key: Array) -> None:
    """Refuse a model that has no proper joint density."""

    def run(key: Array) -> None:
        sites = run_model(model, rng_key=key, inside=(StandardNormalBase(), _RefusesImproper()))
        refuse_unobserved(sites, "the evidence is that of observations")
        if not latent_sites(sites):
            raise ValueError("the model has no latent site with these arguments, and so nothing to integrate over.")
        for site in sites.values():
            if site["type"] == "plate":
                refuse_subsampled(site, "the evidence is that of all data")
        for name, site in latent_sites(sites).items():
            if site["scale"] is not None or isinstance(unwrap(site["fn"]), dist.MaskedDistribution):
                raise ValueError(
                    f"the prior of latent site {name!r} is scaled or masked, and does not integrate to one; take it "
                    "out of the handler, and hide missing rows by numpyro.handlers.mask, not obs_mask."
                )
        coordinates = _Unconstrained(draw(model, key)[0])
        run_model(model, inside=(coordinates,))
        if unseen := coordinates.position.keys() - coordinates.log_dets.keys():
            raise ValueError(
                f"latent site {listing(sorted(unseen))} is inside of a scan or another control flow; write a Python "
                "loop, or one site."
            )

    jax.eval_shape(run, rng_key)


class _RefusesImproper(Messenger):
    """Handler that refuses latent sites that are discrete or cannot be drawn."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        name, fn = msg["name"], unwrap(msg["fn"], masks=True)
        if fn.support.is_discrete:
            raise ValueError(f"latent site {name!r} is discrete; sum it out, as by a mixture distribution.")
        if type(fn).sample is dist.Distribution.sample:
            raise ValueError(f"latent site {name!r} has {kind_of(fn)} prior, without draws; give it a proper prior.")
