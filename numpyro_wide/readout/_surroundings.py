"""Handlers around a model, and what they may not set; the only reader of NumPyro's stack of handlers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpyro
from numpyro.handlers import condition, substitute
from numpyro.primitives import _PYRO_STACK

from numpyro_wide._checks import listing
from numpyro_wide._traces import STACK_LOCK


def active_plates() -> list[numpyro.plate]:
    """Return the plates around the calling code."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


@contextmanager
def only_given_values() -> Iterator[None]:
    """Take away all handlers around but those that set values, for as long as the context lasts."""
    # The stack is one for all threads, so it must not be exchanged while another runs a model.
    with STACK_LOCK:
        outside = list(_PYRO_STACK)
        _PYRO_STACK[:] = [handler for handler in outside if isinstance(handler, condition | substitute)]
        try:
            yield
        finally:
            _PYRO_STACK[:] = outside


def refuse_given_value(site: str, base_site: str) -> None:
    """Refuse a value of a repriorised readout, which is a function of its base site.

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
    """Refuse a value of a readout that is integrated out: it has none.

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
    """Refuse a value of the base site alone where there are no targets: without a map it would be lost silently.

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
    """Refuse values of other sites without one of the readout where there are no observations.

    Nothing is integrated out then, and the readout would silently come from its prior.

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
