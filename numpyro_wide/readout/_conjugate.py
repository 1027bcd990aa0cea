"""What a readout and its likelihood must be, and what the handlers' options must be."""

from typing import Any

import numpyro.distributions as dist
from jax import Array

from numpyro_wide._traces import unwrap
from numpyro_wide.linear_gaussian import check_variant


def normal_parameters(site: str, role: str, fn: dist.Distribution) -> tuple[Array, Array]:
    """Loc and scale of a site whose distribution is a Normal, expanded or not.

    Raises:
        ValueError: if it is anything else.
    """
    base = unwrap(fn)
    if not isinstance(base, dist.Normal):
        remedy = " Leave out the rows that a mask would hide." if isinstance(base, dist.MaskedDistribution) else ""
        raise ValueError(
            f"{role} {site!r} must have a Normal distribution (expand and to_event are welcome), but its distribution "
            f"is {type(base).__name__}.{remedy}"
        )
    return base.loc, base.scale


def check_options(fn: Any, variant: str, **names: Any) -> None:
    """A model, a known variant, and names.

    Raises:
        TypeError: if ``fn`` is given and not callable, or a name is no string.
        ValueError: for an unknown variant.
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"fn must be a model, a callable, but got {fn!r}.")
    for role, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{role} must be a name, a string, but got a {type(name).__name__}.")
    check_variant(variant)
