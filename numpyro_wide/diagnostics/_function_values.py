"""Values of a model's function at the inputs of its fit, draw by draw, and what rounding does to its density."""

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


def evidence_error(run: FinishedRun) -> float | None:
    """Estimate how far rounding moves the log density that was sampled, at the last draw of each chain.

    A noise that is sampled is known only now: where it is small, single precision may not resolve it.

    Args:
        run: a finished run, with observations among its arguments.

    Returns:
        The largest error in nats, infinite where the density is NaN; None where the readout cannot be integrated out.
    """
    names = run.conjugate_sites
    if names is None:
        return None
    data, rest = partition(run.arguments)
    last = {name: np.asarray(values)[:, -1:] for name, values in run.latent(run.stored).items()}
    found = run_compiled(_evidence_errors, run.wrapped[0], (names, rest), last, data)
    return float(np.max(found["error"]))


def _evidence_errors(model: Any, static: tuple, draws: Draws, data: list[Any]) -> Draws:
    names, rest = static
    args, kwargs = combine(data, rest)

    def single(draw: Draws) -> Draws:
        return {"error": model.run(names, draw, args, kwargs).problem(model.variant).evidence_error()}

    return for_each_draw(single, draws)


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
