"""Timing of compiled functions against each other."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def interleaved(
    functions: dict[str, Callable[[], Any]],
    num_rounds: int = 15,
    min_seconds: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> dict:
    """Measure seconds a call of each function: the median over rounds in which all take their turn.

    Drifts of a shared machine's speed then fall on all alike. The first call of a turn is not counted: it meets the
    memory as another function left it, where in a chain the same function is called again and again. With
    ``time.process_time`` for a clock, what other programs take of the cores is left out.
    """
    calls = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        start = clock()
        jax.block_until_ready(function())
        calls[name] = max(3, int(min_seconds / (clock() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(num_rounds):
        for name, function in functions.items():
            jax.block_until_ready(function())
            start = clock()
            for _ in range(calls[name]):
                result = function()
            jax.block_until_ready(result)
            seconds[name].append((clock() - start) / calls[name])
    return seconds


def core_seconds(function: Callable, *args: Any) -> tuple[Any, float]:
    """Return what a function returns, and the processors' seconds of its second call, which compiles nothing."""
    jax.block_until_ready(function(*args))
    start = time.process_time()
    result = jax.block_until_ready(function(*args))
    return result, time.process_time() - start


def quickest(call: Callable, seconds: float = 0.5) -> float:
    """Measure processor seconds of the quickest of three calls, or as many as this time takes; the first compiles."""
    jax.block_until_ready(call())
    spent: list[float] = []
    while len(spent) < 3 or sum(spent) < seconds:
        start = time.process_time()
        jax.block_until_ready(call())
        spent.append(time.process_time() - start)
    return min(spent)


def mean_seconds(call: Callable, seconds: float = 0.5) -> float:
    """Measure processor seconds, the mean over this time: a clock read once a call misses other threads' last."""
    jax.block_until_ready(call())
    start, calls = time.process_time(), 0
    while calls < 3 or time.process_time() - start < seconds:
        jax.block_until_ready(call())
        calls += 1
    return (time.process_time() - start) / calls


def median_ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    """Return the median over rounds of one function's time over the other's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


def milliseconds(seconds: list[float]) -> str:
    """Write the median, for a table."""
    return f"{1e3 * statistics.median(seconds):.2f} ms"
