"""Scales, noise, depth and activation of a regression network, by the evidence of the infinitely wide one."""

import warnings
from dataclasses import replace

import numpy as np

from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._report import Report
from numpyro_wide.wide_limit import WideLimitFit, fit

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
