"""Infinite-width limits of networks, and finite-width kernels to hold against them."""

from numpyro_wide.wide_limit._rules import register_kernel as register_kernel
from numpyro_wide.wide_limit.drift import KernelDrift as KernelDrift
from numpyro_wide.wide_limit.drift import drift_monitor as drift_monitor
from numpyro_wide.wide_limit.empirical import empirical_ntk as empirical_ntk
from numpyro_wide.wide_limit.empirical import linearize as linearize
from numpyro_wide.wide_limit.evidence_fit import fit as fit
from numpyro_wide.wide_limit.fitted_limit import WideLimitFit as WideLimitFit
from numpyro_wide.wide_limit.gp import gp_log_evidence as gp_log_evidence
from numpyro_wide.wide_limit.gp import gp_posterior as gp_posterior
from numpyro_wide.wide_limit.kernels import fcn_kernel as fcn_kernel
from numpyro_wide.wide_limit.layer_kernels import Inputs as Inputs
from numpyro_wide.wide_limit.layer_kernels import LayerKernels as LayerKernels
from numpyro_wide.wide_limit.network_kernel import NetworkKernel as NetworkKernel
from numpyro_wide.wide_limit.network_kernel import kernel as kernel
from numpyro_wide.wide_limit.random_features import RandomFeatures as RandomFeatures
from numpyro_wide.wide_limit.random_features import fit_random_features as fit_random_features
from numpyro_wide.wide_limit.training import gradient_flow as gradient_flow
from numpyro_wide.wide_limit.training import ntk_ensemble as ntk_ensemble
from numpyro_wide.wide_limit.width_correction import WidthCorrection as WidthCorrection
from numpyro_wide.wide_limit.width_correction import width_correction as width_correction

__all__ = [
    "drift_monitor",
    "empirical_ntk",
    "fcn_kernel",
    "fit",
    "fit_random_features",
    "gp_log_evidence",
    "gp_posterior",
    "gradient_flow",
    "kernel",
    "linearize",
    "ntk_ensemble",
    "register_kernel",
    "width_correction",
]
