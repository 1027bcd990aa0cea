r"""The conjugate Gaussian readout: arrays in, arrays out, without NumPyro.

The model behind every function here is, for features $\Psi$ of shape (n, d) and targets $Y$ of shape (n, k),

$$W \sim N(\text{loc}, \text{scale}^2), \qquad Y \mid W \sim N(\Psi W, \sigma^2), \qquad
K = \Psi \Psi^\top + \sigma^2 I,$$

with $W$ of shape (d, k). Targets and readout may also be vectors, of shapes (n,) and (d,). ``noise_scale`` is
$\sigma$; it broadcasts against the targets, so that it can be a scalar, one number a row (n, 1), one an output
(k,), or a full (n, k) array. A scalar or a number a row (Mathematics, :eq:`rows`) costs one factorisation for all
outputs; noise, or a prior scale, that varies over outputs costs one for each.
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
