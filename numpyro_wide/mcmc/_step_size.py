"""The step size: a rough one before warmup, and dual averaging on a scale that respects an upper bound.

The dual averaging is NumPyro's. A rule of adaptation has three methods: ``start``, ``update`` and ``step_size``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.infer.hmc_util import dual_averaging

# Hoffman & Gelman 2014 have 0.05. The acceptance of a split trajectory falls from 1 to 0 within a small factor of the
# step; at 0.05 the iterates then swing by factors of ten, and their average settles at a step that is too small.
GAMMA = 0.2
MAX_TRIALS = 60

Averaging = tuple[jax.Array, ...]


def start_averaging(step_size: jax.Array, max_step_size: float | None) -> Averaging:
    """Start the dual averaging, on the real line, at ``step_size``."""
    # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
    return dual_averaging(gamma=GAMMA)[0](to_real_line(step_size, max_step_size) + jnp.log(2.0))


def update_averaging(averaging: Averaging, accept_error: jax.Array) -> Averaging:
    """Learn from one step of warmup, whose acceptance fell short of its target by ``accept_error``."""
    return dual_averaging(gamma=GAMMA)[1](accept_error, averaging)


def averaged_step_size(averaging: Averaging, is_last: jax.Array, max_step_size: float | None) -> jax.Array:
    """Return the step size to go on with: the iterates explore; their average is what warmup leaves behind."""
    return from_real_line(jnp.where(is_last, averaging[1], averaging[0]), max_step_size)


def to_real_line(step_size: jax.Array, max_step_size: float | None) -> jax.Array:
    """Map a step to the real line: its logarithm, or the logit of its ratio to ``max_step_size``.

    Far below the bound the two agree. With the bound, a target at which every proposal is accepted takes
    the step to the bound and no further.
    """
    if max_step_size is None:
        return jnp.log(step_size)
    ratio = jnp.clip(step_size / max_step_size, None, 0.99)  # the bound itself lies at infinity
    return jnp.log(ratio) - jnp.log1p(-ratio)


def from_real_line(real: jax.Array, max_step_size: float | None) -> jax.Array:
    """Invert :func:`to_real_line`."""
    limits = jnp.finfo(jnp.result_type(real))
    if max_step_size is None:
        return jnp.clip(jnp.exp(real), limits.tiny, limits.max)
    return jnp.clip(max_step_size * jax.nn.sigmoid(real), limits.tiny, max_step_size)


def steps_along(length: jax.Array | float, step_size: jax.Array, most: int) -> jax.Array:
    """The number of steps that come nearest to a length, at least one."""
    return jnp.clip(jnp.round(length / step_size), 1, most).astype(jnp.result_type(int))


class AcceptanceRule(NamedTuple):
    """Steer the mean acceptance probability to a target, by dual averaging.

    Attributes:
        target: the mean acceptance probability to reach.
        max_step_size: upper bound of the step size, or None.
    """

    target: float
    max_step_size: float | None

    def start(self, step_size: jax.Array) -> Averaging:
        """Start at a step size."""
        return start_averaging(step_size, self.max_step_size)

    def update(self, averaging: Averaging, accept_prob: jax.Array, square_error: jax.Array) -> Averaging:
        """Learn from one step of warmup."""
        return update_averaging(averaging, self.target - accept_prob)

    def step_size(self, averaging: Averaging, is_last: jax.Array) -> jax.Array:
        """Return the step size to go on with."""
        return averaged_step_size(averaging, is_last, self.max_step_size)


class Search(NamedTuple):
    """Where the search for a first step size is.

    Attributes:
        step_size: of the latest trial.
        heading: 1 to double, −1 to halve; 0 before the first trial, which is made where the search starts.
        latest: the heading that the latest trial asks for.
        num_trials: trials so far.
        rng_key: key of those to come.
    """

    step_size: jax.Array
    heading: jax.Array
    latest: jax.Array
    num_trials: jax.Array
    rng_key: jax.Array


def find_step_size(
    accept_prob_fn: Any,
    step_size: jax.Array,
    threshold: float,
    max_step_size: float | None,
    rng_key: jax.Array,
) -> jax.Array:
    """Double or halve a step size until the acceptance of a single trial crosses ``threshold``.

    Args:
        accept_prob_fn: maps a key and a step size to the acceptance probability of one trial.
        step_size: where the search starts.
        threshold: acceptance probability to cross.
        max_step_size: upper bound of the step size, or None.
        rng_key: key of the trials.

    Returns:
        The first step size on the other side of the threshold, at most ``max_step_size``.
    """
    bound = jnp.inf if max_step_size is None else max_step_size

    def go_on(search: Search) -> jax.Array:
        has_space = (search.step_size < bound) | (search.heading <= 0)
        return (search.latest == search.heading) & has_space & (search.num_trials <= MAX_TRIALS)

    # The trial that finds the heading is one of the loop's: a trial holds a gradient of the model, and what is written
    # twice is compiled twice.
    def trial(search: Search) -> Search:
        rng_key, key_trial = jax.random.split(search.rng_key)
        factor = jnp.where(search.heading == 0, 1.0, jnp.where(search.heading > 0, 2.0, 0.5))
        tried = jnp.minimum(search.step_size * factor, bound)
        latest = jnp.where(accept_prob_fn(key_trial, tried) > threshold, 1, -1)
        heading = jnp.where(search.heading == 0, latest, search.heading)
        return Search(tried, heading, latest, search.num_trials + 1, rng_key)

    none = jnp.array(0)
    return jax.lax.while_loop(go_on, trial, Search(step_size, none, none, none, rng_key)).step_size
