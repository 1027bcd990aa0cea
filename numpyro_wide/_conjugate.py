"""What the handlers check in a user's model before they rely on it."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import condition, substitute
from numpyro.primitives import _PYRO_STACK


def normal_parameters(site: str, role: str, fn: dist.Distribution) -> tuple[Array, Array]:
    """Loc and scale of a site whose distribution is a Normal, expanded or not.

    Raises:
        ValueError: if it is anything else.
    """
    base = fn
    while isinstance(base, dist.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    if not isinstance(base, dist.Normal):
        remedy = " Leave out the rows that a mask would hide." if isinstance(base, dist.MaskedDistribution) else ""
        raise ValueError(
            f"{role} {site!r} must have a Normal distribution (expand and to_event are welcome), but its distribution "
            f"is {type(base).__name__}.{remedy}"
        )
    return base.loc, base.scale


def check_no_nan(name: str, value: Any) -> None:
    """Refuses NaN, where the numbers are known already."""
    if isinstance(value, jax.core.Tracer):
        return
    # Of an array over several processes, each can look at its own part.
    parts = [np.asarray(value)] if is_at_hand(value) else [np.asarray(part.data) for part in value.addressable_shards]
    num_nan = sum(int(np.isnan(part).sum()) for part in parts)
    if num_nan:
        raise ValueError(f"{name} must not contain NaN, but {num_nan} of its entries do.")


def is_at_hand(value: Any) -> bool:
    """Whether this process can read all of an array's numbers; not so where other processes hold a part."""
    return getattr(value, "is_fully_addressable", True)


def check_readout_shape(site: str, shape: tuple[int, ...], features: Array, targets_shape: tuple[int, ...]) -> None:
    """The readout multiplies the features and gives the targets."""
    if jnp.ndim(features) != 2:
        raise ValueError(f"features must have shape (n, d), but got {jnp.shape(features)}.")
    if not 1 <= len(targets_shape) <= 2 or targets_shape[0] != features.shape[0]:
        raise ValueError(
            f"targets must have shape ({features.shape[0]},) or ({features.shape[0]}, k), one row for each row of the "
            f"features {features.shape}, but got {targets_shape}."
        )
    expected = (features.shape[1], *targets_shape[1:])
    if tuple(shape) != expected:
        one_column = len(shape) == 1 and targets_shape[1:] == (1,)
        remedy = f"give targets of shape ({targets_shape[0]},)" if one_column else "give both the same columns"
        raise ValueError(
            f"readout {site!r} must have shape {expected} to go with features {features.shape} and targets "
            f"{targets_shape}, but it has {tuple(shape)}; {remedy}, or change the readout."
        )


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


def listing(names: Iterable[str]) -> str:
    """Names for an error message."""
    return ", ".join(repr(name) for name in names) or "none"
