"""Mistakes of a user, and what the user is told."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Case(NamedTuple):
    """A mistake, and what the user is told."""

    call: Callable[[], Any]
    message: str
    error: type[Exception] = ValueError

    def check(self) -> None:
        """Make the mistake, and look at its error."""
        with pytest.raises(self.error, match=self.message):
            self.call()

    def id_of(self) -> str:
        """Return what pytest calls it."""
        return self.message[:60]
