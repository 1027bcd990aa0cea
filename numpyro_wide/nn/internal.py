"""Names of the networks that tests and sibling rooms need and users do not."""

from numpyro_wide.nn._convolutional import check_network as check_network
from numpyro_wide.nn._layers import LAYER_NORM_EPSILON as LAYER_NORM_EPSILON
from numpyro_wide.nn._layers import PADDINGS as PADDINGS
from numpyro_wide.nn._scales import activation_function as activation_function
from numpyro_wide.nn._scales import scale_or_unit as scale_or_unit
from numpyro_wide.nn._scales import unit_scale as unit_scale
