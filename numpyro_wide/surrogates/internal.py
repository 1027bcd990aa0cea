"""Names of the surrogates that sibling rooms need and users do not."""

from numpyro_wide.surrogates._observations import Observations as Observations
from numpyro_wide.surrogates._variational import GaussianLikelihood as GaussianLikelihood
from numpyro_wide.surrogates._variational import State as State
from numpyro_wide.surrogates._variational import VariationalFit as VariationalFit
