"""MCMC kernels for posteriors that are close to N(0, I), to be run by :class:`numpyro.infer.MCMC`.

The kernels act on the unconstrained coordinates of any NumPyro model, or on a ``potential_fn``. Their
reference is N(0, I) on these coordinates, which is what the posterior of a repriorised wide network
tends to.
"""

from numpyro_wide.mcmc._kernel import KernelState as KernelState
from numpyro_wide.mcmc.langevin import UnderdampedLangevin as UnderdampedLangevin
from numpyro_wide.mcmc.pcn import PreconditionedCrankNicolson as PreconditionedCrankNicolson
from numpyro_wide.mcmc.pcnl import PreconditionedCrankNicolsonLangevin as PreconditionedCrankNicolsonLangevin
from numpyro_wide.mcmc.split_hmc import SplitHMC as SplitHMC

__all__ = [
    "KernelState",
    "PreconditionedCrankNicolson",
    "PreconditionedCrankNicolsonLangevin",
    "SplitHMC",
    "UnderdampedLangevin",
]
