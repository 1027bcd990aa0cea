"""Simultaneous bands for the plots, and the ranks behind coverage and its tests."""

from numpyro_wide.calibration._bands import uniformity_band as uniformity_band
from numpyro_wide.calibration._ranks import hpd_ranks as hpd_ranks
from numpyro_wide.calibration._ranks import tarp_ranks as tarp_ranks
