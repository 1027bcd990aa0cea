"""Regression with wide Bayesian neural networks, for scikit-learn."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import validate_data

from numpyro_wide._checks import check_level, check_one_of, levels_of, whole_number
from numpyro_wide.estimators._base import Report, WideBNN, moments, words_named
from numpyro_wide.estimators._plan import Plan, plan_regression
from numpyro_wide.estimators._policy import decide, without_copies
from numpyro_wide.estimators._posteriors import Mixture, blocks
from numpyro_wide.estimators._targets import TRANSFORMS, TargetScale, refuse_not_positive
from numpyro_wide.machine import set_blas_threads


class WideBNNRegressor(RegressorMixin, WideBNN):
    """Regression with a wide Bayesian neural network, in the units of the targets.

    The evidence chooses an infinitely wide network (:func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`). It predicts
    itself ("limit"), or draws of a finite network do: weighted draws of the prior ("weighted",
    :func:`~numpyro_wide.wide_limit_draws`), or microcanonical chains ("chains"), of the depth and activation that
    predict rows left out best. "auto" takes draws, unless the limit has clearly more leave-one-out log density.

    Args:
        hidden: equal widths of the hidden layers, such as (50,); or "auto": depth and units as the budget pays.
        target_transform: "none", "cube_root", "log" (of positive ones), or "auto": as they are, unless another
            clearly has the larger leave-one-out density.
        noise: "constant", "by_row" (:class:`~numpyro_wide.nn.NoiseNetwork`, not of the limit), or "auto": by row, but
            for few rows, discrete targets and short budgets.
        method: "limit", "weighted", "chains"; "auto": the first, or draws with a little of it; or "posterior": adjusted
            chains of one network, 1 x 50 or as ``hidden`` has it, with latent scales and noise, if R-hat of function,
            scales and noise is at most 1.01; else the limit predicts, with a warning.
        time_budget: seconds of the fit at most, compilation included; None for ten minutes.
        num_chains: number of chains.
        plan: ``plan_`` of an earlier fit to as many rows and columns, or its JSON text, instead of all options above:
            the fit is then run to its end, however long it takes.
        random_state: seed, an int or a ``numpy.random.RandomState``.
        progress_bar: whether to show a bar with the stage and its seconds.

    Attributes:
        plan_: rows, candidates and steps of the fit, as they were run; its ``to_json()`` is a text. On one machine fits
            by a plan and a ``random_state`` are equal to the last bit.
        report_: decisions with their numbers, as text by ``str``.
        summary_: the report's numbers, a dictionary: "method"; "structure", "dense", "additive" or "both";
            "log_density" of a row left out; "noise_scale" of the limit, in deviations of the targets; "rhat" of
            predictions between chains, and "agrees", whether they do; "pareto_shape" of weighted draws; "seconds".
        method_: "limit", "weighted", "chains", "stacked" or "posterior".
        target_transform_: "none", "cube_root" or "log".
        fit_: infinitely wide network, a :class:`~numpyro_wide.wide_limit.WideLimitFit` of standardised data, targets
            transformed.
        model_: collapsed model, ``model_(medians, x, y)``; None for the limit.
        model_args_: arguments of the model's fit; None for the limit.
        mcmc_: NumPyro's ``MCMC`` after its run; None without chains.
        draws_: draws of latent sites, N(0, 1) a priori, by site, as many of a chain as its weight; None for the limit.
        n_iter_: steps by chain, warmup included; 1 without chains.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.estimators import WideBNNRegressor
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = WideBNNRegressor(method="limit", random_state=0).fit(x, np.sin(2 * x[:, 0]))
        >>> mean, sd = model.predict(np.array([[0.5], [1.0]]), return_std=True)
        >>> mean.round(2).tolist(), sd.shape
        ([0.84, 0.91], (2,))
    """

    _task = "regression"
    _methods = ("auto", "limit", "weighted", "chains", "posterior")
    _targets: TargetScale

    def __init__(
        self,
        *,
        hidden: str | Sequence[int] = "auto",
        target_transform: str = "auto",
        noise: str = "auto",
        method: str = "auto",
        time_budget: float | None = None,
        num_chains: int = 4,
        plan: Plan | None = None,
        random_state: int | np.random.RandomState | None = None,
        progress_bar: bool = True,
    ):
        super().__init__(
            hidden=hidden,
            method=method,
            time_budget=time_budget,
            num_chains=num_chains,
            plan=plan,
            random_state=random_state,
            progress_bar=progress_bar,
        )
        self.target_transform = target_transform
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike) -> "WideBNNRegressor":
        """Fit to rows of a table.

        Args:
            X: inputs, (n, d).
            y: targets, (n,), or (n, k) for outputs of equal scales and noise.
        """
        random = self._check_parameters()
        check_one_of("noise", self.noise, ("auto", "constant", "by_row"))
        check_one_of("target_transform", self.target_transform, ("auto", *TRANSFORMS))
        if (self.noise, self.method) == ("by_row", "limit"):
            raise ValueError(
                'noise="by_row" needs a finite network, but method is "limit"; take method="chains" or "auto".'
            )
        checks = {"multi_output": True, "y_numeric": True, "dtype": np.float64, "ensure_min_samples": 2}
        with words_named(X):
            inputs, targets = validate_data(self, X, y, **checks)
            targets = np.asarray(targets, float)
        report = Report("Bayesian neural network, regression")
        inputs, targets = without_copies(inputs, targets, report)
        scale = moments(targets)[1]
        if np.any(scale > 0) and np.any(scale == 0):
            raise ValueError(
                f"columns {np.flatnonzero(scale == 0).tolist()} of y are constant, and all columns share one noise; "
                "leave them out."
            )
        x = self._learn_columns(inputs, report)
        num_outputs = 1 if targets.ndim == 1 else targets.shape[1]
        options = {"noise": self.noise, "target_transform": self.target_transform}
        plan = self._planned(plan_regression, report, *x.shape, num_outputs, **options)
        if plan.target_transform != "auto":
            refuse_not_positive(plan.target_transform, targets)
        # Several threads on few cores mostly wait.
        with set_blas_threads(1), self._clock(plan) as clock, warnings.catch_warnings():
            # Of the limit's fits, to some rows in an order and units of their own; the report tells of all.
            warnings.filterwarnings("ignore", message=r"\d+ of \d+ rows, row")
            self._targets, work, result = decide(x, targets, plan, clock, random, report)
        self.target_transform_, self.n_iter_ = self._targets.transform, result.num_steps
        if self.target_transform_ == "none" and np.all(scale > 0):
            noise = ", ".join(f"{number:.4g}" for number in work.fit.noise_scale * np.ravel(scale))
            report.add("Infinitely wide network", f"noise in the units of the targets: {noise}")
        log_density = result.log_density + float(np.mean(self._targets.log_slope(targets)))
        self._keep(report, clock, work.plan, result.method, work.fit, result.posterior, result.mcmc, log_density)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict means, and standard deviations or covariances of observations.

        Args:
            X: inputs, (m, d).
            return_std: whether standard deviations are returned too.
            return_cov: whether covariances between rows are returned too.

        Returns:
            Means, (m,) or (m, k); with ``return_std`` also standard deviations of that shape, with ``return_cov`` also
            covariances, (m, m) or (m, m, k).
        """
        if return_std and return_cov:
            raise ValueError("predict returns standard deviations or covariances, not both; ask for one of them.")
        rows = self._rows(X)
        mean, deviation = self._by_blocks(rows, lambda mixture, _: np.stack(self._targets.moments(mixture)))
        if return_std:
            return self._out(mean), self._out(deviation)
        if not return_cov:
            return self._out(mean)
        size = np.max(deviation)
        if size > 1e150 or size < 1e-150:
            raise ValueError(
                f"the covariances of targets with the standard deviation {size:.3g} are out of range; "
                "take other units, or return_std=True."
            )
        mean_z, variance_z = self._by_blocks(rows, lambda mixture, _: np.stack(mixture.moments()))
        covariance = self._posterior.covariance(rows)
        index = np.arange(len(rows))
        covariance[index, index] = variance_z
        covariance = self._targets.correlation(mean_z, covariance) * deviation[:, None] * deviation
        return self._out(mean), covariance if self._targets.loc.ndim else covariance[..., 0]

    def predict_quantiles(self, X: ArrayLike, quantiles: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Predict quantiles of observations.

        Args:
            X: inputs, (m, d).
            quantiles: probabilities, between 0 and 1.

        Returns:
            Quantiles, (m, quantiles) or (m, k, quantiles).
        """
        levels = levels_of("quantiles", quantiles)
        by_level = self._by_blocks(self._rows(X), lambda mixture, _: mixture.quantiles(levels))
        return np.stack([self._out(self._targets.inverse(values)) for values in by_level], axis=-1)

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> np.ndarray:
        """Predict central intervals of observations.

        Args:
            X: inputs, (m, d).
            level: probability, between 0 and 1.

        Returns:
            Lower and upper ends, (m, 2) or (m, k, 2).
        """
        check_level(level)
        return self.predict_quantiles(X, (0.5 - level / 2, 0.5 + level / 2))

    def log_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Compute log predictive densities of observations by row.

        Args:
            X: inputs, (m, d).
            y: observations, (m,) or (m, k).

        Returns:
            Log densities, (m,), joint over outputs; minus infinity where a logarithm is modelled of what has none.
        """
        rows = self._rows(X)
        observed = np.asarray(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"))
        shape = (len(rows), *self._targets.loc.shape)
        if observed.shape != shape:
            raise ValueError(f"y must have the shape {shape}, as the targets of the fit had, but has {observed.shape}.")
        if self.target_transform_ == "cube_root" and np.any(observed == 0):
            raise ValueError(
                'cube roots are modelled, whose density at 0 is infinite; fit with target_transform="none".'
            )
        targets = self._targets.forward(observed).reshape(len(observed), -1)
        found = self._by_blocks(rows, lambda mixture, block: mixture.log_density(targets[block])[None])
        with np.errstate(invalid="ignore"):
            log_density = found[0] + self._targets.log_slope(observed)
        return np.where(np.isfinite(targets).all(axis=1), log_density, -np.inf)

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0
    ) -> np.ndarray:
        """Draw observations, independent over rows given a sample's weights.

        Args:
            X: inputs, (m, d).
            n_samples: number of samples.
            random_state: seed or generator.

        Returns:
            Samples, (m, n_samples) or (m, k, n_samples).
        """
        num_samples = whole_number("n_samples", n_samples)
        random = check_random_state(random_state)
        rows, places = self._rows(X), random.random_sample(num_samples)
        samples = self._by_blocks(rows, lambda mixture, _: mixture.sample(random, places))
        return np.stack([self._out(self._targets.inverse(values)) for values in samples], axis=-1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags

    def _by_blocks(self, rows: np.ndarray, find: Callable[[Mixture, slice], np.ndarray]) -> np.ndarray:
        """Concatenate results, (s, m, ...), of blocks of rows."""
        parts = []
        for block in blocks(len(rows)):
            mean, variance, noise_variance = self._posterior.function(rows[block])
            parts.append(find(Mixture(mean, variance + noise_variance), block))
        return np.concatenate(parts, axis=1)

    def _out(self, values: np.ndarray) -> np.ndarray:
        """Return (m, k) in the shape of the targets."""
        return values if self._targets.loc.ndim else values[:, 0]
