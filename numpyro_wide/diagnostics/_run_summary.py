"""Findings of a summary of a run, and how they show themselves: as a table with notes below it."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from numpyro_wide._checks import FELT_ERROR, IN_FLOAT64


@dataclass(frozen=True)
class SiteSummary:
    """Posterior of one number.

    Attributes:
        mean: mean of the draws.
        standard_deviation: standard deviation of the draws.
        quantiles: quantiles of the draws by their level.
        rhat: rank-normalised split R-hat; of a single chain, that of its two halves.
        ess: effective number of draws (ArviZ's "bulk").
    """

    mean: float
    standard_deviation: float
    quantiles: dict[float, float]
    rhat: float
    ess: float


@dataclass(frozen=True)
class FunctionSummary:
    """Convergence of the function at the inputs of the fit.

    Attributes:
        is_integrated: whether it is the mean given the hidden weights, the readout integrated out; else the observed
            distribution's mean, or the probabilities of its classes, at all weights.
        rhat: R-hat of each entry, (entries,); NaN where no draw moves it.
        ess: effective number of draws of each entry, (entries,); NaN where no draw moves it.
        num_distinct: number of draws of each chain at which the function differs from the draw before, (chains,).
    """

    is_integrated: bool
    rhat: np.ndarray
    ess: np.ndarray
    num_distinct: np.ndarray


@dataclass(frozen=True)
class RunSummary:
    """Findings of :func:`summary`. Printing them gives a table.

    Attributes:
        sites: a :class:`SiteSummary` for each number among the sites, by its name.
        function: a :class:`FunctionSummary`; None if draws of some latent sites are not stored.
        evidence_error: estimate, in nats, of how far rounding moves the log density at the last draws, the readout
            integrated out; infinite where that is NaN. None with other likelihoods, or if draws of some latent sites
            are not stored.
        num_chains: number of chains.
        num_draws: number of draws of each chain.
        num_parameters: number of latent numbers of the unwrapped model, readout included.
        num_features: number of columns of the features, which is the width of the last layer, and one more with a
            bias; None of a model that was not wrapped.
        accept_prob: mean acceptance probability; None if the run does not hold it.
        step_size: step size by chain at the end, (chains,); None if the run does not hold it.
        num_gradients: number of gradients that the stored draws took, in all chains; None if the extra field
            ``num_grad``, or NUTS's ``num_steps``, was not asked for.
        num_divergent: number of divergent draws of NUTS or HMC; None for other kernels.
        num_nonfinite: number of proposals, those of the warmup included, that were rejected because their energy was
            not finite; None if the run does not hold it.
    """

    sites: dict[str, SiteSummary]
    function: FunctionSummary | None
    evidence_error: float | None
    num_chains: int
    num_draws: int
    num_parameters: int
    num_features: int | None
    accept_prob: float | None
    step_size: np.ndarray | None
    num_gradients: int | None
    num_divergent: int | None
    num_nonfinite: int | None

    def __str__(self) -> str:
        lines = [self._size()]
        if self.sites:
            table = self._table()
            first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in table]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._table()]
        table = "".join(f"<tr>{row}</tr>" for row in rows) if self.sites else ""
        notes = "<br>".join(map(escape, self._notes()))
        return f"<p>{escape(self._size())}</p><table>{table}</table><p>{notes}</p>"

    def _size(self) -> str:
        chains = f"{self.num_chains} {'chain' if self.num_chains == 1 else 'chains'} of {self.num_draws} draws"
        features = "" if self.num_features is None else f", {self.num_features} features"
        return f"{chains}; {self.num_parameters} parameters{features}"

    def _table(self) -> list[list[str]]:
        """Return the cells of the sites' table, its heading included."""
        levels = next(iter(self.sites.values())).quantiles if self.sites else ()
        heading = ["site", "mean", "sd", *(f"{100 * level:g}%" for level in levels), "R-hat", "ESS"]
        rows = [heading]
        for name, site in self.sites.items():
            numbers = [site.mean, site.standard_deviation, *site.quantiles.values()]
            rows.append([name, *(f"{value:.4g}" for value in numbers), f"{site.rhat:.3f}", f"{site.ess:.0f}"])
        return rows

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        lines = []
        if self.function is None:
            lines.append("function at the inputs: unknown, since not all latent sites are stored")
        else:
            lines += self._function_notes(self.function)
        if self.evidence_error is not None and self.evidence_error >= FELT_ERROR:
            lost = "more than can be told" if np.isinf(self.evidence_error) else f"about {self.evidence_error:.2g} nats"
            lines.append(f"rounding moves the log density by {lost}: run {IN_FLOAT64}")
        parts = {
            "acceptance": None if self.accept_prob is None else f"{self.accept_prob:.3f}",
            "step size": None if self.step_size is None else _range_of(self.step_size),
            "gradients": None if self.num_gradients is None else str(self.num_gradients),
            "divergent": None if self.num_divergent is None else str(self.num_divergent),
            "proposals not finite": None if self.num_nonfinite is None else str(self.num_nonfinite),
        }
        told = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        return [*lines, told] if told else lines

    def _function_notes(self, function: FunctionSummary) -> list[str]:
        how = "readout integrated out" if function.is_integrated else "at all weights"
        total = self.num_chains * self.num_draws
        if np.isnan(function.ess).all():
            return [f"function at the inputs ({how}): no draw moves it"]
        median, largest = (_number(statistic, function.rhat) for statistic in (np.nanmedian, np.nanmax))
        rhats = f"median R-hat {median}, largest {largest}"
        sizes = f"median ESS {np.nanmedian(function.ess):.0f}, least {np.nanmin(function.ess):.0f}, of {total}"
        lines = [f"function at the inputs ({how}): {rhats}; {sizes}"]
        if function.num_distinct.min() < 0.1 * self.num_draws:
            lines.append(f"a chain stands still: {function.num_distinct.tolist()} distinct draws by chain")
        return lines


def _range_of(values: np.ndarray) -> str:
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _number(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> str:
    return "unknown" if np.isnan(values).all() else f"{statistic(values):.3f}"
