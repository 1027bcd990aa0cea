"""Gaussian surrogates of other likelihoods, by which the readout of classes and counts can be repriorised."""

from numpyro_wide.readout.internal import Surrogate as Surrogate
from numpyro_wide.surrogates._fitted import fitted_surrogate as fitted_surrogate
from numpyro_wide.surrogates._mean_kernel import mean_kernel as mean_kernel
from numpyro_wide.surrogates._quick import class_contrasts as class_contrasts
from numpyro_wide.surrogates._quick import surrogate_targets as surrogate_targets

__all__ = ["class_contrasts", "fitted_surrogate", "mean_kernel", "surrogate_targets"]
