"""Names of the samplers' room that sibling rooms need and users do not."""

from numpyro_wide.mcmc._moves import quietly as quietly
from numpyro_wide.mcmc._point import Point as Point
from numpyro_wide.mcmc._reference import Reference as Reference
from numpyro_wide.mcmc._state import KernelState as KernelState
from numpyro_wide.mcmc._state import chain_axes as chain_axes
from numpyro_wide.mcmc._state import share_schedule as share_schedule
