"""Values of a model's function at the inputs of its fit, draw by draw."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.handlers import substitute

from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import run_model
from numpyro_wide.diagnostics._finished_run import Draws, FinishedRun, for_each_draw
from numpyro_wide.diagnostics._stored import by_blocks
from numpyro_wide.readout.internal import moments_of


def function_values(run: FinishedRun, rng_key: Array, most: int) -> np.ndarray:
    """Compute what the observed sites' distributions are about, at the inputs of the fit.

    Where the readout can be integrated out, that is the mean given the hidden weights; else the observed distribution's
    mean at all weights, or the probabilities of its classes.

    Args:
        run: a finished run, with observations among its arguments.
        rng_key: a PRNG key for readouts that have to be drawn.
        most: largest number of entries to return, evenly spaced among all.

    Returns:
        The values, (chain, draw, entry).
    """
    data, rest = partition(run.arguments)
    names = run.conjugate_sites
    if names is not None:
        body, model, draws = _integrated, run.wrapped[0], run.latent(run.stored)
        static: tuple = names, most, rest
    else:
        body, model, draws = _at_weights, run.plain, run.latent(run.with_readout(rng_key, is_needed=True))
        static = tuple(run.sites.observed), most, rest
    found = by_blocks(lambda block, _: run_compiled(body, model, static, block, data), draws)
    return np.asarray(found["values"])


def _integrated(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    names, most, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        fit = model.run(names, draw, args, kwargs)
        mean, *_ = fit.problem(model.variant).predict(fit.features)
        return {"values": _some(jnp.ravel(fit.loc + mean), most)}

    return for_each_draw(single, draws)


def _at_weights(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    observed, most, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        # Next to the model, where a readout that is repriorised inside of it is overridden as well.
        sites = run_model(model, args, kwargs, inside=(substitute(data=draw),))
        moments = [moments_of(sites[name]["fn"]) for name in observed]
        values = [jnp.ravel(found["probs"] if "probs" in found else found["mean"]) for found in moments]
        return {"values": _some(jnp.concatenate(values), most)}

    return for_each_draw(single, draws)


def _some(values: Array, most: int) -> Array:
    """Return all values, or ``most`` of them, evenly spaced."""
    return values[np.unique(np.linspace(0, values.size - 1, min(most, values.size)).round().astype(int))]
