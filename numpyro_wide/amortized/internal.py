"""Single runs of simulating models and of guides, with their checks, for sibling rooms."""

from numpyro_wide.amortized._simulation import Draws as Draws
from numpyro_wide.amortized._simulation import check_guide as check_guide
from numpyro_wide.amortized._simulation import check_params as check_params
from numpyro_wide.amortized._simulation import check_simulator as check_simulator
from numpyro_wide.amortized._simulation import draw_from_guide as draw_from_guide
from numpyro_wide.amortized._simulation import latent_names as latent_names
from numpyro_wide.amortized._simulation import log_density as log_density
from numpyro_wide.amortized._simulation import run_guide as run_guide
from numpyro_wide.amortized._simulation import simulate as simulate
from numpyro_wide.amortized._simulation import site_names as site_names
