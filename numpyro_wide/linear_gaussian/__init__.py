r"""Conjugate Gaussian readout: arrays in, arrays out, without NumPyro.

$W \sim N(\text{loc}, \text{scale}^2)$, $Y \mid W \sim N(\Psi W, \sigma^2)$; noise by row costs no more (:eq:`rows`).
"""

from numpyro_wide.linear_gaussian._problem import ReadoutProblem as ReadoutProblem
from numpyro_wide.linear_gaussian._problem import log_evidence as log_evidence
from numpyro_wide.linear_gaussian._problem import readout_inverse_map as readout_inverse_map
from numpyro_wide.linear_gaussian._problem import readout_map as readout_map
from numpyro_wide.linear_gaussian._problem import readout_posterior as readout_posterior

__all__ = [
    "ReadoutProblem",
    "log_evidence",
    "readout_inverse_map",
    "readout_map",
    "readout_posterior",
]
