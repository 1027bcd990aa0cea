"""Evidence on whether a result is to be trusted: convergence over many weights, and scores of predictions."""

from numpyro_wide.diagnostics._chains import effective_sample_size as effective_sample_size
from numpyro_wide.diagnostics._chains import rhat_squared as rhat_squared
from numpyro_wide.diagnostics._classification import accuracy as accuracy
from numpyro_wide.diagnostics._classification import classification_scores as classification_scores
from numpyro_wide.diagnostics._classification import expected_calibration_error as expected_calibration_error
from numpyro_wide.diagnostics._classification import negative_log_likelihood as negative_log_likelihood
from numpyro_wide.diagnostics._classification import predictive_entropy as predictive_entropy
from numpyro_wide.diagnostics._pooling import PoolingReport as PoolingReport
from numpyro_wide.diagnostics._pooling import pooling as pooling
from numpyro_wide.diagnostics._projections import function_ess as function_ess
from numpyro_wide.diagnostics._projections import project as project
from numpyro_wide.diagnostics._projections import projected_ess as projected_ess
from numpyro_wide.diagnostics._projections import random_projections as random_projections
from numpyro_wide.diagnostics._regression import crps as crps
from numpyro_wide.diagnostics._regression import interval_coverage as interval_coverage
from numpyro_wide.diagnostics._regression import log_predictive_density as log_predictive_density
from numpyro_wide.diagnostics._regression import probability_integral_transform as probability_integral_transform
from numpyro_wide.diagnostics._regression import regression_scores as regression_scores
from numpyro_wide.diagnostics._regression import rmse as rmse
from numpyro_wide.diagnostics._run_summary import FunctionSummary as FunctionSummary
from numpyro_wide.diagnostics._run_summary import RunSummary as RunSummary
from numpyro_wide.diagnostics._run_summary import SiteSummary as SiteSummary
from numpyro_wide.diagnostics._slices import PosteriorSlice as PosteriorSlice
from numpyro_wide.diagnostics._slices import posterior_slice as posterior_slice
from numpyro_wide.diagnostics._summary import summary as summary
from numpyro_wide.diagnostics._to_arviz import to_arviz as to_arviz
from numpyro_wide.diagnostics._width import wide_enough as wide_enough
from numpyro_wide.diagnostics._width_report import WidthReport as WidthReport
from numpyro_wide.diagnostics._width_report import WidthRow as WidthRow

__all__ = [
    "accuracy",
    "classification_scores",
    "crps",
    "effective_sample_size",
    "expected_calibration_error",
    "function_ess",
    "interval_coverage",
    "log_predictive_density",
    "negative_log_likelihood",
    "pooling",
    "posterior_slice",
    "predictive_entropy",
    "probability_integral_transform",
    "project",
    "projected_ess",
    "random_projections",
    "regression_scores",
    "rhat_squared",
    "rmse",
    "summary",
    "to_arviz",
    "wide_enough",
]
