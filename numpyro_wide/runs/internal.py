"""Names of the runs that tests and sibling rooms need and users do not."""

from numpyro_wide.runs._lock import sole_use as sole_use
