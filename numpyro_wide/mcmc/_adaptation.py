"""Warmup: the step size by dual averaging, and optionally a diagonal mass or a reference Gaussian.

Dual averaging and the variances of the mass are NumPyro's; here the step is put on a scale that respects an upper
bound.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc_util import build_adaptation_schedule, dual_averaging, welford_covariance

from numpyro_wide.mcmc._reference import Moments, Reference, close_window, count_draw, identity_reference, start_moments
from numpyro_wide.mcmc._tree import PyTree, select

# Hoffman & Gelman 2014 have 0.05. The acceptance of a split trajectory falls from 1 to 0 within a small factor of the
# step; at 0.05 the iterates then swing by factors of ten, and their average settles at a step that is too small.
GAMMA = 0.2
# Shares of warmup: the reference is learnt from the first on, and renewed at each of the others. A trajectory forgets
# where it began, so that short windows do; the last part is left to the step size alone.
REFERENCE_WINDOWS = (0.1, 0.2, 0.35, 0.55, 0.75)
MIN_REFERENCE_WARMUP = 20


class AdaptState(NamedTuple):
    """What warmup has learnt so far.

    Attributes:
        num_warmup: how many steps adapt; part of the state, so that a chain that is resumed by an ``MCMC``
            with another ``num_warmup`` does not adapt again.
        averaging: state of the dual averaging, on the real line.
        scale: square root of the inverse of the diagonal mass, a pytree like the position, or None.
        variance: state of Welford's recursion, or None.
        reference: the Gaussian in whose coordinates the kernel works, or None for N(0, I).
        moments: what the reference will be learnt from, or None.
        window_start: step at which the draws begin to count for the mass or the reference, or None.
        window_ends: steps at whose end the mass or the reference is renewed, or None.
    """

    num_warmup: jax.Array
    averaging: tuple[Any, ...]
    scale: PyTree = None
    variance: tuple[Any, ...] | None = None
    reference: tuple[Reference, ...] | None = None
    moments: tuple[Moments, ...] | None = None
    window_start: jax.Array | None = None
    window_ends: jax.Array | None = None


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


def init_adaptation(
    step_size: jax.Array,
    max_step_size: float | None,
    num_warmup: int,
    z: PyTree,
    scale: PyTree,
    adapt_mass_matrix: bool,
    adapt_reference: bool,
) -> AdaptState:
    """Start the adaptation at ``step_size`` and at the mass that ``scale`` stands for."""
    averaging = _start_averaging(step_size, max_step_size)
    length = jnp.asarray(num_warmup, jnp.result_type(int))
    if adapt_reference and num_warmup >= MIN_REFERENCE_WARMUP:
        first, *last = (int(share * num_warmup) for share in REFERENCE_WINDOWS)
        return AdaptState(
            length,
            averaging,
            reference=identity_reference(z),
            moments=start_moments(z),
            window_start=jnp.asarray(first, length.dtype),
            window_ends=jnp.asarray(last, length.dtype) - 1,
        )
    if not adapt_mass_matrix:
        return AdaptState(length, averaging, scale)
    windows = build_adaptation_schedule(num_warmup)[1:-1]
    start = jnp.asarray(windows[0].start if windows else num_warmup, length.dtype)
    ends = jnp.asarray([window.end for window in windows], length.dtype)
    scale = jax.tree.map(jnp.ones_like, z) if scale is None else scale
    variance = welford_covariance()[0](ravel_pytree(z)[0].size)
    return AdaptState(length, averaging, scale, variance, window_start=start, window_ends=ends)


def update_adaptation(
    state: AdaptState,
    step: jax.Array,
    accept_error: jax.Array,
    z: PyTree,
    z_grad: PyTree,
    step_size: jax.Array,
    max_step_size: float | None,
    adapt_step_size: bool,
) -> tuple[jax.Array, AdaptState]:
    """Learn from one step of warmup.

    Args:
        state: what was known before.
        step: number of the step, from 0.
        accept_error: target acceptance probability minus the one of this step.
        z: position after this step.
        z_grad: gradient of the potential energy there.
        step_size: step size of this step.
        max_step_size: upper bound of the step size, or None.
        adapt_step_size: whether to change the step size.

    Returns:
        The next step size and the next state.
    """
    if adapt_step_size:
        averaging = dual_averaging(gamma=GAMMA)[1](accept_error, state.averaging)
        # The iterates explore; their average is what warmup leaves behind.
        real = jnp.where(step == state.num_warmup - 1, averaging[1], averaging[0])
        step_size = from_real_line(real, max_step_size)
        state = state._replace(averaging=averaging)
    state = _update_mass(state, step, z, step_size, max_step_size)
    state = _update_reference(state, step, z, z_grad, step_size, max_step_size)
    return step_size, state


def _start_averaging(step_size: jax.Array, max_step_size: float | None) -> tuple[Any, ...]:
    # Like Hoffman & Gelman 2014, pull the iterates towards more than the first step: large steps are cheap to test.
    return dual_averaging(gamma=GAMMA)[0](to_real_line(step_size, max_step_size) + jnp.log(2.0))


def _update_mass(
    state: AdaptState, step: jax.Array, z: PyTree, step_size: jax.Array, max_step_size: float | None
) -> AdaptState:
    """Count a draw; at the end of a window take the variances for the inverse mass and start afresh."""
    if state.variance is None or state.window_start is None or state.window_ends is None or not state.window_ends.size:
        return state
    start, update, finish = welford_covariance()
    counts = (step >= state.window_start) & (step <= state.window_ends[-1])
    variance = select(counts, update(z, state.variance), state.variance)
    renewed = state._replace(
        averaging=_start_averaging(step_size, max_step_size),
        scale=ravel_pytree(z)[1](finish(variance, regularize=True)[2]),
        variance=start(variance[0].size),
    )
    at_end = jnp.any(step == state.window_ends)
    return select(at_end, renewed, state._replace(variance=variance))


def _update_reference(
    state: AdaptState, step: jax.Array, z: PyTree, z_grad: PyTree, step_size: jax.Array, max_step_size: float | None
) -> AdaptState:
    """Count a draw; at the end of a window measure the reference and start afresh."""
    if state.moments is None or state.reference is None or state.window_start is None or state.window_ends is None:
        return state
    seen, reference = state.moments, state.reference
    counts = (step >= state.window_start) & (step <= state.window_ends[-1])
    moments = jax.lax.cond(counts, lambda: count_draw(seen, z, z_grad), lambda: seen)

    def renewed() -> AdaptState:
        found, measured = close_window(moments, reference)
        averaging = _start_averaging(step_size, max_step_size)
        return state._replace(averaging=averaging, moments=found, reference=measured)

    at_end = counts & jnp.any(step == state.window_ends)
    return jax.lax.cond(at_end, renewed, lambda: state._replace(moments=moments))


Search = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


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

    def direction(key: jax.Array, step: jax.Array) -> jax.Array:
        return jnp.where(accept_prob_fn(key, step) > threshold, 1, -1)

    def go_on(carry: Search) -> jax.Array:
        step, heading, latest, trials, _ = carry
        return (latest == heading) & (trials < 60) & ((step < bound) | (heading < 0))

    def trial(carry: Search) -> Search:
        step, heading, _, trials, key = carry
        key, key_trial = jax.random.split(key)
        step = jnp.minimum(step * 2.0**heading, bound)
        return step, heading, direction(key_trial, step), trials + 1, key

    rng_key, key_first = jax.random.split(rng_key)
    heading = direction(key_first, step_size)
    return jax.lax.while_loop(go_on, trial, (step_size, heading, heading, jnp.array(0), rng_key))[0]
