"""The models that the handlers give: one with its readout repriorised, and one with it integrated out."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from jax.typing import ArrayLike
from numpyro.handlers import reparam
from numpyro.primitives import Messenger

from numpyro_wide._conjugate import (
    listing,
    refuse_base_without_targets,
    refuse_draws_without_readout,
    refuse_given_collapsed,
)
from numpyro_wide._readout_sites import ReadoutSites, check_conjugacy, is_tracing, sample_sites
from numpyro_wide.distributions import ReadoutMarginal
from numpyro_wide.reparam import ReprioriseReadout

Model = Callable[..., Any]


class RepriorisedModel:
    """A model with its readout repriorised: what :func:`~numpyro_wide.repriorise` gives."""

    def __init__(
        self,
        fn: Model,
        *,
        readout: str,
        features: str,
        targets: str,
        noise_scale: str | ArrayLike | None,
        surrogate: Callable[[Any], tuple[ArrayLike, ArrayLike]] | None,
        regulariser: ArrayLike | Callable[[ArrayLike], ArrayLike] | None,
        variant: str,
    ):
        self.fn = fn
        self.readout = readout
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.surrogate = surrogate
        self.regulariser = regulariser
        self.variant = variant
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, repriorised if it is given targets."""
        arguments = _bound_arguments(self.fn, args, kwargs)
        if self.targets not in arguments and not isinstance(arguments, defaultdict):
            raise ValueError(
                f"targets names the argument {self.targets!r}, which the model does not have; "
                f"its arguments are {listing(arguments)}. Make the targets an argument, or repriorise the readout "
                "inside the model with ReprioriseReadout."
            )
        if arguments[self.targets] is None:
            refuse_base_without_targets(self.readout, f"{self.readout}_base")
            return self.fn(*args, **kwargs)

        sites = _SiteValues(hidden=self.features, base=f"{self.readout}_base")
        with sites, reparam(config=partial(self._reparam, arguments, sites)):
            result = self.fn(*args, **kwargs)
        if self.readout not in sites.values:
            raise ValueError(
                f"readout names the sample site {self.readout!r}, which the model does not have; "
                f"its sites are {listing(sites.values)}."
            )
        if f"{self.readout}_base" not in sites.values:
            raise ValueError(f"the readout {self.readout!r} must be a latent sample site with a Normal prior.")
        return result

    def _reparam(self, arguments: dict[str, Any], sites: "_SiteValues", msg: dict) -> ReprioriseReadout | None:
        if msg["name"] != self.readout:
            return None
        targets: Any = arguments[self.targets]
        noise_scale: Any = self.noise_scale
        if self.surrogate is not None:
            targets, noise_scale = self.surrogate(targets)
        elif isinstance(noise_scale, str):
            given = arguments.get(noise_scale)
            noise_scale = self._preceding(sites, "noise_scale") if given is None else given
        return ReprioriseReadout(
            self._preceding(sites, "features"),
            targets,
            noise_scale,
            regulariser=self.regulariser,
            variant=self.variant,
        )

    def _preceding(self, sites: "_SiteValues", role: str) -> Any:
        name = getattr(self, role)
        if name not in sites.values:
            raise ValueError(
                f"{role} names the site {name!r}, which must come before the readout {self.readout!r} in the model; "
                f"the sites before it are {listing(sites.values)}."
            )
        return sites.values[name]


class CollapsedModel:
    """A model with its readout integrated out: what :func:`~numpyro_wide.collapse_readout` gives."""

    def __init__(self, fn: Model, *, readout: str, features: str, observed: str, variant: str):
        self.fn = fn
        self.readout = readout
        self.features = features
        self.observed = observed
        self.variant = variant
        self._is_checked = False
        self._moves_with_readout: set[str] = set()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, collapsed if its observed site is observed."""
        is_observed = sample_sites(self.fn, args, kwargs)
        if self.observed not in is_observed:
            raise ValueError(
                f"observed names the sample site {self.observed!r}, which the model does not have; "
                f"its sample sites are {listing(is_observed)}."
            )
        if not is_observed[self.observed]:
            refuse_draws_without_readout(self.readout, [site for site, seen in is_observed.items() if not seen])
            return self.fn(*args, **kwargs)
        refuse_given_collapsed(self.readout)
        if not self._is_checked and not is_tracing():
            self._moves_with_readout = check_conjugacy(self, args, kwargs)
            self._is_checked = True

        sites = _Marginalise(self)
        sites.hide(self._moves_with_readout)
        with sites:
            result = self.fn(*args, **kwargs)
        sites.check_complete()
        return result


class _SiteValues(Messenger):
    """Keeps the values of all sites, and ``hidden`` from every handler outside; refuses a part of the data."""

    def __init__(self, hidden: str, base: str):
        self.hidden = hidden
        self.base = base
        self._names: list[str | None] = []  # of the sites at hand, before a handler outside renames them
        self.values: dict[str, Any] = {}
        super().__init__()

    def process_message(self, msg: dict) -> None:
        self._names.append(msg.get("name"))
        if msg["type"] == "plate" and msg["args"][1] not in (None, msg["args"][0]):
            size, subsample_size = msg["args"]
            raise ValueError(
                f"the plate {msg['name']!r} takes {subsample_size} of {size} rows, and a repriorised readout would be "
                "another one for each minibatch; drop subsample_size, or use the model without repriorise."
            )
        if msg.get("name") == self.base and msg["scale"] is not None:
            raise ValueError(
                f"the prior of the readout that {self.base!r} stands for is scaled inside the model, and the map's "
                "log-determinant would be scaled with it; take the readout out of the scale handler."
            )
        if msg["type"] == "deterministic" and msg["name"] == self.hidden:
            msg["stop"] = True

    def postprocess_message(self, msg: dict) -> None:
        name = self._names.pop()
        if name is not None:
            self.values[name] = msg["value"]


class _Marginalise(ReadoutSites):
    """Puts the marginal in the place of the observed site's Normal."""

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and msg["name"] == self.observed:
            msg["fn"] = ReadoutMarginal(
                self.features_value, self.loc, self.noise_scale, self.prior_scale, variant=self.variant
            )
            # The rows are no longer independent, whatever plates surround them.
            msg["cond_indep_stack"] = []


def _bound_arguments(fn: Model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by name, defaults and extra keywords included; a keyword not given is None."""
    signature = inspect.signature(fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = defaultdict(lambda: None, arguments | arguments.pop(name))
    return arguments
