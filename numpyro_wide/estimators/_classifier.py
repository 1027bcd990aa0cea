"""Classification with wide Bayesian neural networks, as scikit-learn's estimators do it."""

from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_wide.datasets import Standardiser
from numpyro_wide.estimators._base import WIDTH, WideBNN, standardised
from numpyro_wide.estimators._chains import tell_no_chains
from numpyro_wide.estimators._class_limit import ClassLimit, choose
from numpyro_wide.estimators._class_network import ClassNetwork, sample
from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._report import Report
from numpyro_wide.machine import set_blas_threads
from numpyro_wide.wide_limit import WideLimitFit


class WideBNNClassifier(ClassifierMixin, WideBNN):
    r"""Classification with a wide Bayesian neural network: fit, predict probabilities, read what was decided.

    Inputs are standardised, constant columns left out. Scales are those of :func:`~numpyro_wide.wide_limit.fit` for
    classes; activation and depth, and the readout's scale, which decides how sure a prediction may be, are those under
    which the infinitely wide network gives the labels of folds left out the most probability. It predicts itself, by
    probabilities averaged over its logits ("limit", and "auto"); or microcanonical chains of a finite network do
    ("chains"), with the readout repriorised by the limit's surrogate. ``report_`` tells all numbers.

    Of more than 1500 rows, as many are fitted to: the surrogate's fit takes the cube of their number.

    Args:
        hidden: widths of the hidden layers, all the same, such as (50,); or "auto".
        method: "limit" or "chains"; "auto" is the limit.
        time_budget: number of seconds that the fit may take, those of compilation apart; None for ten minutes at most.
            Chains end before it is spent if they have settled.
        num_chains: number of chains.
        random_state: seed, an int or a ``numpy.random.RandomState``, of chains and choices of rows. How many steps a
            budget pays for is seen by the clock: a fit with chains does not repeat exactly.
        progress_bar: whether to show the seconds worked and what is being done.

    Attributes:
        classes_: labels, in the order of the probabilities.
        report_: what was decided, and from which numbers; ``str(report_)`` is a page of text.
        method_: what predicts: "limit" or "chains".
        fit_: the infinitely wide network, a :class:`~numpyro_wide.wide_limit.WideLimitFit` of standardised inputs.
        model_: repriorised model, ``model_(x, labels)``; None for the limit.
        model_args_: arguments that it was fitted with; None for the limit.
        mcmc_: NumPyro's ``MCMC`` after its run; None without chains.
        draws_: draws that predict, by site; None for the limit.
        predictive_: :class:`~numpyro_wide.ReadoutPredictive` of these, to be called in float64; None for the limit.
        n_iter_: number of steps of each chain, warmup included; 1 without chains.
        n_features_in_: number of columns of the inputs.
        feature_names_in_: names of the columns, where the inputs had names.

    Raises:
        ValueError: when it is fitted, for parameters that are none of these, and data that scikit-learn refuses, such
            as NaN, a single row, or a single class.

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

        Returns:
            Itself.

        Raises:
            ValueError: for parameters out of their range, data that scikit-learn refuses, or a single class.
        """
        depth, width, budget, random = self._checked_parameters()
        inputs, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold two classes at least, but all labels are of one class, {self.classes_[0]}.")
        self._columns = np.flatnonzero(np.ptp(inputs, axis=0) > 0)
        self._by_column = Standardiser.fit(self._kept(inputs))
        report = Report("Bayesian neural network, classification")
        counts = ", ".join(f"{label}: {count}" for label, count in zip(self.classes_, np.bincount(labels), strict=True))
        report.add("Data", f"{len(inputs)} rows, {len(self._columns)} columns that vary", f"classes {counts}")
        # Several threads on few cores wait for each other far longer than they work.
        with set_blas_threads(1), Clock(budget, self.progress_bar) as clock:
            rows = standardised(self._by_column, self._kept(inputs)), labels, len(self.classes_)
            limit = choose(*rows, depth, clock, random, report)
            self._decide(limit, width or WIDTH, clock, random, report)
        report.add("Decision", f'predictions are those of "{self.method_}"')
        report.add("Time", f"{clock.working:.1f} seconds of {clock.budget:g}, and {clock.compiling:.1f} of compilation")
        self.report_, self.fit_ = report, limit
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict probabilities of the classes, averaged over draws.

        Args:
            X: inputs, (m, d).

        Returns:
            Probabilities, (m, classes), in the order of ``classes_``.

        Raises:
            ValueError: for inputs that scikit-learn refuses.
        """
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        return self._posterior.probabilities(standardised(self._by_column, self._kept(rows)))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predict the most probable class.

        Args:
            X: inputs, (m, d).

        Returns:
            Labels, (m,).

        Raises:
            ValueError: for inputs that scikit-learn refuses.
        """
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict logarithms of the probabilities of the classes.

        Args:
            X: inputs, (m, d).

        Returns:
            Log probabilities, (m, classes).

        Raises:
            ValueError: for inputs that scikit-learn refuses.
        """
        return np.log(self.predict_proba(X))

    def _decide(self, limit: WideLimitFit, width: int, clock: Clock, random: Any, report: Report) -> None:
        """Run chains if they are asked for."""
        posterior = ClassLimit(limit)
        self.method_, self._posterior, self.n_iter_ = "limit", posterior, 1
        self.model_ = self.model_args_ = self.mcmc_ = self.draws_ = None
        if self.method != "chains":
            clock.begin("surrogate of the likelihood")
            posterior.prepare()
            return
        network = ClassNetwork(limit, width)
        key = jax.random.key(random.randint(2**31 - 1))
        run = sample(network, self.num_chains, clock, key, report)
        if run is None:
            tell_no_chains(clock, True, report)
            return
        score = run.posterior.leave_one_out()
        unsure = f"a rough estimate for {score.share_unsure:.1%} of the rows, whose Pareto shape is above 0.7"
        report.add("Chains", f"leave-one-out log probability of a label {score}, {unsure}")
        self.method_, self._posterior, self.n_iter_, self.mcmc_ = "chains", run.posterior, run.num_steps, run.mcmc
        self.model_, self.draws_ = run.mcmc.sampler.model, run.posterior.draws
        self.model_args_ = (limit.inputs, limit.targets.astype(int))
