r"""Conjugate Gaussian readout: arrays in, arrays out, without NumPyro.

$W \sim N(\text{loc}, \text{scale}^2)$, $Y \mid W \sim N(\Psi W, \sigma^2)$; noise by row costs no more (:eq:`rows`).
"""

from numpyro_wide.linear_gaussian._problem import (
    ReadoutProblem,
    log_evidence,
    readout_inverse_map,
    readout_map,
    readout_posterior,
)

__all__ = [
    "ReadoutProblem",
    "log_evidence",
    "readout_inverse_map",
    "readout_map",
    "readout_posterior",
]
