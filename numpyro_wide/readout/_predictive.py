"""Predictions from draws of a wrapped model: the interface for users."""

import re
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from numpyro_wide import _mixture
from numpyro_wide._blocks import blocks_of, is_mapped
from numpyro_wide._checks import (
    NOISE_TOO_SMALL,
    are_known,
    check_key,
    check_known,
    check_no_nan,
    is_known,
    kind_of,
    late_progress,
    levels_of,
    listing,
    named_arguments,
    num_draws_of,
    refuse_frames,
    warn_if_stuck,
    whole_number,
)
from numpyro_wide._compile import cache_key, is_traced, run_program, split
from numpyro_wide._traces import abstract_sites, latent_sites, observed_sites
from numpyro_wide.linear_gaussian._row_blocks import BlockedPosterior, RowFeatures
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._assumptions import check_at, conjugate_form
from numpyro_wide.readout._model import (
    Draws,
    Model,
    ReadoutModel,
    ReadoutRun,
    as_call,
    check_fit_observed,
    check_wrapped,
    first_draw,
    refuse_other_readout,
)
from numpyro_wide.readout._predictions import Call, Integrated, Method, PredictionInputs, Results, ThroughWeights

T = TypeVar("T")
# Names that predictions are given under, besides that of the observed site.
NAMES = ("mean", "variance", "predictive_variance", "noise_scale", "probs")
_ORDER = "ReadoutPredictive(model, draws, (x, y))"
_NUM_NAMED = 20
_MOST_KEPT = 2**27  # numbers of the matrices of all draws: 1 GB in float64


@dataclass(frozen=True, repr=False)
class PredictiveSummary:
    """Predictions as one distribution for each row, the mixture over draws with the noise; shown as a table.

    Attributes:
        mean: its mean, (m,) or (m, k); None for classes.
        standard_deviation: of the shape of ``mean``; None for classes.
        quantiles: by their level, each of the shape of ``mean``.
        probs: probabilities of the classes, (m, classes), or of a one, (m,); None for other likelihoods.
    """

    mean: np.ndarray | None = None
    standard_deviation: np.ndarray | None = None
    quantiles: dict[float, np.ndarray] = field(default_factory=dict)
    probs: np.ndarray | None = None

    def to_frame(self) -> Any:
        """Return the table as a ``pandas.DataFrame``, a column for each statistic of each output."""
        import pandas  # whose import takes a while

        statistics: dict[str, Any] = {"mean": self.mean, "sd": self.standard_deviation}
        statistics |= {f"{100 * level:g}%": values for level, values in self.quantiles.items()}
        statistics["p"] = self.probs
        columns: dict[str, np.ndarray] = {}
        for name, values in statistics.items():
            by_column = [] if values is None else values.reshape(len(values), -1).T
            for index, column in enumerate(by_column):
                columns[name if values.ndim == 1 else f"{name}[{index}]"] = column
        return pandas.DataFrame(columns).rename_axis("row", axis="columns")

    def __str__(self) -> str:
        return self.to_frame().to_string(max_rows=20, float_format="{:.4g}".format)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(max_rows=20, float_format="{:.4g}".format)


class ReadoutPredictive:
    """Predictions from draws of a model: of a chain, of a guide, or of the wide limit.

    Given the hidden weights, and with a Normal likelihood, the readout is Gaussian (Hron 2022, eq. 2; Mathematics,
    :eq:`posterior`): its draws are exact, and predictions integrate over it (:eq:`predictive`), one Gaussian for each
    draw of the hidden weights. That holds for collapsed models, and for others whose own likelihood is Normal with a
    mean linear in the readout. For all others, such as classes and counts, predictions go through draws of all weights.

    Everything is computed in float64, whatever the precision of the chains, and returned in JAX's own, which is float32
    unless ``jax_enable_x64`` is set. Under a transformation, such as ``jax.jit``, it is computed in JAX's own as well;
    a key draws other numbers there.

    Arrays are copied. Programs are compiled at the first call for inputs of some shape, of the model and the objects
    among its arguments as they are then, and used again by further calls and for other draws; make a new one after a
    change of the model.

    Args:
        model: result of :func:`~numpyro_wide.collapse_readout` or :func:`~numpyro_wide.repriorise`; or any model, with
            the names of its sites.
        draws: draws of all its latent sites, each with a leading axis for the draws; ``{**draws, <readout>:
            predictive.readout(key)}`` are draws of the unwrapped model. A repriorised model's may hold its base site,
            the readout, or both. Memory-mapped ones are read in blocks.
        model_args: arguments that the model was fitted with, observations included.
        model_kwargs: its keyword arguments.
        readout: of a model that is not wrapped, the name of the readout's site.
        features: likewise, that of the site which the readout multiplies.
        observed: name of the observed site, where a model that is not collapsed has several.
        params: values of the model's param sites, as NumPyro's ``Predictive`` takes them.
        batch_size: number of draws that are worked on at once; by default as many as the memory is meant for.
        progress_bar: whether to show a bar while features are summed over by blocks of rows, once for all draws.

    Raises:
        ValueError: if a latent site has no draws, their numbers differ, nothing is observed, or the readout of a
            collapsed model cannot be integrated out at the first draw; of predictions, at another draw or other inputs.
        FloatingPointError: in predictions, if a draw's are not finite: the noise is too small even for float64.

    Warns:
        RuntimeWarning: if under a fifth of the draws are distinct; or if the model cannot be run in float64.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import ReadoutPredictive, collapse_readout, nn, wide_limit_draws
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> draws = wide_limit_draws(jax.random.key(0), collapsed, 20, x, y)
        >>> predictive = ReadoutPredictive(collapsed, draws, (x, y))
        >>> predictions = predictive(jax.random.key(1), jnp.zeros((3, 1)))
        >>> {name: values.shape for name, values in sorted(predictions.items())}
        {'mean': (20, 3), 'noise_scale': (20, 3), 'predictive_variance': (20, 3), 'variance': (20, 3), 'y': (20, 3)}
        >>> predictive.log_density(jnp.zeros((3, 1)), jnp.zeros(3)).shape
        (3,)
    """

    def __init__(
        self,
        model: ReadoutModel | Model,
        draws: Mapping[str, ArrayLike],
        model_args: tuple = (),
        model_kwargs: Mapping[str, object] | None = None,
        *,
        readout: str | None = None,
        features: str | None = None,
        observed: str | None = None,
        params: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        progress_bar: bool = True,
    ):
        if readout is not None and features is not None and not isinstance(model, ReadoutModel):
            model = ReadoutModel(model, readout, features, observed=observed)
        self.model: Any = model
        check_wrapped(model, "of a model that is not wrapped, name the sites: readout=..., features=...")
        if not isinstance(draws, Mapping):
            raise TypeError(
                f"draws must be a dictionary of draws, such as mcmc.get_samples(), but got {kind_of(draws)}; the order "
                f"is {_ORDER}."
            )
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        self.draws: dict[str, Any] = {
            name: values if isinstance(values, np.memmap) else jnp.array(values) for name, values in draws.items()
        }
        self.num_draws = num_draws_of("draws", self.draws)
        call = as_call(model_args, model_kwargs, _ORDER)
        refuse_frames(*call)
        self._fit: Call = _copied(call)
        self._params: Draws = _copied(dict(params or {}))
        self._progress_bar = progress_bar
        self._functions: dict[Hashable, Callable] = {}
        self._solved: BlockedPosterior | None = None
        self._is_double = True
        self._shapes, self._predictor = self._in_double(lambda: self._choose_predictor(observed))
        if self._predictor.observed in NAMES:
            raise ValueError(
                f"the observed site is called {self._predictor.observed!r}, but predictions are given under the names "
                f"{listing(NAMES)}; rename the site."
            )
        warn_if_stuck(self.draws, by_chain=False)

    def __getstate__(self) -> dict[str, object]:
        # Programs are compiled anew where they are wanted.
        return {**vars(self), "_functions": {}}

    @property
    def is_integrated(self) -> bool:
        """Whether the readout is integrated out: the model's likelihood is Normal, and linear in it."""
        return isinstance(self._predictor, Integrated)

    def readout(self, rng_key: Array) -> Array:
        """Draw the readout from its posterior, once for each draw of the other sites, (draws, d) or (draws, d, k).

        Where it cannot be integrated out, return the draws' own.
        """
        check_key("rng_key", rng_key, "predictive.readout(rng_key)")
        return self._run(self._predictor.readouts, rng_key=rng_key)

    def __call__(self, rng_key: Array, *args: object, **kwargs: object) -> Draws:
        """Predict at other inputs."""
        check_key("rng_key", rng_key, "predictive(rng_key, x_new)")
        return self._run(self._predictor.predictions, (args, kwargs), rng_key)

    def moments(self, *args: object, **kwargs: object) -> Draws:
        """Predict at other inputs without drawing observations: mean, variances and noise of each draw's Gaussian.

        Where the readout is not integrated out, a ``ValueError``.
        """
        return self._run(self._integrated("call predictive(rng_key, x_new)").moments, (args, kwargs))

    def summary(
        self,
        *args: object,
        quantiles: ArrayLike = (0.05, 0.5, 0.95),
        rng_key: Array | None = None,
        **kwargs: object,
    ) -> PredictiveSummary:
        """Summarise predictions at other inputs: the mixture over draws, noise included, as a table.

        Args:
            *args: arguments of the model without observations.
            quantiles: level of a quantile, or several, between 0 and 1.
            rng_key: a PRNG key, which matters where quantiles are those of draws; ``jax.random.key(0)`` by default.
            **kwargs: its keyword arguments.

        Returns:
            A :class:`~numpyro_wide.readout.PredictiveSummary`. Quantiles are those of a mixture of Gaussians where the
            readout is integrated out, else of draws.
        """
        levels = levels_of("quantiles", quantiles)
        if any(isinstance(arg, Array) and jnp.issubdtype(arg.dtype, jax.dtypes.prng_key) for arg in args):
            raise TypeError("summary(x_new) takes the rows to predict; a PRNG key goes by name, rng_key=key.")
        if self.is_integrated:
            predictions = self.moments(*args, **kwargs)
        else:
            predictions = self(jax.random.key(0) if rng_key is None else rng_key, *args, **kwargs)
        check_known("a summary holds numbers", *predictions.values())
        values = {name: np.asarray(draws, float) for name, draws in predictions.items()}
        if "probs" in values:
            return PredictiveSummary(probs=values["probs"].mean(axis=0))
        mean, variance = values["mean"], values["predictive_variance"]

        def quantile(level: float) -> np.ndarray:
            if self.is_integrated:
                return _mixture.quantile(np.asarray(level), mean, variance)
            return np.quantile(values[self._predictor.observed], level, axis=0, method="inverted_cdf")

        center, total_variance = _mixture.moments(mean, variance)
        return PredictiveSummary(center, np.sqrt(total_variance), {level: quantile(level) for level in levels})

    def log_density(self, *args: object, **kwargs: object) -> Array:
        r"""Return the log predictive density of observations, row by row, under the average over draws, (m,).

        $\log \frac{1}{S} \sum_s \prod_k N(y_k; \text{mean}_{sk}, \text{variance}_{sk} + \text{noise\_scale}_{sk}^2)$
        with the moments of :eq:`predictive`; where the readout is not integrated out, the terms are the likelihood at
        each draw of all weights. The sum over rows is the log score of a test set, not the density of all of it
        together.

        Args:
            *args: arguments of the model, observations included, such as ``(x_test, y_test)``.
            **kwargs: its keyword arguments.
        """
        return self._log_average(self._predictor.log_densities, (args, kwargs))

    def joint_log_density(self, *args: object, **kwargs: object) -> Array:
        r"""Return the log predictive density of all rows together, the conditional log evidence $\log p(D_2 | D_1)$.

        $D_1$ is what the model was fitted on, $D_2$ the observations of these rows; $\log \frac{1}{S} \sum_s
        p(D_2 | D_1, \text{hidden}_s)$, each term a Gaussian with the covariance of :eq:`predictive` (Lotfi et al.
        2022). Under many rows few draws dominate the average, and the estimate is too low. Arguments are those of
        :meth:`log_density`.
        """
        return self._log_average(self._predictor.joint_log_densities, (args, kwargs))[0]

    def log_evidence(self) -> Array:
        r"""Return the log evidence of the fit's observations at each draw of the other sites, (draws,).

        $\log N(Y; \text{loc}, \Psi \Psi^\top + \sigma^2 I)$ (Mathematics, :eq:`evidence`), in nats. Where the readout
        is not integrated out, a ``ValueError``.
        """
        return self._run(self._integrated("estimate its evidence with numpyro_wide.model_evidence").log_evidences)

    def leave_one_out(self) -> tuple[Array, Array]:
        """Predict each row of the fit from all others, in closed form at each draw (Mathematics, :eq:`left-out`).

        Hidden weights have adapted to all rows: an average over draws weighs each, for a row, by the inverse of its
        density there, smoothed as ``arviz.psislw`` does, and is too good where the Pareto shape is above 0.7.

        Returns:
            Mean and variance, noise included, (draws, n) or (draws, n, k) each. Where the readout is not integrated
            out, a ``ValueError``.
        """
        remedy = "leave one out by arviz.loo, of diagnostics.to_arviz(..., log_likelihood=True)"
        return self._run(self._integrated(remedy).left_out)

    def _integrated(self, remedy: str) -> Integrated:
        """Return the predictor of a readout that is integrated out."""
        if isinstance(self._predictor, Integrated):
            return self._predictor
        raise ValueError(f"the readout is not integrated out of this model, whose likelihood is not Normal; {remedy}.")

    def _choose_predictor(self, observed: str | None) -> tuple[ReadoutRun | None, Integrated | ThroughWeights]:
        """Return the predictor, after the shapes of the fit's run where the readout is integrated out."""
        model, data = self.model, PredictionInputs(self.draws, self._params, self._fit)
        ((args, kwargs),) = data.calls
        observed = model.observed or observed
        sites = abstract_sites(model.fn, args, kwargs, self._params)
        latent = {name: tuple(site["fn"].shape()) for name, site in latent_sites(sites).items()}
        check_fit_observed(observed, latent)
        if latent.pop(model.readout, None) is None:
            refuse_other_readout(model.readout, sites)
        self._check_draws(latent, [name for name, site in sites.items() if site["type"] == "param"])
        form = conjugate_form(model, data.values_at(first_draw(self.draws)), args, kwargs, observed)
        if form is not None:
            predictor = Integrated(form, form.observed, self.batch_size)
            return predictor.shapes(data)[0], predictor
        if not {model.readout, model.base} & self.draws.keys():
            self._refuse_missing([model.readout])
        candidates = [name for name in observed_sites(sites) if observed in (None, name)]
        if len(candidates) != 1:
            raise ValueError(
                f"predictions are of one observed site, but the model observes {listing(observed_sites(sites))} with "
                "these model_args and model_kwargs; pass the observations, and name one of several sites: observed=..."
            )
        return None, ThroughWeights(model, candidates[0], self.batch_size)

    def _check_draws(self, latent: dict[str, tuple[int, ...]], params: list[str]) -> None:
        """Refuse draws that lack a latent site or have another shape, and param sites without a value."""
        self._refuse_missing([name for name in latent if name not in self.draws])
        # The parameters of a random flax module are replaced by its sample sites.
        modules = {name.split("/")[0] + "$params" for name in latent}
        with_values = modules | self._params.keys() | self.draws.keys()
        unset = [name for name in params if name not in with_values]
        if unset:
            raise ValueError(f"the model has the param sites {listing(unset)}; pass their values as params.")
        for name, shape in latent.items():
            if self.draws[name].shape[1:] != shape:
                raise ValueError(
                    f"draws[{name!r}] must have shape (draws, *{shape}), but has {self.draws[name].shape}; flatten "
                    "chains, as mcmc.get_samples() does."
                )

    def _refuse_missing(self, missing: list[str]) -> None:
        if missing:
            raise ValueError(
                f"draws must hold every latent site, but {listing(missing)} is missing; they hold "
                f"{listing(self.draws)}."
            )

    def _run(
        self, method: Method, test: Call | None = None, rng_key: Array | None = None, *, is_average: bool = False
    ) -> Any:
        """Run one prediction method over all draws, in the caller's precision; raise if a result is not finite."""

        def compute() -> Any:
            try:
                results, is_finite = self._results(method, test, rng_key, is_average=is_average)
            except Exception as error:
                if test is not None:
                    self._add_hints(error, test)
                raise
            return self._checked(method, results, is_finite, test, is_average=is_average)

        results = self._in_double(compute, test, rng_key)
        return jax.tree.map(lambda leaf: leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)), results)

    def _in_double(self, compute: Callable[[], T], *arguments: object) -> T:
        """Compute in float64, but where a caller's transformation goes on, or the model can only be run in float32."""
        if self._is_double and not is_traced((self.draws, self._fit, self._params, arguments)):
            try:
                with double_precision():
                    return compute()
            except (TypeError, ValueError) as error:
                if not all(re.search(pattern, str(error)) for pattern in ("f(loat)?32", "f(loat)?64")):
                    raise
            self._is_double = False
            results = compute()
            warnings.warn(
                "predictions are computed in float32: the model fixes it, or holds NumPy arrays, which JAX keeps in "
                "the precision of their first use (a fault of JAX); pass those as arguments, or jnp.asarray of them.",
                RuntimeWarning,
                stacklevel=3,
            )
            return results
        return compute()

    def _checked(self, method: Method, results: Any, is_finite: Any, test: Call | None, *, is_average: bool) -> Any:
        """Return results whose draws are finite, or NaN where that is not known."""
        if is_known(is_finite):
            if not np.all(is_finite) and self.is_integrated:
                self._refuse_wrong(int(np.argmin(is_finite)), test)
            subject = "predictions" if test is not None else method.__name__.replace("_", " ")
            _refuse_nonfinite(subject, np.asarray(is_finite))
        elif is_average:  # under a transformation nothing can be raised
            results = jnp.where(jnp.all(is_finite), results, jnp.nan)
        return results

    def _results(self, method: Method, test: Call | None, rng_key: Array | None, *, is_average: bool) -> Results:
        """Return the results of all draws; those of blocks of memory-mapped ones on the host."""
        if test is not None:
            refuse_frames(*test)
        if self._solved is None and self._is_kept():
            self._solved = self._solve()
        if not is_mapped(self.draws):
            inputs = PredictionInputs(self.draws, self._params, self._fit, test, self._solved, rng_key)
            return self._computed(method, inputs)
        by_block, is_finite = [], []
        for start, block in blocks_of(self.draws, axis=0):
            key = None if rng_key is None else jax.random.fold_in(rng_key, start)
            inputs = PredictionInputs(block, self._params, self._fit, test, rng_key=key)
            results, finite = self._computed(method, inputs)
            by_block.append(jax.tree.map(np.asarray, results))
            is_finite.append(np.asarray(finite))
        if is_average:
            counts = np.array([finite.sum() for finite in is_finite])[:, None]
            # A block without a finite draw has the weight zero, whatever its density.
            log_averages = np.where(counts > 0, np.array(by_block), -np.inf)
            results = logsumexp(log_averages, b=counts / max(1, counts.sum()), axis=0)
        else:
            results = jax.tree.map(lambda *blocks: np.concatenate(blocks), *by_block)
        return results, np.concatenate(is_finite)

    def _computed(self, method: Method, data: PredictionInputs) -> Results:
        """Run a method as a program, traced once for types and for all inputs but arrays."""
        arrays, join = split(data)
        static, structure = jax.tree.flatten(join([Array] * len(arrays)))
        key = method.__name__, structure, *map(cache_key, static)
        compute = self._functions.setdefault(key, lambda arrays: method(join(arrays)))
        return run_program(compute, arrays)

    def _is_kept(self) -> bool:
        """Whether all rows are summed over once for each draw, and the matrices kept."""
        features = None if self._shapes is None else self._shapes.features
        if not isinstance(features, RowFeatures) or is_mapped(self.draws):
            return False
        is_small = self.num_draws * features.shape[1] ** 2 <= _MOST_KEPT
        return is_small and are_known((self.draws, self._fit, self._params))

    def _solve(self) -> BlockedPosterior:
        """Return the readout's posterior at every draw, one draw at a time: of many rows each takes a while."""
        posteriors = []
        for index in late_progress(range(self.num_draws), shown=self._progress_bar, desc="sums over rows, by draw"):
            draw = {name: values[index : index + 1] for name, values in self.draws.items()}
            inputs = PredictionInputs(draw, self._params, self._fit)
            posterior, _ = self._computed(self._integrated("").posteriors, inputs)
            posteriors.append(jax.block_until_ready(posterior))
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *posteriors)

    def _log_average(self, method: Method, test: Call) -> Array:
        """Return log densities, NaN under a transformation where a draw is not finite; without NaN elsewhere."""
        log_densities = self._run(method, test, is_average=True)
        check_no_nan(f"the observations of site {self._predictor.observed!r}", log_densities.squeeze())
        return log_densities

    def _refuse_wrong(self, index: int, test: Call | None) -> None:
        """Say why the readout cannot be integrated out at a draw, by the arguments of the fit or test, if it cannot."""
        data = PredictionInputs(self.draws, self._params, self._fit, test)
        values = data.values_at({name: draws[index] for name, draws in self.draws.items()})
        for call, where in zip(data.calls, ("the arguments of the fit", "these arguments"), strict=False):
            try:
                check_at(self._predictor.model, values, *call)
            except ValueError as error:
                raise ValueError(f"at draw {index}, with {where}: {error}") from error

    def _add_hints(self, error: Exception, test: Call) -> None:
        """Add to an error at the rows to predict how they differ from those of the fit, which it may come from."""
        fitted = named_arguments(*self._fit)
        for name, value in named_arguments(*test).items():
            old, new = (getattr(array, "shape", ()) for array in (fitted.get(name, value), value))
            if old[1:] != new[1:]:
                columns = ", ".join(map(str, old[1:]))
                error.add_note(
                    f"{name} has shape {new}, where the fit had {old}. New inputs need the columns of the fit, (m, "
                    f"{columns})."
                )
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(test)}
        if (0,) in lengths:
            error.add_note("There are no rows to predict for, and a plate of the model may need one.")
        elif self._shapes is not None:
            noise, loc = self._shapes.noise_scale.shape, self._shapes.loc.shape
            if len(noise) == len(loc) and noise[0] == loc[0] > 1 and loc[:1] not in lengths:
                error.add_note(
                    f"The noise of observed site {self._predictor.observed!r} is by row, for the {loc[0]} rows of the "
                    "fit: make that of the rows to predict an argument of the model, and pass it."
                )


def _refuse_nonfinite(quantity: str, is_finite: np.ndarray) -> None:
    lost = np.flatnonzero(~is_finite)
    if lost.size == is_finite.size:
        raise FloatingPointError(
            f"no {quantity} are finite, of any draw: look for NaN or infinity among the inputs. If there is none, "
            f"{NOISE_TOO_SMALL}, float64; use a larger noise."
        )
    if lost.size:
        named = ", ".join(map(str, lost[:_NUM_NAMED])) + (", ..." if lost.size > _NUM_NAMED else "")
        which = f"draw {named}" if lost.size == 1 else f"{lost.size} draws ({named})"
        raise FloatingPointError(
            f"{quantity} of {which} of {is_finite.size} are not finite: {NOISE_TOO_SMALL}, float64, or a draw is not "
            "finite itself. Use a larger noise, or leave these draws out."
        )


def _copied(tree: T) -> T:
    """Return a tree whose NumPy arrays nobody else can change."""
    return jax.tree.map(lambda leaf: leaf.copy() if type(leaf) is np.ndarray else leaf, tree)
