"""Joint runs of guide and model, site densities, and the check of KL weights, shared by the losses."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import replay, seed, substitute, trace

from numpyro_wide._checks import check_positive, is_known


def check_weight(name: str, value: Any) -> None:
    """Refuse a weight that is not one positive finite number, where it is known already."""
    check_positive(name, value)
    if is_known(value) and not (np.ndim(value) == 0 and np.isrealobj(value) and np.isfinite(value)):
        raise ValueError(f"{name} must be one finite number, which the KL term is multiplied by, but got {value}.")


def run_pair(
    rng_key: Array, params: dict, model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> tuple[dict, dict]:
    """Run the guide, and the model on its draws, with the keys that NumPyro's own losses would take.

    Args:
        rng_key: a PRNG key.
        params: values of the param sites by name.
        model: model, of which the latents take the guide's draws.
        guide: guide.
        args: arguments of both.
        kwargs: keyword arguments of both.

    Returns:
        The traces of guide and model.
    """
    model_key, guide_key = random.split(rng_key)
    guide_trace = trace(substitute(seed(guide, guide_key), data=params)).get_trace(*args, **kwargs)
    mutable = {name: site["value"] for name, site in guide_trace.items() if site["type"] == "mutable"}
    replayed = substitute(replay(seed(model, model_key), guide_trace), data={**params, **mutable})
    return guide_trace, trace(replayed).get_trace(*args, **kwargs)


def log_density(site: dict) -> Array:
    """Sum the log density of a site over its entries, scaled and masked."""
    arguments = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    return jnp.sum(scale_and_mask(site["fn"].log_prob(*arguments), site["scale"]))
