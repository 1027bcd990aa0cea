"""Calibration of posteriors on average over their own model: ranks, coverage, and tests with random points.

Simulate latents and data from the model, draw from the posterior under test given the data (:func:`from_guide`,
:func:`from_mcmc`, or any other in a :class:`Simulations`), and compare the draws with the latents that made the data.
:mod:`numpyro_wide.plots` draws the results with simultaneous bands.
"""

from numpyro_wide.calibration._bands import uniformity_p_value as uniformity_p_value
from numpyro_wide.calibration._coverage import Coverage as Coverage
from numpyro_wide.calibration._coverage import expected_coverage as expected_coverage
from numpyro_wide.calibration._coverage import tarp as tarp
from numpyro_wide.calibration._ranks import sbc_ranks as sbc_ranks
from numpyro_wide.calibration._sampling import from_guide as from_guide
from numpyro_wide.calibration._sampling import from_mcmc as from_mcmc
from numpyro_wide.calibration._simulations import Simulations as Simulations

__all__ = [
    "expected_coverage",
    "from_guide",
    "from_mcmc",
    "sbc_ranks",
    "tarp",
    "uniformity_p_value",
]
