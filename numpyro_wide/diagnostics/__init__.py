"""Convergence of chains, summaries of runs, distance from the wide limit, scores of predictions."""

from numpyro_wide.diagnostics._convergence import effective_sample_size as effective_sample_size
from numpyro_wide.diagnostics._convergence import function_ess as function_ess
from numpyro_wide.diagnostics._convergence import project as project
from numpyro_wide.diagnostics._convergence import projected_ess as projected_ess
from numpyro_wide.diagnostics._convergence import random_projections as random_projections
from numpyro_wide.diagnostics._pooling import PoolingReport as PoolingReport
from numpyro_wide.diagnostics._pooling import pooling as pooling
from numpyro_wide.diagnostics._pooling import rhat_squared as rhat_squared
from numpyro_wide.diagnostics._scores import accuracy as accuracy
from numpyro_wide.diagnostics._scores import classification_scores as classification_scores
from numpyro_wide.diagnostics._scores import crps as crps
from numpyro_wide.diagnostics._scores import expected_calibration_error as expected_calibration_error
from numpyro_wide.diagnostics._scores import interval_coverage as interval_coverage
from numpyro_wide.diagnostics._scores import log_predictive_density as log_predictive_density
from numpyro_wide.diagnostics._scores import negative_log_likelihood as negative_log_likelihood
from numpyro_wide.diagnostics._scores import predictive_entropy as predictive_entropy
from numpyro_wide.diagnostics._scores import probability_integral_transform as probability_integral_transform
from numpyro_wide.diagnostics._scores import regression_scores as regression_scores
from numpyro_wide.diagnostics._scores import rmse as rmse
from numpyro_wide.diagnostics._summary import FunctionSummary as FunctionSummary
from numpyro_wide.diagnostics._summary import RunSummary as RunSummary
from numpyro_wide.diagnostics._summary import SiteSummary as SiteSummary
from numpyro_wide.diagnostics._summary import summary as summary
from numpyro_wide.diagnostics._to_arviz import to_arviz as to_arviz
from numpyro_wide.diagnostics._width import WidthReport as WidthReport
from numpyro_wide.diagnostics._width import WidthRow as WidthRow
from numpyro_wide.diagnostics._width import wide_enough as wide_enough

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
