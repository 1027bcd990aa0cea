"""The step size: a rough one before warmup, and dual averaging on a scale that respects an upper bound.

The dual averaging is NumPyro's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.hmc_util import dual_averaging

from numpyro_wide.mcmc._adaptation import Lesson
from numpyro_wide.mcmc._rounding import LEAST, Rounding

# Hoffman & Gelman 2014 have 0.05. The acceptance of a split trajectory falls from 1 to 0 within a small factor of the
# step; at 0.05 the iterates then swing by factors of ten, and their average settles at a step that is too small.
GAMMA = 0.2
MAX_TRIALS = 60
# More steps than any trajectory has.
ENDLESS = 2**20
# Where acceptance does not fall with the step, the step grows as if acceptance were so far above its target.
LIFT = 0.5

Averaging = tuple[Array, ...]


def start_averaging(step_size: Array, max_step_size: float | None) -> Averaging:
    """Start the dual averaging, on the real line, at ``step_size``."""
    # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
    return dual_averaging(gamma=GAMMA)[0](to_real_line(step_size, max_step_size) + jnp.log(2.0))


def update_averaging(averaging: Averaging, accept_error: Array) -> Averaging:
    """Learn from one step of warmup, whose acceptance fell short of its target by ``accept_error``."""
    return dual_averaging(gamma=GAMMA)[1](accept_error, averaging)


def averaged_step_size(averaging: Averaging, is_last: Array, max_step_size: float | None) -> Array:
    """Return the step size to continue with: the iterates explore; their average is what warmup leaves behind."""
    return from_real_line(jnp.where(is_last, averaging[1], averaging[0]), max_step_size)


def to_real_line(step_size: Array, max_step_size: float | None) -> Array:
    """Map a step to the real line: its logarithm, or the logit of its ratio to ``max_step_size``.

    Far below the bound the two agree. With the bound, a target at which every proposal is accepted takes
    the step to the bound and no further.
    """
    if max_step_size is None:
        return jnp.log(step_size)
    ratio = jnp.clip(step_size / max_step_size, None, 0.99)  # the bound itself lies at infinity
    return jnp.log(ratio) - jnp.log1p(-ratio)


def from_real_line(real: Array, max_step_size: float | None) -> Array:
    """Invert :func:`to_real_line`."""
    limits = jnp.finfo(jnp.result_type(real))
    if max_step_size is None:
        return jnp.clip(jnp.exp(real), limits.tiny, limits.max)
    return jnp.clip(max_step_size * jax.nn.sigmoid(real), limits.tiny, max_step_size)


def steps_along(length: Array | float, step_size: Array, most: int = ENDLESS) -> Array:
    """Return the number of steps that come nearest to a length, at least one and at most ``most``."""
    return jnp.clip(jnp.round(length / step_size), 1, most).astype(jnp.result_type(int))


class AcceptanceRule(NamedTuple):
    """Rule that steers the mean acceptance probability to a target, by dual averaging.

    Attributes:
        target: mean acceptance probability to reach, in (0, 1).
        max_step_size: upper bound of the step size, or None.
    """

    target: float
    max_step_size: float | None

    @property
    def probes(self) -> bool:
        """True: acceptance alone does not tell the errors of steps from those of rounding."""
        return True

    def start(self, step_size: Array) -> Averaging:
        """Start at a step size."""
        return start_averaging(step_size, self.max_step_size)

    def update(self, averaging: Averaging, lesson: Lesson, rounding: Rounding, is_hidden: Array) -> Averaging:
        """Learn from one step of warmup."""
        # More than what faint steps have of it, no step size reaches.
        target = self.target * jnp.maximum(rounding.accept_prob_of_faint, LEAST)
        return update_averaging(averaging, jnp.where(is_hidden, -LIFT, target - lesson.accept_prob))

    def step_size(self, averaging: Averaging, is_last: Array) -> Array:
        """Return the step size to continue with."""
        return averaged_step_size(averaging, is_last, self.max_step_size)

    def takes(
        self, is_drawn: Array, energy_error: Array, rounding: Rounding, is_adapting: Array, num_dimensions: int
    ) -> Array:
        """Obey the Metropolis correction."""
        return is_drawn


class Search(NamedTuple):
    """State of the search for a first step size.

    Attributes:
        step_size: step size of the latest trial.
        heading: 1 to double, −1 to halve; 0 before the first trial, which is made where the search starts.
        latest: heading that the latest trial asks for.
        num_trials: number of trials so far.
        rng_key: key of the trials to come.
    """

    step_size: Array
    heading: Array
    latest: Array
    num_trials: Array
    rng_key: Array


def find_step_size(
    accept_prob_fn: Any,
    step_size: Array,
    threshold: float,
    max_step_size: float | None,
    rng_key: Array,
) -> Array:
    """Double or halve a step size until the acceptance of a single trial crosses ``threshold``.

    Args:
        accept_prob_fn: function from a key and a step size to the acceptance probability of one trial.
        step_size: step size at which the search starts.
        threshold: acceptance probability to cross.
        max_step_size: upper bound of the step size, or None.
        rng_key: key of the trials.

    Returns:
        The first step size on the other side of the threshold, at most ``max_step_size``.
    """
    bound = jnp.inf if max_step_size is None else max_step_size

    def go_on(search: Search) -> Array:
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
