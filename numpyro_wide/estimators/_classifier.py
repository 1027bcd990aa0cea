"""Classification with wide Bayesian neural networks, for scikit-learn."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from numpyro_wide import _arviz
from numpyro_wide.estimators._base import WIDTH, Clock, Report, WideBNN
from numpyro_wide.estimators._chains import (
    MOST_CHECKED,
    ONE_CHAIN,
    Judgement,
    effective_draws,
    gradient_seconds,
    run_chains,
)
from numpyro_wide.estimators._posteriors import DrawnModel, blocks
from numpyro_wide.estimators._scoring import averaged
from numpyro_wide.machine import precision, set_blas_threads
from numpyro_wide.nn._networks import FCN
from numpyro_wide.nn._random import random_network
from numpyro_wide.readout._repriorise import Surrogate, repriorise
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._limit import WideLimitFit

_COMPARED = 300  # rows of the comparison
_MOST_KNOWN = 1500  # rows of the limit: its surrogate takes n³
_ARCHITECTURES = (("erf", 1), ("relu", 1), ("gelu", 2))
_FEWEST = 50  # rows, however small the budget
_SECONDS = 100.0  # of comparison and fit at most


def choose(
    x: np.ndarray, labels: np.ndarray, num_classes: int, depth: int | None, clock: Clock, random: Any, report: Report
) -> WideLimitFit:
    """Choose architecture and scales on some rows, x (n, d) and labels (n,); predict from affordable ones."""
    clock.begin("scales of the infinitely wide network")
    rows = random.permutation(len(x))
    affordable = min(1.0, (clock.budget / _SECONDS) ** (1 / 3))
    some = _of_every_class(labels, rows, max(_FEWEST, int(affordable * _COMPARED)))
    kind: dict[str, Any] = {"likelihood": "categorical", "num_classes": num_classes}
    if num_classes == 2:
        kind = {"likelihood": "bernoulli"}
    fits = [
        fit(x[some], labels[some], activation=name, depth=depth or layers, num_restarts=1, num_rows=len(some), **kind)
        for name, layers in _ARCHITECTURES
    ]
    fits.sort(key=lambda found: -found.table[0]["held_out"])
    best = replace(fits[0], table=[row for found in fits for row in found.table])
    known = _of_every_class(labels, rows, max(_FEWEST, int(affordable * _MOST_KNOWN)))
    scales = ", ".join(f"{name} {np.round(value, 3)}" for name, value in best.scales.items())
    report.add(
        "Infinitely wide network",
        "held out: mean log probability of a label left out, in three folds; the largest is chosen",
        str(best),
        f"scales {scales}",
        f"architecture chosen on {len(some)} rows; predictions from {len(known)} of {len(x)}",
    )
    return replace(best, inputs=x[known], targets=labels[known])


def _of_every_class(labels: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first rows, and one of every other class."""
    some = rows[:most]
    missing = np.setdiff1d(labels, labels[some])
    return np.concatenate([some, *[rows[labels[rows] == label][:1] for label in missing]])


def run_network(limit: WideLimitFit, width: int, x: Array, labels: Array | None = None) -> None:
    """Run a finite network of the limit's scales: N(0, 1) weights, logits linear in the readout."""
    num_logits = () if limit.likelihood == "bernoulli" else (int(limit.parameters["num_classes"]),)
    module = FCN(limit.depth, width, limit.activation, **limit.scales)
    features = numpyro.deterministic("features", random_network("hidden", module, x)(x))
    prior = dist.Normal(0, 1).expand((features.shape[1], *num_logits))
    logits = features @ numpyro.sample("readout", prior.to_event(1 + len(num_logits)))
    with numpyro.plate("rows", x.shape[0]):
        likelihood = dist.Categorical(logits=logits) if num_logits else dist.Bernoulli(logits=logits)
        numpyro.sample("label", likelihood, obs=labels)


class DrawnClasses(DrawnModel):
    """Draws of a finite network of classes, with a repriorised readout."""

    def __init__(self, model: Any, draws: Mapping[str, Any], limit: WideLimitFit):
        super().__init__(model, draws, (limit.inputs, limit.targets.astype(int)))

    def by_draw(self, x: np.ndarray) -> np.ndarray:
        """Return class probabilities at x (m, d) by draw, (draws, m, classes)."""
        probs = self.predictions(x)["probs"]
        return probs if probs.ndim == 3 else np.stack([1 - probs, probs], axis=-1)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return class probabilities at x (m, d), averaged over draws, (m, classes)."""
        found = np.concatenate([self.by_draw(x[block]).mean(axis=0) for block in blocks(len(x))])
        return found / found.sum(axis=1, keepdims=True)

    def own(self) -> np.ndarray:
        """Return probabilities of the fit's labels by draw, (draws, n)."""
        x, labels = self.known
        return self.by_draw(x)[:, np.arange(len(labels)), labels]


_LARGEST_RHAT = 1.05  # of chains that have settled


def convergence(own: np.ndarray, num_chains: int) -> Judgement:
    """Judge chains by probabilities of known labels, (chains · draws, rows)."""
    moves = own.std(axis=0) > 0
    lines = [] if moves.all() else [f"{np.sum(~moves)} rows have the same probability in all draws, and no R-hat"]
    by_chain = own[:, moves].reshape(num_chains, -1, np.sum(moves))
    lines.append(effective_draws("probabilities", by_chain))
    if num_chains == 1:
        return True, [*lines, ONE_CHAIN]
    rhats = _arviz.rhat(by_chain)
    lines.append(f"R-hat of probabilities: median {np.nanmedian(rhats):.3f}, largest {np.nanmax(rhats):.3f}")
    return bool(np.nanmax(rhats) <= _LARGEST_RHAT), lines


class WideBNNClassifier(ClassifierMixin, WideBNN):
    """Classification with a wide Bayesian neural network, fitted to at most 1500 rows.

    Scales are those of :func:`~numpyro_wide.wide_limit.fit`. The infinitely wide network predicts ("limit"), or chains
    of a finite one ("chains"), repriorised by the limit's surrogate.

    Args:
        hidden: equal widths of the hidden layers, such as (50,); or "auto".
        method: "limit", "chains", or "auto" for "limit".
        time_budget: as of :class:`WideBNNRegressor`.
        num_chains: number of chains.
        random_state: seed, an int or a ``numpy.random.RandomState``.
        progress_bar: whether seconds and stage are shown.

    Attributes:
        classes_: labels, in the order of the probabilities.
        report_: decisions with their numbers, as text by ``str``.
        method_: "limit" or "chains".
        fit_: infinitely wide network, a :class:`~numpyro_wide.wide_limit.WideLimitFit` of standardised inputs.
        model_: repriorised model, ``model_(x, labels)``; None for the limit.
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
        inputs, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, but holds one class, {self.classes_[0]}.")
        report = Report("Bayesian neural network, classification")
        counts = ", ".join(f"{label}: {count}" for label, count in zip(self.classes_, np.bincount(labels), strict=True))
        report.add("Data", f"rows: {len(inputs)}, columns: {inputs.shape[1]}", f"labels by class: {counts}")
        # Several threads on few cores mostly wait.
        with set_blas_threads(1), Clock(budget, self.progress_bar) as clock:
            rows = self._learn_columns(inputs, report)
            limit = choose(rows, labels, len(self.classes_), depth, clock, random, report)
            run = self._run_chains(limit, width or WIDTH, clock, random, report) if self.method == "chains" else None
            if run is None:
                clock.begin("surrogate of the likelihood")
                limit.predict(limit.inputs[:1])  # finds the surrogate
                run = limit, None, 1
        self._keep(report, clock, "limit" if run[0] is limit else "chains", limit, *run)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict class probabilities, averaged over draws.

        Args:
            X: inputs, (m, d).

        Returns:
            Probabilities, (m, classes), in the order of ``classes_``.
        """
        rows = self._rows(X)
        probs = self._posterior.predict(rows)
        return probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predict the most probable label for inputs (m, d): (m,)."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Predict log probabilities of the classes for inputs (m, d): (m, classes)."""
        return np.log(self.predict_proba(X))

    def _run_chains(
        self, limit: WideLimitFit, width: int, clock: Clock, random: np.random.RandomState, report: Report
    ) -> tuple[Any, ...] | None:
        """Run chains of a finite network: posterior, chains, steps; None for too small a budget."""
        key = jax.random.key(random.randint(2**31 - 1))
        clock.begin("surrogate of the likelihood")
        own: Any = None

        def judge(draws: dict[str, Any]) -> Judgement:
            nonlocal own
            own = DrawnClasses(model, draws, limit).own()
            return convergence(own[:, :: -(-own.shape[1] // MOST_CHECKED)], self.num_chains)

        with precision(False):
            surrogate = Surrogate(*map(jnp.asarray, limit.surrogate()))
            sites: dict[str, Any] = {"readout": "readout", "features": "features", "targets": "labels"}
            model = repriorise(partial(run_network, limit, width), surrogate=surrogate, **sites)
            args = jnp.asarray(limit.inputs, float), jnp.asarray(limit.targets.astype(int))
            seconds = gradient_seconds(len(limit.inputs), limit.depth, width)
            form: dict[str, Any] = {"clock": clock, "key": key, "report": report, "judge": judge}
            form |= {"gradient_seconds": seconds, "hold": None, "are_asked_for": True}
            run = run_chains(model, args, self.num_chains, **form)
        if run is None:
            return None
        score = averaged(np.log(np.maximum(own, 1e-300)))
        report.add("Chains", f"leave-one-out log probability of a label {score}; {score.reliability}")
        return DrawnClasses(model, run[0].get_samples(), limit), *run
