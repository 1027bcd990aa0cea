"""Closed forms of the quasi-KL divergence, for the losses."""

from numpyro_wide.distributions._quasi_kl import closed_quasi_kl as closed_quasi_kl
