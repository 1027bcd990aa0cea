"""Losses for wide networks: a tempered ELBO, quasi-KL losses, their terms, and a bound."""

from numpyro_wide.elbo._certificate import mean_field_bound
from numpyro_wide.elbo._tempered import TemperedTraceMeanFieldELBO
from numpyro_wide.elbo._terms import ELBOTerms as ELBOTerms
from numpyro_wide.elbo._terms import MonitoredRun as MonitoredRun
from numpyro_wide.elbo._terms import OnPriorWarning as OnPriorWarning
from numpyro_wide.elbo._terms import elbo_terms, run_monitored, warn_if_on_prior
from numpyro_wide.elbo._trace_qkl import PenalizedMaximumLikelihood, TraceQKL

__all__ = [
    "PenalizedMaximumLikelihood",
    "TemperedTraceMeanFieldELBO",
    "TraceQKL",
    "elbo_terms",
    "mean_field_bound",
    "run_monitored",
    "warn_if_on_prior",
]
