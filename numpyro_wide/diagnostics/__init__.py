"""Is the result to be trusted: convergence over many weights, on top of ArviZ, and calibration of classes."""

from numpyro_wide.diagnostics._arviz import to_arviz as to_arviz
from numpyro_wide.diagnostics._chains import autocorrelation as autocorrelation
from numpyro_wide.diagnostics._chains import effective_sample_size as effective_sample_size
from numpyro_wide.diagnostics._chains import rhat_squared as rhat_squared
from numpyro_wide.diagnostics._classification import accuracy as accuracy
from numpyro_wide.diagnostics._classification import confidence as confidence
from numpyro_wide.diagnostics._classification import expected_calibration_error as expected_calibration_error
from numpyro_wide.diagnostics._classification import negative_log_likelihood as negative_log_likelihood
from numpyro_wide.diagnostics._classification import predictive_entropy as predictive_entropy
from numpyro_wide.diagnostics._functions import readout_function as readout_function
from numpyro_wide.diagnostics._functions import site_function as site_function
from numpyro_wide.diagnostics._projections import function_ess as function_ess
from numpyro_wide.diagnostics._projections import project as project
from numpyro_wide.diagnostics._projections import projected_ess as projected_ess
from numpyro_wide.diagnostics._projections import random_projections as random_projections
from numpyro_wide.diagnostics._reduced import reduced as reduced
from numpyro_wide.diagnostics._width import WidthReport as WidthReport
from numpyro_wide.diagnostics._width import WidthRow as WidthRow
from numpyro_wide.diagnostics._width import wide_enough as wide_enough

__all__ = [
    "WidthReport",
    "WidthRow",
    "accuracy",
    "autocorrelation",
    "confidence",
    "effective_sample_size",
    "expected_calibration_error",
    "function_ess",
    "negative_log_likelihood",
    "predictive_entropy",
    "project",
    "projected_ess",
    "random_projections",
    "readout_function",
    "reduced",
    "rhat_squared",
    "site_function",
    "to_arviz",
    "wide_enough",
]
