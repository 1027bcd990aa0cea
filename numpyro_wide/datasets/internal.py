"""Reader of single files in the IDX format."""

from numpyro_wide.datasets._idx import read_idx as read_idx
