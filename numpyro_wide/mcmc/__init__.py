"""MCMC kernels for posteriors that are close to N(0, I), to be run by :class:`numpyro.infer.MCMC`.

The kernels act on the unconstrained coordinates of any NumPyro model, or on a ``potential_fn``. Their
reference is N(0, I) on these coordinates, which is what the posterior of a repriorised wide network
tends to.

All of them take, beside what is their own,

- ``model``, a NumPyro model, or ``potential_fn`` in its place, a function of a pytree that returns the potential energy
  U = −log p up to a constant, a scalar, and then needs ``init_params``;
- ``step_size``, to start from, and ``adapt_step_size``, whether warmup adapts it;
- ``target_accept_prob``, in (0, 1), the mean acceptance probability that warmup aims at; in its place the two that can
  do without a correction have ``bias_tolerance`` where they do;
- ``find_heuristic_step_size``, whether to double or halve ``step_size`` before warmup until the acceptance of one trial
  crosses ``target_accept_prob``;
- ``init_strategy``, NumPyro's initialisation strategy for a ``model``;

and all of them raise a ``ValueError`` if not exactly one of ``model`` and ``potential_fn`` is given, or a number is out
of its range, and a ``TypeError`` if what should be a function or a number is none.
"""

from numpyro_wide.mcmc._kernel import KernelState as KernelState
from numpyro_wide.mcmc._optimum import init_to_optimum as init_to_optimum
from numpyro_wide.mcmc._pieces import run_in_pieces as run_in_pieces
from numpyro_wide.mcmc._reduced import reduced as reduced
from numpyro_wide.mcmc._reference import Reference as Reference
from numpyro_wide.mcmc._stored_draws import StoredDraws as StoredDraws
from numpyro_wide.mcmc.langevin import UnderdampedLangevin as UnderdampedLangevin
from numpyro_wide.mcmc.microcanonical import MicrocanonicalLangevin as MicrocanonicalLangevin
from numpyro_wide.mcmc.pcn import PreconditionedCrankNicolson as PreconditionedCrankNicolson
from numpyro_wide.mcmc.pcnl import PreconditionedCrankNicolsonLangevin as PreconditionedCrankNicolsonLangevin
from numpyro_wide.mcmc.split_hmc import SplitHMC as SplitHMC

__all__ = [
    "KernelState",
    "MicrocanonicalLangevin",
    "PreconditionedCrankNicolson",
    "PreconditionedCrankNicolsonLangevin",
    "Reference",
    "SplitHMC",
    "StoredDraws",
    "UnderdampedLangevin",
    "init_to_optimum",
    "reduced",
    "run_in_pieces",
]
