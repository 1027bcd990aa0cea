"""Blocks of a kernel on several devices: the numbers of one, and as many blocks on each."""

from pathlib import Path

import jax
import pytest

from numpyro_wide import wide_limit
from numpyro_wide.nn import FCN
from tests.machine.test_sharding import results, start


def test_devices_share_the_blocks():
    """Of 8 rows of blocks the upper triangle has 36; of the other kernel there are 8 x 4."""
    (found,) = results(start(4, worker=Path(__file__).with_name("devices_worker.py")))
    assert sum(found["by_device"]["one set"].values()) == 36
    assert len(found["by_device"]["one set"]) == 4 and min(found["by_device"]["one set"].values()) >= 6
    assert list(found["by_device"]["two sets"].values()) == [8] * 4
    assert len(found["differences"]) == 4 and max(found["differences"].values()) < 1e-13


@pytest.mark.parametrize("options", [{"devices": jax.devices()}, {"devices": [], "block_size": 2}])
def test_devices_need_blocks(options):
    with pytest.raises(ValueError, match="devices need blocks to share: give block_size"):
        wide_limit.kernel(FCN(1, 1), **options)
