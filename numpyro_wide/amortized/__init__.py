"""Amortised inference by the expected forward KL divergence."""

from numpyro_wide.amortized._fit import AmortizedFit as AmortizedFit
from numpyro_wide.amortized._fit import Report as Report
from numpyro_wide.amortized._fit import fit as fit
from numpyro_wide.amortized._importance import ImportanceSample as ImportanceSample
from numpyro_wide.amortized._importance import importance_sample as importance_sample
from numpyro_wide.amortized._trainer import AmortizedForwardKL as AmortizedForwardKL
from numpyro_wide.amortized._trainer import AmortizedRunResult as AmortizedRunResult
from numpyro_wide.amortized._trainer import AmortizedState as AmortizedState
from numpyro_wide.amortized._trainer import HeldOut as HeldOut

__all__ = ["AmortizedForwardKL", "fit", "importance_sample"]
