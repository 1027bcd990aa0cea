"""Classification with wide Bayesian neural networks, for scikit-learn."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import WIDTH, Clock, Report, WideBNN, words_named
from numpyro_wide.estimators._chains import MOST_CHECKED, run_chains
from numpyro_wide.estimators._policy import needs_double, without_copies
from numpyro_wide.estimators._posteriors import DrawnPosterior, LimitPosterior, Network, blocks
from numpyro_wide.machine import precision, set_blas_threads
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._label_regression import FEW_LABELS, Calibration, of_every_class
from numpyro_wide.wide_limit._limit import WideLimitFit

_MOST_KNOWN = 3000  # rows of limit and chains: a factorisation takes n³
_FEWEST = 50  # rows, however small the budget
_SECONDS = 100.0  # of the limit at most
_FEW_COLUMNS = 50  # above which columns may be alike, as pixels are
_QUICK = 10.0  # seconds of a budget that pays for one architecture
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
    limit: WideLimitFit, width: int, num_chains: int, are_asked_for: bool, clock: Clock, random: Any, report: Report
) -> tuple[DrawnClasses, Any, int] | None:
    """Run chains of a finite network of codes: posterior, chains, steps; None for too small a budget."""
    codes, inputs = np.asarray(limit.codes), limit.inputs
    # Codes have no noise of their own: latent, it would vanish, and with it the law of the limit's leave-one-out.
    network = Network(limit.depth, width, limit.activation, codes.shape[1], False, is_latent=False)
    known: tuple[dict[str, Any], Any, Any] = {**limit.scales, "noise": limit.noise_scale}, inputs, codes
    size = float(np.sqrt(np.mean(codes**2)))
    function = np.mean(np.sum(limit.scales["readout_w_std"] ** 2)) / size**2
    is_double, reason = needs_double(limit.noise_scale / size, function, len(inputs))
    report.add("Chains", f"rows: {len(inputs)}; precision: {reason}")
    some = slice(None, None, -(-len(inputs) // MOST_CHECKED))
    key = jax.random.key(random.randint(2**31 - 1))
    with precision(is_double):
        form: dict[str, Any] = {"are_asked_for": are_asked_for, "clock": clock, "key": key, "report": report}
        run = run_chains(network, known, (inputs[some], codes[some]), num_chains, **form)
    if run is None:
        return None
    posterior, *others = run
    kept = slice(None, None, -(-len(next(iter(posterior.draws.values()))) // _MOST_DRAWS))
    return DrawnClasses(network, {name: values[kept] for name, values in posterior.draws.items()}, known), *others


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
        random_state: seed, an int or a ``numpy.random.RandomState``.
        progress_bar: whether to show a bar with the stage and its seconds.

    Attributes:
        classes_: labels, in the order of the probabilities.
        report_: decisions with their numbers, as text by ``str``.
        method_: "limit", "chains" or "stacked".
        fit_: infinitely wide network, a :class:`~numpyro_wide.wide_limit.WideLimitFit` of standardised inputs.
        model_: collapsed model, ``model_(medians, x, codes)``; None for the limit.
        model_args_: as of :class:`WideBNNRegressor`, like ``mcmc_``, ``draws_`` and ``n_iter_``.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.estimators import WideBNNClassifier
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> model = WideBNNClassifier(method="limit", random_state=0).fit(x, np.where(x[:, 0] > 0, "yes", "no"))
        >>> model.predict(np.array([[-1.0], [1.5]])).tolist(), model.predict_proba(x).shape
        (['no', 'yes'], (30, 2))
    """

    _methods = ("auto", "limit", "chains")

    def fit(self, X: ArrayLike, y: ArrayLike) -> "WideBNNClassifier":
        """Fit to rows of a table.

        Args:
            X: inputs, (n, d).
            y: labels, (n,), numbers or words.
        """
        depth, width, budget, random = self._checked_parameters()
        with words_named(X):
            inputs, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, but holds one class, {self.classes_[0]}.")
        report = Report("Bayesian neural network, classification")
        counts = ", ".join(f"{label}: {count}" for label, count in zip(self.classes_, np.bincount(labels), strict=True))
        report.add("Data", f"rows: {len(inputs)}, columns: {inputs.shape[1]}", f"labels by class: {counts}")
        # Several threads on few cores mostly wait.
        with set_blas_threads(1), Clock(budget, self.progress_bar) as clock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\d+ of \d+ rows repeat others")  # those that were measured
            self._learn_columns(inputs, report)
            inputs, labels = without_copies(inputs, labels, report)
            limit = self._fit_limit(inputs, labels, depth, clock, random, report)
            chosen: tuple[str, Any, Any, int] = "limit", limit, None, 1
            if self.method != "limit":
                chosen = self._with_chains(limit, width or WIDTH, clock, random, report) or chosen
        method, posterior, mcmc, num_steps = chosen
        self._keep(report, clock, method, limit, posterior, mcmc, num_steps)
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
        self, inputs: np.ndarray, labels: np.ndarray, depth: int | None, clock: Clock, random: Any, report: Report
    ) -> WideLimitFit:
        """Fit the limit to codes of labels at affordable rows, standardised, also by one scale for many columns."""
        clock.begin("scales of the infinitely wide network")
        random = np.random.RandomState(random.randint(2**31 - 1))
        affordable = min(1.0, (clock.budget / _SECONDS) ** (1 / 3))
        rows = of_every_class(labels, random.permutation(len(labels)), max(_FEWEST, int(affordable * _MOST_KNOWN)))
        kind: dict[str, Any] = {"likelihood": "categorical", "num_classes": len(self.classes_)}
        if len(self.classes_) == 2:
            kind = {"likelihood": "bernoulli"}
        if clock.budget < _QUICK:
            kind |= {"activation": "erf", "input_scale": False, "depth": 1}
        if depth is not None:
            kind["depth"] = depth
        kind["seed"] = random.randint(2**31 - 1)
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
        self, limit: WideLimitFit, width: int, clock: Clock, random: np.random.RandomState, report: Report
    ) -> tuple[str, Any, Any, int] | None:
        """Run chains; return them if asked for, or stacked by the labels of a fifth of the rows, given the others."""
        is_asked_for = self.method == "chains"
        kind = f"{limit.depth} x {width} {limit.activation} units, constant noise"
        report.add("Finite network", f"{kind}; codes of the classes are its targets")
        labels, places = limit.targets.astype(int), random.permutation(len(limit.targets))
        out, others = np.split(places, [max(1, len(places) // 5)])
        some = replace(limit, inputs=limit.inputs[others], targets=labels[others])
        try:
            # Labels that chains have seen, reweighed, would seem too probable: the hidden weights have adapted to them.
            clock.begin("chains of four fifths of the rows")
            half = Clock(clock.left / 2)
            first = run_codes(some, width, self.num_chains, is_asked_for, half, random, report)
            if first is None:
                return None
            codes: Any = limit.codes
            regression = replace(some, targets=codes[others], likelihood="normal", calibration=None)
            values = first[0].codes(limit.inputs[out]), regression.predict(limit.inputs[out])[0]
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
            found = None
            if is_worse := loo.is_better(by_limit, by_chains):
                report.add("Decision", "the limit is better by more than two standard errors")
            if is_asked_for or not is_worse:
                clock.begin("chains of all rows")
                found = run_codes(limit, width, self.num_chains, is_asked_for, clock, random, report)
        except (FloatingPointError, RuntimeError, ValueError) as error:
            if is_asked_for:
                raise
            report.give_up(error)
            return None
        if found is None:
            return None
        posterior, mcmc, num_steps = found
        # A fifth of the rows may be easy by chance: only the difference between both is known.
        posterior.calibration = of_all.changed(of_limit, of_chains)
        if is_asked_for:
            return "chains", posterior, mcmc, num_steps
        posterior.stack(LimitPosterior(limit), weight)
        return "stacked", posterior, mcmc, num_steps
