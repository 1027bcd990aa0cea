"""Models with a readout: one run read by the names of their sites, and handlers around it."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import condition, do, substitute
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_wide._checks import as_floats, check_names_known, check_no_nan, kind_of, listing
from numpyro_wide._traces import STACK_LOCK, run_model, unwrap
from numpyro_wide.linear_gaussian._problem import STATIC, ReadoutProblem, check_variant
from numpyro_wide.linear_gaussian._row_blocks import BlockedProblem, RowFeatures, as_features, first_block

Model: TypeAlias = Callable[..., object]
Draws: TypeAlias = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReadoutRun:
    """Likelihood and prior of a readout, as one run of a model with the readout at its prior mean shows them."""

    features: Array | RowFeatures  # Ψ, (n, d)
    loc: Array  # mean of the observed site, (n,) or (n, k)
    observations: Array | None  # like ``loc``, if there are any
    noise_scale: Array  # standard deviation of the model's Normal; broadcasts against ``loc``
    prior_loc: Array  # (d,) or (d, k)
    prior_scale: Array  # broadcasts against ``prior_loc``
    readout: str = field(metadata=STATIC)
    variant: str = field(metadata=STATIC)

    @property
    def is_observed(self) -> bool:
        return self.observations is not None

    @property
    def residual(self) -> Array:
        """Observations less their mean; the mean where there are none."""
        return self.loc if self.observations is None else self.observations - self.loc

    def prior_size(self) -> Array:
        """Return the root mean square of features @ readout under the readout's prior, by the first rows of blocks."""
        squares = jnp.square(first_block(self.features))
        return jnp.sqrt(jnp.mean(squares @ jnp.broadcast_to(self.prior_scale**2, self.prior_loc.shape)))

    def problem(self) -> Any:
        """Return the readout's problem less its prior mean, which ``loc`` holds."""
        args = self.residual, self.noise_scale
        problem: ReadoutProblem | BlockedProblem
        if isinstance(self.features, RowFeatures):
            problem = BlockedProblem.of(self.features, *args, self.prior_scale)
        else:
            problem = ReadoutProblem.of(self.features, *args, variant=self.variant, prior_scale=self.prior_scale)
        problem.check_readout(f"readout {self.readout!r}", self.prior_loc.shape)
        return problem


class SiteRecorder(Messenger):
    """Handler that keeps the values of a run's sites, by the names that the model gives them."""

    def __init__(self, hidden: Iterable[str]):
        self.hidden = frozenset(hidden)
        self.values: dict[str, Any] = {}
        self.open_sites: list[str | None] = []  # begun and not ended: sites nest
        super().__init__()

    def process_message(self, msg: dict) -> None:
        name = msg.get("name")
        self.open_sites.append(None if msg["type"] == "plate" else name)
        if msg["type"] == "deterministic" and name in self.hidden:
            msg["stop"] = True

    def postprocess_message(self, msg: dict) -> None:
        name = self.open_sites.pop()
        if name is not None:
            self.values[name] = msg["value"]

    def value_before(self, role: str, name: str, where: str) -> Any:
        """Return the value of the site that ``role`` names, which must have come before ``where``."""
        if name not in self.values:
            remedy = f" Record it by numpyro.deterministic({name!r}, ...)." if role == "features" else ""
            raise ValueError(
                f"{role} names the site {name!r}, which must come before {where} in the model; the sites before it are "
                f"{listing(self.values)}.{remedy}"
            )
        return self.values[name]


class ReadoutSites(SiteRecorder):
    """Handler that takes readout and features out of a model's run, and records its likelihood.

    Their faults are raised by ``read_off``: a run without observations need not be right.
    """

    def __init__(
        self,
        model: "ReadoutModel",
        step: Array | None = None,
        hidden: Iterable[str] = (),
        keys: Iterable[Array] | None = None,
    ):
        super().__init__({model.features, *hidden})
        self.model = model
        self.step = step  # of the readout from its prior mean, along ``direction``
        self.direction: Array | None = None  # a draw of the prior less its mean
        self.prior: tuple[Array, Array] | None = None  # its location of the readout's shape
        self.likelihood: tuple[Array, Array] | None = None
        self.observations: Array | None = None
        self.other_sites: dict[str, tuple[dist.Distribution, Any]] = {}  # sample sites: distribution and scale
        self.is_observed: dict[str, bool] = {}  # the sample sites
        self.error: ValueError | None = None
        self.fixed_sites: set[str | None] = set()  # whose value the model itself sets
        self.keys: list[Array] = []
        self._replayed = None if keys is None else iter(keys)

    @property
    def free_values(self) -> dict[str, object]:
        """Values of the sites that come from outside of the model: draws and parameters."""
        return {name: value for name, value in self.values.items() if name not in self.fixed_sites}

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        name = msg.get("name")
        # Sites of a scan come with their values, drawn or not.
        if msg["is_observed"] if msg["type"] == "sample" else msg["value"] is not None:
            self.fixed_sites.add(name)
        if msg["type"] == "row_features" and msg["site"] == self.model.features:
            msg["value"] = msg["stop"] = True
        elif msg["type"] == "prng_key" and self._replayed is not None:
            msg["kwargs"]["rng_key"], msg["stop"] = next(self._replayed), True
        elif msg["type"] == "sample" and name == self.model.readout:
            self._note(self._take_readout, msg)
        elif msg["type"] == "sample" and name == self.model.observed:
            self._note(self._take_likelihood, msg)
        elif msg["type"] == "sample" and len(self.open_sites) == 1:  # of the model: handlers have sites, too
            self.other_sites[msg["name"]] = msg["fn"], msg["scale"]

    def postprocess_message(self, msg: dict) -> None:
        name = self.open_sites[-1]
        super().postprocess_message(msg)
        if msg["type"] == "prng_key":  # drawn outside of sites
            self.keys.append(msg["value"])
        elif msg["type"] == "sample" and not self.open_sites:
            self.is_observed[name] = msg["is_observed"]  # type: ignore[index]
            if name == self.model.observed and msg["is_observed"]:
                self._note(self._take_observations, msg)

    def read_off(self) -> ReadoutRun:
        """Return the run, once every named site has come; raise what is wrong with it."""
        if self.error is not None:
            raise self.error
        if self.likelihood is None or self.prior is None:
            for role in ("readout", "features", "observed"):
                check_names_known(role, getattr(self.model, role), self.values)
            raise ValueError(f"the observed site {self.model.observed!r} must be a sample site.")
        loc, noise_scale = self.likelihood
        observations = self.observations
        if observations is not None:
            names = f"the values of {self.model.observed!r}", "its mean"
            observations, loc = as_floats(observations, loc, names=names)
        return ReadoutRun(
            as_features(self.values[self.model.features]),
            loc,
            observations,
            noise_scale,
            *self.prior,
            self.model.readout,
            self.model.variant,
        )

    def _note(self, take: Callable[[dict], None], msg: dict) -> None:
        try:
            take(msg)
        except ValueError as error:
            self.error = self.error or error

    def _take_readout(self, msg: dict) -> None:
        name = self.model.readout
        if msg["value"] is not None:
            raise ValueError(f"the readout {name!r} is observed; only a latent readout can be integrated out.")
        if msg["scale"] is not None:
            raise ValueError(
                f"the prior of readout {name!r} is scaled or in a subsampled plate; only a plain Normal prior can be "
                "integrated out."
            )
        loc, scale = normal_parameters(name, "readout", msg["fn"])
        shape = tuple(msg["fn"].shape())
        (loc,) = as_floats(loc)
        self.prior = jnp.broadcast_to(loc, shape), scale  # which stays a number where it is one
        value = self.prior[0]
        if self.step is not None:
            draw = np.random.default_rng(0).standard_normal(shape).astype(loc.dtype)
            self.direction = jnp.broadcast_to(jnp.asarray(scale, loc.dtype), shape) * draw
            value = value + self.step.astype(loc.dtype) * self.direction
        msg["value"], msg["stop"] = value, True
        self.fixed_sites.add(name)

    def _take_likelihood(self, msg: dict) -> None:
        name = self.model.observed
        refuse_scaled(name, msg)
        for role in ("readout", "features"):
            self.value_before(role, getattr(self.model, role), f"the observed site {name!r}")
        if self.prior is None:
            refuse_other_readout(self.model.readout, self.values)
        shape = tuple(msg["fn"].shape())
        loc, noise_scale = normal_parameters(name, "observed site", msg["fn"])
        self.likelihood = jnp.broadcast_to(loc, shape), noise_scale

    def _take_observations(self, msg: dict) -> None:
        if self.likelihood is None:  # which has been refused
            return
        name, features, shape = self.model.observed, self.values[self.model.features], self.likelihood[0].shape
        self.observations = jnp.asarray(msg["value"])
        if self.observations.shape != shape:
            loc, noise_scale = normal_parameters(name, "observed site", msg["fn"])
            raise ValueError(
                f"the observations of site {name!r} have shape {self.observations.shape}, but its distribution has "
                f"{shape}, from a mean {jnp.shape(loc)} and a noise scale {jnp.shape(noise_scale)}. For "
                "targets (n,) the readout is (width,), and for (n, k) it is (width, k)."
            )
        check_no_nan(f"observed site {name!r}", msg["value"])
        if not isinstance(features, RowFeatures):
            check_no_nan("features", features)


def refuse_other_readout(name: str, sites: Iterable[str]) -> NoReturn:
    """Refuse a readout that is none of the sites, or no site of the right kind."""
    check_names_known("readout", name, sites)
    raise ValueError(f"the readout {name!r} must be a latent sample site with a Normal prior.")


def refuse_scaled(name: str, msg: dict) -> None:
    """Refuse an observed site whose log density is scaled: that of rows without their covariance is another one."""
    if msg["scale"] is not None:
        raise ValueError(
            f"the observed site {name!r} is scaled or in a subsampled plate; the readout can be integrated out of "
            "all rows only. Drop subsample_size and handlers.scale, or use the unwrapped model."
        )


def normal_parameters(site: str, role: str, fn: dist.Distribution) -> tuple[Array, Array]:
    """Return loc and scale of a site whose distribution is ``Normal`` itself, expanded or not."""
    base = unwrap(fn)
    if type(base) is not dist.Normal:  # a subclass may have a log density of its own
        remedy = " Give it a Normal prior, or sample the unwrapped model."
        if role == "observed site" and type(base) is dist.MaskedDistribution:
            remedy = " Leave out masked rows."
        elif role == "observed site":
            remedy = " For another likelihood use repriorise(..., surrogate=fitted_surrogate(...))."
        raise ValueError(
            f"{role} {site!r} must have a Normal distribution (expand and to_event are welcome, subclasses of Normal "
            f"are not), but its distribution is {type(base).__name__}.{remedy}"
        )
    return base.loc, base.scale


@dataclass(eq=False)
class ReadoutModel:
    """A NumPyro model and the sites of its readout, which a subclass repriorises or integrates out.

    Attributes:
        fn: the unwrapped model.
        readout: name of the readout's site.
        features: name of the site that holds what the readout multiplies.
        variant: "feature", "data", "data-cholesky" or "auto".
        observed: name of the observed site, where that is known.
    """

    fn: Model
    readout: str
    features: str
    variant: str = "auto"
    observed: Any = None
    is_collapsed = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn must be a model, a callable, but got {self.fn!r}.")
        for role in ("readout", "features", "observed", "targets"):
            name = getattr(self, role, None)
            if not isinstance(name, str | None):
                raise TypeError(f"{role} must be a name, a string, but got {kind_of(name)}.")
        check_variant(self.variant)
        functools.update_wrapper(self, self.fn, updated=())

    @property
    def base(self) -> str:
        """Name of the site that is sampled instead of a repriorised readout."""
        return base_name(self.readout)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the wrapped model."""
        return self.fn(*args, **kwargs)


def read_sites(
    model: ReadoutModel, values: Mapping[str, object], args: tuple, kwargs: Mapping[str, object], **options: Any
) -> ReadoutSites:
    """Run a model, hidden from all handlers, at values of its other sites; ``options`` are those of ReadoutSites."""
    sites = ReadoutSites(model, **options)
    run_model(model.fn, args, kwargs, values=values, inside=(sites,))
    return sites


def check_wrapped(model: object, remedy: str) -> None:
    """Refuse a model that is no wrapped one; ``remedy`` says what to do with others."""
    if not isinstance(model, ReadoutModel):
        raise TypeError(f"model must come from collapse_readout or repriorise, but is {kind_of(model)}; {remedy}.")


def as_call(model_args: object, model_kwargs: Mapping[str, object] | None, order: str) -> tuple[tuple, dict]:
    if not isinstance(model_args, tuple | list):
        raise TypeError(
            f"model_args must be a tuple of what the model is fitted on, but is {kind_of(model_args)}; the order is "
            f"{order}."
        )
    return tuple(model_args), dict(model_kwargs or {})


def check_fit_observed(observed: str | None, latent: Mapping[str, object]) -> None:
    """Refuse an observed site that is latent with the arguments of the fit."""
    if observed in latent:
        raise ValueError(
            f"the observed site {observed!r} is not observed with these model_args and model_kwargs; pass those that "
            "the model was fitted on, observations included."
        )


def first_draw(draws: Draws) -> Draws:
    """Return the first draw of every site."""
    return {name: values[0] for name, values in draws.items()}


def base_name(readout: str) -> str:
    return f"{readout}_base"


@contextmanager
def only_value_handlers() -> Iterator[None]:
    """Hide all outer handlers but those that set values, while the context lasts."""
    # The stack is one for all threads, so it must not be exchanged while another runs a model.
    with STACK_LOCK:
        outer_handlers = list(_PYRO_STACK)
        _PYRO_STACK[:] = [handler for handler in outer_handlers if isinstance(handler, condition | substitute)]
        try:
            yield
        finally:
            _PYRO_STACK[:] = outer_handlers


def refuse_given_readout(site: str, remedy: str, base_site: str | None = None) -> None:
    """Refuse a value of a readout that is no latent site, unless there is one of its base site."""
    for handler in _PYRO_STACK:
        has_base = isinstance(handler, substitute) and _sets(handler, base_site)
        if isinstance(handler, condition | do | substitute) and not has_base and _sets(handler, site):
            raise ValueError(f"the readout {site!r} cannot be given a value: {remedy}.")


def refuse_prior_readout(site: str, latent_sites: Iterable[str]) -> None:
    """Refuse values of other sites without one of the readout, which would silently come from its prior."""
    substituted = [name for name in latent_sites if name != site and _is_substituted(name)]
    if substituted and not _is_substituted(site):
        raise ValueError(
            f"a value of {listing(substituted)} is given, but the model is run without observations, where the readout "
            f"{site!r} is drawn from its prior. Predict with ReadoutPredictive(model, draws, model_args); guide_draws "
            "gives a guide's draws."
        )


def _is_substituted(site: str) -> bool:
    return any(isinstance(handler, substitute) and _sets(handler, site) for handler in _PYRO_STACK)


def _sets(handler: Messenger, site: str | None) -> bool:
    """Return whether a handler sets the value of a site."""
    if handler.data is not None:
        return site in handler.data
    # Only the function knows what Predictive substitutes; an initialisation strategy needs more than the name of a
    # site, and sets no value either.
    with suppress(KeyError, TypeError, AttributeError):
        fn = handler.condition_fn if isinstance(handler, condition) else handler.substitute_fn
        return fn({"type": "sample", "name": site}) is not None
    return False
