"""Fit of scales and noise by the evidence of the infinite network."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._activations import Activation
from numpyro_wide._checks import (
    check_finite,
    check_known,
    check_one_of,
    check_positive,
    column_deviations,
    listing,
    progress,
    whole_number,
)
from numpyro_wide.machine import double_precision, set_blas_threads
from numpyro_wide.wide_limit._duals import activation_name
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._label_regression import RELEVANCE, fit_labels, folds_of
from numpyro_wide.wide_limit._layer_kernels import check_inputs, check_targets
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS
from numpyro_wide.wide_limit._limit import WideLimitFit
from numpyro_wide.wide_limit._observations import Observations, refuse_foreign
from numpyro_wide.wide_limit._scale_draws import ScalePosterior, draw_scales
from numpyro_wide.wide_limit._scale_problem import BOUND, Objective, ScaleProblem, laplace, mode_of, problem_type
from numpyro_wide.wide_limit._variational import State, VariationalFit

_TOLERANCE = 2e-3  # of means and weights at the largest bound


@dataclass(frozen=True)
class Evidence(Objective):
    """Log evidence of targets with Gaussian noise."""

    problem: ScaleProblem
    targets: np.ndarray
    step: ClassVar[float] = 1e-3

    def __getitem__(self, rows: np.ndarray) -> "Evidence":
        return Evidence(self.problem[rows], self.targets[rows])

    def likelihood(self, covariance: np.ndarray) -> tuple[float, np.ndarray]:
        process = Conditioned(covariance, self.targets.reshape(len(covariance), -1))
        return process.log_evidence(), process.evidence_slope()


class Bound(Objective):
    """Variational bound on the log evidence (Mathematics, :eq:`bound-slope`)."""

    step = 0.03

    def __init__(self, problem: ScaleProblem, observations: Observations):
        self.problem, self.observations = problem, observations
        self._columns = observations.columns()
        self._states: list[State | None] = [None] * len(self._columns)

    def __getitem__(self, rows: np.ndarray) -> "Bound":
        return Bound(self.problem[rows], self.observations[rows])

    def likelihood(self, covariance: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = 0.0, np.zeros_like(covariance)
        for i, column in enumerate(self._columns):
            fit = VariationalFit(column, covariance)
            state = self._states[i] = fit.climb(self._states[i], _TOLERANCE)
            value += state.bound + float(np.sum(column.constant))
            slope += fit.kernel_slope(state)
        return value, slope


def fit_scales(
    objective: Evidence | Bound, rows: np.ndarray, num_restarts: int, random: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
    """Return fields of the fit, row of the table, logarithms at the mode and the Hessian, from starts on some rows."""
    problem = objective.problem
    logarithms = mode_of(objective, rows, num_restarts, random)
    loss, log_marginal, errors, hessian = laplace(objective, logarithms)
    held_out = {}
    if isinstance(objective, Bound) and objective.observations.is_of_labels:
        logarithms, held_out["held_out"] = choose_readout(objective[rows], logarithms)
        errors[problem.place("readout_w_std")] = np.nan
        loss, _ = objective(logarithms)
    fields = problem.fields(problem.scales(logarithms), errors)
    fields["log_evidence"] = problem.prior(logarithms) - loss
    row = problem.row() | {"log_evidence": fields["log_evidence"], "log_marginal": log_marginal, **held_out}
    if fields["noise_scale"] is not None:
        row["noise_scale"] = fields["noise_scale"]
    return fields, row, logarithms, hessian


_NUM_FOLDS, _MANY_FOLDS = 3, 10  # of each of several scales, and of the one chosen
_STEP = 0.5 * np.log(10)  # between the readout's scales
_MOST = 5  # of them above the bound's own


def choose_readout(bound: Bound, logarithms: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the logarithms with the best readout's scale, and its mean log probability of a label."""
    place = bound.problem.place("readout_w_std")
    spread, candidates = bound.problem.spreads[place], []
    for step in range(-1, _MOST + 1):
        shifted = logarithms.copy()
        shifted[place] = np.clip(shifted[place] + step * _STEP, -BOUND * spread, BOUND * spread)
        score = float(np.mean(left_out(bound.problem.gram(shifted), bound.observations, _NUM_FOLDS)))
        candidates.append((score * len(bound.problem.inputs) - 0.5 * (shifted[place] / spread) ** 2, shifted, score))
    _, logarithms, score = max(candidates, key=lambda candidate: candidate[0])
    return logarithms, score


def left_out(gram: np.ndarray, observations: Observations, num_folds: int) -> np.ndarray:
    """Return the log probability of each label (n,) given the other folds, (n,)."""
    labels, log_probs = observations.values.astype(int), np.empty(len(observations.values))
    for train, test in folds_of(labels, np.arange(len(labels)), num_folds):
        gram_train, cross, prior = gram[np.ix_(train, train)], gram[np.ix_(test, train)], np.diagonal(gram)[test]
        processes = observations[train].processes(gram_train)
        probs = observations[test].predicted([process.moments(cross, prior) for process in processes])
        probs = probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)
        log_probs[test] = np.log(np.maximum(probs[np.arange(len(test)), labels[test]], 1e-300))
    return log_probs


_MOST_COMPARED = 1000  # rows whose labels are left out, one by one
_MOST_COLUMNS = 50  # of inputs whose scales are compared by default
_ONE_THREAD = 3000  # rows, up to which several BLAS threads mostly wait for each other


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    likelihood: str = "normal",
    num_classes: int | None = None,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
    labels: str | None = None,
    structure: str | Sequence[str] = "dense",
    order: int | Sequence[int] | None = None,
    network: Any = None,
    noise_scale: float | None = None,
    activation: Activation | Sequence[Activation] | None = None,
    depth: int | Sequence[int] | None = None,
    input_scale: bool | Sequence[bool] | None = None,
    num_restarts: int | None = None,
    num_rows: int = 300,
    scales: str = "mode",
    seed: int = 0,
    progress_bar: bool = True,
) -> WideLimitFit:
    r"""Fit a network's scales and its noise by the evidence of the infinitely wide network.

    The mode of the log evidence $\log N(y; 0, K + \sigma^2 I)$ of the NNGP kernel (Mathematics, :eq:`kernels`) plus
    log-normal priors, within four prior standard deviations; of counts and heavy tails, of the variational bound on it
    (Mathematics, :eq:`bound-slope`).

    Classes are regression on their one-hot codes: scales, noise and architecture are those of the largest log
    probability of each label given all others, and so is the softmax from predictions of codes to probabilities
    (Mathematics, :eq:`left-out`; Rifkin and Klautau 2004). Up to 80 rows the softmax is that of predictions by scales
    which a fifth of the rows had no part in. With ``labels="logits"`` classes have logits, by the variational bound;
    the readout's scale is then chosen by labels left out in three folds, and has no standard error.
    ``labels="auto"`` fits both, and takes that under which labels left out are more probable, which favours codes a
    little: of logits a tenth of the labels is left out at a time.

    Standardise inputs and targets. The scales go into
    ``bnn(FCN(fit.depth, width, fit.activation), None, fit.noise_scale, scales=fit.scales)``; ``fit.network``, of a fit
    of networks or of a structure, has them already.

    Args:
        x: inputs, (n, d_in), or images for a network that takes them.
        y: targets, (n,), or (n, k) for outputs that share all scales; labels of classes, (n,), from 0.
        likelihood: "normal", with a fitted noise, or a name of :func:`~numpyro_wide.fitted_surrogate`, whose
            parameters are the following, and broadcast against the targets.
        num_classes: number of classes of a categorical; None for one more than the largest label.
        total_count: number of trials of a binomial.
        concentration: concentration of a negative binomial.
        df: degrees of freedom of Student's t.
        scale: scale of Student's t.
        offset: added to function values, such as a log exposure; not of a normal likelihood, or of codes.
        labels: "codes", the default, "logits", or "auto", of a Bernoulli or categorical likelihood.
        structure: "dense", units that see all inputs; "additive", an :class:`~numpyro_wide.nn.AdditiveNetwork` with the
            inputs' own law; "both", with a dense block; several to compare; or "auto" for all three. With
            ``input_scale`` an additive network has a weight scale and a relevance by column. Not of labels.
        order: largest number of inputs of an effect, at most that of columns, or several to compare; 2 by default, or 1
            of a single column.
        network: an :class:`~numpyro_wide.nn.FCN`, :class:`~numpyro_wide.nn.CNN`, :class:`~numpyro_wide.nn.WideResNet`
            or one of a registered kernel, or several to compare, instead of ``activation`` and ``depth``; its
            ``w_std``, ``b_std`` and ``readout_w_std`` are fitted.
        noise_scale: standard deviation of a normal likelihood's noise, if it is known, such as a hundredth of the
            targets' for a simulator without noise; None to fit it.
        activation: an activation of :func:`fcn_kernel`, or several to compare; "erf" by default, of codes
            ``("erf", "relu")``.
        depth: number of hidden layers, at least 1, or several to compare; 1 by default, of codes ``(1, 3)``.
        input_scale: whether each column of the inputs has a scale of its own (automatic relevance determination), or
            ``(False, True)`` to compare, the default of codes with 2 to 50 columns; else False by default.
        num_restarts: number of starts; 4 by default, of codes 1.
        num_rows: number of rows of the starts, and of the folds of classes.
        scales: "mode", or "integrated" of a normal likelihood: predictions are then a mixture over draws of all scales
            and the noise from their posterior, for the best architecture (Mathematics, :eq:`scale-weights`). Each of
            400 draws costs a Cholesky factor; while the Pareto shape of their weights is above 0.7, others follow from
            their moments, and if it is so of the eighth 400, two chains of NUTS instead, up to 500 rows of 12 scales.
        seed: seed of starts, rows and draws.
        progress_bar: whether to show a bar over the architectures.

    Returns:
        the best architecture, a :class:`~numpyro_wide.wide_limit.WideLimitFit`, with a table of all.

    Raises:
        ValueError: if no start has a finite evidence.

    Warns:
        UserWarning: if copied rows, or a single far one, may have decided, or few draws of the scales.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> fit = wide_limit.fit(x, np.sin(3 * x[:, 0]), activation=("erf", "relu"), num_restarts=1)
        >>> fit.activation, sorted(fit.scales)
        ('erf', ['b_std', 'readout_w_std', 'w_std'])
        >>> mean, variance = fit.predict(np.zeros((1, 1)))
    """
    arguments = dict(locals())
    if labels == "auto":
        # Of two classes, for probabilities of one shape.
        as_classes = {"likelihood": "categorical", "num_classes": 2} if likelihood == "bernoulli" else {}
        candidates = [fit(**arguments | {"labels": "codes"}), fit(**arguments | as_classes | {"labels": "logits"})]
        return max(candidates, key=lambda candidate: float(np.mean(np.asarray(candidate.held_out))))
    check_known("wide_limit.fit chooses by numbers")
    check_finite("x", x)
    check_finite("y", y)
    inputs, targets = np.array(x, float), np.array(y, float)  # copies, as the caller's may change in place
    check_inputs("x", inputs, is_matrix=network is None)
    check_targets(targets, len(inputs))
    check_one_of("likelihood", likelihood, ("normal", *LIKELIHOODS))
    is_normal, is_of_classes = likelihood == "normal", likelihood in ("bernoulli", "categorical")
    check_one_of("scales", scales, ("mode", "integrated"))
    if scales == "integrated" and not is_normal:
        raise ValueError(f"scales are integrated over with a normal likelihood only, not {likelihood!r}; take 'mode'.")
    if noise_scale is not None:
        refuse_foreign(["noise_scale"], ["noise_scale"] * is_normal, likelihood)
        check_positive("noise_scale", noise_scale)
        if np.ndim(noise_scale):
            raise ValueError(f"noise_scale must be one number for all rows, but has shape {np.shape(noise_scale)}.")
    names = ("num_classes", "total_count", "concentration", "df", "scale")
    parameters = {name: arguments[name] for name in names if arguments[name] is not None}
    has_offset = bool(np.any(np.asarray(offset) != 0))
    if is_normal:
        refuse_foreign([*parameters, *["offset"] * has_offset], (), likelihood)
    if labels is not None:
        check_one_of("labels", labels, ("codes", "logits", "auto"))
        refuse_foreign(["labels"], ["labels"] * is_of_classes, likelihood)
    if is_of_classes and len(targets) < 2:
        raise ValueError("labels are predicted from others: x and y must have at least two rows, but have one.")
    is_of_codes = is_of_classes and labels != "logits"
    structures = _structures(structure, inputs)
    if network is not None and set(structures) != {"dense"}:
        raise ValueError("give a structure or a network, whose structure is its own, but not both.")
    num_restarts = (1 if is_of_codes else 4) if num_restarts is None else num_restarts
    activation = (("erf", "relu") if is_of_codes else "erf") if activation is None else activation
    depth = ((1, 3) if is_of_codes else 1) if depth is None else depth
    if input_scale is None:
        is_compared = is_of_codes and network is None and inputs.shape[1] in range(2, _MOST_COLUMNS + 1)
        input_scale = (False, True) if is_compared else False
    if likelihood == "categorical" and "num_classes" not in parameters:
        parameters["num_classes"] = _num_classes(targets)
    by_column = _several(input_scale)
    if not all(isinstance(choice, bool | np.bool_) for choice in by_column):
        raise ValueError(
            f"input_scale must be True or False, or both to compare, (False, True), but got {input_scale!r}."
        )
    num_restarts = whole_number("num_restarts", num_restarts)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(len(inputs), num_rows, replace=False))
    with double_precision(), set_blas_threads(1) if len(inputs) <= _ONE_THREAD else nullcontext():
        observations = None if is_normal else Observations.of(targets, likelihood, parameters, offset)
        if is_of_codes:
            _check_labels(targets, has_offset)
            size = 1.0
        else:
            size = observations.size if observations else float(np.sqrt(np.mean(targets**2))) or 1.0
        has_noise = is_of_codes or (is_normal and noise_scale is None)
        options: dict[str, Any] = {"inputs": inputs, "size": size, "has_noise": has_noise}
        options["relevance"] = RELEVANCE if is_of_codes else 1.0
        if network is None:
            problems = _problems(structures, _several(activation), depth, order, by_column, options)
        else:
            pairs = itertools.product(_several(network), by_column)
            problems = [
                problem_type(module).of_network(module, by_input=bool(choice), **options) for module, choice in pairs
            ]
        if not problems:
            raise ValueError("there is no architecture to fit; give one structure, activation, depth and input_scale.")
        if is_of_classes and not all(problem.takes_labels for problem in problems):
            raise ValueError("additive networks are fitted to numbers, not to labels; pass structure='dense'.")
        if noise_scale is not None:
            problems = [replace(problem, known_noise=float(noise_scale)) for problem in problems]
        data: dict[str, Any] = {"inputs": inputs, "targets": targets}
        data |= {"likelihood": likelihood, "parameters": parameters}
        queue = _with_progress(problems, progress_bar)
        if is_of_codes:
            count: Any = parameters.get("num_classes", 2)
            max_rows = _MOST_COMPARED if network is None else num_rows  # kernels of images take long
            label_fields = fit_labels(queue, targets.astype(int), int(count), max_rows, num_rows, num_restarts, random)
            fitted = WideLimitFit(**label_fields, **data)
            _warn_of_copies(fitted)
            return fitted
        fits = []
        for problem in queue:
            objective = Bound(problem, observations) if observations else Evidence(problem, targets)
            fits.append((*fit_scales(objective, rows, num_restarts, random), problem))
        fits.sort(key=lambda entry: -entry[1].get("held_out", entry[1]["log_marginal"]))
        fields, row, logarithms, hessian, problem = fits[0]
        if observations and "held_out" in row:
            data["held_out"] = left_out(problem.gram(logarithms), observations, _MANY_FOLDS)
        fitted = WideLimitFit(**fields, table=[row for _, row, *_ in fits], offset=offset, **data)
        if scales == "integrated":
            posterior = ScalePosterior(problem, targets, logarithms, hessian)
            fitted = fitted.over(problem, draw_scales(posterior, random, progress_bar))
        if is_normal:
            process = Conditioned(problem.covariance(logarithms), targets.reshape(len(targets), -1))
            _warn_of_copies(fitted)
            _warn_of_far_rows(fitted, process.targets - process.left_out)
    return fitted


_STRUCTURES = ("dense", "additive", "both")


def _structures(structure: str | Sequence[str], inputs: np.ndarray) -> Sequence[str]:
    """Return the structures to compare; of a single column all are one, and one that is constant has no effect."""
    for choice in _several(structure):
        check_one_of("structure", choice, (*_STRUCTURES, "auto"))
    if "auto" in _several(structure):
        return _STRUCTURES if inputs.shape[1] > 1 and column_deviations(inputs).all() else _STRUCTURES[:1]
    return _several(structure)


def _problems(
    structures: Sequence[str],
    activations: Sequence[Activation],
    depth: int | Sequence[int] | None,
    order: int | Sequence[int] | None,
    by_column: Sequence[bool],
    options: Mapping[str, Any],
) -> list[ScaleProblem]:
    """Return one problem for each choice; an additive network alone has no depth."""
    depths = [whole_number("depth", layers) for layers in _several(depth)]
    order = min(2, options["inputs"].shape[1]) if order is None else order
    orders = [whole_number("order", size) for size in _several(order)]
    problems = []
    for structure, name, by_input in itertools.product(structures, activations, by_column):
        if structure == "dense":
            problems += [ScaleProblem.of(name, layers, by_input=bool(by_input), **options) for layers in depths]
            continue
        from numpyro_wide.nn._additive_problem import structured_network  # with flax, loaded late

        for layers, size in itertools.product(depths if structure == "both" else [0], orders):
            network = structured_network(name, size, layers, options["inputs"])
            problems.append(problem_type(network).of_network(network, by_input=bool(by_input), **options))
    return problems


def _with_progress(problems: Sequence[ScaleProblem], progress_bar: bool) -> Iterator[ScaleProblem]:
    """Yield problems under a bar that names the one in work."""
    with progress(total=len(problems), shown=progress_bar, leave=False, desc="infinite networks") as bar:
        for problem in problems:
            bar.set_postfix_str(f"{activation_name(problem.activation)}, depth {problem.depth}")
            yield problem
            bar.update()


def _num_classes(labels: np.ndarray) -> int:
    """Return the number of classes of labels that have all of them."""
    present = np.unique(labels)
    if len(present) < 2 or not np.array_equal(present, np.arange(len(present))):
        raise ValueError(
            f"labels of a categorical must be 0, 1, ..., two at least, but y holds "
            f"{listing(f'{label:g}' for label in present[:10])}; pass num_classes if y lacks a class, and leave "
            "likelihood out for numbers to regress on."
        )
    return len(present)


def _check_labels(labels: np.ndarray, has_offset: bool) -> None:
    """Refuse labels that have no codes."""
    if labels.ndim != 1:
        raise ValueError(f"labels must have shape (n,) to become codes, but have {labels.shape}; pass labels='logits'.")
    if has_offset:
        raise ValueError("an offset is of logits, and codes have none; drop the offset, or pass labels='logits'.")


def _several(choices: Any) -> Sequence[Any]:
    """Return one or several choices as several."""
    return [choices] if callable(choices) or np.ndim(choices) == 0 else list(choices)


_SMALL_NOISE = 0.1  # of the targets' root mean square
_MANY_COPIES = 0.05  # of the rows of classes
# Fewest rows for a test; distances in robust standard deviations of residuals, and in those of the targets.
_FEWEST_ROWS, _FAR, _FAR_OF_TARGETS = 10, 20.0, 5.0
_ONE_OF = 50  # one far row of so many
MEND_FAR_ROWS = "Correct mistakes, transform the targets, or use a likelihood with heavy tails."


def far_rows(targets: np.ndarray, residuals: np.ndarray) -> list[tuple[int, int, float]]:
    """Return places and distances of entries (n, k) that lie far out, the farthest first.

    They are the few that hold most of the squared leave-one-out residuals of their column, the first that has any.
    """
    if len(residuals) < _FEWEST_ROWS:
        return []
    distances, few = np.abs(residuals - np.median(residuals, axis=0)), max(1, len(residuals) // _ONE_OF)
    for column, (distance, target) in enumerate(zip(distances.T, targets.reshape(residuals.shape).T, strict=True)):
        rows = np.argsort(-distance)[:few]
        share = np.sum(distance[rows] ** 2) / max(np.sum(distance**2), np.finfo(float).tiny)
        bound = max(_FAR * 1.4826 * np.median(distance), _FAR_OF_TARGETS * np.std(np.delete(target, rows)))
        far = [(int(row), column, float(distance[row])) for row in rows if distance[row] > bound]
        if share > 0.5 and far:
            return far
    return []


def _warn_of_far_rows(fitted: WideLimitFit, residuals: np.ndarray) -> None:
    """Warn if few rows hold most of the squared leave-one-out residuals, (n, k), and lie far out."""
    if far := far_rows(fitted.targets, residuals):
        row, column, distance = far[0]
        target = fitted.targets.reshape(residuals.shape)[row, column]
        warnings.warn(
            f"{len(far)} of {len(residuals)} rows, row {row} with the target {target:.4g} the farthest, lie "
            f"up to {distance:.2g} from the other rows' predictions: the fitted noise, "
            f"{fitted.noise_scale:.2g}, and the scales are decided by them. {MEND_FAR_ROWS}",
            UserWarning,
            stacklevel=3,  # the caller of fit
        )


def _warn_of_copies(fitted: WideLimitFit) -> None:
    """Warn if rows repeat others, and the noise is small, or labels left out have copies left in."""
    inputs, targets = fitted.inputs, fitted.targets
    num_copies = len(inputs) - len(np.unique(np.column_stack([inputs.reshape(len(inputs), -1), targets]), axis=0))
    if fitted.calibration is not None:
        is_suspect = num_copies > _MANY_COPIES * len(inputs)
        reason = "labels included: a label left out has copies left in, and seems too easy to predict"
    else:
        is_suspect = num_copies > 0 and fitted.noise_scale < _SMALL_NOISE * np.sqrt(np.mean(targets**2))
        reason = f"and the fitted noise, {fitted.noise_scale:.2g}, is small"
    if is_suspect:
        warnings.warn(
            f"{num_copies} of {len(inputs)} rows repeat others, {reason}. If they are copies, not measurements, fit to "
            "distinct rows.",
            UserWarning,
            stacklevel=3,  # the caller of fit
        )
