"""NumPyro pieces for inference in wide Bayesian neural networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# A name of NumPyro's comes first: ArviZ 1.x puts its import off, and modules loaded before it do not know their parts.
from numpyro import handlers as _handlers  # noqa: F401

from numpyro_wide import amortized as amortized
from numpyro_wide import autoguide as autoguide
from numpyro_wide import calibration as calibration
from numpyro_wide import diagnostics as diagnostics
from numpyro_wide import distributions as distributions
from numpyro_wide import elbo as elbo
from numpyro_wide import evidence as evidence
from numpyro_wide import linear_gaussian as linear_gaussian
from numpyro_wide import mcmc as mcmc
from numpyro_wide import natural as natural
from numpyro_wide import plots as plots
from numpyro_wide import readout as readout
from numpyro_wide import runs as runs
from numpyro_wide import surrogates as surrogates
from numpyro_wide import wide_limit as wide_limit
from numpyro_wide.amortized import AmortizedForwardKL as AmortizedForwardKL
from numpyro_wide.distributions import log_uniform_kl as log_uniform_kl
from numpyro_wide.distributions import quasi_kl as quasi_kl
from numpyro_wide.elbo import TemperedTraceMeanFieldELBO as TemperedTraceMeanFieldELBO
from numpyro_wide.elbo import TraceQKL as TraceQKL
from numpyro_wide.evidence import model_evidence as model_evidence
from numpyro_wide.machine import set_blas_threads as set_blas_threads
from numpyro_wide.machine import shard_rows as shard_rows
from numpyro_wide.mcmc import SplitHMC as SplitHMC
from numpyro_wide.readout import ReadoutPredictive as ReadoutPredictive
from numpyro_wide.readout import ReprioriseReadout as ReprioriseReadout
from numpyro_wide.readout import collapse_readout as collapse_readout
from numpyro_wide.readout import guide_draws as guide_draws
from numpyro_wide.readout import repriorise as repriorise
from numpyro_wide.readout import wide_limit_draws as wide_limit_draws
from numpyro_wide.surrogates import fitted_surrogate as fitted_surrogate
from numpyro_wide.surrogates import mean_kernel as mean_kernel
from numpyro_wide.surrogates import surrogate_targets as surrogate_targets

if TYPE_CHECKING:
    from numpyro_wide import datasets as datasets
    from numpyro_wide import estimators as estimators
    from numpyro_wide import nn as nn

__version__ = "0.1.0"

# Parts that bring libraries which NumPyro has not loaded, such as flax or scikit-learn, are imported when first used.
_LAZY = ("datasets", "estimators", "nn")

__all__ = [
    "AmortizedForwardKL",
    "ReadoutPredictive",
    "ReprioriseReadout",
    "SplitHMC",
    "TemperedTraceMeanFieldELBO",
    "TraceQKL",
    "amortized",
    "autoguide",
    "calibration",
    "collapse_readout",
    "datasets",
    "diagnostics",
    "distributions",
    "elbo",
    "estimators",
    "evidence",
    "fitted_surrogate",
    "guide_draws",
    "linear_gaussian",
    "log_uniform_kl",
    "mcmc",
    "mean_kernel",
    "model_evidence",
    "natural",
    "nn",
    "plots",
    "quasi_kl",
    "readout",
    "repriorise",
    "runs",
    "set_blas_threads",
    "shard_rows",
    "surrogate_targets",
    "surrogates",
    "wide_limit",
    "wide_limit_draws",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"numpyro_wide.{name}")
    raise AttributeError(f"module 'numpyro_wide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
