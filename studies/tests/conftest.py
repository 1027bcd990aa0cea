"""Fixtures of the tests that look at functions of the studies."""

from tests.conftest import strict_promotion, x64
from tests.wide_limit.conftest import make_network

__all__ = ["make_network", "strict_promotion", "x64"]
