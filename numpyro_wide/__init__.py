"""NumPyro pieces for inference in wide Bayesian neural networks."""

from numpyro_wide import distributions as distributions
from numpyro_wide import linear_gaussian as linear_gaussian
from numpyro_wide._blas import set_blas_threads as set_blas_threads
from numpyro_wide.handlers import collapse_readout as collapse_readout
from numpyro_wide.handlers import repriorise as repriorise
from numpyro_wide.predictive import ReadoutPredictive as ReadoutPredictive
from numpyro_wide.predictive import guide_draws as guide_draws
from numpyro_wide.predictive import wide_limit_draws as wide_limit_draws
from numpyro_wide.reparam import ReprioriseReadout as ReprioriseReadout

__version__ = "0.1.0"

__all__ = [
    "ReadoutPredictive",
    "ReprioriseReadout",
    "collapse_readout",
    "distributions",
    "guide_draws",
    "linear_gaussian",
    "repriorise",
    "set_blas_threads",
    "wide_limit_draws",
]
