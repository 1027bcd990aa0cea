"""Names of the readout that sibling rooms need and users do not."""

from numpyro_wide.readout._fit import refuse_mismatch as refuse_mismatch
from numpyro_wide.readout._limit import StandardNormalBase as StandardNormalBase
from numpyro_wide.readout._limit import has_latent_noise as has_latent_noise
from numpyro_wide.readout._limit import log_weight as log_weight
from numpyro_wide.readout._model import ReadoutModel as ReadoutModel
from numpyro_wide.readout._model import base_name as base_name
from numpyro_wide.readout._model import readout_of as readout_of
from numpyro_wide.readout._reparam import ReadoutTransform as ReadoutTransform
from numpyro_wide.readout._reparam import base_transforms as base_transforms
from numpyro_wide.readout._repriorise import Surrogate as Surrogate
from numpyro_wide.readout._run import ReadoutRun as ReadoutRun
from numpyro_wide.readout._run import SiteNames as SiteNames
from numpyro_wide.readout._run import normal_parameters as normal_parameters
from numpyro_wide.readout._summary import summarise as summarise
from numpyro_wide.readout._through_weights import moments_of as moments_of
