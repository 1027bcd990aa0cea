"""What the losses share: running guide and model together, and what a weight of the KL must be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import replay, seed, substitute, trace

from numpyro_wide._checks import check_positive, is_known


def check_weight(name: str, value: Any) -> None:
    """Refuse what is not one positive finite number, where it is known already."""
    check_positive(name, value)
    if is_known(value) and not (np.ndim(value) == 0 and np.isfinite(value)):
        raise ValueError(f"{name} must be one finite number, which the KL term is multiplied by, but got {value}.")


def run_pair(
    rng_key: jax.Array, params: dict, model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> tuple[dict, dict]:
    """Traces of the guide and of the model replayed on its draws, by NumPyro's own stack, key by key."""
    model_key, guide_key = random.split(rng_key)
    guide_trace = trace(substitute(seed(guide, guide_key), data=params)).get_trace(*args, **kwargs)
    mutable = {name: site["value"] for name, site in guide_trace.items() if site["type"] == "mutable"}
    replayed = substitute(replay(seed(model, model_key), guide_trace), data={**params, **mutable})
    return guide_trace, trace(replayed).get_trace(*args, **kwargs)


def log_density(site: dict) -> jax.Array:
    """Scaled log density of a site, summed."""
    arguments = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    return jnp.sum(scale_and_mask(site["fn"].log_prob(*arguments), site["scale"]))
