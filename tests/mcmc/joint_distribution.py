"""A joint-distribution test of MCMC kernels (Geweke 2004), on independent replicates.

Every replicate draws (latents, data) from the model, then alternates between steps of the kernel at fixed
data and fresh data at fixed latents. If the kernel leaves the posterior invariant for every data set, the
replicates keep the joint law of the model for ever; if not, they drift away from it. Replicates are
independent and start in the joint law itself, so plain two-sample z-scores against fresh draws from the model
are exact, without a burn-in or an effective sample size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import constrain_fn, unconstrain_fn


@dataclass
class JointProblem:
    """A model as the test needs it.

    Attributes:
        draw: maps a key to (latents, data) from the joint law.
        redraw_data: maps a key and latents to data given the latents.
        to_position: maps latents and data to the kernel's unconstrained position.
        to_latents: maps a position and data back.
        model_arguments: maps data to the (args, kwargs) of the model that the kernel samples from.

    A model whose coordinates depend on the data, such as a repriorised one, differs from an ordinary one in
    ``to_position`` and ``to_latents``.
    """

    draw: Callable[[jax.Array], tuple[Any, jax.Array]]
    redraw_data: Callable[[jax.Array, Any], jax.Array]
    to_position: Callable[[Any, jax.Array], Any]
    to_latents: Callable[[Any, jax.Array], Any]
    model_arguments: Callable[[jax.Array], tuple[tuple[Any, ...], dict[str, Any]]]


def problem_of(model: Callable[..., Any], *args: Any, observed: str) -> JointProblem:
    """Describe an ordinary model, called as ``model(*args, <observed>=data)``."""

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args)
        sites = {k: s["value"] for k, s in trace.items() if s["type"] == "sample"}
        data = sites.pop(observed)
        return sites, data

    def redraw_data(key, latents):
        return draw_with(key, latents)[observed]

    def draw_with(key, latents):
        trace = handlers.trace(handlers.substitute(handlers.seed(model, key), latents)).get_trace(*args)
        return {k: s["value"] for k, s in trace.items()}

    def to_latents(z, data):
        constrained = constrain_fn(model, args, {observed: data}, z)
        return {k: constrained[k] for k in z}

    return JointProblem(
        draw=draw,
        redraw_data=redraw_data,
        to_position=lambda latents, data: unconstrain_fn(model, args, {observed: data}, latents),
        to_latents=to_latents,
        model_arguments=lambda data: (args, {observed: data}),
    )


def fresh_moments(problem, rng_key, num_draws=32768):
    """Return moment functions of ``num_draws`` fresh draws from the joint law, to compare kernels with."""

    def fresh(key):
        latents, data = problem.draw(key)
        return _moments(problem.to_position(latents, data), data)

    return jax.jit(jax.vmap(fresh))(jax.random.split(rng_key, num_draws))


def largest_z_score(kernel, problem, expected, rng_key, *, num_replicates=8192, num_rounds=8, num_steps=3):
    """Return the largest |z| over first and second moments of (position, data), and the mean acceptance.

    Args:
        kernel: an MCMC kernel with a fixed step size.
        problem: the joint law.
        expected: what :func:`fresh_moments` returned for the problem.
        rng_key: key of everything else.
        num_replicates: number of independent replicates.
        num_rounds: rounds of kernel steps and fresh data.
        num_steps: kernel steps a round.
    """
    key_init, key_chains = jax.random.split(rng_key)
    first_args, first_kwargs = problem.model_arguments(problem.draw(key_init)[1])
    template = kernel.init(key_init, 0, None, first_args, first_kwargs)

    def kernel_step(state, data):
        state = kernel.sample(state, *problem.model_arguments(data))
        return state, state.accept_prob

    def one_round(carry, key):
        state, data = carry
        # New data moves the potential, and for some problems the coordinates, under the chain.
        state = kernel.refresh(state, *problem.model_arguments(data))
        state, accept_prob = jax.lax.scan(lambda s, _: kernel_step(s, data), state, length=num_steps)
        latents = problem.to_latents(state.z, data)
        data = problem.redraw_data(key, latents)
        return (state._replace(z=problem.to_position(latents, data)), data), jnp.mean(accept_prob)

    def replicate(key):
        key_draw, key_momentum, key_state, key_rounds = jax.random.split(key, 4)
        latents, data = problem.draw(key_draw)
        state = template._replace(z=problem.to_position(latents, data), rng_key=key_state)
        if state.r is not None:
            flat, unravel = ravel_pytree(state.r)
            state = state._replace(r=unravel(jax.random.normal(key_momentum, flat.shape)))
        rounds = jax.random.split(key_rounds, num_rounds)
        (state, data), accept_prob = jax.lax.scan(one_round, (state, data), rounds)
        return _moments(state.z, data), jnp.mean(accept_prob)

    chained, accept_prob = jax.jit(jax.vmap(replicate))(jax.random.split(key_chains, num_replicates))
    error = jnp.sqrt(jnp.var(chained, 0) / len(chained) + jnp.var(expected, 0) / len(expected))
    scores = jnp.abs(jnp.mean(chained, 0) - jnp.mean(expected, 0)) / error
    return float(jnp.max(scores)), float(jnp.mean(accept_prob))


def _moments(z, data):
    """First moments and all products of the position and of two data points."""
    values = jnp.concatenate([ravel_pytree(z)[0], jnp.ravel(data)[:2]])
    # Data may have heavy tails; a bounded function of it has good z-scores.
    values = values.at[-2:].set(jnp.tanh(values[-2:]))
    products = jnp.outer(values, values)[jnp.triu_indices(len(values))]
    return jnp.concatenate([values, products])
