"""Readouts of networks: repriorised, integrated out, drawn, and predicted with."""

from numpyro_wide.readout._collapse import CollapsedModel as CollapsedModel
from numpyro_wide.readout._collapse import ReadoutMarginal as ReadoutMarginal
from numpyro_wide.readout._collapse import collapse_readout
from numpyro_wide.readout._draws import WideLimitDraws as WideLimitDraws
from numpyro_wide.readout._draws import guide_draws, wide_limit_draws
from numpyro_wide.readout._functions import readout_function, site_function
from numpyro_wide.readout._model import ReadoutModel
from numpyro_wide.readout._predictive import PredictiveSummary as PredictiveSummary
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.readout._repriorise import RepriorisedModel as RepriorisedModel
from numpyro_wide.readout._repriorise import ReprioriseReadout, repriorise
from numpyro_wide.readout._transform import ReadoutTransform as ReadoutTransform

__all__ = [
    "ReadoutModel",
    "ReadoutPredictive",
    "ReprioriseReadout",
    "collapse_readout",
    "guide_draws",
    "readout_function",
    "repriorise",
    "site_function",
    "wide_limit_draws",
]
