"""One run of a model with a conjugate readout, read off: what its likelihood is made of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Messenger

from numpyro_wide._checks import as_floats, check_no_nan, listing
from numpyro_wide._traces import latent_sites, run_model
from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.readout._conjugate import normal_parameters


class SiteNames(NamedTuple):
    """The sites that a collapsed model is about."""

    readout: str
    features: str
    observed: str


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["features", "loc", "residual", "noise_scale", "prior_loc", "prior_scale"],
    meta_fields=["is_observed", "latent_shapes", "param_names"],
)
@dataclass(frozen=True)
class ReadoutRun:
    """What a run of a model gives, the readout at its prior mean.

    Attributes:
        features: (n, d).
        loc: mean of the observed site, (n,) or (n, k).
        residual: observations less ``loc``; ``loc`` where there are none.
        noise_scale: as the model's Normal has it; broadcasts against ``loc``.
        prior_loc: of the readout, (d,) or (d, k).
        prior_scale: broadcasts against that.
        is_observed: whether the observed site is.
        latent_shapes: name and shape of every other latent site.
        param_names: of the param sites.
    """

    features: Array
    loc: Array
    residual: Array
    noise_scale: Array
    prior_loc: Array
    prior_scale: Array
    is_observed: bool
    latent_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    param_names: tuple[str, ...]

    def problem(self, readout: str, variant: str = "auto") -> ReadoutProblem:
        """The readout's problem, less its prior mean: that is in ``loc``."""
        return ReadoutProblem.of(
            self.features,
            self.residual,
            self.noise_scale,
            variant=variant,
            prior_scale=self.prior_scale,
            readout=(f"readout {readout!r}", self.prior_loc.shape),
        )


class StoppedRunError(ValueError):
    """A model's own error at its likelihood, with the number of rows that its features had by then."""

    def __init__(self, error: ValueError, num_rows: int):
        super().__init__(*error.args)
        self.num_rows = num_rows


class ReadoutSites(Messenger):
    """Takes the readout and features sites out of a model's run, and notes what its likelihood is made of.

    Args:
        names: of the sites.
        displacement: what is added to the readout's prior mean, for its shape; None for nothing.
        hidden: deterministic sites to be kept from every handler outside, as the features are.
    """

    def __init__(
        self,
        names: SiteNames,
        displacement: Callable[[tuple[int, ...]], Array] | None = None,
        hidden: Iterable[str] = (),
    ):
        self.names = names
        self.displacement = displacement
        self.hidden = {names.features, *hidden}
        self.seen: list[str] = []
        self.features: Array | None = None
        self.readout_shape: tuple[int, ...] | None = None
        self.prior: tuple[Array, Array] | None = None
        self.likelihood: tuple[Array, Array] | None = None
        self.observations: Array | None = None
        super().__init__()

    def process_message(self, msg: dict) -> None:
        name = msg.get("name")
        if name is None or msg["type"] == "plate":
            return
        self.seen.append(name)
        if name in self.hidden and msg["type"] == "deterministic":
            msg["stop"] = True
        elif msg["type"] == "sample" and name == self.names.readout:
            self._take_readout(msg)
        elif msg["type"] == "sample" and name == self.names.observed:
            self._take_observed(msg)

    def postprocess_message(self, msg: dict) -> None:
        if msg.get("name") == self.names.features and msg["type"] != "plate":
            self.features = jnp.asarray(msg["value"])

    def read_off(self, latent_shapes: tuple = (), param_names: tuple[str, ...] = ()) -> ReadoutRun:
        """What was noted, once every named site has occurred."""
        for role, name in self.names._asdict().items():
            if name not in self.seen:
                raise ValueError(
                    f"{role} names the site {name!r}, which the model does not have; its sites are "
                    f"{listing(self.seen)}."
                )
        if self.features is None or self.readout_shape is None or self.prior is None or self.likelihood is None:
            raise ValueError(f"the observed site {self.names.observed!r} must be a sample site.")
        loc, noise_scale = self.likelihood
        residual = loc
        if self.observations is not None:
            observations, loc = as_floats(self.observations, loc)
            residual = observations - loc
        return ReadoutRun(
            self.features,
            loc,
            residual,
            noise_scale,
            jnp.broadcast_to(self.prior[0], self.readout_shape),
            self.prior[1],
            self.observations is not None,
            latent_shapes,
            param_names,
        )

    def _take_readout(self, msg: dict) -> None:
        name = self.names.readout
        if msg["value"] is not None:
            raise ValueError(f"the readout {name!r} is observed; only a latent readout can be integrated out.")
        if msg["scale"] is not None:
            raise ValueError(
                f"the prior of readout {name!r} is scaled or in a subsampled plate; only a plain Normal prior can be "
                "integrated out."
            )
        self.prior = normal_parameters(name, "readout", msg["fn"])
        self.readout_shape = tuple(msg["fn"].shape())
        value = jnp.broadcast_to(self.prior[0], self.readout_shape)
        msg["value"] = value if self.displacement is None else value + self.displacement(self.readout_shape)
        msg["stop"] = True

    def _take_observed(self, msg: dict) -> None:
        name = self.names.observed
        if msg["scale"] is not None:
            raise ValueError(
                f"the observed site {name!r} is scaled or in a subsampled plate; the readout can be integrated out of "
                "the full data only. Drop subsample_size, or use the plain model."
            )
        for role in ("readout", "features"):
            if getattr(self.names, role) not in self.seen:
                raise ValueError(
                    f"{role} names the site {getattr(self.names, role)!r}, which must come before the observed site "
                    f"{name!r}; the sites before it are {listing(self.seen[:-1])}."
                )
        if self.readout_shape is None:
            raise ValueError(f"the readout {self.names.readout!r} must be a latent sample site with a Normal prior.")
        shape = tuple(msg["fn"].shape())
        loc, noise_scale = normal_parameters(name, "observed site", msg["fn"])
        if msg["value"] is not None:
            self.observations = msg["value"] = jnp.asarray(msg["value"])
            if self.observations.shape != shape:
                raise ValueError(
                    f"the observations of site {name!r} have shape {self.observations.shape}, but its distribution has "
                    f"{shape}, from a mean {jnp.shape(loc)} and a noise scale {jnp.shape(noise_scale)}; reshape one of "
                    "them."
                )
            check_no_nan(f"observed site {name!r}", self.observations)
            check_no_nan("features", self.features)
        self.likelihood = jnp.broadcast_to(loc, shape), noise_scale


def run_at_draw(
    model: Callable, names: SiteNames, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> ReadoutRun:
    """Run a model at values of its other sites and parameters, the readout at its prior mean, and read it off.

    Raises:
        StoppedRunError: in the place of the model's own ``ValueError`` after its features.
    """
    sites = ReadoutSites(names)
    try:
        others = run_model(model, args, kwargs, values=values, inside=(sites,))
    except ValueError as error:
        if sites.features is None or sites.likelihood is not None or names.observed in sites.seen:
            raise
        raise StoppedRunError(error, sites.features.shape[0]) from error
    others.pop(names.observed, None)
    latent_shapes = tuple((name, tuple(site["fn"].shape())) for name, site in latent_sites(others).items())
    param_names = tuple(name for name, site in others.items() if site["type"] == "param")
    return sites.read_off(latent_shapes, param_names)
