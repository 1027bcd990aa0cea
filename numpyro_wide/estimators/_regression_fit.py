"""The fit of the regressor: what is run, and what is kept of it."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_wide import wide_limit_draws
from numpyro_wide.estimators import _leave_one_out as loo
from numpyro_wide.estimators._base import WIDTH
from numpyro_wide.estimators._chains import (
    GRADIENTS_A_STEP,
    MOST_CHECKED,
    Convergence,
    convergence,
    gradient_seconds,
    run_chains,
    tell_no_chains,
)
from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._network import SPREAD, Network, collapsed
from numpyro_wide.estimators._noise_test import LARGEST_P, fewest_rows, has_steps, noise_p_value
from numpyro_wide.estimators._posteriors import DrawnPosterior, LimitPosterior
from numpyro_wide.estimators._precision import needs_double
from numpyro_wide.estimators._report import Report
from numpyro_wide.estimators._scale_fit import MOST_FITTED, MOST_KNOWN, distinct_rows, fit_scales, repeats
from numpyro_wide.machine import double_precision, precision
from numpyro_wide.wide_limit import WideLimitFit

METHODS = ("auto", "limit", "weighted", "chains")
NOISES = ("auto", "constant", "by_row")
_NUM_WEIGHTED = 500  # draws that are chosen by their evidence, at the most
_LEAST_WEIGHTED = 50
_GRADIENTS_A_DRAW = 30  # that a draw costs, chosen from ten in double precision, with its score: measured
_MOST_WEIGHTED = 100  # rows: of more, few draws of the prior carry the weight
_LARGEST_SHAPE = 0.7  # of the weights of these draws (Vehtari et al. 2024)
_MANY = 10_000  # rows, of which the user is told what will be done
_ENOUGH_STEPS = 1000  # of chains, below which they run on fewer rows
_MOST_SCORED = 1000  # rows of which log densities are compared
_FEWEST_SCORED = 20  # rows without copies, below which all are


class Request(NamedTuple):
    """Choices of the user.

    Attributes:
        depth: number of hidden layers, or None to choose it.
        width: number of units in each, or None to choose it.
        noise: one of ``NOISES``.
        method: one of ``METHODS``.
        num_chains: number of chains.
    """

    depth: int | None
    width: int | None
    noise: str
    method: str
    num_chains: int


class Result(NamedTuple):
    """Outcome of a fit.

    Attributes:
        method: what predicts.
        posterior: the posterior that predicts.
        fit: scales, fitted by the evidence.
        model: collapsed model; None for the limit.
        model_args: arguments that it was fitted with; None for the limit.
        mcmc: chains; None without.
        draws: draws that predict; None for the limit.
        num_steps: number of steps of each chain.
    """

    method: str
    posterior: Any
    fit: WideLimitFit
    model: Any = None
    model_args: tuple | None = None
    mcmc: MCMC | None = None
    draws: dict[str, Any] | None = None
    num_steps: int = 1


def decide(
    request: Request, x: np.ndarray, y: np.ndarray, clock: Clock, random: np.random.RandomState, report: Report
) -> Result:
    """Fit scales, run what the request and the numbers ask for, and keep what predicts best.

    Args:
        request: the request.
        x: standardised inputs, (n, d).
        y: standardised targets, (n,) or (n, k).
        clock: clock of the whole fit.
        random: generator of all choices.
        report: report of all decisions.
    """
    report.add("Data", f"{len(x)} rows, {x.shape[1]} column(s), {y.reshape(len(y), -1).shape[1]} target(s)")
    if len(x) > _MANY:
        _announce(request, len(x), clock, report)
    fit, num_fitted = fit_scales(x, y, request.depth, clock, random, report)
    found = limit = Result("limit", LimitPosterior(fit), fit)
    clock.begin("leave-one-out log densities of the limit")
    scored = _scored(fit, report)
    by_limit = _score(limit.posterior, fit, scored)
    report.add("Infinitely wide network", f"leave-one-out log density of a row {by_limit}")
    varies = _varies(fit.targets, report)
    is_by_row = varies and _is_noise_by_row(request, fit, limit.posterior, scored, report)
    if request.method != "limit" and varies:
        num_outputs = None if fit.targets.ndim == 1 else fit.targets.shape[1]
        network = Network(fit.depth, request.width or WIDTH, fit.activation, num_outputs, is_by_row)
        sample = partial(_sampled, request, network, fit, (x, y), scored, clock, random, report)
        found, by_draws = _tried(request, sample, fit, scored, clock, report) or (limit, by_limit)
    if found is not limit:
        unsure = f"a rough estimate for {by_draws.share_unsure:.1%} of the rows, whose Pareto shape is above 0.7"
        report.add("Decision", f"leave-one-out log density of a row by draws {by_draws}, {unsure}")
        # The limit's scales were fitted to these rows: one nat a number, as in Akaike's criterion.
        num_scales = sum(np.size(error) for error in fit.standard_errors.values())
        penalised = by_limit._replace(by_row=by_limit.by_row - num_scales / num_fitted)
        is_worse, gain = loo.is_better(penalised, by_draws)
        report.add(
            "Decision",
            f"log density of the limit, less one nat in all for each of its {num_scales} scales, minus that of draws: "
            f"{gain}",
            "the limit is better by more than two standard errors" if is_worse else "the limit is not clearly better",
        )
        found = limit if is_worse and request.method == "auto" else found
    if found is limit and is_by_row:
        line = "the limit has one noise for all rows: its intervals are too wide at some and too narrow at others"
        report.add("Noise", f'{line}; method="chains" has a noise by row')
    report.add("Decision", f'predictions are those of "{found.method}"')
    report.add("Time", f"{clock.working:.1f} seconds of {clock.budget:g}, and {clock.compiling:.1f} of compilation")
    return found


def _announce(request: Request, num_rows: int, clock: Clock, report: Report) -> None:
    """Say what many rows will be used for, before anything is begun."""
    report.announce(
        f"scales are fitted to {MOST_FITTED} of {num_rows} rows at most, the limit predicts from {MOST_KNOWN}"
    )
    if request.method != "limit":
        rows = "all rows" if _pays_for_all(num_rows, request, clock) else f"{MOST_KNOWN} rows, as the budget pays for"
        report.announce(
            f"a finite network of {rows}, {request.width or WIDTH} units, in {clock.budget:g} seconds at the most"
        )


def _pays_for_all(num_rows: int, request: Request, clock: Clock) -> bool:
    """Tell whether the budget pays for enough steps of chains of all rows; weighted draws cost as much."""
    gradient = gradient_seconds(num_rows, request.depth or 1, request.width or WIDTH)
    step = GRADIENTS_A_STEP * gradient * request.num_chains
    return num_rows <= MOST_KNOWN or clock.budget > _ENOUGH_STEPS * step


def _varies(targets: np.ndarray, report: Report) -> bool:
    if np.ptp(targets, axis=0).any():
        return True
    report.add(
        "Decision", "the targets are all the same: the limit says so, nothing is sampled, and the noise is made up"
    )
    return False


def _score(posterior: Any, fit: WideLimitFit, rows: np.ndarray) -> loo.LeaveOneOut:
    """Score the log densities of rows of the fit, each given the others."""
    mean, variance, noise_variance = posterior.function(fit.inputs[rows])
    return loo.of_regression(mean, variance, fit.targets.reshape(len(fit.inputs), -1)[rows], noise_variance)


def _scored(fit: WideLimitFit, report: Report) -> np.ndarray:
    """Return rows that both the limit and the draws are fitted to, without those that have copies if others suffice.

    What a row's copies say of it is still there when it is left out.
    """
    table = np.column_stack([fit.inputs, fit.targets.reshape(len(fit.inputs), -1)])
    most = max(_MOST_SCORED, fewest_rows(fit.inputs))
    if repeats(fit.inputs):
        return np.unique(np.linspace(0, len(table) - 1, min(len(table), most)).astype(int))
    _, places, counts = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    single = np.flatnonzero(counts[places.ravel()] == 1)
    if len(single) < min(_FEWEST_SCORED, len(table)):
        report.add("Data", "most rows have copies, which say what they are: leave-one-out log densities are too high")
        single = np.arange(len(table))
    return single[np.unique(np.linspace(0, len(single) - 1, min(len(single), most)).astype(int))]


def _is_noise_by_row(
    request: Request, fit: WideLimitFit, limit: LimitPosterior, rows: np.ndarray, report: Report
) -> bool:
    """Tell whether the noise is to depend on the row, because that is asked for, or the limit's residuals say so."""
    if request.noise != "auto":
        return request.noise == "by_row"
    if has_steps(fit.targets, fit.noise_scale):
        report.add(
            "Noise", "taken for constant: the targets are whole steps apart, and at these one by row would vanish"
        )
        return False
    mean, variance, noise_variance = limit.function(fit.inputs[rows])
    targets = fit.targets.reshape(len(fit.inputs), -1)[rows]
    others, spread = loo.cavity(mean[0], variance[0], targets, noise_variance[0])
    residuals = (targets - others) / np.sqrt(spread + noise_variance[0])
    p_value = noise_p_value(fit.inputs[rows], others.mean(axis=1), np.sqrt(np.mean(residuals**2, axis=1)))
    if p_value is None:
        report.add("Noise", "taken for constant: too few rows for a test")
        return False
    is_by_row = p_value < LARGEST_P
    found = "below {}, so it depends on the inputs" if is_by_row else "not below {}, so it is taken for constant"
    report.add("Noise", f"Koenker's test of a constant noise has p = {p_value:.2g}, {found.format(f'{LARGEST_P:g}')}")
    return is_by_row


def _tried(
    request: Request,
    sample: Callable[[], Result | None],
    fit: WideLimitFit,
    scored: np.ndarray,
    clock: Clock,
    report: Report,
) -> tuple[Result, loo.LeaveOneOut] | None:
    """Draw from a finite network, and score the draws; None where the limit is to predict in their place."""
    try:
        found = sample()
        if found is None:
            return None
        clock.begin("leave-one-out log densities of the draws")
        return found, _score(found.posterior, fit, scored)
    except (FloatingPointError, RuntimeError, ValueError) as error:  # no start, or draws that are not finite
        if request.method != "auto":
            raise
        line = f"the finite network was given up, and the limit predicts: {error}"
        report.add("Decision", line)
        warnings.warn(line, UserWarning, stacklevel=2)
        return None


def _sampled(
    request: Request,
    network: Network,
    fit: WideLimitFit,
    data: tuple[np.ndarray, np.ndarray],
    scored: np.ndarray,
    clock: Clock,
    random: np.random.RandomState,
    report: Report,
) -> Result | None:
    """Run weighted draws, or chains; None if the budget pays for neither."""
    if network.by_row:
        data = _without_copies(*data, report)
    model = collapsed(network)
    medians = {**fit.scales, "noise": fit.noise_scale}
    key = jax.random.key(random.randint(2**31 - 1))
    kind = f"{network.depth} hidden layer(s) of {network.width} {network.activation} units, "
    kind += "noise by row" if network.by_row else "constant noise"
    report.add("Finite network", f"{kind}; priors log-normal, by {SPREAD:g} around the fitted scales")
    if not _pays_for_all(len(data[0]), request, clock):
        data = fit.inputs, fit.targets
        report.add("Finite network", f"of {len(data[0])} rows: the budget does not pay for all")
    if request.method == "weighted" or (request.method == "auto" and len(data[0]) <= _MOST_WEIGHTED):
        clock.begin("weighted draws")
        each = _GRADIENTS_A_DRAW * gradient_seconds(len(data[0]), network.depth, network.width)
        num_draws = int(np.clip(clock.left / each, _LEAST_WEIGHTED, _NUM_WEIGHTED))
        found, shape = _weighted(network, model, fit, (medians, *data), num_draws, key)
        report.add("Weighted draws", f"{num_draws} draws of ten times as many, Pareto shape {shape:.2f}")
        if request.method == "weighted" or shape <= _LARGEST_SHAPE:
            return found
        report.add("Weighted draws", f"above {_LARGEST_SHAPE}: few draws carry the weight, so chains are run")
    result = _chains(request, network, model, fit, (medians, *data), scored, clock, key, report)
    if result is None:
        tell_no_chains(clock, request.method == "chains", report)
    return result


def _without_copies(x: np.ndarray, y: np.ndarray, report: Report) -> tuple[np.ndarray, np.ndarray]:
    """Leave out copies of rows, which pass for measurements without noise: there one by row would vanish."""
    rows = distinct_rows(x, y.reshape(len(x), -1))
    if len(rows) < len(x):
        report.add("Finite network", f"fitted to {len(rows)} rows: at copies of others a noise by row would vanish")
    return x[rows], y[rows]


def _weighted(
    network: Network, model: Any, fit: WideLimitFit, known: tuple, num_draws: int, key: Any
) -> tuple[Result, float]:
    """Draw from the prior by the evidence, in double precision; with the Pareto shape of the weights."""
    with double_precision(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the Pareto shape")  # the report tells it
        args = jax.tree.map(jnp.asarray, known)
        found = wide_limit_draws(key, model, num_draws, *args, weighted=True)
        shape = float("nan") if found.pareto_shape is None else found.pareto_shape
        latent = {name: values for name, values in found.items() if name != "readout"}
    posterior = DrawnPosterior(network, latent, known)
    return Result("weighted", posterior, fit, model, posterior.known, None, posterior.draws), shape


def _chains(
    request: Request,
    network: Network,
    model: Any,
    fit: WideLimitFit,
    known: tuple,
    scored: np.ndarray,
    clock: Clock,
    key: Any,
    report: Report,
) -> Result | None:
    """Run chains, in the precision that noise and scales need."""
    rows = scored[:: -(-len(scored) // MOST_CHECKED)]
    targets = fit.targets.reshape(len(fit.inputs), -1)[rows]

    def judge(draws: dict[str, Any]) -> Convergence:
        mean, variance, noise_variance = DrawnPosterior(network, draws, known).function(fit.inputs[rows])
        return convergence(mean, variance + noise_variance, targets, request.num_chains)

    is_double, why = needs_double(fit, len(known[1]))
    report.add("Chains", f"in {'double' if is_double else 'single'} precision, for {why}")
    with precision(is_double):
        args = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), known)
        # In double precision everything takes twice as long.
        seconds = (1 + is_double) * gradient_seconds(len(known[1]), network.depth, network.width)
        options: dict[str, Any] = {"gradient_seconds": seconds, "hold": "scales", "judge": judge}
        run = run_chains(model, args, request.num_chains, clock, key, report, **options)
    if run is None:
        return None
    posterior = DrawnPosterior(network, run.draws, known)
    return Result("chains", posterior, fit, model, posterior.known, run.mcmc, posterior.draws, run.num_steps)
