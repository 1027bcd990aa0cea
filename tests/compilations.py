"""Counts what JAX compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_open_counts: list[list[str]] = []


def _listen(event: str, duration: float, **kwargs) -> None:
    if event == _EVENT:
        for count in _open_counts:
            count.append(str(kwargs.get("fun_name", "")))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs compiled inside, as a list that grows, taken from the persistent cache or not."""
    count: list[str] = []
    _open_counts.append(count)
    try:
        yield count
    finally:
        _open_counts.remove(count)
