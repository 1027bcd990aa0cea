"""NumPyro distributions that wide networks and their guides need."""

from numpyro_wide.distributions._dropout import BernoulliDropout as BernoulliDropout
from numpyro_wide.distributions._dropout import GaussianDropout as GaussianDropout
from numpyro_wide.distributions._log_uniform import ImproperLogUniform as ImproperLogUniform
from numpyro_wide.distributions._readout_marginal import ReadoutMarginal as ReadoutMarginal
from numpyro_wide.distributions._singular import DegenerateNormal as DegenerateNormal
from numpyro_wide.distributions._singular import SingularDistribution as SingularDistribution

__all__ = [
    "BernoulliDropout",
    "DegenerateNormal",
    "GaussianDropout",
    "ImproperLogUniform",
    "ReadoutMarginal",
    "SingularDistribution",
]
