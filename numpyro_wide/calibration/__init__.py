"""Is a posterior right on average over its own model? Ranks, coverage and tests with random points.

Simulate latents and data from the model, draw from the posterior under test given the data (:func:`from_guide`,
:func:`from_mcmc`, or any other in a :class:`Simulations`), and compare the draws with the latents that made the data.
:mod:`numpyro_wide.plots` draws the results with simultaneous bands.
"""

from numpyro_wide.calibration._bands import uniformity_band as uniformity_band
from numpyro_wide.calibration._bands import uniformity_p_value as uniformity_p_value
from numpyro_wide.calibration._coverage import Coverage as Coverage
from numpyro_wide.calibration._coverage import expected_coverage as expected_coverage
from numpyro_wide.calibration._coverage import tarp as tarp
from numpyro_wide.calibration._ranks import hpd_ranks as hpd_ranks
from numpyro_wide.calibration._ranks import sbc_ranks as sbc_ranks
from numpyro_wide.calibration._ranks import tarp_ranks as tarp_ranks
from numpyro_wide.calibration._sampling import from_guide as from_guide
from numpyro_wide.calibration._sampling import from_mcmc as from_mcmc
from numpyro_wide.calibration._simulations import Simulations as Simulations

__all__ = [
    "Coverage",
    "Simulations",
    "expected_coverage",
    "from_guide",
    "from_mcmc",
    "hpd_ranks",
    "sbc_ranks",
    "tarp",
    "tarp_ranks",
    "uniformity_band",
    "uniformity_p_value",
]
