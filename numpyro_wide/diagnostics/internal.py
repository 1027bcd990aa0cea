"""Names of diagnostics that sibling rooms need and users do not."""

from numpyro_wide.diagnostics._chains import autocorrelation as autocorrelation
