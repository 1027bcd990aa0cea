"""Classification with wide Bayesian neural networks, for scikit-learn."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.random import RandomState
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import Clock, Report, WideBNN, words_named
from numpyro_wide.estimators._chains import MOST_CHECKED, Run, run_chains
from numpyro_wide.estimators._plan import Plan, Schedule, plan_classification
from numpyro_wide.estimators._policy import in_precision, too_few, without_copies
from numpyro_wide.estimators._posteriors import DrawnPosterior, LimitPosterior, Network, blocks
from numpyro_wide.machine import set_blas_threads
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._label_regression import FEW_LABELS, Calibration, of_every_class
from numpyro_wide.wide_limit._limit import WideLimitFit

_FEW_COLUMNS = 50  # above which columns may be alike, as pixels are
_MOST_DRAWS = 200  # that are averaged over
_CALIBRATION_SPREAD = 0.2  # of the chains' log slope and shifts, around the limit's


class DrawnClasses(DrawnPosterior):
    """Draws of a collapsed network of codes, and the calibration of their predictions."""

    calibration: Calibration

    def codes(self, x: np.ndarray) -> np.ndarray:
        """Return predictions of codes at x (m, d), (draws, m, classes)."""
        return np.concatenate([self.predictions(x[block])["mean"] for block in blocks(len(x))], axis=1)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return class probabilities at x (m, d), averaged over draws and stacked, (m, classes)."""
        probs = np.concatenate([self.calibration(self.codes(x[block])).mean(axis=0) for block in blocks(len(x))])
        if self.limit is None:
            return probs
        return self.weight * probs + (1 - self.weight) * self.limit.fit.predict(x)


def run_codes(
    limit: WideLimitFit, schedule: Schedule, num_chains: int, clock: Clock, random: RandomState, report: Report
) -> Run:
    """Run chains of a finite network of codes."""
    codes, inputs = np.asarray(limit.codes), limit.inputs
    # Codes have no noise of their own: latent, it would vanish, and with it the law of the limit's leave-one-out.
    network = Network(limit.depth, schedule.units, limit.activation, codes.shape[1], False, is_latent=False)
    known = {**limit.scales, "noise": limit.noise_scale}, inputs, codes
    size = float(np.sqrt(np.mean(codes**2)))
    function = np.mean(np.sum(limit.scales["readout_w_std"] ** 2)) / size**2
    schedule = in_precision(schedule, limit.noise_scale / size, function, report)
    some = slice(None, None, -(-len(inputs) // MOST_CHECKED))
    form: dict[str, Any] = {"clock": clock, "key": jax.random.key(random.randint(2**31 - 1)), "report": report}
    run = run_chains(network, known, (inputs[some], codes[some]), num_chains, schedule, **form)
    draws = run.posterior.draws
    kept = slice(None, None, -(-len(next(iter(draws.values()))) // _MOST_DRAWS))
    return run._replace(posterior=DrawnClasses(network, {name: values[kept] for name, values in draws.items()}, known))


class WideBNNClassifier(ClassifierMixin, WideBNN):
    """Classification with a wide Bayesian neural network, fitted to at most 3000 rows.

    One-hot codes of the labels are regressed on, in closed form given the hidden weights, and the log probability of
    each label given all others chooses and calibrates. The infinitely wide network of
    :func:`~numpyro_wide.wide_limit.fit` predicts ("limit"), chains of a finite one ("chains"), or a weighted mean of
    both ("stacked").

    Args:
        hidden: equal widths of the hidden layers, such as (50,); or "auto".
        method: "limit", "chains", or "auto": both, weighted by the probabilities of labels held out, or the limit where
            it is clearly better.
        time_budget: as of :class:`WideBNNRegressor`.
        num_chains: number of chains.
        plan: as of :class:`WideBNNRegressor`.
        random_state: seed, an int or a ``numpy.random.RandomState``.
        progress_bar: whether to show a bar with the stage and its seconds.

    Attributes:
        classes_: labels, in the order of the probabilities.
        report_: decisions with their numbers, as text by ``str``.
        summary_: as of :class:`WideBNNRegressor`; "log_density" is the limit's, of a label given all others.
        method_: "limit", "chains" or "stacked".
        fit_: infinitely wide network, a :class:`~numpyro_wide.wide_limit.WideLimitFit` of standardised inputs.
        model_: collapsed model, ``model_(medians, x, codes)``; None for the limit.
        model_args_: as of :class:`WideBNNRegressor`, like ``plan_``, ``mcmc_``, ``draws_`` and ``n_iter_``.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.estimators import WideBNNClassifier
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> model = WideBNNClassifier(method="limit", random_state=0).fit(x, np.where(x[:, 0] > 0, "yes", "no"))
        >>> model.predict(np.array([[-1.0], [1.5]])).tolist(), model.predict_proba(x).shape
        (['no', 'yes'], (30, 2))
    """

    _task = "classification"
    _methods = ("auto", "limit", "chains")

    def fit(self, X: ArrayLike, y: ArrayLike) -> "WideBNNClassifier":
        """Fit to rows of a table.

        Args:
            X: inputs, (n, d).
            y: labels, (n,), numbers or words.
        """
        random = self._check_parameters()
        with words_named(X):
            inputs, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, but holds one class, {self.classes_[0]}.")
        report = Report("Bayesian neural network, classification")
        counts = ", ".join(f"{label}: {count}" for label, count in zip(self.classes_, np.bincount(labels), strict=True))
        report.add("Data", f"rows: {len(inputs)}, columns: {inputs.shape[1]}", f"labels by class: {counts}")
        self._learn_columns(inputs, report)
        inputs, labels = without_copies(inputs, labels, report)
        shape = len(inputs), len(self._columns), len(self.classes_)
        plan = self._planned(plan_classification, report, *shape)
        # Several threads on few cores mostly wait.
        with set_blas_threads(1), self._clock(plan) as clock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\d+ of \d+ rows repeat others")  # those that were measured
            limit = self._fit_limit(inputs, labels, plan, clock, random, report)
            method, posterior, run = "limit", limit, None
            if plan.method != "limit":
                plan, method, posterior, run = self._with_chains(limit, plan, clock, random, report)
        self.n_iter_ = 1 if run is None else run.num_steps
        log_density = float(np.mean(np.asarray(limit.held_out)))
        self._keep(report, clock, plan, method, limit, posterior, None if run is None else run.mcmc, log_density)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict class probabilities, averaged over draws.

        Args:
            X: inputs, (m, d).

        Returns:
            Probabilities, (m, classes), in the order of ``classes_``.
        """
        rows = self._rows(X)  # which checks that there is a fit
        return self._posterior.predict(rows)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predict the most probable label for inputs (m, d): (m,)."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict log probabilities of the classes for inputs (m, d): (m, classes)."""
        return np.log(self.predict_proba(X))

    def _fit_limit(
        self, inputs: np.ndarray, labels: np.ndarray, plan: Plan, clock: Clock, random: RandomState, report: Report
    ) -> WideLimitFit:
        """Fit the limit to codes of labels, standardised, also by one scale for many columns."""
        clock.begin("scales of the infinitely wide network")
        random = np.random.RandomState(random.randint(2**31 - 1))
        rows = of_every_class(labels, random.permutation(len(labels)), plan.known_rows)
        kind: dict[str, Any] = {"likelihood": "categorical", "num_classes": len(self.classes_)}
        if len(self.classes_) == 2:
            kind = {"likelihood": "bernoulli"}
        if not plan.by_column:
            kind |= {"activation": "erf", "input_scale": False}
        kind |= {"depth": plan.depths, "seed": random.randint(2**31 - 1)}
        loc, scale = self._moments
        fits, scalings = [], {"by column": scale}
        if len(self._columns) > _FEW_COLUMNS:
            largest = np.max(scale)
            scalings["one for all columns"] = (
                largest * np.sqrt(np.mean((scale[scale > 0] / largest) ** 2)) * (scale > 0)
            )
        for name, divisors in scalings.items():
            self._moments = loc, divisors
            if len(scalings) > 1:
                report.add("Infinitely wide network", f"inputs divided by their standard deviation, {name}:")
            found = fit(self._standardised(inputs[rows]), labels[rows], progress_bar=False, **kind)
            report.add(
                "Infinitely wide network",
                "held out: mean log probability of a label given all others; the largest is chosen",
                str(found),
                f"predictions from {len(rows)} of {len(labels)} rows; log probability of a label left out, of up to "
                f"{FEW_LABELS} also of the choice: {loo.average(np.asarray(found.held_out))}",
            )
            fits.append((found, self._moments))
        limit, self._moments = max(fits, key=lambda one: float(np.mean(np.asarray(one[0].held_out))))
        return limit

    def _with_chains(
        self, limit: WideLimitFit, plan: Plan, clock: Clock, random: RandomState, report: Report
    ) -> tuple[Plan, str, Any, Run | None]:
        """Run chains; return them if asked for, or stacked by the labels of a fifth of the rows, given the others."""
        is_asked_for, schedule = plan.method == "chains", plan.schedule(limit.depth)
        if clock.is_over:
            plan, schedule = replace(plan, schedules=()), None
        if schedule is None:
            line, mend = too_few(plan)
            report.warn("Plan", line, mend) if is_asked_for else report.add("Plan", line)
            return plan, "limit", limit, None
        kind = f"{limit.depth} x {schedule.units} {limit.activation} units, constant noise"
        report.add("Finite network", f"{kind}; codes of the classes are its targets")
        labels, places = limit.targets.astype(int), random.permutation(len(limit.targets))
        out, others = np.split(places, [max(1, len(places) // 5)])
        some = replace(limit, inputs=limit.inputs[others], targets=labels[others])
        run = None
        try:
            # Labels that chains have seen, reweighed, would seem too probable: the hidden weights have adapted to them.
            clock.begin("chains of four fifths of the rows")
            half = Clock((clock.budget - clock.seconds) / 2, stops=clock.stops)
            first = run_codes(some, schedule, plan.num_chains, half, random, report)
            plan = plan.having_run(first.schedule)
            codes: Any = limit.codes
            regression = replace(some, targets=codes[others], likelihood="normal", calibration=None)
            values = first.posterior.codes(limit.inputs[out]), regression.predict(limit.inputs[out])[0]
            of_all: Any = limit.calibration
            prior = of_all.as_prior(_CALIBRATION_SPREAD)
            of_chains, of_limit = (Calibration.of(value, labels[out], prior) for value in values)
            by_chains = of_chains.log_probs(values[0], labels[out])
            by_limit = of_limit.log_probs(values[1], labels[out])
            weight = loo.stacking_weight(by_chains, by_limit)
            report.add(
                "Decision",
                f"log probability of a label of a fifth of the rows, by chains of the others: {loo.average(by_chains)}",
                f"chains minus limit: {loo.average(by_chains - by_limit)}",
                f"weight of the chains, stacked with the limit by these labels: {weight:.2f}",
            )
            if is_worse := loo.is_better(by_limit, by_chains):
                report.add("Decision", "the limit is better by more than two standard errors")
            if is_asked_for or not is_worse:
                clock.begin("chains of all rows")
                half.stops = False  # as many steps as of four fifths
                run = run_codes(limit, first.schedule, plan.num_chains, half, random, report)
        except (FloatingPointError, RuntimeError, ValueError) as error:
            if is_asked_for:
                raise
            report.warn("Decision", f"the finite network was given up, and the limit predicts: {error}")
        if run is None:
            return plan, "limit", limit, None
        # A fifth of the rows may be easy by chance: only the difference between both is known.
        run.posterior.calibration = of_all.changed(of_limit, of_chains)
        if is_asked_for:
            return plan, "chains", run.posterior, run
        run.posterior.stack(LimitPosterior(limit), weight)
        return plan, "stacked", run.posterior, run
