"""Wrapped models: NumPyro models some of whose sites are known by their role."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax import Array

from numpyro_wide._checks import kind_of
from numpyro_wide.linear_gaussian.internal import check_variant
from numpyro_wide.readout._run import ReadoutRun, SiteNames, read_run

Model: TypeAlias = Callable[..., Any]
Draws: TypeAlias = dict[str, Array]


class ReadoutModel(ABC):
    """A NumPyro model whose readout is repriorised or integrated out.

    Attributes:
        fn: the unwrapped model.
        readout: name of the readout's site.
        features: name of the site that holds what the readout multiplies.
        variant: "feature", "data", "data-cholesky" or "auto".
    """

    fn: Model
    readout: str
    features: str
    variant: str

    @property
    def base(self) -> str:
        """Name of the site that is sampled instead of a repriorised readout."""
        return base_name(self.readout)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model."""

    @abstractmethod
    def conjugate_sites(self, args: tuple, kwargs: Mapping[str, Any]) -> SiteNames | None:
        """Return the names of the sites with which the readout can be integrated out; None if it cannot be."""

    @abstractmethod
    def weights(
        self,
        rng_key: Array,
        draws: Draws,
        args: tuple,
        kwargs: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
    ) -> Draws:
        """Return draws of the unwrapped model, readout included.

        Args:
            rng_key: a PRNG key.
            draws: draws of the wrapped model's latent sites, of a chain, a guide or the wide limit, (draw, ...) each.
            args: arguments that the model was fitted with.
            kwargs: keyword arguments that the model was fitted with.
            params: values of the model's param sites.
        """

    def run(self, names: SiteNames, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> ReadoutRun:
        """Run the unwrapped model, at values of all sites but the readout, and read its likelihood and prior."""
        return read_run(self.fn, names, values, args, kwargs)


def check_wrapped(model: Any, remedy: str) -> None:
    """Refuse a model that is no wrapped one.

    Args:
        model: argument that was passed.
        remedy: what to do with other models, in words.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(model, ReadoutModel):
        raise TypeError(f"model must come from collapse_readout or repriorise, but is {kind_of(model)}; {remedy}.")


def check_fit_observed(run: ReadoutRun, observed: str) -> None:
    """Refuse a run with the arguments of the fit whose observed site has no observations.

    Raises:
        ValueError: if it has none.
    """
    if not run.is_observed:
        raise ValueError(
            f"the observed site {observed!r} is not observed with these model_args and model_kwargs; pass those that "
            "the model was fitted on, observations included."
        )


def first_of(draws: Draws) -> Draws:
    """Return the first of some draws."""
    return {name: values[0] for name, values in draws.items()}


def base_name(readout: str) -> str:
    """Return the name of the base site of a repriorised readout."""
    return f"{readout}_base"


def readout_of(base: str) -> str:
    """Return the name of the readout that a base site stands for; any other name as it is."""
    return base.removesuffix(base_name(""))


def adopt_signature(wrapped: Any, fn: Model) -> None:
    """Give a wrapped model the name, the documentation and the signature of the model."""
    vars(wrapped).update(
        {name: getattr(fn, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(fn, name)}, __wrapped__=fn
    )


def bound_arguments(fn: Model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults and extra keywords included; a keyword not given is None."""
    signature = inspect.signature(fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = defaultdict(lambda: None, arguments | arguments.pop(name))
    return arguments


def check_options(fn: Any, variant: str, **names: Any) -> None:
    """Check the arguments of a handler that wraps a model: a model, a known variant, names.

    Raises:
        TypeError: if ``fn`` is given and not callable, or a name is not a string.
        ValueError: for an unknown variant.
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"fn must be a model, a callable, but got {fn!r}.")
    for role, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{role} must be a name, a string, but got {kind_of(name)}.")
    check_variant(variant)
