"""The programs behind predictions: one exact draw, or one Gaussian, for each draw of the hidden weights.

Each gives its results and, by draw of the hidden weights, whether they are finite.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import logsumexp

from numpyro_wide._blocks import map_draws
from numpyro_wide._programs import combine
from numpyro_wide.linear_gaussian import draw_readout, predict_jointly, predict_readout
from numpyro_wide.readout._collapse import CollapsedModel
from numpyro_wide.readout._sites import ReadoutRun, StoppedRunError, run_at_draw

Samples = dict[str, Array]


def _draw_of_readout(model: CollapsedModel, fit: ReadoutRun, normals: Array) -> Array:
    """A draw of the readout; of standard normal numbers it takes as many as that has."""
    problem = fit.problem(model.readout, model.variant)
    return fit.prior_loc + draw_readout(problem, normals.astype(problem.features.dtype))


def _predicted(model: CollapsedModel, fit: ReadoutRun, new: ReadoutRun, normals: list[Array]) -> Samples:
    """Mean and variance of the function, and a draw with noise, at other inputs."""
    problem = fit.problem(model.readout, model.variant)
    phi, residuals, noise = (part.astype(problem.features.dtype) for part in normals)
    mean, variance, draw = predict_readout(problem, new.features, phi, residuals)
    return {
        "mean": new.loc + mean,
        "variance": variance,
        "noise_scale": jnp.broadcast_to(jnp.asarray(new.noise_scale, mean.dtype), mean.shape),
        model.observed: new.loc + draw + new.noise_scale * noise,
    }


def _log_density(model: CollapsedModel, fit: ReadoutRun, new: ReadoutRun, nothing: None) -> tuple[Array, Array]:
    """Of each row's observations, (m,), and whether their mean and variance are finite, a scalar.

    A density may be zero, and its logarithm infinite, of observations far from any prediction.
    """
    mean, variance, _ = predict_readout(fit.problem(model.readout, model.variant), new.features)
    variance = variance + new.noise_scale**2
    by_entry = -0.5 * ((new.residual - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance))
    # Given the hidden weights the outputs are independent.
    by_row = by_entry if by_entry.ndim == 1 else by_entry.sum(axis=1)
    return by_row, jnp.isfinite(new.loc + mean).all() & jnp.isfinite(variance).all()


def _joint_log_density(model: CollapsedModel, fit: ReadoutRun, new: ReadoutRun, nothing: None) -> tuple[Array, Array]:
    """Of all rows' observations together, (1,), and whether their mean and covariance are finite."""
    mean, covariance = predict_jointly(fit.problem(model.readout, model.variant), new.features)
    noise_scale, residual = (
        jnp.broadcast_to(part, new.loc.shape).reshape(mean.shape).T for part in (new.noise_scale, new.residual)
    )
    covariance = covariance + jnp.eye(len(mean))[None] * noise_scale[:, None] ** 2
    by_output = dist.MultivariateNormal(mean.T, covariance).log_prob(residual)
    is_finite = jnp.isfinite(new.loc).all() & jnp.isfinite(mean).all() & jnp.isfinite(covariance).all()
    # A density may be zero, as of a single row; NumPyro's is, too, where an observation is NaN.
    found = jnp.where(jnp.isinf(residual).any(), -jnp.inf, by_output.sum())
    return jnp.where(jnp.isnan(residual).any(), jnp.nan, found)[None], is_finite


def _check_fits(model: CollapsedModel, fit: ReadoutRun, new: ReadoutRun, *, is_observed: bool) -> None:
    if new.is_observed and not is_observed:
        raise ValueError(
            f"the observed site {model.observed!r} is observed with these arguments, and predictions make no use of "
            "observations; call without them, predictive(key, x_new), or get their density from "
            "predictive.log_density(x_new, y_new)."
        )
    if is_observed and not new.is_observed:
        raise ValueError(
            f"the observed site {model.observed!r} is not observed with these arguments; pass the observations whose "
            "density is wanted, predictive.log_density(x_new, y_new)."
        )
    num_rows, num_features = new.features.shape
    if new.loc.shape[0] != num_rows:
        error = f"the inputs give features with {num_rows} rows, but means of shape {new.loc.shape}."
        raise StoppedRunError(ValueError(error), num_rows)
    if num_features != fit.features.shape[1]:
        raise ValueError(
            f"the inputs give features with {num_features} columns, but the model was fitted with "
            f"{fit.features.shape[1]}."
        )


def readouts(model: CollapsedModel, static: tuple, rng_key: Array, samples: Samples, params: dict, data: list) -> Any:
    batch_size, num_draws, rest = static
    fitted_on, _ = combine(data, rest)
    (fit,) = _shapes(model, samples, params, [fitted_on])
    normals = random.normal(rng_key, (num_draws, *fit.prior_loc.shape))

    run = partial(_runs, model, params, [fitted_on])
    found = _map(run, partial(_draw_of_readout, model), (samples, normals), batch_size, [fit])
    return found, _is_finite(found)


def predictions(
    model: CollapsedModel, static: tuple, rng_key: Array, samples: Samples, params: dict, data: list
) -> Any:
    batch_size, num_draws, rest = static
    fitted_on, test = combine(data, rest)
    fit, new = _shapes(model, samples, params, [fitted_on, test])
    _check_fits(model, fit, new, is_observed=False)
    # All numbers at once: each call of a generator is a program of its own to compile.
    shapes = fit.prior_loc.shape, fit.loc.shape, new.loc.shape
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    normals = jnp.split(random.normal(rng_key, (num_draws, ends[-1])), ends[:-1], axis=1)
    normals = [part.reshape(num_draws, *shape) for part, shape in zip(normals, shapes, strict=True)]

    run = partial(_runs, model, params, [fitted_on, test])
    found = _map(run, partial(_predicted, model), (samples, normals), batch_size, [fit, new])
    return found, _is_finite(found)


def log_densities(model: CollapsedModel, static: tuple, _: None, samples: Samples, params: dict, data: list) -> Any:
    return _averaged(_log_density, model, static, samples, params, data)


def joint_log_densities(
    model: CollapsedModel, static: tuple, _: None, samples: Samples, params: dict, data: list
) -> Any:
    return _averaged(_joint_log_density, model, static, samples, params, data)


def _averaged(
    solve: Callable, model: CollapsedModel, static: tuple, samples: Samples, params: dict, data: list
) -> tuple[Array, Array]:
    """Log of the average of densities over the draws that are finite, whose logarithms are arrays of one axis."""
    batch_size, _, rest = static
    fitted_on, test = combine(data, rest)
    fit, new = _shapes(model, samples, params, [fitted_on, test])
    _check_fits(model, fit, new, is_observed=True)
    run = partial(_runs, model, params, [fitted_on, test])
    found, is_finite = _map(run, partial(solve, model), (samples, None), batch_size, [fit, new])
    # Whether other draws may be left out is for the caller to say.
    found = jnp.where(is_finite[:, None], found, -jnp.inf)
    return logsumexp(found, axis=0) - jnp.log(is_finite.sum()), is_finite


def _shapes(model: CollapsedModel, samples: Samples, params: dict, calls: list[tuple[tuple, dict]]) -> list[ReadoutRun]:
    """What the model's runs at a draw look like."""
    first = {**params, **{name: draws[0] for name, draws in samples.items()}}
    return [jax.eval_shape(lambda call=call: run_at_draw(model.fn, model.names, first, *call)) for call in calls]


def _runs(model: CollapsedModel, params: dict, calls: list[tuple[tuple, dict]], values: Samples) -> list[ReadoutRun]:
    """The model's runs at a draw."""
    return [run_at_draw(model.fn, model.names, {**params, **values}, *call) for call in calls]


def _map(
    run: Callable[[Samples], list[ReadoutRun]],
    solve: Callable,
    draws: tuple[Samples, Any],
    batch_size: int | None,
    runs: list[ReadoutRun],
) -> Any:
    """``solve(*run(values), normals)`` of each draw."""
    num_draws = len(jax.tree.leaves(draws)[0])
    if batch_size is None:
        limit = 2**20 if jax.default_backend() == "cpu" else 2**26
        batch_size = _divisor(num_draws, limit // max(1, *(run.features.size for run in runs)))
    return map_draws(lambda draw: solve(*run(draw[0]), draw[1]), draws, batch_size)


def _is_finite(results: Any) -> Array:
    """By draw, (draws,)."""
    by_leaf = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1) for leaf in jax.tree.leaves(results)]
    return jnp.array(by_leaf).all(axis=0)


def _divisor(number: int, limit: int) -> int:
    """The largest divisor within the limit: batches of one size are one program to compile."""
    return max(size for size in range(1, min(number, max(1, limit)) + 1) if number % size == 0)
