"""The pure mathematics is held to stricter rules than the rest."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_arrays():
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        yield
