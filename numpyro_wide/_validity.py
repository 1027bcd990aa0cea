"""Validity of a model, computed within a compiled program: whether there is something to say of it.

NumPyro refuses parameters of distributions that are outside of where they may be, and models of ours warn of unusual
numbers, if numbers are known. In a program they are not: there the condition is computed with the rest, and who finds
it false runs the model again so that it can say what is wrong. Data outside of their support need no condition: with
them the density is zero.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution, constraints

from numpyro_wide._checks import is_known
from numpyro_wide._traces import IS_USUAL


def is_valid(sites: dict[str, Any]) -> Array:
    """Tell whether all parameters of distributions are where they may be, and nothing is unusual."""
    found = [condition for site in sites.values() if site["type"] == "sample" for condition in _conditions(site)]
    return jnp.stack([jnp.all(condition) for condition in found] or [jnp.array(True)]).all()


def is_bound(sites: dict[str, Any]) -> bool:
    """Tell whether NumPyro's closures over a model are good for the program alone that traced it.

    They keep parameters, and bounds of supports, of the trace that they were made in.
    """
    kept = [site["value"] for site in sites.values() if site["type"] in ("param", "mutable")]
    kept += [site["fn"].support for site in sites.values() if site["type"] == "sample" and not site["is_observed"]]
    return not all(map(is_known, jax.tree.leaves(kept)))


def _conditions(site: dict[str, Any]) -> Iterator[Array]:
    yield from _of_parameters(site["fn"])
    yield site["infer"].get(IS_USUAL, True)


def _of_parameters(distribution: Distribution) -> Iterator[Array]:
    """Yield the conditions on a distribution's parameters, and on those of the distributions that it is made of."""
    held = vars(distribution)
    for name, constraint in distribution.arg_constraints.items():
        # As in NumPyro: what is not held is computed from what is.
        if held.get(name) is not None and not constraints.is_dependent(constraint):
            yield constraint(held[name])
    for value in held.values():
        if isinstance(value, Distribution):
            yield from _of_parameters(value)
