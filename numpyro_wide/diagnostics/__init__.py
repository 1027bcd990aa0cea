"""Convergence of chains, summaries of runs, distance from the wide limit, scores of predictions."""

from numpyro_wide.diagnostics._convergence import effective_sample_size, function_ess, projected_ess, random_projections
from numpyro_wide.diagnostics._effects import Effects as Effects
from numpyro_wide.diagnostics._effects import effects
from numpyro_wide.diagnostics._pooling import PoolingReport as PoolingReport
from numpyro_wide.diagnostics._pooling import pooling, rhat_squared
from numpyro_wide.diagnostics._scores import (
    classification_scores,
    crps,
    expected_calibration_error,
    interval_coverage,
    log_predictive_density,
    probability_integral_transform,
    regression_scores,
    rmse,
)
from numpyro_wide.diagnostics._summary import FunctionSummary as FunctionSummary
from numpyro_wide.diagnostics._summary import RunSummary as RunSummary
from numpyro_wide.diagnostics._summary import SiteSummary as SiteSummary
from numpyro_wide.diagnostics._summary import summary
from numpyro_wide.diagnostics._to_arviz import to_arviz
from numpyro_wide.diagnostics._width import WidthReport as WidthReport
from numpyro_wide.diagnostics._width import WidthRow as WidthRow
from numpyro_wide.diagnostics._width import wide_enough

__all__ = [
    "classification_scores",
    "crps",
    "effective_sample_size",
    "effects",
    "expected_calibration_error",
    "function_ess",
    "interval_coverage",
    "log_predictive_density",
    "pooling",
    "probability_integral_transform",
    "projected_ess",
    "random_projections",
    "regression_scores",
    "rhat_squared",
    "rmse",
    "summary",
    "to_arviz",
    "wide_enough",
]
