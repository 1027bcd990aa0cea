"""Counts of what JAX compiles, and programs kept between runs that trace them anew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

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


@contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
    """Compile programs of the same text once inside, however often they are traced, unless JAX keeps them already."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    compilation_cache.reset_cache()  # which has noted at the first program that there was no folder
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()
