"""Parametrized tests of which CI runs the first case alone."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def parametrize(
    names: str | Sequence[str], values: Iterable[Any], *, rest: str, **options: Any
) -> pytest.MarkDecorator:
    """Parametrize a test as pytest does; all cases but the first bear the mark ``rest``."""
    first, *others = values
    is_single = len(names.split(",") if isinstance(names, str) else names) == 1
    return pytest.mark.parametrize(names, [first, *(_marked(value, rest, is_single) for value in others)], **options)


def _marked(value: Any, mark: str, is_single: bool) -> Any:
    marks = [getattr(pytest.mark, mark)]
    if hasattr(value, "marks"):  # pytest.param(...)
        return pytest.param(*value.values, marks=[*value.marks, *marks], id=value.id)
    return pytest.param(*((value,) if is_single else value), marks=marks)
