"""Regression by a plan, in order: targets, limit, architecture, noise, draws of a finite network, choice."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._chains import LARGEST_RHAT, Run, run_chains
from numpyro_wide.estimators._plan import RACE_UNITS, Plan, Schedule, units_of
from numpyro_wide.estimators._posteriors import SPREAD, DrawnPosterior, LimitPosterior, Mixture, Network, collapsed
from numpyro_wide.estimators._race import Optimum, with_limit
from numpyro_wide.estimators._targets import TargetScale, choose_scale
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._draws import wide_limit_draws
from numpyro_wide.wide_limit._fit import MEND_FAR_ROWS, far_rows, fit
from numpyro_wide.wide_limit._limit import WideLimitFit

HEADING = "Infinitely wide network"
_MOST_SCORED = 1000  # rows of compared log densities
_NOISE_SHARE = 0.2  # of the limit's leave-one-out error, below which its noise is flagged
_SHARE_OF_MEASURED = 0.1  # of repeated inputs with other targets, to those by chance: above it they were measured
_ACTIVATIONS = ("erf", "relu")
# In targets' deviations: smaller noises need float64; at 0.04 gradients of float32 are 0.1 % off.
_LEAST_NOISE = 0.02
# Least ratio of the noise's variance to the rounding of features' squares, summed over rows.
_ROUNDINGS = 20
_MOST_OF_LIMIT = 0.1  # stacked with draws: tails


class Result(NamedTuple):
    """What a regression predicts by, of standardised targets."""

    method: str
    posterior: Any
    log_density: float  # of rows left out, a row
    mcmc: MCMC | None = None
    num_steps: int = 1


@dataclass
class Regression:
    """A regression at work: its plan, as it is run, and what the stages so far have learnt."""

    plan: Plan
    x: np.ndarray
    y: np.ndarray  # standardised
    clock: Clock
    random: np.random.RandomState
    report: Report

    def fit_limit(self) -> None:
        """Fit the limit's scales, and score its predictions of rows left out."""
        self.clock.begin("scales of the infinitely wide network")
        self.fit = fit_scales(self.x, self.y, self.plan, self.random, self.report)
        self.limit = LimitPosterior(self.fit)
        self.clock.begin("leave-one-out log densities of the limit")
        self.gram, num_known = self.fit.nngp(self.fit.inputs), len(self.fit.inputs)
        left_out, outputs = self.limit.left_out(self.gram), self.fit.targets.reshape(num_known, -1)
        self.residuals = outputs - left_out.mean[0]
        rows = np.unique(np.linspace(0, num_known - 1, min(num_known, _MOST_SCORED)).astype(int))
        self.scored = self.fit.inputs[rows], outputs[rows]
        by_limit = Mixture(*(part[:, rows] for part in left_out)).by_draw(outputs[rows])[0]
        self.by_limit = loo.LeaveOneOut(by_limit)
        error = float(np.sqrt(np.mean(self.residuals[rows] ** 2)))
        self.report.add(HEADING, f"leave-one-out log density per row: {self.by_limit}, error {error:.4g}")
        if self.fit.noise_scale < _NOISE_SHARE * error:
            line = f"a noise of {self.fit.noise_scale:.2g} is far below that error: the rows are too few to tell it"
            self.report.add(HEADING, f"{line}, and intervals rest on the spread of the function")

    def tell_far_rows(self, scale: TargetScale) -> None:
        """Warn of targets far from what the other rows predict."""
        outputs = self.fit.targets.reshape(self.residuals.shape)
        if far := far_rows(outputs, self.residuals):
            row, column, _ = far[0]
            target = scale.inverse(self.fit.targets).reshape(outputs.shape)[row, column]
            line = f"{len(far)} of {len(outputs)} targets, {target:.4g} the farthest, decide the noise and the scales"
            self.report.warn(HEADING, line, f". {MEND_FAR_ROWS}")

    def choose_noise(self) -> bool:
        """Whether the noise may depend on inputs; it holds a constant one, too, so that no test need be trusted."""
        is_constant = self.plan.noise == "constant"
        if loo.has_steps(self.fit.targets, self.fit.noise_scale):
            line = "the targets are discrete, such as ratings, but predicted as continuous: round draws of sample_y"
            self.report.add("Noise", line)
            if self.plan.noise == "auto":
                # Exact predictions of such a value have an unbounded density.
                self.report.add("Noise", "constant: one that varies would vanish")
                is_constant = True
        return not is_constant

    def draw(self, by_row: bool) -> Run | None:
        """Return draws of a finite network; None where the budget pays for none."""
        optima = list[Optimum]()
        if self.plan.race_runs:
            self.clock.begin("race of architectures")
            optima, self.plan = with_limit(self.limit, self.gram, self.plan, self.clock, self.random, self.report)
        chosen: Any = optima[0] if optima else self.fit
        if not optima and self.fit.network is not None:
            self.report.add("Finite network", "none: the limit of the structured network predicts")
            return None
        schedule = self.plan.schedule(chosen.depth)
        key = jax.random.key(self.random.randint(2**31 - 1))
        if self.plan.num_weighted:
            network = self.network(chosen, units_of(self.plan, chosen.depth), by_row)
            known = {**chosen.scales, "noise": chosen.noise_scale}, self.x, self.y
            if (run := self.weigh(network, known, key)) is not None:
                return run
        if self.clock.is_over:
            self.plan = replace(self.plan, schedules=())
        if schedule is None or not self.plan.schedules:
            self.report.warn("Plan", *too_few(self.plan))
            return None
        network = self.network(chosen, schedule.units, by_row and schedule.by_row)
        everything = schedule.num_rows == len(self.x)
        data = (self.x, self.y) if everything else (self.fit.inputs, self.fit.targets)
        known = {**chosen.scales, "noise": chosen.noise_scale}, *data
        size = chosen.size if optima else np.mean(np.diagonal(self.gram))
        schedule = in_precision(schedule, chosen.noise_scale, size, self.report)
        starts = chosen.weights if optima and schedule.units == RACE_UNITS else []
        form: dict[str, Any] = {"optima": starts, "clock": self.clock, "key": key, "report": self.report}
        run = run_chains(network, known, self.scored, self.plan.num_chains, schedule, **form)
        self.plan = self.plan.having_run(run.schedule)
        return run

    def network(self, chosen: WideLimitFit | Optimum, units: int, by_row: bool) -> Network:
        """Return a finite network of a limit or an optimum of the race."""
        num_outputs = None if self.y.ndim == 1 else self.y.shape[1]
        kind = f"{chosen.depth} x {units} {chosen.activation} units, {'noise by row' if by_row else 'constant noise'}"
        line = f"{kind}; log-normal priors, of spread {SPREAD:g}, around the fitted scales"
        self.report.add("Finite network", line)
        return Network(chosen.depth, units, chosen.activation, num_outputs, by_row)

    def weigh(self, network: Network, known: tuple, key: jax.Array) -> Run | None:
        """Return weighted draws of the prior; None where few have the weight, and chains are planned."""
        self.clock.begin("weighted draws")
        number = self.plan.num_weighted
        with double_precision(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the Pareto shape")
            args = jax.tree.map(jnp.asarray, known)
            draws = wide_limit_draws(key, collapsed(network), number, *args, weighted=True)
        shape = float("nan") if draws.pareto_shape is None else draws.pareto_shape
        line = f"{number} chosen of {10 * number} draws of the prior by their evidence; Pareto shape {shape:.2f}"
        self.report.add("Weighted draws", line)
        if self.plan.method == "weighted" or shape <= loo.LARGEST_SHAPE:
            posterior = DrawnPosterior(network, {name: draws[name] for name in draws if name != "readout"}, known)
            posterior.pareto_shape = shape
            return Run(posterior)
        self.report.add("Weighted draws", f"above {loo.LARGEST_SHAPE}: few draws have the weight, so chains are run")
        return None

    def choose(self, run: Run) -> Result:
        """Take the limit if it is clearly better, less one nat for each fitted scale (Akaike's criterion); else draws.

        These are stacked with a little of it. They know their rows, so that their leave-one-out densities are no ground
        for more.
        """
        by_draws = loo.of_regression(run.posterior.function(self.scored[0]), self.scored[1])
        density = float(np.mean(by_draws.by_row))
        num_scales = sum(np.size(error) for error in self.fit.standard_errors.values())
        penalised = self.by_limit.by_row - num_scales / self.plan.fitted_rows
        kind = "weighted draws" if run.mcmc is None else "chains"
        self.report.add(
            "Decision",
            f"leave-one-out log density per row by {kind}: {by_draws}; {by_draws.reliability}",
            f"{kind} over the infinite-width limit: {loo.average(by_draws.by_row - penalised)} nats per row "
            f"(leave-one-out, the limit less one nat for each of its {num_scales} scales)",
        )
        if self.plan.method == "posterior" and not run.posterior.agrees:
            self.limit.rhat = run.posterior.rhat
            line = f"no posterior: the chains reached an R-hat of {self.limit.rhat:.3f}, not {LARGEST_RHAT}"
            mend = '; give a larger time_budget, other units by hidden, or take the ensemble of method="chains".'
            self.report.warn("Decision", f"{line}, and the limit predicts", mend)
            return self.by_limit_alone()
        if self.plan.method != "auto":
            return Result(self.plan.method, run.posterior, density, *run[1:3])
        if loo.is_better(penalised, by_draws.by_row):
            self.report.add("Decision", f"{kind} dropped: the limit is better by more than two standard errors")
            return self.by_limit_alone()
        weight = max(1 - _MOST_OF_LIMIT, loo.stacking_weight(by_draws.by_row, penalised))
        least = f"at least {1 - _MOST_OF_LIMIT:g}"
        self.report.add("Decision", f"weight of {kind}, stacked with the limit: {weight:.3f}, {least}")
        run.posterior.stack(self.limit, weight)
        return Result("stacked", run.posterior, density, *run[1:3])

    def by_limit_alone(self) -> Result:
        """Return the limit's predictions."""
        return Result("limit", self.limit, float(np.mean(self.by_limit.by_row)))


def decide(
    x: np.ndarray, y: np.ndarray, plan: Plan, clock: Clock, random: np.random.RandomState, report: Report
) -> tuple[TargetScale, Regression, Result]:
    """Fit x (n, d), y (n,) or (n, k) by a plan; return the scale of y, the work and its result."""
    clock.begin("scale of the targets")
    scale = choose_scale(x, y, plan, random, report)
    work = Regression(plan, x, scale.forward(y), clock, random, report)
    work.fit_limit()
    work.tell_far_rows(scale)
    result, varies = work.by_limit_alone(), np.ptp(work.fit.targets, axis=0).any()
    by_row = bool(varies) and work.choose_noise()
    if not varies:
        report.add("Decision", "the targets are all the same: the limit predicts them, and its noise is arbitrary")
    elif plan.method != "limit":
        try:
            if (run := work.draw(by_row)) is not None:
                result = work.choose(run)
        except (FloatingPointError, RuntimeError, ValueError) as error:  # no start, or infinite draws
            if plan.method != "auto":
                raise
            report.warn("Decision", f"the finite network was given up, and the limit predicts: {error}")
    if by_row and result.method == "limit":
        line = "the limit has one noise for all rows: where it varies, intervals are too wide at some, narrow at others"
        report.add("Noise", f'{line}; method="chains" has a noise by row')
    return scale, work, result


def without_copies(x: np.ndarray, y: np.ndarray, report: Report) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, d) and y (n,) or (n, k) without repeated rows, which feign zero noise, but with measurements."""
    rows = np.column_stack([x, y.reshape(len(y), -1)])
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    num_copies = len(x) - len(first)
    if not num_copies:
        return x, y
    num_rows, num_targets = (np.unique(inputs, axis=0, return_counts=True)[1] for inputs in (x, x[first]))
    shares = np.unique(rows[:, x.shape[1] :], axis=0, return_counts=True)[1] / len(x)
    by_chance = 1 - shares @ shares  # that two targets differ: rarely, where one label is rare
    are_measured = np.mean(num_targets[num_rows > 1] > 1) > _SHARE_OF_MEASURED * by_chance
    # Of a table that was copied as a whole, every row is there as often.
    if are_measured and counts.min() < counts.max():
        report.add(
            "Data", f"{num_copies} of {len(x)} rows are like others, but measured: others of equal inputs differ"
        )
        return x, y
    line = f"{num_copies} of {len(x)} rows are copies of others, inputs and targets: each row counts once"
    if counts.min() > 1:
        report.warn("Data", line, ".")
    else:
        report.add("Data", line)
    return x[np.sort(first)], y[np.sort(first)]


def fit_scales(x: np.ndarray, y: np.ndarray, plan: Plan, random: np.random.RandomState, report: Report) -> WideLimitFit:
    """Choose an architecture on few rows and fit scales to more."""
    rows = random.permutation(len(x))
    some, more = rows[: plan.compared_rows], rows[: plan.fitted_rows]
    found = compare_architectures(x[some], y[some], plan, report)
    best = found.table[0]
    if len(more) > len(some):
        kind = {name: best[name] for name in ("structure", "activation", "input_scale")}
        kind |= {"depth": max(best["depth"], 1), "order": max(best["order"], 1)}
        found = fit(x[more], y[more], num_restarts=1, num_rows=len(some), progress_bar=False, **kind)
    known = rows[: plan.known_rows] if plan.known_rows < len(x) else np.arange(len(x))
    report.add(
        HEADING,
        f"{best['structure']}, {found.activation}, hidden layers: {found.depth}, "
        f"input scale: {'by column' if best['input_scale'] else 'none'}",
        f"noise {found.noise_scale:.4g} standard deviations of the targets, log evidence {found.log_evidence:.2f}",
    )
    return replace(found, inputs=x[known], targets=y[known])


def compare_architectures(x: np.ndarray, y: np.ndarray, plan: Plan, report: Report) -> WideLimitFit:
    """Choose activation, depth and column scales by the evidence of some rows."""
    fitted = partial(fit, x, y, num_restarts=1, num_rows=len(x), progress_bar=False)
    first, *deeper = plan.depths

    def log_marginal(one: WideLimitFit) -> float:
        return one.table[0]["log_marginal"]

    fits = [fitted(activation=_ACTIVATIONS, depth=first, input_scale=False)]
    fits += [fitted(activation=fits[0].activation, depth=depth, input_scale=False) for depth in deeper]
    if plan.by_column:
        # Both again: column scales often change their order.
        fits.append(fitted(activation=_ACTIVATIONS, depth=first, input_scale=True))
    if np.ptp(x, axis=0).all():  # by dummies, few rows may not
        forms = [False, True] if max(fits, key=log_marginal).table[0]["input_scale"] else [False]
        activation: Any = _ACTIVATIONS
        for structure in plan.structures[1:]:
            before, of_structure = max(map(log_marginal, fits)), list[WideLimitFit]()
            for by_column in forms:
                of_structure.append(fitted(activation=activation, structure=structure, input_scale=by_column))
                activation = of_structure[0].activation  # of both, by column, a fit would take twice as long
            fits += of_structure
            found = max(of_structure, key=log_marginal)
            if log_marginal(found) < before:
                break  # one with a dense block, too, follows on a gain
            activation, forms = found.activation, [found.table[0]["input_scale"]]
    best = max(fits, key=log_marginal)
    table = sorted((row for one in fits for row in one.table), key=lambda row: -row["log_marginal"])
    report.add(
        HEADING,
        "log evidence at the fitted scales; log marginal: scales integrated out, the largest is chosen",
        str(replace(best, table=table)),
    )
    return best


def too_few(plan: Plan) -> tuple[str, str]:
    """Return a line on a budget that pays for no finite network, and how to mend it."""
    line = f"{plan.time_budget:g} seconds are too few for a finite network: the limit predicts"
    return line, "; give a larger time_budget, or fewer units by hidden, such as (20,)."


def in_precision(schedule: Schedule, noise_scale: float, prior_variance: float, report: Report) -> Schedule:
    """Return the schedule in the precision that chains need, or that it has already: float64 has half of the steps."""
    if schedule.precision != "auto":
        return schedule
    is_double, reason = needs_double(noise_scale, prior_variance, schedule.num_rows)
    report.add("Chains", f"precision: {reason}")
    return schedule.in_float64() if is_double else replace(schedule, precision="float32")


def needs_double(noise_scale: float, prior_variance: float, num_rows: int) -> tuple[bool, str]:
    """Return whether chains need float64, and why, for targets of variance 1."""
    rounding = _ROUNDINGS * np.finfo(np.float32).eps * prior_variance * num_rows
    if noise_scale < _LEAST_NOISE:
        return True, f"float64 (noise {noise_scale:.3g} is below {_LEAST_NOISE})"
    if noise_scale**2 < rounding:
        beside = f"{num_rows} rows of outputs with a prior standard deviation of {prior_variance**0.5:.3g}"
        return True, f"float64 (noise {noise_scale:.3g} is lost in float32 beside {beside})"
    return False, f"float32 (noise {noise_scale:.3g} is large enough)"
