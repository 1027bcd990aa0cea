"""Reports on how far networks are from their wide limit."""

from typing import Any, NamedTuple

import numpy as np


class WidthRow(NamedTuple):
    r"""Distance of one network from the limit.

    Attributes:
        accept_prob: mean acceptance probability of independent N(0, I) proposals in a chain at its stationary
            distribution; 1 in the limit.
        pareto_k: $\hat k$ of the importance weights of N(0, I) draws (Vehtari et al. 2024): below 0.7 their averages
            can be trusted; −inf where the weights are all equal.
        gap: $\log E[w] - E[\log w]$ in nats, which is KL(N(0, I) ‖ posterior) of $\phi$ and, with a Gaussian
            likelihood, the log of the mean evidence less the mean log evidence; 0 in the limit.
        gap_error: its Monte Carlo standard error.
        log_evidence: $\log E[w]$, the log marginal likelihood of the data, as far as draws of the limit tell; where
            they do not, :func:`~numpyro_wide.model_evidence` does, by chains.
        log_evidence_error: its Monte Carlo standard error; not to be believed where ``pareto_k``, or
            ``prior_pareto_k``, is above 0.7.
        sample_size: effective number of the independent draws after weighting, as a share of all of them: by their
            weights, not by a chain's autocorrelations, and the same for weights and functions.
        num_draws: number of draws.
        prior_pareto_k: as ``pareto_k``, of draws of hyperparameters and weights together from their prior, which
            ``log_evidence`` is from; NaN without hyperparameters.
        limit_log_evidence: of the infinitely wide network: of the Gaussian process with the kernel that was given, or
            with the mean kernel of some prior draws, whose error is of order 1/width beyond one hidden layer. NaN
            with a latent noise, with hyperparameters, or if the readout cannot be integrated out.
    """

    accept_prob: float
    pareto_k: float
    gap: float
    gap_error: float
    log_evidence: float
    log_evidence_error: float
    sample_size: float
    num_draws: int
    prior_pareto_k: float = float("nan")
    limit_log_evidence: float = float("nan")

    @property
    def advice(self) -> str:
        """Advice on sampling at this distance from the limit."""
        if self.pareto_k >= _largest_shape(self.num_draws):
            return "far: run a chain"
        if self.prior_pareto_k >= 0.7:
            return "near, but the hyperparameters are far from their prior: narrow it, or run a chain"
        if self.accept_prob < 0.9:
            return "near: weight independent draws, or run a chain"
        return "at the limit: wide_limit_draws is enough"


class WidthReport(NamedTuple):
    """Findings of :func:`wide_enough`. Printing them gives a table.

    Attributes:
        rows: a :class:`WidthRow` for each network, by width; the key of a single network is "model".
        has_kernel: whether the limit's kernel was given.
    """

    rows: dict[Any, WidthRow]
    has_kernel: bool = False

    @property
    def slope(self) -> float:
        """Slope of log gap against log width, near −1 for wide networks; NaN unless the keys are several widths."""
        widths = [key for key in self.rows if isinstance(key, int | float)]
        gaps = [self.rows[key].gap for key in widths]
        if len(widths) < 2 or min(gaps) <= 0:
            return float("nan")
        return float(np.polyfit(np.log(widths), np.log(gaps), 1)[0])

    def __str__(self) -> str:
        lines = ["   width  acceptance  Pareto k  gap, nats          share      log evidence  advice"]
        for key, row in self.rows.items():
            evidence = f"{row.log_evidence:.2f} ± {row.log_evidence_error:.1g}"
            lines.append(
                f"{key!s:>8s}  {row.accept_prob:10.3f}  {row.pareto_k:8.2f}  {row.gap:8.3g} ± {row.gap_error:<7.1g} "
                f"{row.sample_size:5.2f}  {evidence:>16s}  {row.advice}"
            )
            if not np.isnan(row.prior_pareto_k):
                lines.append(f"          Pareto k of weights and hyperparameters together: {row.prior_pareto_k:.2f}")
        known = [row.limit_log_evidence for row in self.rows.values() if not np.isnan(row.limit_log_evidence)]
        if known:
            source = "" if self.has_kernel else ", by the last one's mean kernel"
            lines.append(f"log evidence of the infinitely wide network{source}: {known[-1]:.2f}")
        if not np.isnan(self.slope):
            lines.append(f"the gap falls like width to the power {self.slope:.2f}; near the limit it is -1")
        return "\n".join(lines)


def _largest_shape(num_draws: int) -> float:
    """Return the Pareto shape above which averages of so many draws are not to be trusted (Vehtari et al. 2024)."""
    return float(min(1 - 1 / np.log10(num_draws), 0.7))
