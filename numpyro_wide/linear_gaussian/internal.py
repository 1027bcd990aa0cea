"""Names that sibling rooms need and users do not."""

from numpyro_wide.linear_gaussian._arguments import check_variant as check_variant
from numpyro_wide.linear_gaussian._blocked_posterior import BlockedPosterior as BlockedPosterior
from numpyro_wide.linear_gaussian._blocked_problem import BlockedProblem as BlockedProblem
from numpyro_wide.linear_gaussian._row_features import RowFeatures as RowFeatures
