"""Infinite-width limits of networks, and finite-width kernels to hold against them."""

from typing import TYPE_CHECKING, Any

from numpyro_wide.wide_limit._empirical import empirical_ntk as empirical_ntk
from numpyro_wide.wide_limit._empirical import linearize as linearize
from numpyro_wide.wide_limit._fit import fit as fit
from numpyro_wide.wide_limit._gp import gp_log_evidence as gp_log_evidence
from numpyro_wide.wide_limit._gp import gp_posterior as gp_posterior
from numpyro_wide.wide_limit._kernels import NetworkKernel as NetworkKernel
from numpyro_wide.wide_limit._kernels import fcn_kernel as fcn_kernel
from numpyro_wide.wide_limit._kernels import kernel as kernel
from numpyro_wide.wide_limit._layer_kernels import Inputs as Inputs
from numpyro_wide.wide_limit._layer_kernels import LayerKernels as LayerKernels
from numpyro_wide.wide_limit._layer_kernels import register_kernel as register_kernel
from numpyro_wide.wide_limit._limit import WideLimitFit as WideLimitFit

if TYPE_CHECKING:
    from numpyro_wide._random_features import RandomFeatures as RandomFeatures
    from numpyro_wide._random_features import fit_random_features as fit_random_features

__all__ = [
    "empirical_ntk",
    "fcn_kernel",
    "fit",
    "fit_random_features",
    "gp_log_evidence",
    "gp_posterior",
    "kernel",
    "linearize",
    "register_kernel",
]


def __getattr__(name: str) -> Any:
    if name in ("RandomFeatures", "fit_random_features"):  # of finite networks and predictions, which import this
        from numpyro_wide import _random_features

        return getattr(_random_features, name)
    raise AttributeError(f"module 'numpyro_wide.wide_limit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "RandomFeatures", "fit_random_features"})
