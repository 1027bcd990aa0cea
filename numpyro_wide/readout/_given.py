"""What handlers around a model may not set; the only reader of NumPyro's handler stack for that."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpyro
from numpyro.handlers import condition, substitute
from numpyro.primitives import _PYRO_STACK

from numpyro_wide._checks import listing


def active_plates() -> list[numpyro.plate]:
    """The plates that the code at hand stands in."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


@contextmanager
def only_given_values() -> Iterator[None]:
    """Inside, of the handlers around only those that set values are there."""
    outside = list(_PYRO_STACK)
    _PYRO_STACK[:] = [handler for handler in outside if isinstance(handler, condition | substitute)]
    try:
        yield
    finally:
        _PYRO_STACK[:] = outside


def refuse_given_value(site: str, base_site: str) -> None:
    """A repriorised readout is a function of its base site, and cannot be set to something else.

    Raises:
        ValueError: if ``condition`` sets the readout, or ``substitute`` sets it without its base.
    """
    remedy = (
        f"set {base_site!r} to linear_gaussian.readout_inverse_map(features, targets, readout, noise_scale), or "
        "use the model without repriorisation."
    )
    for handler in _PYRO_STACK:
        data = getattr(handler, "data", None) or {}
        if isinstance(handler, condition) and site in data:
            raise ValueError(f"the repriorised readout {site!r} cannot be conditioned on: {remedy}")
        if isinstance(handler, substitute) and site in data and base_site not in data:
            raise ValueError(f"the repriorised readout {site!r} is substituted, but {base_site!r} is not: {remedy}")


def refuse_given_collapsed(site: str) -> None:
    """A readout that is integrated out has no value that could be set.

    Raises:
        ValueError: if ``condition`` or ``substitute`` around the model sets it.
    """
    for handler in _PYRO_STACK:
        if isinstance(handler, condition | substitute) and site in (getattr(handler, "data", None) or {}):
            raise ValueError(
                f"the readout {site!r} is integrated out, and cannot be given a value; use the model without "
                "collapse_readout."
            )


def refuse_base_without_targets(site: str, base_site: str) -> None:
    """Without targets there is no map, and a value of the base site alone would be lost without a word.

    Raises:
        ValueError: if a handler around the model, such as ``Predictive``'s, sets the base site but not the readout.
    """
    if _is_given(base_site) and not _is_given(site):
        raise ValueError(
            f"{base_site!r} is given, but the model is run without targets, where the readout {site!r} is drawn from "
            "its prior. Predict with draws of the readout itself: mcmc.get_samples() holds them, and for a guide "
            "guide_draws(...) gives them."
        )


def refuse_draws_without_readout(site: str, latent_sites: Iterable[str]) -> None:
    """Without observations nothing is integrated out, and the readout would come from its prior without a word.

    Raises:
        ValueError: if a handler around the model, such as ``Predictive``'s, sets other latent sites without it.
    """
    given = [name for name in latent_sites if name != site and _is_given(name)]
    if given and not _is_given(site):
        raise ValueError(
            f"a value of {listing(given)} is given, but the collapsed model is run without observations, where the "
            f"readout {site!r} is drawn from its prior. Predict with ReadoutPredictive(model, draws, model_args), or "
            "put the readout back with its method readout(key) and use the model without collapse_readout."
        )


def _is_given(site: str) -> bool:
    for handler in _PYRO_STACK:
        if not isinstance(handler, substitute):
            continue
        if handler.data is not None and site in handler.data:
            return True
        if handler.substitute_fn is not None:
            # What Predictive substitutes can only be asked for; an initialisation strategy wants more than a name
            # of the site, and gives no value of its own either.
            with suppress(KeyError, TypeError, AttributeError):
                if handler.substitute_fn({"type": "sample", "name": site}) is not None:
                    return True
    return False
