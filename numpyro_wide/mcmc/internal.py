"""Names of the samplers' room that sibling rooms need and users do not."""

from numpyro_wide.mcmc._moves import quietly as quietly
from numpyro_wide.mcmc._point import Point as Point
from numpyro_wide.mcmc._reference import Reference as Reference
from numpyro_wide.mcmc._state import KernelState as KernelState
from numpyro_wide.mcmc._state import over_states as over_states
