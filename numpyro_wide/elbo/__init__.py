"""Losses for wide networks: a tempered ELBO, quasi-KL for singular guides, and a cockpit for their terms."""

from numpyro_wide.elbo._cockpit import ELBOTerms as ELBOTerms
from numpyro_wide.elbo._cockpit import MonitoredRun as MonitoredRun
from numpyro_wide.elbo._cockpit import elbo_terms as elbo_terms
from numpyro_wide.elbo._cockpit import run_monitored as run_monitored
from numpyro_wide.elbo._quasi_kl import PenalizedMaximumLikelihood as PenalizedMaximumLikelihood
from numpyro_wide.elbo._quasi_kl import TraceQKL as TraceQKL
from numpyro_wide.elbo._tempered import TemperedTraceMeanFieldELBO as TemperedTraceMeanFieldELBO

__all__ = [
    "ELBOTerms",
    "MonitoredRun",
    "PenalizedMaximumLikelihood",
    "TemperedTraceMeanFieldELBO",
    "TraceQKL",
    "elbo_terms",
    "run_monitored",
]
