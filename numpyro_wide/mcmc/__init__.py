"""MCMC kernels for posteriors that are close to N(0, I), to be run by :class:`numpyro.infer.MCMC`.

The kernels act on the unconstrained coordinates of any NumPyro model, or on a ``potential_fn``. Their
reference is N(0, I) on these coordinates, which is what the posterior of a repriorised wide network
tends to.

All of them work on a ``model`` or a ``potential_fn``, adapt their step size during warmup, and count what they spend.
Among the fields of their state, which can be named in ``extra_fields`` of :meth:`numpyro.infer.MCMC.run`, are

- ``accept_prob``, the acceptance probability of the last proposal, whether or not the kernel obeys it, a mean where a
  step has several, and ``mean_accept_prob``, its mean over the warmup, or over the steps after it;
- ``potential_energy``, U at the draw, and ``energy_error``, −log of the last acceptance ratio, infinite if the proposal
  was not finite;
- ``num_grad``, the evaluations of the gradient (without gradients: of the potential) in the last step;
- ``num_nonfinite``, the proposals so far that were rejected because their energy or gradient was not finite;
- ``step_size``, the step size that the next step will use.
"""

from numpyro_wide.mcmc.crank_nicolson import PreconditionedCrankNicolson as PreconditionedCrankNicolson
from numpyro_wide.mcmc.crank_nicolson import PreconditionedCrankNicolsonLangevin as PreconditionedCrankNicolsonLangevin
from numpyro_wide.mcmc.langevin import UnderdampedLangevin as UnderdampedLangevin
from numpyro_wide.mcmc.microcanonical import MicrocanonicalLangevin as MicrocanonicalLangevin
from numpyro_wide.mcmc.split_hmc import SplitHMC as SplitHMC

__all__ = [
    "MicrocanonicalLangevin",
    "PreconditionedCrankNicolson",
    "PreconditionedCrankNicolsonLangevin",
    "SplitHMC",
    "UnderdampedLangevin",
]
