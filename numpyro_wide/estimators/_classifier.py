"""The classifier."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike
from numpyro.infer import MCMC
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_wide import _arviz
from numpyro_wide.estimators._base import WIDTH, Report, Standardiser, WideBNN, standardised
from numpyro_wide.estimators._chains import (
    MOST_CHECKED,
    ONE_CHAIN,
    Clock,
    Convergence,
    effective_draws,
    gradient_seconds,
    run_chains,
    tell_no_chains,
)
from numpyro_wide.estimators._posteriors import padded_blocks
from numpyro_wide.estimators._scoring import LeaveOneOut, averaged
from numpyro_wide.machine import double_precision, precision, set_blas_threads
from numpyro_wide.nn._networks import FCN
from numpyro_wide.nn._random import random_network
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.readout._repriorise import Surrogate, repriorise
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._limit import WideLimitFit

_COMPARED = 300  # rows to which architectures and scales are fitted
_MOST_KNOWN = 1500  # rows that the infinitely wide network predicts from: the surrogate's fit takes n³
_ARCHITECTURES = (("erf", 1), ("relu", 1), ("gelu", 2))
_FEWEST = 50  # rows, however small the budget
_SECONDS = 100.0  # that comparison and fit take at most


class ClassLimit:
    """Infinitely wide network of classes, with probabilities of two as of more.

    Args:
        fit: the network, fitted to standardised inputs and the numbers of the classes.
    """

    def __init__(self, fit: WideLimitFit):
        self.fit = fit

    def prepare(self) -> None:
        """Find the surrogate that predictions are made with, which the fit keeps: the first would wait for it."""
        self.probabilities(self.fit.inputs[:1])

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, averaged over the logits, (m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        probs = self.fit.predict(x)
        return probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)


def choose(
    x: np.ndarray, labels: np.ndarray, num_classes: int, depth: int | None, clock: Clock, random: Any, report: Report
) -> WideLimitFit:
    """Choose architecture and scales on some rows, and predict from all that is paid for.

    Args:
        x: standardised inputs, (n, d).
        labels: numbers of the classes, (n,).
        num_classes: number of classes.
        depth: number of hidden layers, or None to choose it.
        clock: clock of the whole fit.
        random: generator of the choice of rows.
        report: report, to which a section is added.
    """
    clock.begin("scales of the infinitely wide network")
    rows = random.permutation(len(x))
    payable = min(1.0, (clock.budget / _SECONDS) ** (1 / 3))
    some = _of_every_class(labels, rows, max(_FEWEST, int(payable * _COMPARED)))
    kind: dict[str, Any] = {"likelihood": "categorical", "num_classes": num_classes}
    if num_classes == 2:
        kind = {"likelihood": "bernoulli"}
    fits = [
        fit(x[some], labels[some], activation=name, depth=depth or layers, num_restarts=1, num_rows=len(some), **kind)
        for name, layers in _ARCHITECTURES
    ]
    fits.sort(key=lambda found: -found.table[0]["held_out"])
    best = replace(fits[0], table=[row for found in fits for row in found.table])
    known = _of_every_class(labels, rows, max(_FEWEST, int(payable * _MOST_KNOWN)))
    scales = ", ".join(f"{name} {np.round(value, 3)}" for name, value in best.scales.items())
    report.add(
        "Infinitely wide network",
        "held out: log probability of a label left out, in three folds; the largest is chosen",
        str(best),
        f"scales {scales}",
        f"chosen on {len(some)} rows; predictions from {len(known)} of {len(x)}",
    )
    return replace(best, inputs=x[known], targets=labels[known])


def _of_every_class(labels: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the first of the rows, and of every class that is not among them the first."""
    some = rows[:most]
    missing = np.setdiff1d(labels, labels[some])
    return np.concatenate([some, *[rows[labels[rows] == label][:1] for label in missing]])


_LARGEST_RHAT = 1.05  # of chains that have settled


class ClassNetwork(NamedTuple):
    """A network of classes.

    Attributes:
        limit: infinitely wide network, with architecture, scales and the likelihood of its labels.
        width: number of hidden units in each layer.
    """

    limit: WideLimitFit
    width: int

    @property
    def num_logits(self) -> tuple[int, ...]:
        """Shape of a row's logits, () of two classes."""
        return () if self.limit.likelihood == "bernoulli" else (int(self.limit.parameters["num_classes"]),)


class ClassChains(NamedTuple):
    """Outcome of chains of a network of classes.

    Attributes:
        posterior: the posterior that predicts.
        mcmc: the chains.
        num_steps: number of steps of each chain, warmup included.
    """

    posterior: "DrawnClasses"
    mcmc: MCMC
    num_steps: int


def run_network(network: ClassNetwork, x: Array, labels: Array | None = None) -> None:
    """Run the model of a network of classes: weights N(0, 1), logits linear in the readout.

    Args:
        network: the network.
        x: inputs, (n, d).
        labels: numbers of the classes, (n,); None to predict.
    """
    limit, num_logits = network.limit, network.num_logits
    module = FCN(limit.depth, network.width, limit.activation, **limit.scales)
    features = numpyro.deterministic("features", random_network("hidden", module, x)(x))
    prior = dist.Normal(0, 1).expand((features.shape[1], *num_logits))
    logits = features @ numpyro.sample("readout", prior.to_event(1 + len(num_logits)))
    with numpyro.plate("rows", x.shape[0]):
        likelihood = dist.Categorical(logits=logits) if num_logits else dist.Bernoulli(logits=logits)
        numpyro.sample("label", likelihood, obs=labels)


class DrawnClasses:
    """Draws of the weights of a finite network of classes. Predicts in float64.

    Args:
        network: the network.
        surrogate: the limit's surrogate, which the readout is repriorised with.
        draws: draws of the repriorised model's sites, each with a leading axis.
    """

    def __init__(self, network: ClassNetwork, surrogate: Surrogate, draws: dict[str, Any]):
        self.network, self.surrogate = network, surrogate
        self.draws = {name: np.asarray(values, float) for name, values in draws.items()}
        self._predictive: ReadoutPredictive | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictive": None}  # compiled programs stay behind

    @property
    def labels(self) -> np.ndarray:
        """Numbers of the classes of the fit, (n,)."""
        return self.network.limit.targets.astype(int)

    @property
    def predictive(self) -> ReadoutPredictive:
        """The predictive of the repriorised model, to be called in double precision."""
        if self._predictive is None:
            with double_precision():
                draws = {name: jnp.asarray(values) for name, values in self.draws.items()}
                args = jnp.asarray(self.network.limit.inputs), jnp.asarray(self.labels)
                self._predictive = ReadoutPredictive(repriorised(self.network, self.surrogate), draws, args)
        return self._predictive

    def by_draw(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes by draw, (draws, m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        blocks = []
        for padded, num_rows in padded_blocks(x):
            with double_precision():
                found = np.asarray(self.predictive(jax.random.key(0), jnp.asarray(padded))["probs"], float)
            blocks.append(found[:, :num_rows])
        found = np.concatenate(blocks, axis=1)
        return found if found.ndim == 3 else np.stack([1 - found, found], axis=-1)

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, averaged over the draws, (m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        found = self.by_draw(x).mean(axis=0)
        return found / found.sum(axis=1, keepdims=True)

    def leave_one_out(self) -> LeaveOneOut:
        """Score the labels of the fit, each given all others."""
        return averaged(np.log(np.maximum(self._own(slice(None)), 1e-300)))

    def convergence(self, num_chains: int) -> Convergence:
        """Judge chains by R-hat and effective draws of the labels' probabilities at rows of the fit.

        Args:
            num_chains: number of chains that the draws are of.
        """
        own = self._own(slice(None, None, -(-len(self.labels) // MOST_CHECKED)))
        moves = own.std(axis=0) > 0
        lines = [] if moves.all() else [f"{np.sum(~moves)} rows have the same probability in all draws, and no R-hat"]
        by_chain = own[:, moves].reshape(num_chains, -1, np.sum(moves))
        sizes = _arviz.effective_sample_size(by_chain)
        lines.append(effective_draws("probabilities", sizes))
        if num_chains == 1:
            return Convergence(True, (*lines, ONE_CHAIN))
        rhats = _arviz.rhat(by_chain)
        lines.append(f"R-hat of probabilities: median {np.nanmedian(rhats):.3f}, largest {np.nanmax(rhats):.3f}")
        return Convergence(bool(np.nanmax(rhats) <= _LARGEST_RHAT), tuple(lines))

    def _own(self, rows: slice) -> np.ndarray:
        """Return the probabilities of rows' own labels by draw, (draws, rows)."""
        labels = self.labels[rows]
        return self.by_draw(self.network.limit.inputs[rows])[:, np.arange(len(labels)), labels]


def repriorised(network: ClassNetwork, surrogate: Surrogate) -> Any:
    """Return the model ``(x, labels)`` with the readout repriorised by the limit's surrogate.

    Args:
        network: the network.
        surrogate: the surrogate of its limit, fitted to these rows.
    """
    here = Surrogate(*map(jnp.asarray, surrogate))
    model = partial(run_network, network)
    return repriorise(model, readout="readout", features="features", targets="labels", surrogate=here)


def sample(network: ClassNetwork, num_chains: int, clock: Clock, key: Any, report: Report) -> ClassChains | None:
    """Run chains of a network of classes; None if the budget does not pay for them.

    Args:
        network: the network.
        num_chains: number of chains.
        clock: clock of the whole fit.
        key: a PRNG key.
        report: report, to which lines are added.
    """

    def judge(draws: dict[str, Any]) -> Convergence:
        return DrawnClasses(network, surrogate, draws).convergence(num_chains)

    clock.begin("surrogate of the likelihood")
    with precision(False):
        surrogate = network.limit.surrogate()
        args = jnp.asarray(network.limit.inputs, float), jnp.asarray(network.limit.targets.astype(int))
        model = repriorised(network, surrogate)
        seconds = gradient_seconds(len(args[1]), network.limit.depth, network.width)
        run = run_chains(model, args, num_chains, clock, key, report, gradient_seconds=seconds, hold=None, judge=judge)
        if run is None:
            return None
    return ClassChains(DrawnClasses(network, surrogate, run.draws), run.mcmc, run.num_steps)


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
