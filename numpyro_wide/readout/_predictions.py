"""Predictions from draws of a wrapped model: their computation, draw by draw.

Both predictors, with the readout integrated out and through draws of all weights, have the same methods, which return
results with a leading axis for the draws, or averages over them, and by draw whether the numbers are finite. Results
are NaN where the model is not as it should be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import logsumexp

from numpyro_wide._blocks import map_draws
from numpyro_wide._traces import Sites, latent_sites, log_prob_by_observation, run_model, unwrap
from numpyro_wide.linear_gaussian._row_blocks import BlockedPosterior, RowFeatures
from numpyro_wide.readout._assumptions import read_run
from numpyro_wide.readout._model import Draws, ReadoutModel, ReadoutRun, first_draw, read_sites, refuse_other_readout
from numpyro_wide.readout._transform import weights_of_run

Call: TypeAlias = tuple[tuple, dict]  # arguments and keyword arguments of a model
T = TypeVar("T")
Results: TypeAlias = tuple[Any, Array | np.ndarray]  # of all draws, and by draw whether they are finite
# (fit, new, readout's posterior) -> log densities, and whether their moments are finite
Method: TypeAlias = Callable[["PredictionInputs"], Results]  # of a predictor
Density: TypeAlias = Callable[[ReadoutRun, ReadoutRun, Any], tuple[Array, Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PredictionInputs:
    """Draws, parameters, arguments of fit and test, cached posteriors, and a key."""

    draws: Draws
    params: Draws
    fit: Call
    test: Call | None = None
    solved: BlockedPosterior | None = None
    rng_key: Any = None  # where something is drawn

    @property
    def num_draws(self) -> int:
        return next(iter(self.draws.values())).shape[0]

    @property
    def calls(self) -> list[Call]:
        """Arguments of the fit, and of the test if there is one."""
        return in_default_precision([self.fit] if self.test is None else [self.fit, self.test])

    def values_at(self, draw: Draws) -> Draws:
        """Return values of all sites."""
        return in_default_precision({**self.params, **draw})


@dataclass(frozen=True)
class _Predictor:
    """A model with a readout, the name of its observed site, and how many draws are computed at once."""

    model: ReadoutModel
    observed: str
    batch_size: int | None

    def _over_draws(self, single: Callable[..., T], draws: object, size_of_draw: int) -> T:
        """Map a function over draws, ``batch_size`` at once, or as many as the memory is for."""
        batch_size = self.batch_size
        if batch_size is None:
            # On processors, arrays of a batch stay in the cache.
            batch_size = max(1, (2**16 if jax.default_backend() == "cpu" else 2**26) // size_of_draw)
        return map_draws(single, draws, batch_size)


class Integrated(_Predictor):
    """Predictions with the readout integrated out: one Gaussian for each draw of the hidden weights."""

    def readouts(self, data: PredictionInputs) -> Results:
        """Draw the readout, (draws, d) or (draws, d, k)."""

        def single(solved: BlockedPosterior | None, normal: Array, fit: ReadoutRun) -> Array:
            return fit.prior_loc + self._readout(fit, solved).draw(normal)

        (fit,) = self.shapes(data)
        normals = random.normal(data.rng_key, (data.num_draws, *fit.prior_loc.shape))
        return with_finite_draws(self._map(single, data, normals))

    def posteriors(self, data: PredictionInputs) -> Results:
        """Return the readout's posterior, of many rows by sums over blocks of them."""
        return with_finite_draws(self._map(lambda _, fit: fit.problem().solved(), data))

    def log_evidences(self, data: PredictionInputs) -> Results:
        """Return the log evidence of the fit's observations, (draws,)."""
        if data.solved is not None:
            return with_finite_draws(data.solved.log_evidence)
        return with_finite_draws(self._map(lambda _, fit: fit.problem().log_evidence(), data))

    def left_out(self, data: PredictionInputs) -> Results:
        """Return mean and variance of each row's observations given all others, (draws, n) or (draws, n, k)."""

        def single(_: object, fit: ReadoutRun) -> tuple[Array, Array]:
            mean, variance = fit.problem().leave_one_out()
            return fit.loc + mean, variance

        return with_finite_draws(self._map(single, data))

    def predictions(self, data: PredictionInputs) -> Results:
        """Return moments and draws at the inputs of the test, (draws, m) or (draws, m, k) each."""
        fit, new = self._checked_shapes(data, is_observed=False)
        # All numbers at once: each call of a generator is a program of its own to compile. Blocks of rows need no
        # residuals of the fit's rows, of which there are many.
        residuals_shape = (0,) if isinstance(fit.features, RowFeatures) else fit.loc.shape
        shapes = fit.prior_loc.shape, residuals_shape, new.loc.shape
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        normals = jnp.split(random.normal(data.rng_key, (data.num_draws, ends[-1])), ends[:-1], axis=1)
        normals = [normal.reshape(data.num_draws, *shape) for normal, shape in zip(normals, shapes, strict=True)]

        def single(solved: BlockedPosterior | None, normals: list[Array], fit: ReadoutRun, new: ReadoutRun) -> Draws:
            phi, residuals, noise = normals
            mean, variance, function = self._readout(fit, solved).predict(new.features, phi, residuals)
            moments = self._moments(new, mean, variance)
            drawn = new.loc + function + moments["noise_scale"] * noise.astype(mean.dtype)
            return {**moments, self.observed: drawn}

        return with_finite_draws(self._map(single, data, normals))

    def moments(self, data: PredictionInputs) -> Results:
        """Return moments at the inputs of the test, (draws, m) or (draws, m, k) each."""
        self._checked_shapes(data, is_observed=False)

        def single(solved: BlockedPosterior | None, fit: ReadoutRun, new: ReadoutRun) -> Draws:
            mean, variance, _ = self._readout(fit, solved).predict(new.features)
            return self._moments(new, mean, variance)

        return with_finite_draws(self._map(single, data))

    def _moments(self, new: ReadoutRun, mean: Array, variance: Array) -> Draws:
        noise_scale = jnp.broadcast_to(jnp.asarray(new.noise_scale, mean.dtype), mean.shape)
        return {
            "mean": new.loc + mean,
            "variance": variance,
            "predictive_variance": variance + noise_scale**2,
            "noise_scale": noise_scale,
        }

    def log_densities(self, data: PredictionInputs) -> Results:
        """Return the log predictive density of each row's observations, (m,)."""

        def by_row(fit: ReadoutRun, new: ReadoutRun, readout: Any) -> tuple[Array, Array]:
            # The problem is less the prior's mean, which ``loc`` holds, and the residual is less ``loc``.
            mean, variance, _ = readout.predict(new.features)
            variance = variance + new.noise_scale**2
            by_entry = -0.5 * ((new.residual - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance))
            # Given the hidden weights the outputs are independent.
            log_density = by_entry if by_entry.ndim == 1 else by_entry.sum(axis=1)
            return log_density, jnp.isfinite(new.loc + mean).all() & jnp.isfinite(variance).all()

        return self._averaged(by_row, data)

    def joint_log_densities(self, data: PredictionInputs) -> Results:
        """Return the log predictive density of all rows' observations together, (1,)."""

        def joint_density(fit: ReadoutRun, new: ReadoutRun, readout: Any) -> tuple[Array, Array]:
            if not new.loc.size:  # nothing is observed: no covariance to factor
                return jnp.zeros(1, new.loc.dtype), jnp.isfinite(fit.loc).all()
            mean, covariance = readout.predict_jointly(new.features)
            # By output, (k, m): the noise may differ between outputs that share a covariance of the function.
            noise_scale, residual = (
                jnp.broadcast_to(values, new.loc.shape).reshape(mean.shape).T
                for values in (new.noise_scale, new.residual)
            )
            covariance = covariance + jnp.eye(len(mean))[None] * noise_scale[:, None] ** 2
            by_output = dist.MultivariateNormal(mean.T, covariance).log_prob(residual)
            is_finite = jnp.isfinite(new.loc).all() & jnp.isfinite(mean).all() & jnp.isfinite(covariance).all()
            # A density may be zero, as of a single row; NumPyro's is, too, where an observation is NaN.
            log_density = jnp.where(jnp.isinf(residual).any(), -jnp.inf, by_output.sum())
            return jnp.where(jnp.isnan(residual).any(), jnp.nan, log_density)[None], is_finite

        return self._averaged(joint_density, data)

    def _averaged(self, density: Density, data: PredictionInputs) -> Results:
        """Average densities over draws."""
        self._checked_shapes(data, is_observed=True)

        def single(solved: BlockedPosterior | None, fit: ReadoutRun, new: ReadoutRun) -> tuple[Array, Array]:
            return density(fit, new, self._readout(fit, solved))

        return log_of_average(*self._map(single, data))

    def _readout(self, fit: ReadoutRun, solved: BlockedPosterior | None) -> Any:
        """Return the readout's posterior, which draws and predicts."""
        return fit.problem().solved() if solved is None else solved

    def _map(self, single: Callable[..., T], data: PredictionInputs, *extras: object) -> T:
        """Map ``single(solved, *extras, *runs)`` over the draws; means are NaN where the assumptions do not hold."""

        def checked(draw: tuple) -> T:
            values, solved, *extra = draw
            solved, values = in_default_precision(solved), data.values_at(values)
            return single(solved, *extra, *(read_run(self.model, values, *call) for call in data.calls))

        sizes = [run.features.size for run in self.shapes(data)]
        return self._over_draws(checked, (data.draws, data.solved, *extras), max(1, *sizes))

    def shapes(self, data: PredictionInputs) -> list[ReadoutRun]:
        """Return the runs of a draw with shapes instead of numbers, so that shapes are checked once."""
        values = data.values_at(first_draw(data.draws))

        def read() -> list[ReadoutRun]:
            runs = [read_sites(self.model, values, *call).read_off() for call in data.calls]
            runs[0].problem()  # which checks it
            return runs

        return jax.eval_shape(read)

    def _checked_shapes(self, data: PredictionInputs, *, is_observed: bool) -> list[ReadoutRun]:
        fit, new = self.shapes(data)
        check_observed(self.observed, new.is_observed, is_wanted=is_observed)
        num_rows, num_features = new.features.shape
        if new.loc.shape[0] != num_rows:
            raise ValueError(f"the inputs give features with {num_rows} rows, but means of shape {new.loc.shape}.")
        if num_features != fit.features.shape[1]:
            raise ValueError(
                f"the inputs give features with {num_features} columns, but the model was fitted with "
                f"{fit.features.shape[1]}."
            )
        return [fit, new]


_SIZE_OF_DRAW = 2**14


class ThroughWeights(_Predictor):
    """Predictions through draws of all weights, readout included, of one observed site with any likelihood."""

    def readouts(self, data: PredictionInputs) -> Results:
        """Return the draws' own readouts, (draws, d) or (draws, d, k)."""
        readouts = self._over_draws(lambda draw: self._weights(draw, data)[self.model.readout], data.draws, 1)
        return with_finite_draws(readouts)

    def predictions(self, data: PredictionInputs) -> Results:
        def single(draw: tuple[Draws, Array]) -> tuple[Draws, Array]:
            site = self._site(draw[0], data, is_observed=False)
            return {**moments_of(site["fn"]), self.observed: site["fn"].sample(draw[1])}, _is_finite(site["fn"])

        return self._over_draws(single, (data.draws, random.split(data.rng_key, data.num_draws)), _SIZE_OF_DRAW)

    def log_densities(self, data: PredictionInputs) -> Results:
        def by_row(site: dict) -> Array:
            by_observation = log_prob_by_observation(site)
            if not by_observation.ndim:
                raise ValueError(
                    f"the observed site {site['name']!r} is one event, whose density is no product over its rows; take "
                    "joint_log_density."
                )
            return by_observation.sum(axis=tuple(range(1, by_observation.ndim)))

        return self._averaged(by_row, data)

    def joint_log_densities(self, data: PredictionInputs) -> Results:
        return self._averaged(lambda site: jnp.sum(log_prob_by_observation(site))[None], data)

    def _averaged(self, density: Callable[[dict], Array], data: PredictionInputs) -> Results:
        def single(draw: Draws) -> tuple[Array, Array]:
            site = self._site(draw, data, is_observed=True)
            return density(site), _is_finite(site["fn"])

        return log_of_average(*self._over_draws(single, data.draws, _SIZE_OF_DRAW))

    def _weights(self, draw: Draws, data: PredictionInputs) -> Draws:
        """Return one draw of the unwrapped model, of one that may hold the base site instead of the readout."""
        values = data.values_at(draw)
        if self.model.readout in values:
            return values
        args, kwargs = data.calls[0]
        return {**values, **weights_of_run(run_model(self.model, args, kwargs, values=values))}

    def _site(self, draw: Draws, data: PredictionInputs, *, is_observed: bool) -> dict:
        args, kwargs = data.calls[1]
        sites: Sites = run_model(self.model.fn, args, kwargs, values=self._weights(draw, data))
        if self.model.readout not in latent_sites(sites):
            refuse_other_readout(self.model.readout, sites)
        site = sites[self.observed]
        check_observed(self.observed, site["is_observed"], is_wanted=is_observed)
        return site


def in_default_precision(tree: T) -> T:
    """Return a tree whose arrays of floats have the precision of JAX's numbers."""
    precision = jnp.result_type(float)

    def cast(leaf: Any) -> object:
        is_float = isinstance(leaf, Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(precision) if is_float else leaf

    return jax.tree.map(cast, tree)


def log_of_average(log_densities: Array, is_finite: Array) -> Results:
    """Return the log of the average of densities (draw, m) over the draws whose moments are finite, (m,)."""
    # Draws that are left out have the density zero here, and are not counted either: the mixture is of the others.
    log_terms = jnp.where(is_finite[:, None], log_densities, -jnp.inf)
    return logsumexp(log_terms, axis=0) - jnp.log(is_finite.sum()), is_finite


def with_finite_draws(results: object) -> Results:
    """Return results, and whether all of a draw are finite, (draw,)."""
    by_leaf = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1) for leaf in jax.tree.leaves(results)]
    return results, jnp.array(by_leaf).all(axis=0)


def check_observed(site: str, is_observed: bool, *, is_wanted: bool) -> None:
    """Check that there are observations where their density is wanted, and none where they would not be used."""
    if is_observed and not is_wanted:
        raise ValueError(
            f"the observed site {site!r} is observed with these arguments, and predictions make no use of "
            "observations; call without them, or predictive.log_density(x_new, y_new)."
        )
    if is_wanted and not is_observed:
        raise ValueError(
            f"the observed site {site!r} is not observed with these arguments; pass the observations, "
            "predictive.log_density(x_new, y_new)."
        )


def moments_of(fn: dist.Distribution) -> Draws:
    """Return the moments of an observed distribution, or the probabilities of its classes."""
    base = unwrap(fn, masks=True)
    if isinstance(base, dist.CategoricalLogits | dist.CategoricalProbs):
        return {"probs": jnp.broadcast_to(base.probs, (*fn.shape(), base.probs.shape[-1]))}
    moments = {"mean": fn.mean, "predictive_variance": fn.variance}
    if isinstance(base, dist.BernoulliLogits | dist.BernoulliProbs):
        moments["probs"] = fn.mean
    if isinstance(base, dist.Normal):
        moments["noise_scale"] = jnp.broadcast_to(base.scale, fn.shape())
    return moments


def _is_finite(fn: dist.Distribution) -> Array:
    """Return whether the parameters of a distribution are finite; its moments need not be, as Cauchy's are not."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(fn)]).all()
