"""Regressor's decisions, in order: rows, targets, scales, architecture, noise, network, precision, posterior."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import WIDTH, Clock, Report
from numpyro_wide.estimators._chains import (
    GRADIENTS_A_STEP,
    gradient_seconds,
    run_chains,
)
from numpyro_wide.estimators._posteriors import (
    SPREAD,
    DrawnPosterior,
    LimitPosterior,
    Mixture,
    Network,
    collapsed,
)
from numpyro_wide.estimators._race import DEPTHS, LEAST_BUDGET, Optimum, with_limit
from numpyro_wide.estimators._race import WIDTH as RACE_WIDTH
from numpyro_wide.estimators._targets import TargetScale, choose_scale
from numpyro_wide.machine import double_precision, precision
from numpyro_wide.readout._draws import wide_limit_draws
from numpyro_wide.wide_limit._fit import MEND_FAR_ROWS, far_rows, fit
from numpyro_wide.wide_limit._limit import WideLimitFit


def decide(
    x: np.ndarray,
    y: np.ndarray,
    *,
    transform: str,
    depth: int | None,
    width: int | None,
    noise: str,
    method: str,
    num_chains: int,
    clock: Clock,
    random: np.random.RandomState,
    report: Report,
) -> tuple[TargetScale, str, WideLimitFit, Any, MCMC | None, int]:
    """Fit x (n, d), y (n,) or (n, k); return scale of y, method, the limit's fit, posterior, chains and their steps."""
    # Rows, without copies.
    num_outputs = 1 if y.ndim == 1 else y.shape[1]
    report.add("Data", f"rows: {len(x)}, columns: {x.shape[1]}, targets: {num_outputs}")
    units = width or WIDTH
    if len(x) > _MANY:
        some = f"at most {MOST_FITTED} of {len(x)} rows"
        report.announce(f"scales are fitted to {some}, the limit predicts from {MOST_KNOWN}")
    if len(x) > _MANY and method != "limit":
        allows_all = allows_all_rows(len(x), depth or 1, units, num_chains, clock)
        some = "all rows" if allows_all else f"{MOST_KNOWN} rows, as the budget allows"
        report.announce(f"a finite network is fitted to {some}, in at most {clock.budget:g} seconds")

    # Targets: as they are, or mapped where that is clearly better; all that follows is in standardised ones.
    clock.begin("scale of the targets")
    scale = choose_scale(x, y, transform, random, report)
    y = scale.forward(y)

    # Scales: those of the infinitely wide network's largest evidence.
    clock.begin("scales of the infinitely wide network")
    fit, num_fitted = fit_scales(x, y, depth, clock, random, report)
    clock.begin("leave-one-out log densities of the limit")
    limit = LimitPosterior(fit)
    gram = fit.nngp(fit.inputs)
    num_known = len(fit.inputs)
    left_out, outputs = limit.left_out(gram), fit.targets.reshape(num_known, -1)
    if far := far_rows(outputs, outputs - left_out.mean[0]):
        row, column, _ = far[0]
        target = scale.inverse(fit.targets).reshape(outputs.shape)[row, column]
        line = f"{len(far)} of {num_known} targets, {target:.4g} the farthest, decide the noise and the scales"
        report.add("Infinitely wide network", f"far from what the other rows predict: {line}")
        warnings.warn(f"{line}. {MEND_FAR_ROWS}", UserWarning, stacklevel=3)
    rows = np.unique(np.linspace(0, num_known - 1, min(num_known, _MOST_SCORED)).astype(int))
    inputs, targets = fit.inputs[rows], outputs[rows]
    left_out = Mixture(*(part[:, rows] for part in left_out))
    by_limit = loo.LeaveOneOut(left_out.by_draw(targets)[0])
    error = float(np.sqrt(np.mean((targets - left_out.mean[0]) ** 2)))
    report.add("Infinitely wide network", f"leave-one-out log density per row: {by_limit}, error {error:.4g}")
    if fit.noise_scale < _NOISE_SHARE * error:
        line = f"a noise of {fit.noise_scale:.2g} is far below that error: the rows are too few to tell it"
        report.add("Infinitely wide network", f"{line}, and intervals rest on the spread of the function")
    varies = np.ptp(fit.targets, axis=0).any()
    if not varies:
        report.add("Decision", "the targets are all the same: the limit predicts them, and its noise is arbitrary")

    # Architecture: that of which an optimum predicts rows left out best, or the limit's where that is clearly better.
    optima = list[Optimum]()
    if method in ("auto", "chains") and varies and len(x) > _MOST_WEIGHTED and clock.budget >= LEAST_BUDGET:
        clock.begin("race of architectures")
        # Layers that optima gain nothing by, long chains do.
        gradient = gradient_seconds(min(len(x), MOST_KNOWN), max(DEPTHS), RACE_WIDTH, True)
        long_run = _MANY_STEPS * GRADIENTS_A_STEP * num_chains * gradient
        optima = with_limit(limit, gram, depth, clock, random, report, long_run)

    # Noise: by row, which holds a constant one, too, so that no test need be trusted.
    is_by_row = noise == "by_row" and varies
    if noise == "auto" and varies:
        most = max(_MOST_WEIGHTED, _ROWS_A_COLUMN * x.shape[1])
        if loo.has_steps(fit.targets, fit.noise_scale):
            # Exact predictions of such a value have an unbounded density.
            line = "the targets are discrete, such as ratings, but predicted as continuous: round draws of sample_y"
            report.add("Noise", f"constant: {line}; one that varies would vanish")
        elif len(x) <= most:
            report.add("Noise", f"constant: {most} rows or fewer do not tell one that varies")
        else:
            is_by_row = True
            report.add("Noise", "by row, as a small network of the inputs")

    def draw(x: np.ndarray, y: np.ndarray, units: int) -> tuple[DrawnPosterior, MCMC | None, int] | None:
        """Return draws of a finite network, chains and steps; None for too small a budget."""
        # Network: finite width, scales and noise latent around the fitted ones.
        chosen: Any = fit  # or an optimum
        varying = is_by_row
        if optima:
            noises = [is_by_row] if noise == "by_row" or not is_by_row else [True, False]
            given = width, noises, min(len(x), MOST_KNOWN), num_chains
            chosen, units, varying = affordable(optima, *given, clock, report)
        network = Network(chosen.depth, units, chosen.activation, None if y.ndim == 1 else num_outputs, varying)
        kind = f"{chosen.depth} x {units} {chosen.activation} units, {'noise by row' if varying else 'constant noise'}"
        report.add("Finite network", f"{kind}; log-normal priors, of spread {SPREAD:g}, around the fitted scales")
        if not allows_all_rows(len(x), chosen.depth, units, num_chains, clock):
            x, y = fit.inputs, fit.targets
            report.add("Finite network", f"fitted to {len(x)} rows: the budget does not allow for all")
        known = {**chosen.scales, "noise": chosen.noise_scale}, x, y
        gradient = gradient_seconds(len(x), chosen.depth, units, varying)
        key = jax.random.key(random.randint(2**31 - 1))

        # Posterior, of few rows: weighted draws of the prior.
        if method == "weighted" or (method == "auto" and len(x) <= _MOST_WEIGHTED):
            clock.begin("weighted draws")
            most = (clock.left - _COMPILING_WEIGHTED) / (_GRADIENTS_A_DRAW * gradient)
            num_draws = next((number for number in _NUM_WEIGHTED if number <= most), _NUM_WEIGHTED[-1])
            if most < num_draws and method == "auto":
                report.fall_back(clock.left, warns=True, stacklevel=5)  # the caller of the estimator's fit
                return None
            with double_precision(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="the Pareto shape")
                draws = wide_limit_draws(
                    key, collapsed(network), num_draws, *jax.tree.map(jnp.asarray, known), weighted=True
                )
            shape = float("nan") if draws.pareto_shape is None else draws.pareto_shape
            line = (
                f"{num_draws} chosen of {10 * num_draws} draws of the prior by their evidence; Pareto shape {shape:.2f}"
            )
            report.add("Weighted draws", line)
            if method == "weighted" or shape <= loo.LARGEST_SHAPE:
                hidden = {name: draws[name] for name in draws if name != "readout"}
                return DrawnPosterior(network, hidden, known), None, 1
            report.add("Weighted draws", f"above {loo.LARGEST_SHAPE}: few draws have the weight, so chains are run")

        # Posterior of many rows, or with few weighty draws: chains.
        size = chosen.size if optima else np.mean(np.diagonal(gram))
        is_double, reason = needs_double(chosen.noise_scale, size, len(x))
        report.add("Chains", f"precision: {reason}")
        with precision(is_double):
            starts = chosen.weights if optima and units == RACE_WIDTH else []
            form: dict[str, Any] = {"optima": starts, "clock": clock, "key": key, "report": report}
            return run_chains(network, known, (inputs, targets), num_chains, **form)

    found = None
    if method != "limit" and varies:
        try:
            found = draw(x, y, units)
            by_draws = None if found is None else loo.of_regression(found[0].function(inputs), targets)
        except (FloatingPointError, RuntimeError, ValueError) as error:  # no start, or infinite draws
            if method != "auto":
                raise
            found = None
            report.give_up(error)

    # Choice: the limit if clearly better, less one nat for each fitted scale (Akaike's criterion); else draws, stacked
    # with a little of it. Draws know their rows, so that their leave-one-out densities are no ground for more.
    if found is not None and by_draws is not None:
        posterior, mcmc, num_steps = found
        num_scales = sum(np.size(error) for error in fit.standard_errors.values())
        penalised = by_limit.by_row - num_scales / num_fitted
        kind = "weighted draws" if mcmc is None else "chains"
        report.add(
            "Decision",
            f"leave-one-out log density per row by {kind}: {by_draws}; {by_draws.reliability}",
            f"{kind} over the infinite-width limit: {loo.average(by_draws.by_row - penalised)} nats per row "
            f"(leave-one-out, the limit less one nat for each of its {num_scales} scales)",
        )
        if method != "auto":
            return scale, method, fit, posterior, mcmc, num_steps
        if loo.is_better(penalised, by_draws.by_row):
            report.add("Decision", f"{kind} dropped: the limit is better by more than two standard errors")
        else:
            weight = max(1 - _MOST_OF_LIMIT, loo.stacking_weight(by_draws.by_row, penalised))
            least = f"at least {1 - _MOST_OF_LIMIT:g}"
            report.add("Decision", f"weight of {kind}, stacked with the limit: {weight:.3f}, {least}")
            posterior.stack(limit, weight)
            return scale, "stacked", fit, posterior, mcmc, num_steps
    if is_by_row:
        line = "the limit has one noise for all rows: where it varies, intervals are too wide at some, narrow at others"
        report.add("Noise", f'{line}; method="chains" has a noise by row')
    return scale, "limit", fit, limit, None, 1


# Rows
_MANY = 10_000  # rows, above which a plan is announced
_MOST_SCORED = 1000  # rows of compared log densities
_ROWS_A_COLUMN = 10  # at the most with constant noise
_NOISE_SHARE = 0.2  # of the limit's leave-one-out error, below which its noise is flagged
_SHARE_OF_MEASURED = 0.05  # of pairs with equal inputs that differ, above which inputs were measured repeatedly
_ENOUGH_STEPS = 1000  # of chains; with less, fewer rows


def without_copies(x: np.ndarray, y: np.ndarray, report: Report) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, d) and y (n,) or (n, k) without repeated rows, which feign zero noise, but with measurements."""
    targets = y.reshape(len(y), -1)
    _, first, counts = np.unique(np.column_stack([x, targets]), axis=0, return_index=True, return_counts=True)
    num_copies = len(x) - len(first)
    by_input, by_target = (np.unique(values, axis=0, return_counts=True)[1] for values in (x, targets))
    # Of several measurements some differ. Others agree by chance, if targets are discrete, or inputs take few values.
    differ = _num_pairs(by_input) - _num_pairs(counts) > _SHARE_OF_MEASURED * _num_pairs(by_input)
    may_agree = 4 * len(by_target) < len(x) or (2 * len(by_input) < len(x) and counts.min() == 1)
    if not num_copies:
        return x, y
    if differ and may_agree:
        report.add(
            "Data", f"{num_copies} of {len(x)} rows are like others, but measured: others of equal inputs differ"
        )
        return x, y
    line = f"{num_copies} of {len(x)} rows are copies of others, inputs and targets: each row counts once"
    report.add("Data", line)
    if counts.min() > 1:
        warnings.warn(f"{line}.", UserWarning, stacklevel=3)
    return x[np.sort(first)], y[np.sort(first)]


def _num_pairs(counts: np.ndarray) -> int:
    return int(np.sum(counts * (counts - 1)) // 2)


def allows_all_rows(num_rows: int, depth: int, width: int, num_chains: int, clock: Clock) -> bool:
    """Tell whether the budget allows enough steps on all rows."""
    step = GRADIENTS_A_STEP * num_chains * gradient_seconds(num_rows, depth, width)
    return num_rows <= MOST_KNOWN or clock.budget > _ENOUGH_STEPS * step


_DEEP_WIDTH = RACE_WIDTH  # units of several layers: longer chains gain more than wider layers
_CHEAP_WIDTH = 16
_MANY_STEPS = 17_000  # of chains; with as many, more layers: on rows left out, with less nothing is gained
_FEWEST_STEPS = 500  # of chains; with less, a constant noise, then fewer layers, and then fewer units
# Seconds of compiling chains: in all, and of noise by row besides.
_COMPILING_CHAINS, _COMPILING_BY_ROW = 8.5, 2.0


def affordable(
    optima: list[Optimum],
    width: int | None,
    noises: list[bool],  # whether by row, the best first
    num_rows: int,
    num_chains: int,
    clock: Clock,
    report: Report,
) -> tuple[Optimum, int, bool]:
    """Return the first optimum, units and noise whose chains are long enough in the seconds left, or the cheapest."""
    best_by_depth = {one.depth: one for one in reversed(optima) if one.depth <= optima[0].depth}
    by_depth = [best_by_depth[depth] for depth in sorted(best_by_depth, reverse=True)]
    units = width or (WIDTH if optima[0].depth == 1 else _DEEP_WIDTH)
    choices = [(one, units, by_row) for one in by_depth[:1] for by_row in noises]
    choices += [(one, units, noises[-1]) for one in by_depth[1:]]
    choices.append((by_depth[-1], width or _CHEAP_WIDTH, noises[-1]))

    def is_affordable(one: Optimum, units: int, by_row: bool) -> bool:
        gradient = gradient_seconds(num_rows, one.depth, units, by_row)
        gradient *= 1 + needs_double(one.noise_scale, one.size, num_rows)[0]
        compiling = _COMPILING_CHAINS + _COMPILING_BY_ROW * by_row
        return compiling + GRADIENTS_A_STEP * num_chains * gradient * _FEWEST_STEPS < clock.left

    place = next((place for place, choice in enumerate(choices) if is_affordable(*choice)), len(choices) - 1)
    if place:
        one, units, by_row = choices[0]
        kind = f"{one.depth} x {units} {one.activation} units{', noise by row,' if by_row else ''}"
        report.add("Finite network", f"{kind} are too dear for {clock.left:.0f} s left")
    return choices[place]


# Scales
MOST_FITTED = 1000  # rows of the fit
MOST_KNOWN = 3000  # rows of the limit
_COMPARED = 200  # rows of the comparison
_ACTIVATIONS = ("erf", "relu")
_DEEP = 3  # hidden layers compared with one
_FEW = 50  # rows; below, one layer and one scale
# Seconds of a fit to a thousand rows, cubic in their number; and the fit's share of the budget.
_SECONDS, _SHARE = 30.0, 0.3


def fit_scales(
    x: np.ndarray, y: np.ndarray, depth: int | None, clock: Clock, random: np.random.RandomState, report: Report
) -> tuple[WideLimitFit, int]:
    """Choose an architecture on few rows and fit scales to more; return the fit and the number fitted to."""
    rows = random.permutation(len(x))
    affordable = int(MOST_FITTED * (_SHARE * clock.budget / _SECONDS) ** (1 / 3))
    some = rows[: min(_COMPARED, max(affordable, _FEW))]
    found = compare_architectures(x[some], y[some], depth, report)
    more = rows[: max(len(some), min(affordable, MOST_FITTED))]
    by_column = "input_scale" in found.scales
    if len(more) > len(some):
        kind: dict[str, Any] = {"activation": found.activation, "depth": found.depth, "input_scale": by_column}
        found = fit(x[more], y[more], num_restarts=1, num_rows=len(some), progress_bar=False, **kind)
    known = rows[:MOST_KNOWN] if len(x) > MOST_KNOWN else np.arange(len(x))
    report.add(
        "Infinitely wide network",
        f"rows: {len(some)} to choose the architecture, {len(more)} to fit scales to, {len(known)} to predict from",
        f"{found.activation}, hidden layers: {found.depth}, input scale: {'by column' if by_column else 'none'}",
        f"noise {found.noise_scale:.4g} standard deviations of the targets, log evidence {found.log_evidence:.2f}",
    )
    return replace(found, inputs=x[known], targets=y[known]), len(more)


def compare_architectures(x: np.ndarray, y: np.ndarray, depth: int | None, report: Report) -> WideLimitFit:
    """Choose activation, depth and column scales by the evidence of some rows."""
    fitted = partial(fit, x, y, num_restarts=1, num_rows=len(x), progress_bar=False)
    found = [fitted(activation=_ACTIVATIONS, depth=depth or 1, input_scale=False)]
    first = found[0]
    if len(x) >= _FEW and depth is None:
        found.append(fitted(activation=first.activation, depth=_DEEP, input_scale=False))
    if len(x) >= _FEW and x.shape[1] > 1:
        # Both again: column scales often change their order.
        found.append(fitted(activation=_ACTIVATIONS, depth=first.depth, input_scale=True))
    best = max(found, key=lambda one: one.table[0]["log_marginal"])
    table = sorted((row for one in found for row in one.table), key=lambda row: -row["log_marginal"])
    report.add(
        "Infinitely wide network",
        "log evidence at the fitted scales; log marginal: scales integrated out, the largest is chosen",
        str(replace(best, table=table)),
    )
    return best


# Precision
# In targets' deviations: smaller ones need float64; at 0.04 gradients of float32 are 0.1 % off.
_LEAST_NOISE = 0.02
# Least ratio of the noise's variance to the rounding of features' squares, summed over rows.
_ROUNDINGS = 20


def needs_double(noise_scale: float, prior_variance: float, num_rows: int) -> tuple[bool, str]:
    """Tell whether chains need float64, and why, for targets of variance 1."""
    rounding = _ROUNDINGS * np.finfo(np.float32).eps * prior_variance * num_rows
    if noise_scale < _LEAST_NOISE:
        return True, f"float64 (noise {noise_scale:.3g} is below {_LEAST_NOISE})"
    if noise_scale**2 < rounding:
        beside = f"{num_rows} rows of outputs with a prior standard deviation of {prior_variance**0.5:.3g}"
        return True, f"float64 (noise {noise_scale:.3g} is lost in float32 beside {beside})"
    return False, f"float32 (noise {noise_scale:.3g} is large enough)"


# Posterior
_NUM_WEIGHTED = (500, 200, 50)  # weighted draws: few numbers, so that programs are found again
_COMPILING_WEIGHTED = 4.5  # seconds: measured
_GRADIENTS_A_DRAW = 45  # cost of one in float64, with its score: measured
_MOST_OF_LIMIT = 0.1  # stacked with draws: tails
_MOST_WEIGHTED = 100  # rows, above which few draws carry the weight
