"""NumPyro pieces for inference in wide Bayesian neural networks."""

from numpyro_wide import autoguide as autoguide
from numpyro_wide import collapse as collapse
from numpyro_wide import diagnostics as diagnostics
from numpyro_wide import distributions as distributions
from numpyro_wide import divergence as divergence
from numpyro_wide import elbo as elbo
from numpyro_wide import linear_gaussian as linear_gaussian
from numpyro_wide import mcmc as mcmc
from numpyro_wide import wide_limit as wide_limit
from numpyro_wide._blas import set_blas_threads as set_blas_threads
from numpyro_wide.divergence import log_uniform_kl as log_uniform_kl
from numpyro_wide.divergence import quasi_kl as quasi_kl
from numpyro_wide.draws import guide_draws as guide_draws
from numpyro_wide.draws import wide_limit_draws as wide_limit_draws
from numpyro_wide.elbo import TemperedTraceMeanFieldELBO as TemperedTraceMeanFieldELBO
from numpyro_wide.elbo import TraceQKL as TraceQKL
from numpyro_wide.handlers import collapse_readout as collapse_readout
from numpyro_wide.handlers import repriorise as repriorise
from numpyro_wide.predictive import ReadoutPredictive as ReadoutPredictive
from numpyro_wide.reparam import ReprioriseReadout as ReprioriseReadout

__version__ = "0.1.0"

__all__ = [
    "ReadoutPredictive",
    "ReprioriseReadout",
    "TemperedTraceMeanFieldELBO",
    "TraceQKL",
    "autoguide",
    "collapse",
    "collapse_readout",
    "diagnostics",
    "distributions",
    "divergence",
    "elbo",
    "guide_draws",
    "linear_gaussian",
    "log_uniform_kl",
    "mcmc",
    "quasi_kl",
    "repriorise",
    "set_blas_threads",
    "wide_limit",
    "wide_limit_draws",
]
