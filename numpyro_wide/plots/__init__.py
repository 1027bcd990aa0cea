"""Figures with matplotlib: every function takes ``ax=`` and returns the axes that it has drawn on."""

from numpyro_wide.plots._calibration import plot_coverage as plot_coverage
from numpyro_wide.plots._calibration import (
    plot_probability_integral_transform as plot_probability_integral_transform,
)
from numpyro_wide.plots._calibration import plot_rank_ecdf as plot_rank_ecdf
from numpyro_wide.plots._calibration import plot_rank_histogram as plot_rank_histogram
from numpyro_wide.plots._mixing import plot_autocorrelation as plot_autocorrelation
from numpyro_wide.plots._mixing import plot_ess_by_width as plot_ess_by_width
from numpyro_wide.plots._mixing import plot_rhat_by_steps as plot_rhat_by_steps
from numpyro_wide.plots._reliability import plot_reliability as plot_reliability
from numpyro_wide.plots._slices import plot_posterior_slice as plot_posterior_slice

__all__ = [
    "plot_autocorrelation",
    "plot_coverage",
    "plot_ess_by_width",
    "plot_posterior_slice",
    "plot_probability_integral_transform",
    "plot_rank_ecdf",
    "plot_rank_histogram",
    "plot_reliability",
    "plot_rhat_by_steps",
]
