"""Clock of a fit that has a budget of seconds, those of compilation apart, and the bar that shows it."""

import threading
import time

import jax
from tqdm.auto import tqdm

# Events of JAX's monitor: the time from a function to machine code, also where that comes from a cache on disk.
_COMPILING = tuple(
    f"/jax/core/compile/{part}_duration" for part in ("backend_compile", "jaxpr_to_mlir_module", "jaxpr_trace")
)


class _Compilations(threading.local):
    """Intervals that this thread has spent on compiling, as they end: their number of seconds, and the latest.

    Functions within functions are traced within one another, and an interval ends after those that it holds.
    """

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    def add(self, seconds: float) -> None:
        """Add an interval that ends now, instead of those that it holds."""
        end = time.perf_counter()
        while self.intervals and self.intervals[-1][0] >= end - seconds:
            self.intervals.pop()
        self.intervals.append((end - seconds, end))


_compilations = _Compilations()
_lock = threading.Lock()
_state = {"listens": False}


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _COMPILING:
        _compilations.add(duration_secs)


class Clock:
    """Seconds of a fit, from when this is made.

    Args:
        budget: number of seconds that the fit may work for.
        progress_bar: whether to show the seconds worked, and what is being done.
    """

    def __init__(self, budget: float, progress_bar: bool = False):
        with _lock:
            if not _state["listens"]:  # once in a process: JAX keeps its listeners
                jax.monitoring.register_event_duration_secs_listener(_listen)
                _state["listens"] = True
        self.budget, self.progress_bar = budget, progress_bar
        form = "{desc}: {n:.0f} of {total:g} seconds |{bar}|"
        self._bar = tqdm(total=budget, bar_format=form, disable=not progress_bar)
        self._start, self._intervals = time.perf_counter(), _compilations.intervals
        self._is_over = threading.Event()
        if progress_bar:
            threading.Thread(target=self._tick, daemon=True).start()

    @property
    def compiling(self) -> float:
        """Seconds of compilation so far."""
        return sum(end - start for start, end in list(self._intervals) if start >= self._start)

    @property
    def working(self) -> float:
        """Seconds so far without those of compilation."""
        return time.perf_counter() - self._start - self.compiling

    @property
    def left(self) -> float:
        """Seconds of the budget that are left, 0 at the least."""
        return max(0.0, self.budget - self.working)

    def begin(self, stage: str) -> None:
        """Show what is being done from now on.

        Args:
            stage: what, in words.
        """
        self._bar.n = min(self.working, self.budget)
        self._bar.set_description_str(stage)

    def _tick(self) -> None:
        """Move the bar every second; what is being compiled counts as work until it is done."""
        while not self._is_over.wait(1.0):
            self._bar.n = min(self.working, self.budget)
            self._bar.refresh()

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.begin("done")
        self._bar.close()
