"""The readout of a network: repriorised, integrated out, drawn, and predicted with."""

from numpyro_wide.readout._collapse import CollapsedModel as CollapsedModel
from numpyro_wide.readout._collapse import collapse_readout as collapse_readout
from numpyro_wide.readout._draws import StandardNormalBase as StandardNormalBase
from numpyro_wide.readout._draws import WideLimitDraws as WideLimitDraws
from numpyro_wide.readout._draws import guide_draws as guide_draws
from numpyro_wide.readout._draws import log_weight as log_weight
from numpyro_wide.readout._draws import wide_limit_draws as wide_limit_draws
from numpyro_wide.readout._fitted_surrogate import fitted_surrogate as fitted_surrogate
from numpyro_wide.readout._functions import readout_function as readout_function
from numpyro_wide.readout._functions import site_function as site_function
from numpyro_wide.readout._limit_evidence import limit_log_evidence as limit_log_evidence
from numpyro_wide.readout._marginal import ReadoutMarginal as ReadoutMarginal
from numpyro_wide.readout._mean_kernel import mean_kernel as mean_kernel
from numpyro_wide.readout._predictive import ReadoutPredictive as ReadoutPredictive
from numpyro_wide.readout._reparam import ReadoutTransform as ReadoutTransform
from numpyro_wide.readout._reparam import ReprioriseReadout as ReprioriseReadout
from numpyro_wide.readout._reparam import readout_transform as readout_transform
from numpyro_wide.readout._repriorise import RepriorisedModel as RepriorisedModel
from numpyro_wide.readout._repriorise import repriorise as repriorise
from numpyro_wide.readout._surrogate import Surrogate as Surrogate
from numpyro_wide.readout._surrogate import class_contrasts as class_contrasts
from numpyro_wide.readout._surrogate import surrogate_targets as surrogate_targets

__all__ = [
    "CollapsedModel",
    "ReadoutMarginal",
    "ReadoutPredictive",
    "ReadoutTransform",
    "ReprioriseReadout",
    "RepriorisedModel",
    "StandardNormalBase",
    "Surrogate",
    "WideLimitDraws",
    "class_contrasts",
    "collapse_readout",
    "fitted_surrogate",
    "guide_draws",
    "limit_log_evidence",
    "log_weight",
    "mean_kernel",
    "readout_function",
    "readout_transform",
    "repriorise",
    "site_function",
    "surrogate_targets",
    "wide_limit_draws",
]
