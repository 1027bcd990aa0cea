"""The policy of the regressor: which network, which noise, which posterior."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from scipy.stats import chi2

from numpyro_wide.estimators import _scoring as loo
from numpyro_wide.estimators._base import WIDTH, Report
from numpyro_wide.estimators._chains import (
    GRADIENTS_A_STEP,
    MOST_CHECKED,
    Clock,
    Convergence,
    convergence,
    gradient_seconds,
    run_chains,
    tell_no_chains,
)
from numpyro_wide.estimators._posteriors import SPREAD, DrawnPosterior, LimitPosterior, Network, collapsed
from numpyro_wide.machine import double_precision, precision
from numpyro_wide.readout._limit import wide_limit_draws
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._kernels import fcn_kernel
from numpyro_wide.wide_limit._limit import WideLimitFit

LARGEST_P = 1e-3  # at which the noise is taken for one that depends on the inputs
_ROWS_A_COLUMN = 10  # at least: of fewer, the law of the statistic is another


def fewest_rows(x: np.ndarray) -> int:
    """Return the number of rows that the test needs, of inputs (n, d)."""
    return _ROWS_A_COLUMN * (x.shape[1] + 2)  # columns, and two powers of the prediction


def noise_p_value(x: np.ndarray, mean: np.ndarray, standardised: np.ndarray) -> float | None:
    r"""Return the p-value of Koenker's test: squared residuals regressed on the inputs and the prediction.

    $n R^2$ of that regression is $\chi^2$ under constant noise, whatever its kurtosis (Koenker 1981, A note on
    studentizing a test for heteroscedasticity).

    Args:
        x: standardised inputs, (n, d).
        mean: predictions of the rows, (n,).
        standardised: residuals of the rows over their predicted standard deviations, (n,).

    Returns:
        The p-value; None of too few rows.
    """
    regressors = np.column_stack([x, mean, mean**2])
    if len(x) < fewest_rows(x):
        return None
    # Logarithms of squares, which no single far row decides.
    squares = np.log(np.maximum(standardised**2, 1e-8))
    squares = squares - squares.mean()
    regressors = regressors - regressors.mean(axis=0)
    coefficients, _, rank, _ = np.linalg.lstsq(regressors, squares, rcond=None)
    explained = np.sum((regressors @ coefficients) ** 2) / np.sum(squares**2)
    return float(chi2.sf(len(x) * explained, rank))


def has_steps(targets: np.ndarray, noise_scale: float) -> bool:
    """Tell whether targets take few values that are further apart than the noise, such as marks from 3 to 8.

    A network can predict such a value exactly, and a noise by row goes to zero there, since the density has no bound.

    Args:
        targets: standardised targets, (n,) or (n, k).
        noise_scale: standard deviation of a constant noise.
    """
    by_target = (np.unique(column) for column in targets.reshape(len(targets), -1).T)
    return any(len(values) < len(targets) / 2 and np.median(np.diff(values)) > noise_scale for values in by_target)


_LEAST_NOISE = 0.15  # in standard deviations of the targets: below, chains in single precision lose it
# Features' squares are summed over rows, and the sum's rounding may be so many times below the noise's variance at the
# scales of the fit, from which chains stray.
_ROUNDINGS = 20
_MOST_SUMMED = 500  # rows that the sum is estimated from


def needs_double(fit: WideLimitFit, num_rows: int) -> tuple[bool, str]:
    """Tell whether chains around a fit need double precision, and from which numbers.

    Args:
        fit: scales and noise, of targets of unit variance.
        num_rows: number of rows that the chains are run on.
    """
    with double_precision():
        kernel = fcn_kernel(fit.depth, fit.activation, **fit.scales)
        variance = np.mean(np.diagonal(kernel(fit.inputs[:_MOST_SUMMED])[0]))
    rounding = _ROUNDINGS * np.finfo(np.float32).eps * variance * num_rows
    sizes = f"the noise is {fit.noise_scale:.3g}, and outputs have a prior standard deviation of {variance**0.5:.3g}"
    return bool(fit.noise_scale**2 < max(_LEAST_NOISE**2, rounding)), sizes


_COMPARED = 200  # rows on which architectures are compared
MOST_FITTED = 1000  # that scales are fitted to
MOST_KNOWN = 3000  # that the infinitely wide network predicts from
_ACTIVATIONS = ("erf", "relu")
_DEEP = 3  # hidden layers, where more than one is compared
_FEW = 50  # rows below which one scale for all columns and one layer are all that is tried
# Seconds of a core that the fit to a thousand rows takes, about; it goes with the cube of their number.
_SECONDS = 30.0
_SHARE = 0.3  # of the budget that the fit may take


def repeats(x: np.ndarray) -> bool:
    """Tell whether inputs take few values, so that equal rows are measurements that were repeated, and no copies."""
    return 2 * len(np.unique(x, axis=0)) < len(x)


def distinct_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return indices of the rows that no earlier row is a copy of, in their order; all where inputs take few values.

    Args:
        x: inputs, (n, d).
        y: targets, (n, k).
    """
    if repeats(x):
        return np.arange(len(x))
    _, first = np.unique(np.column_stack([x, y]), axis=0, return_index=True)
    return np.sort(first)


def fit_scales(
    x: np.ndarray, y: np.ndarray, depth: int | None, clock: Clock, random: np.random.RandomState, report: Report
) -> tuple[WideLimitFit, int]:
    """Choose an architecture on few rows, and fit its scales to more.

    Args:
        x: standardised inputs, (n, d).
        y: standardised targets, (n,) or (n, k).
        depth: number of hidden layers, or None to choose it.
        clock: clock of the whole fit.
        random: generator of the choice of rows.
        report: report, to which a section is added.

    Returns:
        The fit, which predicts from up to three thousand of the rows, and the number of rows that its scales are of.
    """
    clock.begin("scales of the infinitely wide network")
    rows = random.permutation(distinct_rows(x, y.reshape(len(x), -1)))
    if len(rows) < len(x):
        report.add("Data", f"{len(x) - len(rows)} rows are copies of others, which the fit of scales leaves out")
    affordable = int(MOST_FITTED * (_SHARE * clock.budget / _SECONDS) ** (1 / 3))
    some = rows[: min(_COMPARED, max(affordable, _FEW))]
    found = _compared(x[some], y[some], depth, report)
    more = rows[: max(len(some), min(affordable, MOST_FITTED))]
    if len(more) > len(some):
        by_column = "input_scale" in found.scales
        kind = {"activation": found.activation, "depth": found.depth, "input_scale": by_column}
        found = _fit(x[more], y[more], len(some), **kind)
    known = rows[:MOST_KNOWN] if len(x) > MOST_KNOWN else np.arange(len(x))
    report.add(
        "Infinitely wide network",
        f"architecture chosen on {len(some)} rows, scales and noise fitted to {len(more)}",
        f"predictions from {len(known)} rows of {len(x)}",
        f"{found.activation}, {found.depth} hidden layer(s), scales of the inputs "
        + ("by column" if "input_scale" in found.scales else "shared"),
        f"noise {found.noise_scale:.4g} standard deviations of the targets, log evidence {found.log_evidence:.2f}",
    )
    return replace(found, inputs=x[known], targets=y[known]), len(more)


def _compared(x: np.ndarray, y: np.ndarray, depth: int | None, report: Report) -> WideLimitFit:
    """Compare activations, then depths, then scales of the columns, by the evidence of some rows."""
    is_small = len(x) < _FEW
    best = _fit(x, y, len(x), activation=_ACTIVATIONS, depth=depth or 1, input_scale=False)
    table = list(best.table)
    others: list[dict[str, object]] = []
    if not is_small and depth is None:
        others.append({"activation": best.activation, "depth": _DEEP, "input_scale": False})
    if not is_small and x.shape[1] > 1:
        # Both again: with a scale for each column the order of the activations is often another.
        others.append({"activation": _ACTIVATIONS, "depth": best.depth, "input_scale": True})
    for kind in others:
        other = _fit(x, y, len(x), **kind)
        if other.table[0]["log_marginal"] > max(row["log_marginal"] for row in table):
            best = other
        table += other.table
    table.sort(key=lambda row: -row["log_marginal"])
    report.add(
        "Infinitely wide network",
        "log evidence at the fitted scales; log marginal: scales integrated out, the largest is chosen",
        str(replace(best, table=table)),
    )
    return best


def _fit(x: np.ndarray, y: np.ndarray, num_rows: int, **kind: object) -> WideLimitFit:
    """Fit with the warnings that concern the user's rows alone: copies are left out here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copies pass for measurements.*")
        return fit(x, y, num_restarts=1, num_rows=num_rows, **kind)  # type: ignore[arg-type]


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
