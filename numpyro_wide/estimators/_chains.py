"""Chains within a budget of seconds."""

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from numpyro_wide import _arviz
from numpyro_wide.diagnostics._convergence import pooling
from numpyro_wide.estimators._base import Report
from numpyro_wide.mcmc.microcanonical import MicrocanonicalLangevin
from numpyro_wide.runs._optimum import init_to_optimum

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


BIAS_TOLERANCE = 0.15  # of the unadjusted kernel, in root mean square over the directions
_NUM_ADAM, _NUM_WARMUP = 500, 2000  # steps where the budget pays for them
_NUM_SAMPLES = 3000  # steps after which the chains are first looked at
_NUM_KEPT = 200  # draws of a chain that predict
FEWEST_STEPS = 200  # of warmup, below which chains are not begun; and of samples
GRADIENTS_A_STEP = 2.6  # of Adam's cost that a step of the kernel has: two gradients, and what is around them
_WARMUP_SHARE = 0.4  # of the seconds that are left
_SAMPLES_SHARE = 0.85  # of those after it: predictions at the rows of the fit follow
_SECONDS_A_ROW = 1e-6  # of a gradient of fifty units, about
ONE_CHAIN = "R-hat is unknown: a single chain; take more of them"
MOST_CHECKED = 200  # rows at which the chains' predictions are compared


class Convergence(NamedTuple):
    """Findings on draws of chains.

    Attributes:
        is_settled: whether more draws would tell nothing new: the chains are one posterior, or an ensemble.
        lines: findings, for the report.
    """

    is_settled: bool
    lines: tuple[str, ...]


class ChainRun(NamedTuple):
    """Chains after their run.

    Attributes:
        mcmc: the chains.
        draws: draws that predict, chains one after another.
        num_steps: number of steps of each chain, warmup included.
    """

    mcmc: MCMC
    draws: dict[str, Any]
    num_steps: int


def run_chains(
    model: Any,
    args: tuple,
    num_chains: int,
    clock: Clock,
    key: Any,
    report: Report,
    *,
    gradient_seconds: float,
    hold: str | None,
    judge: Callable[[dict[str, Any]], Convergence],
) -> ChainRun | None:
    """Run unadjusted microcanonical chains from where Adam gets, until they have settled or the budget is spent.

    Chains that have not settled go on for twice as many steps, or as many more as the seconds left pay for, and their
    earlier steps are a warmup.

    Args:
        model: wrapped model.
        args: arguments of the model, data included, the last of which are observations.
        num_chains: number of chains.
        clock: clock of the whole fit.
        key: a PRNG key.
        report: report, to which a section is added.
        gradient_seconds: seconds of a gradient of a chain, about, as :func:`gradient_seconds` estimates them.
        hold: "scales" if Adam leaves scales and noise at their medians; None if there are none.
        judge: function from draws to whether the chains have settled.

    Returns:
        The run; None if the budget does not pay for one.
    """
    start_key, run_key = jax.random.split(key)
    start, seconds = _start(model, args, num_chains, clock, start_key, hold, gradient_seconds)
    affordable = int(_WARMUP_SHARE * clock.left / (GRADIENTS_A_STEP * seconds))
    if affordable < FEWEST_STEPS:
        report.add("Chains", f"none: the {clock.left:.1f} seconds left pay for {affordable} steps of warmup")
        return None
    num_warmup = _rounded(min(affordable, _NUM_WARMUP))
    kernel = MicrocanonicalLangevin(model, adjusted=False, bias_tolerance=BIAS_TOLERANCE)
    form = {"num_chains": num_chains, "chain_method": kernel.compiled_once, "jit_model_args": True}
    # Warmup and all lengths of sampling are one program, which keeps as many draws of each.
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=_NUM_KEPT, progress_bar=False, **form)
    fields = {"extra_fields": ("accept_prob", "num_grad")}
    clock.begin("warmup of the chains")
    before = clock.working
    mcmc.warmup(run_key, *args, init_params=start, **fields)
    jax.block_until_ready(mcmc.last_state)
    per_step, num_steps = max((clock.working - before) / num_warmup, 1e-7), num_warmup
    num_samples = min(_affordable(clock, per_step), _NUM_SAMPLES)
    while True:
        num_samples = max(num_samples // _NUM_KEPT, 1) * _NUM_KEPT
        clock.begin(f"samples of the chains, {num_samples} steps")
        mcmc.num_samples, mcmc.thinning = num_samples, num_samples // _NUM_KEPT
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.last_state.rng_key, *args, **fields)
        num_steps += num_samples
        draws = mcmc.get_samples()
        found = judge(draws)
        affordable = _affordable(clock, per_step)
        if found.is_settled or affordable <= num_samples:
            break
        num_samples = min(affordable, 2 * num_samples)
    report.add(
        "Chains",
        f"{num_chains} microcanonical chains, unadjusted (bias tolerance {BIAS_TOLERANCE}), from Adam's optimum"
        + (" at the medians of scales and noise" if hold else ""),
        f"{num_steps - num_samples} steps of warmup and {num_samples} after it, {1000 * per_step:.3g} milliseconds "
        f"each; {_NUM_KEPT} draws of a chain kept",
        *found.lines,
    )
    return ChainRun(mcmc, draws, num_steps)


def tell_no_chains(clock: Clock, were_asked_for: bool, report: Report) -> None:
    """Say that the budget pays for no chains, with a warning where they were asked for.

    Args:
        clock: clock of the whole fit.
        were_asked_for: whether the user chose chains.
        report: report, to which a line is added.
    """
    line = f"{clock.budget:g} seconds do not pay for chains: the limit predicts"
    report.announce(line)
    if were_asked_for:
        warnings.warn(f"{line}; give a larger time_budget.", UserWarning, stacklevel=2)


def convergence(mean: np.ndarray, variance: np.ndarray, y: np.ndarray, num_chains: int) -> Convergence:
    """Judge chains by R-hat and effective draws of predictions at rows of the fit.

    Args:
        mean: means of observations, (chains · draws, rows, k).
        variance: their variances, of the same shape.
        y: observations, (rows, k).
        num_chains: number of chains.
    """
    by_chain = [part.reshape(num_chains, -1, *y.shape) for part in (mean, variance)]
    sizes = _arviz.effective_sample_size(by_chain[0])
    line = effective_draws("predictions", sizes)
    if num_chains == 1:
        return Convergence(True, (line, ONE_CHAIN))
    found = pooling(y, *by_chain)
    rhat = f"R-hat of predictions between chains: {found.between:.3f}, the largest {found.largest:.3f}"
    return Convergence(not found.unsettled, (line, rhat, found.advice))


def effective_draws(name: str, sizes: np.ndarray) -> str:
    """Return a line for the report.

    Args:
        name: of what the draws are.
        sizes: numbers of effective draws, NaN where they are unknown.
    """
    return f"effective draws of {name}: median {np.nanmedian(sizes):.0f}, least {np.nanmin(sizes):.0f}"


def gradient_seconds(num_rows: int, depth: int, width: int) -> float:
    """Estimate the seconds of a gradient: a row's go with the width, and with its square between layers.

    Args:
        num_rows: number of rows.
        depth: number of hidden layers.
        width: number of units in each.
    """
    share = width / 50
    return 1e-4 + _SECONDS_A_ROW * num_rows * max(share, depth * share**2)


def _start(
    model: Any, args: tuple, num_chains: int, clock: Clock, key: Any, hold: str | None, each: float
) -> tuple[Any, float]:
    """Return positions for the chains, and the seconds that a step of Adam took for all of them."""
    num_steps = int(np.clip(0.1 * clock.left / (num_chains * each), 20, _NUM_ADAM))
    clock.begin("Adam, for starts of the chains")
    before = clock.working
    options: dict[str, Any] = {"num_chains": num_chains, "num_steps": num_steps, "hold": hold}
    start = init_to_optimum(key, model, *args, progress_bar=clock.progress_bar, **options)
    return start, (clock.working - before) / num_steps


def _affordable(clock: Clock, per_step: float) -> int:
    """Return the number of steps that the seconds left pay for, and at the least the fewest."""
    return max(int(_SAMPLES_SHARE * clock.left / per_step), FEWEST_STEPS)


def _rounded(number: int) -> int:
    """Round down to a number of few different ones, so that programs on disk are found again."""
    step = 10 ** max(1, len(str(number)) - 2)
    return number // step * step
