"""Tools for what happens around a chain: where it starts, what is stored of it, how a long one survives being stopped.

They serve NumPyro's ``MCMC`` with any kernel, of this package or of NumPyro, and are names of
:mod:`numpyro_wide.mcmc` as well.
"""

from numpyro_wide.runs._optimum import init_to_optimum as init_to_optimum
from numpyro_wide.runs._pieces import StoredDraws as StoredDraws
from numpyro_wide.runs._pieces import run_in_pieces as run_in_pieces
from numpyro_wide.runs._reduced import reduced as reduced

__all__ = ["init_to_optimum", "reduced", "run_in_pieces"]
