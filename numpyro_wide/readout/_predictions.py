"""Predictions from draws of a wrapped model: what is computed."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import logsumexp

from numpyro_wide._blocks import map_draws
from numpyro_wide._compile import combine
from numpyro_wide._traces import Sites, latent_sites, log_prob_by_observation, observed_sites, run_model, unwrap
from numpyro_wide.linear_gaussian._row_blocks import BlockedPosterior, BlockedProblem, RowFeatures
from numpyro_wide.readout._model import (
    Draws,
    ReadoutModel,
    ReadoutRun,
    SiteNames,
    StoppedRunError,
    first_of,
    refuse_other_readout,
)
from numpyro_wide.readout._repriorise import weights_of_run

Solved: TypeAlias = BlockedPosterior | None


class Setting(NamedTuple):
    """Settings that a program depends on besides arrays.

    Attributes:
        names: names of the sites.
        batch_size: number of draws that are worked on at once; None for as many as fit.
        num_draws: number of draws.
        rest: arguments of the fit and of the test without their arrays, as ``partition`` gives them.
    """

    names: SiteNames
    batch_size: int | None
    num_draws: int
    rest: Any


class Quantity(NamedTuple):
    """A quantity that is computed draw by draw.

    Attributes:
        what: its name in messages, in the plural.
        body: the program.
        is_average: whether results are logarithms of averages over the draws, not one for each draw.
    """

    what: str
    body: Callable
    is_average: bool = False


class Quantities(NamedTuple):
    """The quantities of one way to predict.

    Attributes:
        readouts: draws of the readout.
        predictions: moments and draws at other inputs.
        log_densities: log densities of observations, row by row.
        joint_log_densities: log density of all observations together.
        log_evidences: log evidence of the fit's observations; None where the readout is not integrated out.
        posteriors: the readout's posterior, where it is found by sums over blocks of rows; None as well.
        is_integrated: whether the readout is integrated out.
    """

    readouts: Quantity
    predictions: Quantity
    log_densities: Quantity
    joint_log_densities: Quantity
    log_evidences: Quantity | None
    posteriors: Quantity | None
    is_integrated: bool


def _readouts(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: Solved
) -> tuple[Array, Array]:
    fitted_on, *_ = combine(data, setting.rest)
    runs = Runs(model, setting.names, params, [fitted_on])
    (fit,) = runs.shapes(draws)

    def single(draw: tuple[Draws, Array, Solved]) -> Array:
        (fit,) = runs(draw[0])
        readout, dtype = _readout_of(fit, model.variant, draw[2])
        return fit.prior_loc + readout.draw(draw[1].astype(dtype))

    normals = random.normal(rng_key, (setting.num_draws, *fit.prior_loc.shape))
    found = _map(single, (draws, normals, solved), setting, [fit])
    return found, finite_draws(found)


def _posteriors(
    model: ReadoutModel, setting: Setting, rng_key: None, draws: Draws, params: dict, data: list, solved: None
) -> tuple[BlockedPosterior, Array]:
    fitted_on, *_ = combine(data, setting.rest)
    runs = Runs(model, setting.names, params, [fitted_on])
    found = _map(lambda draw: runs(draw)[0].problem(model.variant).posterior(), draws, setting, runs.shapes(draws))
    return found, finite_draws(found)


def _log_evidences(
    model: ReadoutModel, setting: Setting, rng_key: None, draws: Draws, params: dict, data: list, solved: Solved
) -> tuple[Array, Array]:
    if solved is not None:
        return solved.log_evidence, jnp.isfinite(solved.log_evidence)
    fitted_on, *_ = combine(data, setting.rest)
    runs = Runs(model, setting.names, params, [fitted_on])
    found = _map(lambda draw: runs(draw)[0].problem(model.variant).log_evidence(), draws, setting, runs.shapes(draws))
    return found, jnp.isfinite(found)


def _predictions(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: Solved
) -> tuple[Draws, Array]:
    runs = Runs(model, setting.names, params, combine(data, setting.rest))
    fit, new = runs.shapes(draws)
    _check_fits(setting.names, fit, new, is_observed=False)
    # All numbers at once: each call of a generator is a program of its own to compile.
    # Blocks of rows need no residuals of the fit's rows, of which there are many.
    is_blocked = isinstance(fit.features, RowFeatures)
    shapes = fit.prior_loc.shape, (0,) if is_blocked else fit.loc.shape, new.loc.shape
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    normals = jnp.split(random.normal(rng_key, (setting.num_draws, ends[-1])), ends[:-1], axis=1)
    normals = [part.reshape(setting.num_draws, *shape) for part, shape in zip(normals, shapes, strict=True)]

    def single(draw: tuple[Draws, list[Array], Solved]) -> Draws:
        fit, new = runs(draw[0])
        readout, dtype = _readout_of(fit, model.variant, draw[2])
        # Models may be in half or double precision, which is not known before the run.
        phi, residuals, noise = (part.astype(dtype) for part in draw[1])
        mean, variance, function = readout.predict(new.test_features(fit), phi, None if is_blocked else residuals)
        noise_scale = jnp.broadcast_to(jnp.asarray(new.noise_scale, mean.dtype), mean.shape)
        return {
            "mean": new.loc + mean,
            "variance": variance,
            "predictive_variance": variance + noise_scale**2,
            "noise_scale": noise_scale,
            setting.names.observed: new.loc + function + noise_scale * noise,
        }

    found = _map(single, (draws, normals, solved), setting, [fit, new])
    return found, finite_draws(found)


def _log_densities(fit: ReadoutRun, new: ReadoutRun, readout: Any) -> tuple[Array, Array]:
    """Return log densities of each row's observations, (m,), and whether their moments are finite, a scalar.

    A density may be zero, and its logarithm infinite, of observations far from any prediction.
    """
    # The problem is less the prior's mean, which ``loc`` holds, and the residual is less ``loc``: they go together.
    mean, variance, _ = readout.predict(new.test_features(fit))
    variance = variance + new.noise_scale**2
    by_entry = -0.5 * ((new.residual - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance))
    # Given the hidden weights the outputs are independent.
    by_row = by_entry if by_entry.ndim == 1 else by_entry.sum(axis=1)
    return by_row, jnp.isfinite(new.loc + mean).all() & jnp.isfinite(variance).all()


def _joint_log_density(fit: ReadoutRun, new: ReadoutRun, readout: Any) -> tuple[Array, Array]:
    """Return the log density of all rows' observations together, (1,), and whether their moments are finite."""
    if not new.loc.size:  # nothing is observed: no covariance to factor
        return jnp.zeros(1, new.loc.dtype), jnp.isfinite(fit.loc).all()
    mean, covariance = readout.predict_jointly(new.test_features(fit))
    # By output, (k, m): the noise may differ between outputs that share a covariance of the function.
    noise_scale, residual = (
        jnp.broadcast_to(part, new.loc.shape).reshape(mean.shape).T for part in (new.noise_scale, new.residual)
    )
    covariance = covariance + jnp.eye(len(mean))[None] * noise_scale[:, None] ** 2
    by_output = dist.MultivariateNormal(mean.T, covariance).log_prob(residual)
    is_finite = jnp.isfinite(new.loc).all() & jnp.isfinite(mean).all() & jnp.isfinite(covariance).all()
    # A density may be zero, as of a single row; NumPyro's is, too, where an observation is NaN.
    found = jnp.where(jnp.isinf(residual).any(), -jnp.inf, by_output.sum())
    return jnp.where(jnp.isnan(residual).any(), jnp.nan, found)[None], is_finite


def _averaged(
    density: Callable[[ReadoutRun, ReadoutRun, Any], tuple[Array, Array]],
    model: ReadoutModel,
    setting: Setting,
    rng_key: None,
    draws: Draws,
    params: dict,
    data: list,
    solved: Solved,
) -> tuple[Array, Array]:
    runs = Runs(model, setting.names, params, combine(data, setting.rest))
    fit, new = runs.shapes(draws)
    _check_fits(setting.names, fit, new, is_observed=True)

    def single(draw: tuple[Draws, Solved]) -> tuple[Array, Array]:
        fit, new = runs(draw[0])
        return density(fit, new, _readout_of(fit, model.variant, draw[1])[0])

    found, is_finite = _map(single, (draws, solved), setting, [fit, new])
    return log_of_average(found, is_finite), is_finite


INTEGRATED = Quantities(
    readouts=Quantity("readouts", _readouts),
    predictions=Quantity("predictions", _predictions),
    log_densities=Quantity("predictions", partial(_averaged, _log_densities), is_average=True),
    joint_log_densities=Quantity("predictions", partial(_averaged, _joint_log_density), is_average=True),
    log_evidences=Quantity("log evidences", _log_evidences),
    posteriors=Quantity("readouts", _posteriors),
    is_integrated=True,
)


def _readout_of(fit: ReadoutRun, variant: str, solved: Solved) -> tuple[Any, Any]:
    """Return what draws the readout and predicts, and its type of numbers."""
    if solved is not None:
        return solved, solved.mean.dtype
    problem = fit.problem(variant)
    dtype = problem.features.dtype
    return (problem.posterior() if isinstance(problem, BlockedProblem) else problem), dtype


def log_of_average(log_densities: Array, is_finite: Array) -> Array:
    """Return the log of the average of densities over the draws whose moments are finite.

    Args:
        log_densities: (draw, m).
        is_finite: whether each draw's moments are, (draw,). Whether others may be left out is for the caller to say.
    """
    # Draws that are left out have the density zero here, and are not counted either: the mixture is of the others.
    found = jnp.where(is_finite[:, None], log_densities, -jnp.inf)
    return logsumexp(found, axis=0) - jnp.log(is_finite.sum())


def finite_draws(results: Any) -> Array:
    """Return whether all results of a draw are finite, (draw,)."""
    by_leaf = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1) for leaf in jax.tree.leaves(results)]
    return jnp.array(by_leaf).all(axis=0)


class Runs(NamedTuple):
    """A model's runs at a draw: with the arguments of the fit, and with those of the test."""

    model: ReadoutModel
    names: SiteNames
    params: dict[str, Array]
    calls: list[tuple[tuple, dict]]

    def __call__(self, draw: Draws) -> list[ReadoutRun]:
        """Run the model at a draw."""
        return [self.model.run(self.names, {**self.params, **draw}, *call) for call in self.calls]

    def shapes(self, draws: Draws) -> list[ReadoutRun]:
        """Return the runs with shapes instead of numbers."""
        # What is to be checked of shapes is checked once, outside of the map over draws.
        first = first_of(draws)
        return [
            jax.eval_shape(lambda call=call: self.model.run(self.names, {**self.params, **first}, *call))
            for call in self.calls
        ]


def _check_fits(names: SiteNames, fit: ReadoutRun, new: ReadoutRun, *, is_observed: bool) -> None:
    check_observed(names.observed, new.is_observed, is_wanted=is_observed)
    num_rows, num_features = new.features.shape
    if new.loc.shape[0] != num_rows:
        error = f"the inputs give features with {num_rows} rows, but means of shape {new.loc.shape}."
        raise StoppedRunError(ValueError(error), num_rows)
    if num_features != fit.features.shape[1]:
        raise ValueError(
            f"the inputs give features with {num_features} columns, but the model was fitted with "
            f"{fit.features.shape[1]}."
        )


def check_observed(site: str, is_observed: bool, *, is_wanted: bool) -> None:
    """Check that there are observations where their density is wanted, and none where they would not be used.

    Args:
        site: name of the observed site.
        is_observed: whether the arguments hold observations.
        is_wanted: whether they should.

    Raises:
        ValueError: if they do and should not, or the other way round.
    """
    if is_observed and not is_wanted:
        raise ValueError(
            f"the observed site {site!r} is observed with these arguments, and predictions make no use of "
            "observations; call without them, predictive(key, x_new), or get their density from "
            "predictive.log_density(x_new, y_new)."
        )
    if is_wanted and not is_observed:
        raise ValueError(
            f"the observed site {site!r} is not observed with these arguments; pass the observations whose "
            "density is wanted, predictive.log_density(x_new, y_new)."
        )


def _map(single: Callable, draws: Any, setting: Setting, runs: list[ReadoutRun]) -> Any:
    return map_in_batches(single, draws, setting, max(1, *(run.features.size for run in runs)))


def map_in_batches(single: Callable, draws: Any, setting: Setting, size_of_draw: int) -> Any:
    """Map a function over draws, as many at once as the setting says.

    Args:
        single: function of one draw.
        draws: tree of arrays with a leading axis for the draws.
        setting: the program's setting.
        size_of_draw: number of entries that one draw keeps in memory, which decides where the setting does not.
    """
    batch_size = setting.batch_size
    if batch_size is None:
        limit = 2**20 if jax.default_backend() == "cpu" else 2**26
        batch_size = _divisor(setting.num_draws, limit // size_of_draw)
    return map_draws(single, draws, batch_size)


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor within the limit: batches of one size are one program to compile."""
    return max(size for size in range(1, min(number, max(1, limit)) + 1) if number % size == 0)


def observed_site(sites: Sites) -> str:
    """Return the name of the one site that the plain model observes.

    Raises:
        ValueError: if it observes nothing, or several sites.
    """
    names = list(observed_sites(sites))
    if len(names) != 1:
        raise ValueError(
            f"predictions are of one observed site, but the model observes {names or 'none'} with these model_args and "
            "model_kwargs. Pass what it was fitted on, observations included; of several sites, predict with "
            "numpyro's Predictive and draws that hold the readout."
        )
    return names[0]


def weights_at(model: ReadoutModel, values: Draws, fitted_on: tuple[tuple, dict]) -> Draws:
    """Return one draw of the plain model, of one that may hold the base site instead of the readout."""
    if model.readout in values:
        return values
    args, kwargs = fitted_on
    return {**values, **weights_of_run(run_model(model, args, kwargs, values=values))}


def _weights_readouts(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: None
) -> tuple[Array, Array]:
    fitted_on, *_ = combine(data, setting.rest)
    found = map_in_batches(
        lambda draw: weights_at(model, {**params, **draw}, fitted_on)[model.readout], draws, setting, 1
    )
    return found, finite_draws(found)


def _weights_predictions(
    model: ReadoutModel, setting: Setting, rng_key: Array, draws: Draws, params: dict, data: list, solved: None
) -> tuple[Draws, Array]:
    fitted_on, test = combine(data, setting.rest)
    observed = setting.names.observed

    def single(draw: tuple[Draws, Array]) -> tuple[Draws, Array]:
        site = _run(model, {**params, **draw[0]}, fitted_on, test)[observed]
        check_observed(observed, site["is_observed"], is_wanted=False)
        return {**moments_of(site["fn"]), observed: site["fn"].sample(draw[1])}, _is_finite(site["fn"])

    return _weights_map(single, (draws, random.split(rng_key, setting.num_draws)), setting)


def moments_of(fn: dist.Distribution) -> Draws:
    """Return what predictions tell of an observed distribution besides draws: its moments, or those of its classes."""
    base = unwrap(fn, masks=True)
    if isinstance(base, dist.CategoricalLogits | dist.CategoricalProbs):
        return {"probs": jnp.broadcast_to(base.probs, (*fn.shape(), base.probs.shape[-1]))}
    found = {"mean": fn.mean, "predictive_variance": fn.variance}
    if isinstance(base, dist.BernoulliLogits | dist.BernoulliProbs):
        found["probs"] = fn.mean
    if isinstance(base, dist.Normal):
        found["noise_scale"] = jnp.broadcast_to(base.scale, fn.shape())
    return found


def _weights_log_densities(site: dict) -> Array:
    by_observation = log_prob_by_observation(site)
    if not by_observation.ndim:
        raise ValueError(
            f"the observed site {site['name']!r} is one event, whose density is no product over its rows; take "
            "joint_log_density."
        )
    return by_observation.sum(axis=tuple(range(1, by_observation.ndim)))


def _weights_joint_log_density(site: dict) -> Array:
    return jnp.sum(log_prob_by_observation(site))[None]


def _weights_averaged(
    density: Callable[[dict], Array],
    model: ReadoutModel,
    setting: Setting,
    rng_key: None,
    draws: Draws,
    params: dict,
    data: list,
    solved: None,
) -> tuple[Array, Array]:
    fitted_on, test = combine(data, setting.rest)

    def single(draw: Draws) -> tuple[Array, Array]:
        site = _run(model, {**params, **draw}, fitted_on, test)[setting.names.observed]
        check_observed(setting.names.observed, site["is_observed"], is_wanted=True)
        return density(site), _is_finite(site["fn"])

    found, is_finite = _weights_map(single, draws, setting)
    return log_of_average(found, is_finite), is_finite


def _is_finite(fn: dist.Distribution) -> Array:
    """Return whether the parameters of a distribution are finite; its moments need not be, as Cauchy's are not."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(fn)]).all()


def _run(model: ReadoutModel, values: Draws, fitted_on: tuple[tuple, dict], test: tuple[tuple, dict]) -> Sites:
    args, kwargs = test
    sites = run_model(model.fn, args, kwargs, values=weights_at(model, values, fitted_on))
    readout = latent_sites(sites).get(model.readout)
    if readout is None:
        refuse_other_readout(model.readout)
    return sites


def _weights_map(single: Callable, draws: Any, setting: Setting) -> Any:
    return map_in_batches(single, draws, setting, 2**14)


THROUGH_WEIGHTS = Quantities(
    readouts=Quantity("readouts", _weights_readouts),
    predictions=Quantity("predictions", _weights_predictions),
    log_densities=Quantity("predictions", partial(_weights_averaged, _weights_log_densities), is_average=True),
    joint_log_densities=Quantity(
        "predictions", partial(_weights_averaged, _weights_joint_log_density), is_average=True
    ),
    log_evidences=None,
    posteriors=None,
    is_integrated=False,
)
