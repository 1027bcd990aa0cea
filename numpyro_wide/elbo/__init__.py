"""Losses for wide networks: a tempered ELBO, a quasi-KL loss, and their terms."""

from numpyro_wide.elbo._tempered import TemperedTraceMeanFieldELBO
from numpyro_wide.elbo._terms import ELBOTerms as ELBOTerms
from numpyro_wide.elbo._terms import MonitoredRun as MonitoredRun
from numpyro_wide.elbo._terms import OnPriorWarning as OnPriorWarning
from numpyro_wide.elbo._terms import elbo_terms, run_monitored
from numpyro_wide.elbo._trace_qkl import TraceQKL

__all__ = [
    "TemperedTraceMeanFieldELBO",
    "TraceQKL",
    "elbo_terms",
    "run_monitored",
]
