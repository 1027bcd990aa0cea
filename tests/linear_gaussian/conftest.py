"""The pure mathematics is held to stricter rules than the rest."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def no_nans() -> Iterator[None]:
    """Make any NaN an error, in the forward or in the backward pass."""
    with jax.debug_nans(True):
        yield


@pytest.fixture
def nans_allowed(no_nans: None) -> Iterator[None]:
    """For what is NaN on purpose."""
    with jax.debug_nans(False):
        yield
