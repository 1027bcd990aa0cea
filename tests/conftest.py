"""Fixtures shared by all tests."""

import warnings
from collections.abc import Iterator

import jax
import pytest

from tests.promotions import strict

with warnings.catch_warnings():
    # ArviZ 0.23 announces its refactoring when it is first imported.
    warnings.simplefilter("ignore", FutureWarning)
    import arviz  # noqa: F401

try:
    enable_x64 = jax.enable_x64
except AttributeError:  # jax < 0.8
    from jax.experimental import enable_x64


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    """Let the package leave no promotion of ranks or types to JAX."""
    with strict():
        yield


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show progress bars, as where a person waits."""
    monkeypatch.delenv("CI")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test in float64."""
    with enable_x64(True):
        yield
