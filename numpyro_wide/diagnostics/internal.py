"""Names of diagnostics that sibling rooms need and users do not."""

from numpyro_wide.diagnostics._chains import autocorrelation as autocorrelation
from numpyro_wide.diagnostics._classification import ConfidenceBins as ConfidenceBins
from numpyro_wide.diagnostics._classification import confidence_bins as confidence_bins
