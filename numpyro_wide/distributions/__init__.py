"""Distributions that wide Bayesian neural networks ask for."""

from numpyro_wide.distributions._readout_marginal import ReadoutMarginal as ReadoutMarginal

__all__ = ["ReadoutMarginal"]
