"""Names of the networks that tests and sibling rooms need and users do not."""

from numpyro_wide.nn._scales import unit_scale as unit_scale
