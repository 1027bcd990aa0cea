"""Names of the wide limit that tests and sibling rooms need and users do not."""

from numpyro_wide.wide_limit.drift import kernel_drift as kernel_drift
from numpyro_wide.wide_limit.drift import smallest_eigenvalue as smallest_eigenvalue
