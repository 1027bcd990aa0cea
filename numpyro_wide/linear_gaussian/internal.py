"""Names that sibling rooms need and users do not."""

from numpyro_wide.linear_gaussian._arguments import check_variant as check_variant
