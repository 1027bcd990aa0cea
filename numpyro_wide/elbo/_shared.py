"""What the losses share: running guide and model together, and checking a weight."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.distributions.util import scale_and_mask
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.util import not_jax_tracer


def check_positive(value: Any, name: str) -> None:
    """Refuse what is not a positive finite number, unless it is traced."""
    if not_jax_tracer(value) and not (np.ndim(value) == 0 and np.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive finite number, got {value}; the KL term needs a positive weight.")


def run_pair(
    rng_key: jax.Array, params: dict, model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> tuple[dict, dict]:
    """Traces of the guide and of the model replayed on its draws."""
    model_key, guide_key = random.split(rng_key)
    guide_trace = trace(substitute(seed(guide, guide_key), data=params)).get_trace(*args, **kwargs)
    mutable = {name: site["value"] for name, site in guide_trace.items() if site["type"] == "mutable"}
    replayed = substitute(replay(seed(model, model_key), guide_trace), data={**params, **mutable})
    return guide_trace, trace(replayed).get_trace(*args, **kwargs)


def log_density(site: dict) -> jax.Array:
    """Scaled log density of a site, summed."""
    arguments = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    return jnp.sum(scale_and_mask(site["fn"].log_prob(*arguments), site["scale"]))
