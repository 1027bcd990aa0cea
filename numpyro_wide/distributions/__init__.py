"""Distributions without a density, and their divergence."""

from numpyro_wide.distributions._log_uniform import log_uniform_kl as log_uniform_kl
from numpyro_wide.distributions._quasi_kl import quasi_kl as quasi_kl
from numpyro_wide.distributions._quasi_kl import register_quasi_kl
from numpyro_wide.distributions._singular import BernoulliDropout, DegenerateNormal, GaussianDropout
from numpyro_wide.distributions._singular import SingularDistribution as SingularDistribution

__all__ = [
    "BernoulliDropout",
    "DegenerateNormal",
    "GaussianDropout",
    "register_quasi_kl",
]
