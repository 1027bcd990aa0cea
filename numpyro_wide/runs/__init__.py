"""Tools around a chain of any kernel: its start, its stored draws, its continuation."""

from numpyro_wide.runs._optimum import init_to_optimum
from numpyro_wide.runs._pieces import StoredDraws as StoredDraws
from numpyro_wide.runs._pieces import run_in_pieces
from numpyro_wide.runs._reduced import reduced

__all__ = ["init_to_optimum", "reduced", "run_in_pieces"]
