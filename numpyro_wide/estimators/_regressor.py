"""Regression with wide Bayesian neural networks, as scikit-learn's estimators do it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_wide._checks import check_levels, check_one_of, whole_number
from numpyro_wide.estimators._base import Report, Standardiser, WideBNN, standardised
from numpyro_wide.estimators._chains import Clock
from numpyro_wide.estimators._policy import METHODS, NOISES, Request, decide
from numpyro_wide.estimators._posteriors import Mixture
from numpyro_wide.machine import set_blas_threads

_BLOCK = 8192  # rows predicted at a time: of all of them and all draws there may be too many


class WideBNNRegressor(RegressorMixin, WideBNN):
    r"""Regression with a wide Bayesian neural network: fit, predict with uncertainty, read what was decided.

    Inputs and targets are standardised, constant columns left out. The evidence of the infinitely wide network chooses
    activation, depth, and whether columns have scales of their own, and fits scales and noise
    (:func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`). From there the closed form of the infinitely wide network
    predicts ("limit"), or draws of a finite network: of its prior, chosen by their evidence ("weighted",
    :func:`~numpyro_wide.wide_limit_draws`), or of microcanonical chains of the collapsed model ("chains"), with latent
    scales and noise. "auto" weighs draws where rows are few, runs chains where they are not or the weights are bad, and
    keeps these unless the limit has clearly more leave-one-out log density. The limit's is in closed form, and that of
    draws is too, given each draw, with Pareto-smoothed weights. ``report_`` tells all these numbers.

    All predictions are mixtures of Gaussians over draws, noise included, in the units of the targets, and computed in
    double precision whatever JAX is set to. Chains run in single precision unless the noise is small, or
    lost beside large features.

    Args:
        hidden: widths of the hidden layers, all the same, such as (50,); or "auto": depth by the evidence, 50 units.
        noise: "constant"; "by_row", for a standard deviation that is a function of the inputs
            (:class:`~numpyro_wide.nn.NoiseNetwork`), which the limit does not have; or "auto", by a test of the limit's
            leave-one-out residuals.
        method: "auto", "limit", "weighted" or "chains".
        time_budget: number of seconds that the fit may take, those of compilation apart; None for ten minutes at most.
            Chains end before it is spent if they have settled.
        num_chains: number of chains.
        random_state: seed, an int or a ``numpy.random.RandomState``, of chains and choices of rows. How many steps a
            budget pays for is seen by the clock: a fit with chains does not repeat exactly.
        progress_bar: whether to show the seconds worked and what is being done.

    Attributes:
        report_: what was decided, and from which numbers; ``str(report_)`` is a page of text.
        method_: what predicts: "limit", "weighted" or "chains".
        fit_: result of :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`, for standardised inputs and targets.
        model_: collapsed model, ``model_(medians, x, y)``; None for the limit.
        model_args_: arguments that it was fitted with; None for the limit.
        mcmc_: NumPyro's ``MCMC`` after its run; None without chains.
        draws_: draws that predict, by site; None for the limit.
        predictive_: :class:`~numpyro_wide.ReadoutPredictive` of these, to be called in float64; None for the limit.
        n_iter_: number of steps of each chain, warmup included; 1 without chains.
        n_features_in_: number of columns of the inputs.
        feature_names_in_: names of the columns, where the inputs had names.

    Raises:
        ValueError: when it is fitted, for parameters that are none of these or contradict each other, and data that
            scikit-learn refuses, such as NaN or a single row.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.estimators import WideBNNRegressor
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = WideBNNRegressor(method="limit", random_state=0).fit(x, np.sin(2 * x[:, 0]))
        >>> mean, sd = model.predict(np.array([[0.5], [1.0]]), return_std=True)
        >>> mean.round(2).tolist(), sd.shape
        ([0.84, 0.91], (2,))
    """

    _methods = METHODS

    def __init__(
        self,
        *,
        hidden: Any = "auto",
        noise: str = "auto",
        method: str = "auto",
        time_budget: float | None = None,
        num_chains: int = 4,
        random_state: Any = None,
        progress_bar: bool = False,
    ):
        super().__init__(
            hidden=hidden,
            method=method,
            time_budget=time_budget,
            num_chains=num_chains,
            random_state=random_state,
            progress_bar=progress_bar,
        )
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike) -> "WideBNNRegressor":
        """Fit to rows of a table.

        Args:
            X: inputs, (n, d).
            y: targets, (n,), or (n, k) for outputs that share scales and noise.

        Returns:
            Itself.

        Raises:
            ValueError: for parameters out of their range, or data that scikit-learn refuses.
        """
        depth, width, budget, random = self._checked_parameters()
        check_one_of("noise", self.noise, NOISES)
        if (self.noise, self.method) == ("by_row", "limit"):
            raise ValueError(
                'noise="by_row" needs a finite network, but method is "limit", which has one noise for all rows; take '
                'method="chains" or "auto".'
            )
        _refuse_words(y)
        given = {"multi_output": True, "y_numeric": True, "dtype": np.float64, "ensure_min_samples": 2}
        inputs, targets = validate_data(self, X, y, **given)
        targets = np.asarray(targets, float)
        _refuse_constant_columns(targets)
        self._columns = np.flatnonzero(np.ptp(inputs, axis=0) > 0)
        self._by_column = Standardiser.fit(self._kept(inputs))
        self._by_target = Standardiser.fit(targets)
        report = Report("Bayesian neural network, regression")
        request = Request(depth, width, self.noise, self.method, self.num_chains)
        if len(self._columns) < inputs.shape[1]:
            report.add("Data", f"{inputs.shape[1] - len(self._columns)} constant column(s) left out")
        rows = standardised(self._by_column, self._kept(inputs)), standardised(self._by_target, targets)
        # Several threads on few cores wait for each other far longer than they work.
        with set_blas_threads(1), Clock(budget, self.progress_bar) as clock:
            found = decide(request, *rows, clock, random, report)
        if np.all(np.ptp(targets, axis=0) > 0):
            noise = ", ".join(f"{number:.4g}" for number in found.fit.noise_scale * np.ravel(self._by_target.scale))
            report.add("Infinitely wide network", f"noise in the units of the targets: {noise}")
        self.report_, self.method_, self.fit_ = report, found.method, found.fit
        self.model_, self.model_args_, self.mcmc_ = found.model, found.model_args, found.mcmc
        self.draws_, self.n_iter_, self._posterior = found.draws, found.num_steps, found.posterior
        return self

    def predict(self, X: ArrayLike, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict means, and how far observations may lie from them.

        Args:
            X: inputs, (m, d).
            return_std: whether to return standard deviations of observations, too.
            return_cov: whether to return covariances of observations between rows, too, noise on their diagonal.

        Returns:
            Means, (m,) or (m, k); with ``return_std`` also standard deviations of that shape, with ``return_cov`` also
            covariances, (m, m) or (m, m, k).

        Raises:
            ValueError: for inputs that scikit-learn refuses, or if both are asked for.
        """
        if return_std and return_cov:
            raise ValueError(
                "predict returns standard deviations or covariances, not both; the squares of the former are the "
                "diagonal of the latter."
            )
        rows = self._rows(X)
        mean, variance = self._by_blocks(rows, lambda mixture, _: np.stack(mixture.moments()))
        if return_std:
            return self._out(mean), self._out(np.sqrt(variance), deviation=True)
        if not return_cov:
            return self._out(mean)
        covariance = self._posterior.covariance(rows)
        index = np.arange(len(rows))
        covariance[index, index] = variance
        covariance = covariance * np.reshape(self._by_target.scale, -1) ** 2
        return self._out(mean), covariance if self._by_target.loc.ndim else covariance[..., 0]

    def predict_quantiles(self, X: ArrayLike, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Predict numbers that observations are below with given probabilities.

        Args:
            X: inputs, (m, d).
            quantiles: probabilities, between 0 and 1.

        Returns:
            Quantiles, (m, quantiles) or (m, k, quantiles).

        Raises:
            ValueError: for inputs that scikit-learn refuses, or levels outside of (0, 1).
        """
        levels = tuple(np.ravel(quantiles).tolist())
        if not levels:
            raise ValueError("quantiles must hold a probability at least, such as 0.5, but is empty.")
        check_levels("quantiles", levels)
        by_level = self._by_blocks(self._rows(X), lambda mixture, _: mixture.quantiles(levels))
        return np.stack([self._out(values) for values in by_level], axis=-1)

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> np.ndarray:
        """Predict central intervals that hold an observation with a given probability.

        Args:
            X: inputs, (m, d).
            level: probability, between 0 and 1.

        Returns:
            Lower and upper ends, (m, 2) or (m, k, 2).

        Raises:
            ValueError: for inputs that scikit-learn refuses, or a level outside of (0, 1).
        """
        if np.ndim(level):
            raise ValueError(f"level must be a number, such as 0.9, but is {level!r}; call it for one level at a time.")
        check_levels("level", level)
        return self.predict_quantiles(X, (0.5 - level / 2, 0.5 + level / 2))

    def log_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return the log predictive density of observations, row by row, in the units of the targets.

        Args:
            X: inputs, (m, d).
            y: observations, (m,) or (m, k).

        Returns:
            Log densities, (m,); of several outputs that of all of a row together.

        Raises:
            ValueError: for data that scikit-learn refuses, or observations of another shape.
        """
        rows = self._rows(X)
        observed = np.asarray(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"))
        check_consistent_length(X, observed)
        shape = (len(observed), *self._by_target.loc.shape)
        if observed.shape != shape:
            raise ValueError(f"y must have the shape {shape}, as the targets of the fit had, but has {observed.shape}.")
        units = np.sum(np.log(self._by_target.scale))
        targets = standardised(self._by_target, observed).reshape(len(observed), -1)
        found = self._by_blocks(rows, lambda mixture, block: mixture.log_density(targets[block])[None])
        return found[0] - units

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw observations from the predictive distribution of each row.

        Of draws of a network all rows of a sample have the same scales, noise and hidden weights; given these, rows are
        independent.

        Args:
            X: inputs, (m, d).
            n_samples: number of samples.
            random_state: seed, or generator.

        Returns:
            Samples, (m, n_samples) or (m, k, n_samples).

        Raises:
            ValueError: for inputs that scikit-learn refuses, or no positive number of samples.
        """
        num_samples = whole_number("n_samples", n_samples)
        random = check_random_state(random_state)
        rows, places = self._rows(X), random.random_sample(num_samples)
        samples = self._by_blocks(rows, lambda mixture, _: mixture.sample(random, places))
        return np.stack([self._out(values) for values in samples], axis=-1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags

    def _rows(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self)
        return standardised(self._by_column, self._kept(validate_data(self, X, dtype=np.float64, reset=False)))

    def _by_blocks(self, rows: np.ndarray, find: Callable[[Mixture, slice], np.ndarray]) -> np.ndarray:
        """Join what is found, (s, m, ...), of the mixtures of blocks of rows."""
        blocks = (slice(start, start + _BLOCK) for start in range(0, len(rows), _BLOCK))
        return np.concatenate([find(self._posterior.mixture(rows[block]), block) for block in blocks], axis=1)

    def _out(self, values: np.ndarray, deviation: bool = False) -> np.ndarray:
        """Return (m, k) in the units and of the shape of the targets."""
        values = values * self._by_target.scale.reshape(1, -1)
        if not deviation:
            values = values + self._by_target.loc.reshape(1, -1)
        return values if self._by_target.loc.ndim else values[:, 0]


def _refuse_constant_columns(targets: np.ndarray) -> None:
    """Refuse targets of which some columns vary and some do not: all share scales and noise."""
    is_constant = np.ptp(targets, axis=0) == 0
    if np.any(is_constant) and not np.all(is_constant):
        raise ValueError(
            f"columns {np.flatnonzero(is_constant).tolist()} of y are constant, and would make the noise of the others "
            "too small, which they share; leave them out."
        )


def _refuse_words(y: ArrayLike) -> None:
    """Refuse labels that are words; numbers in text are read by scikit-learn."""
    for target in np.ravel(np.asarray(y)):
        if not isinstance(target, str):
            return
        try:
            float(target)
        except ValueError as error:
            raise ValueError(
                f"y must hold numbers, but holds {str(target)!r}; for classes use WideBNNClassifier."
            ) from error
