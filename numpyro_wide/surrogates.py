"""Gaussian surrogates of other likelihoods, by which the readout of classes and counts can be repriorised."""

from numpyro_wide.readout._repriorise import Surrogate as Surrogate
from numpyro_wide.wide_limit._surrogates import class_contrasts as class_contrasts
from numpyro_wide.wide_limit._surrogates import fitted_surrogate as fitted_surrogate
from numpyro_wide.wide_limit._surrogates import mean_kernel as mean_kernel
from numpyro_wide.wide_limit._surrogates import surrogate_targets as surrogate_targets

__all__ = ["class_contrasts", "fitted_surrogate", "mean_kernel", "surrogate_targets"]
