"""Reads the conjugate readout off a run of a model, and checks that it is one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.handlers import block, condition, seed, substitute, trace
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_wide._conjugate import check_no_nan, check_readout_shape, listing, normal_parameters

if TYPE_CHECKING:
    from numpyro_wide._wrapped_models import CollapsedModel


class ReadoutSites(Messenger):
    """Takes the readout and features sites out of a model's run, and notes what its likelihood is made of.

    The readout is set to its prior mean, or to ``displacement`` from it.

    Attributes:
        features_value: (n, d).
        prior_loc, prior_scale: of the readout; broadcast against (d,) or (d, k).
        loc, noise_scale: of the observed site; loc is that at the readout's value.
        value: of the observed site, or None.
    """

    def __init__(self, model: "CollapsedModel", displacement: Callable[[tuple[int, ...]], Array] | None = None):
        self.readout = model.readout
        self.features = model.features
        self.observed = model.observed
        self.variant = model.variant
        self.displacement = displacement
        self.seen: list[str] = []
        self.hidden = {model.features}
        self.readout_shape: tuple[int, ...] | None = None
        super().__init__()

    def process_message(self, msg: dict) -> None:
        name = msg.get("name")
        if name is None or msg["type"] == "plate":
            return
        self.seen.append(name)
        if name in self.hidden and msg["type"] == "deterministic":
            msg["stop"] = True
        elif msg["type"] == "sample" and name == self.readout:
            self._take_readout(msg)
        elif msg["type"] == "sample" and name == self.observed:
            self._take_observed(msg)

    def postprocess_message(self, msg: dict) -> None:
        if msg.get("name") == self.features and msg["type"] != "plate":
            self.features_value = jnp.asarray(msg["value"])

    def check_complete(self) -> None:
        """Every named site has occurred."""
        for role in ("readout", "features", "observed"):
            if getattr(self, role) not in self.seen:
                raise ValueError(
                    f"{role} names the site {getattr(self, role)!r}, which the model does not have; "
                    f"its sites are {listing(self.seen)}."
                )

    def hide(self, names: set[str]) -> None:
        """Keeps these deterministic sites, too, from every handler outside."""
        self.hidden |= names

    def _take_readout(self, msg: dict) -> None:
        if msg["value"] is not None:
            raise ValueError(f"the readout {self.readout!r} is observed; only a latent readout can be integrated out.")
        if msg["scale"] is not None:
            raise ValueError(
                f"the prior of readout {self.readout!r} is scaled or in a subsampled plate; only a plain Normal prior "
                "can be integrated out."
            )
        self.prior_loc, self.prior_scale = normal_parameters(self.readout, "readout", msg["fn"])
        self.readout_shape = tuple(msg["fn"].shape())
        value = jnp.broadcast_to(self.prior_loc, self.readout_shape)
        msg["value"] = value if self.displacement is None else value + self.displacement(self.readout_shape)
        msg["stop"] = True

    def _take_observed(self, msg: dict) -> None:
        if msg["scale"] is not None:
            raise ValueError(
                f"the observed site {self.observed!r} is scaled or in a subsampled plate; the readout can be "
                "integrated out of the full data only. Drop subsample_size, or use the plain model."
            )
        for role in ("readout", "features"):
            if getattr(self, role) not in self.seen:
                raise ValueError(
                    f"{role} names the site {getattr(self, role)!r}, which must come before the observed site "
                    f"{self.observed!r}; the sites before it are {listing(self.seen[:-1])}."
                )
        if self.readout_shape is None:
            raise ValueError(f"the readout {self.readout!r} must be a latent sample site with a Normal prior.")
        shape = tuple(msg["fn"].shape())
        loc, noise_scale = normal_parameters(self.observed, "observed site", msg["fn"])
        self.value = msg["value"]
        if self.value is not None:
            self.value = msg["value"] = jnp.asarray(self.value)
            if self.value.shape != shape:
                raise ValueError(
                    f"the observations of site {self.observed!r} have shape {self.value.shape}, but its distribution "
                    f"has {shape}, from a mean {jnp.shape(loc)} and a noise scale {jnp.shape(noise_scale)}; reshape "
                    "one of them."
                )
            check_no_nan(f"observed site {self.observed!r}", self.value)
            check_no_nan("features", self.features_value)
        check_readout_shape(self.readout, self.readout_shape, self.features_value, shape)
        self.loc = jnp.broadcast_to(loc, shape)
        self.noise_scale = noise_scale


def sample_sites(fn: Callable, args: tuple, kwargs: dict) -> dict[str, bool]:
    """The sample sites of a call of the model and whether each is observed, found by an abstract run.

    Of the handlers around the call, those that set values count; the run is hidden from all others.
    """
    is_observed: dict[str, bool] = {}

    def run() -> None:
        sites = trace(seed(fn, jax.random.key(0))).get_trace(*args, **kwargs)
        is_observed.update({k: site["is_observed"] for k, site in sites.items() if site["type"] == "sample"})

    outside = list(_PYRO_STACK)
    _PYRO_STACK[:] = [handler for handler in outside if isinstance(handler, condition | substitute)]
    try:
        jax.eval_shape(run)
    finally:
        _PYRO_STACK[:] = outside
    return is_observed


def is_tracing() -> bool:
    """Whether JAX is tracing, so that numbers are not known."""
    return isinstance(jnp.zeros(()) + 0, jax.core.Tracer)


def check_conjugacy(model: "CollapsedModel", args: tuple, kwargs: dict) -> set[str]:
    """Compares two runs that differ in the readout alone.

    Returns:
        The deterministic sites that move with the readout, and mean nothing once it is integrated out.

    Raises:
        ValueError: if the observed mean does not move by features @ (change of the readout), or the noise or another
            site's distribution moves too.
    """

    def run(displacement: Callable | None, values: dict[str, Array]) -> tuple[ReadoutSites, dict[str, dict]]:
        sites = ReadoutSites(model, displacement)
        with block(), trace() as others, seed(rng_seed=jax.random.key(0)), substitute(data=values), sites:
            model.fn(*args, **kwargs)
        sites.check_complete()
        others.pop(model.observed)
        return sites, others

    def random_displacement(shape: tuple[int, ...]) -> Array:
        return jax.random.normal(jax.random.key(1), shape)

    try:
        base, base_others = run(None, {})
    except NotImplementedError:  # a prior that cannot be sampled, such as ImproperUniform
        return set()
    samples = {name: site for name, site in base_others.items() if site["type"] == "sample"}
    moved, moved_others = run(random_displacement, {name: site["value"] for name, site in samples.items()})
    if isinstance(moved.loc, jax.core.Tracer):  # a batch of arguments under vmap, say
        return set()
    expected = base.features_value @ random_displacement(base.readout_shape or ())
    # By JAX, not NumPy: the numbers may be spread over several processes.
    if not jnp.allclose(moved.loc - base.loc, expected, rtol=0, atol=1e-2 * float(jnp.abs(expected).max()) + 1e-6):
        raise ValueError(
            f"the mean of observed site {model.observed!r} must be features @ readout plus terms without the readout, "
            f"but a change of {model.readout!r} moves it by something else than {model.features!r} times that change. "
            "Record the features as they are multiplied by the readout, with their scale and bias column."
        )
    if not jnp.allclose(moved.noise_scale, base.noise_scale, rtol=1e-4):
        raise ValueError(
            f"the noise of observed site {model.observed!r} depends on the readout {model.readout!r}, which can then "
            "not be integrated out; use repriorise instead."
        )
    for name, site in samples.items():
        before, after = (one["fn"].log_prob(site["value"]) for one in (site, moved_others[name]))
        if not jnp.allclose(before, after, rtol=1e-4, atol=1e-4):
            raise ValueError(
                f"the distribution of site {name!r} depends on the readout {model.readout!r}, which can then not be "
                "integrated out; use repriorise instead."
            )
    return {
        name
        for name, site in base_others.items()
        if site["type"] == "deterministic" and not _is_equal(site["value"], moved_others[name]["value"])
    }


def _is_equal(one: Any, other: Any) -> bool:
    return all(map(jnp.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))
