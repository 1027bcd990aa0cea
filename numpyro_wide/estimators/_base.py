"""Parameters, standardised inputs, report and clock of both estimators."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from numpyro.infer import MCMC
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_wide._checks import check_one_of, kind_of, progress, whole_number
from numpyro_wide.estimators._plan import DEFAULT_SECONDS, Plan, measured_speed
from numpyro_wide.machine import precision
from numpyro_wide.wide_limit._limit import WideLimitFit

_logger = logging.getLogger("numpyro_wide.estimators")


@dataclass
class Report:
    """Page of text under headings, logged line by line."""

    title: str
    sections: dict[str, list[str]] = field(default_factory=lambda: {"Plan": []})
    warnings: list[str] = field(default_factory=list)

    def add(self, heading: str, *lines: str) -> None:
        """Append lines, or tables of several lines, under a heading."""
        for line in lines:
            _logger.info("%s: %s", heading, line)
        self.sections.setdefault(heading, []).extend(part for line in lines for part in line.split("\n"))

    def warn(self, heading: str, line: str, mend: str = "") -> None:
        """Append a line, of which the user is warned at the end of the fit."""
        self.add(heading, line)
        self.warnings.append(line + mend)

    def __str__(self) -> str:
        lines = [self.title, "=" * len(self.title)]
        for heading, own in self.sections.items():
            lines += ["", heading, *(f"  {line}" for line in own)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Clock:
    """Wall-clock seconds of a fit, compilation included, with an optional progress bar."""

    def __init__(self, budget: float, progress_bar: bool = False, *, stops: bool = True):
        self.budget, self._start, self.stops = budget, time.perf_counter(), stops
        form = "{desc}, since second {n:.0f} of {total:g} |{bar}|"
        self._stages: list[tuple[str, float]] = []
        self._bar = progress(total=budget, bar_format=form, shown=progress_bar, leave=False, desc="preparing")

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start

    @property
    def is_over(self) -> bool:
        """Whether the budget is over, which ends a fit that does not follow a given plan."""
        return self.stops and self.seconds > self.budget

    def begin(self, stage: str) -> None:
        """Show the next stage."""
        self._stages.append((stage, self.seconds))
        self._bar.n = min(self.seconds, self.budget)
        self._bar.set_description_str(stage)

    def by_stage(self) -> str:
        """Return the stages so far with their seconds."""
        ends = [start for _, start in self._stages[1:]] + [self.seconds]
        return ", ".join(f"{stage} {end - start:.1f}" for (stage, start), end in zip(self._stages, ends, strict=True))

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        self.begin("done")
        self._bar.close()


class WideBNN(BaseEstimator):
    """Base of the estimators: parameters and results of a fit."""

    _task: str
    _methods: tuple[str, ...] = ()
    _columns: np.ndarray  # indices of varying input columns
    _moments: tuple[np.ndarray, np.ndarray]  # of all input columns
    _posterior: Any
    model_: Any
    model_args_: tuple | None

    def __init__(
        self,
        *,
        hidden: str | Sequence[int] = "auto",
        method: str = "auto",
        time_budget: float | None = None,
        num_chains: int = 4,
        plan: Plan | None = None,
        random_state: int | np.random.RandomState | None = None,
        progress_bar: bool = True,
    ):
        self.hidden = hidden
        self.method = method
        self.time_budget = time_budget
        self.num_chains = num_chains
        self.plan = plan
        self.random_state = random_state
        self.progress_bar = progress_bar

    @property
    def predictive_(self) -> Any:
        """Predictive of the draws, in standardised units; None for the limit."""
        check_is_fitted(self)
        return getattr(self._posterior, "predictive", None)

    def to_arviz(self) -> Any:
        """Convert the chains to ArviZ: draws of the network, log likelihoods by row."""
        from numpyro_wide.diagnostics._to_arviz import to_arviz

        check_is_fitted(self)
        if self.mcmc_ is None:
            raise ValueError(
                f'there are no chains to convert: "{self.method_}" predicts without any; fit with method="chains".'
            )
        draw = next(iter(self.mcmc_.get_samples().values()))
        with precision(draw.dtype == np.float64):  # of the chains
            return to_arviz(self.mcmc_, self.model_, *jax.tree.map(jnp.asarray, self.model_args_))

    def _check_parameters(self) -> np.random.RandomState:
        """Refuse wrong parameters, and return the generator."""
        check_one_of("method", self.method, self._methods)
        whole_number("num_chains", self.num_chains)
        budget = DEFAULT_SECONDS if self.time_budget is None else self.time_budget
        if not isinstance(budget, Real) or isinstance(budget, bool) or not 0 < float(budget) < np.inf:
            raise ValueError(
                f"time_budget must be a positive number of seconds, or None for at most {DEFAULT_SECONDS:g}, but is "
                f"{self.time_budget!r}."
            )
        if self.plan is not None and not isinstance(self.plan, Plan | str):
            raise TypeError(
                f"plan must be plan_ of an earlier fit, or its text by plan_.to_json(), but is {kind_of(self.plan)}."
            )
        random = check_random_state(self.random_state)
        if isinstance(self.hidden, str) and self.hidden == "auto":
            return random
        if not isinstance(self.hidden, tuple | list) or not self.hidden:
            raise ValueError(
                f'hidden must be "auto" or the widths of the hidden layers, such as (50,), but is {self.hidden!r}.'
            )
        if len({whole_number("the width of a hidden layer", width) for width in self.hidden}) > 1:
            raise ValueError(f"the hidden layers must have the same width, but hidden is {self.hidden!r}.")
        return random

    def _planned(self, make: Callable[..., Plan], report: Report, *shape: int, **options: object) -> Plan:
        """Return the plan that was given, or make one for rows, columns and outputs, or classes."""
        if self.plan is None:
            budget = DEFAULT_SECONDS if self.time_budget is None else float(self.time_budget)
            options |= {"hidden": self.hidden, "method": self.method, "num_chains": int(self.num_chains)}
            plan = make(*shape, **options, time_budget=budget, speed=measured_speed())
        else:
            plan = self.plan if isinstance(self.plan, Plan) else Plan.from_json(self.plan)
            planned = plan.num_rows, plan.num_columns, plan.num_outputs
            if (plan.task, planned) != (self._task, shape):
                raise ValueError(
                    f"plan is of a {plan.task} of {planned} rows, columns and outputs, but this is a {self._task} of "
                    f"{shape}; leave plan out, and take plan_ of the fit."
                )
        report.add("Plan", str(plan))
        return plan

    def _clock(self, plan: Plan) -> Clock:
        """Return the clock of a fit; that of a given plan runs to its end."""
        return Clock(plan.time_budget, self.progress_bar, stops=self.plan is None)

    def _learn_columns(self, inputs: np.ndarray, report: Report) -> np.ndarray:
        """Standardise inputs (n, d), without constant columns."""
        self._moments = moments(inputs)
        self._columns = np.flatnonzero(self._moments[1])
        if len(self._columns) < inputs.shape[1]:
            report.add("Data", f"constant columns left out: {inputs.shape[1] - len(self._columns)}")
        return self._standardised(inputs)

    def _keep(
        self,
        report: Report,
        clock: Clock,
        plan: Plan,
        method: str,
        fit: WideLimitFit,
        posterior: object,
        mcmc: MCMC | None,
        log_density: float,
    ) -> None:
        """Set the results of a fit, and warn; the limit has no model and no draws."""
        of_limit = method == "limit"
        self.summary_ = {
            "method": method,
            "structure": str(fit.table[0]["structure"]) if of_limit else "dense",
            "log_density": log_density,
            "noise_scale": float(fit.noise_scale),
            **{name: getattr(posterior, name, None) for name in ("rhat", "agrees", "pareto_shape")},
            "seconds": clock.seconds,
        }
        report.add("Decision", f'predictions are those of "{method}"', posterior_line(self.summary_))
        report.add("Time", f"{clock.seconds:.1f} of {clock.budget:g} seconds, compilation included", clock.by_stage())
        self.plan_, self.method_, self.fit_, self.mcmc_, self.report_ = plan, method, fit, mcmc, report
        self._posterior = posterior
        for line in report.warnings:
            warnings.warn(line, UserWarning, stacklevel=3)  # the caller of the estimator's fit
        self.model_, self.model_args_, self.draws_ = (
            getattr(posterior, name, None) for name in ("model", "known", "draws")
        )

    def _rows(self, X: ArrayLike) -> np.ndarray:
        """Check and standardise new inputs."""
        check_is_fitted(self)
        with words_named(X):
            return self._standardised(validate_data(self, X, dtype=np.float64, reset=False))

    def _standardised(self, inputs: np.ndarray) -> np.ndarray:
        if not len(self._columns):
            return np.zeros((len(inputs), 1))
        loc, scale = (part[self._columns] for part in self._moments)
        return (inputs[:, self._columns] - loc) / scale


def posterior_line(summary: dict[str, Any]) -> str:
    """Return what a summary's predictions are in the report's words."""
    rhat = summary["rhat"]
    if summary["method"] == "limit":
        kind = f"exact given scales and noise, at their mode, of an infinitely wide {summary['structure']} network"
    elif summary["pareto_shape"] is not None:
        kind = f"weighted draws (Pareto shape {summary['pareto_shape']:.2f})"
    elif rhat is None:
        kind = "draws of a single chain (R-hat unknown)"
    else:
        kind = "draws of" if summary["agrees"] else "an ensemble of"
        kind += f" chains that {'agree' if summary['agrees'] else 'do not agree'} (R-hat {rhat:.3f})"
    return f"posterior: {kind}"


def moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation by column of (n, ...); 0 for a deviation by rounding."""
    size = np.max(np.abs(values), axis=0)
    size = np.where(size > 0, size, 1.0)
    shares = values / size  # for values such as 1e200
    loc, scale = shares.mean(axis=0), shares.std(axis=0)
    return size * loc, np.where(scale > 1e-12 * np.abs(loc), size * scale, 0.0)


@contextmanager
def words_named(X: object) -> Iterator[None]:
    """Name the columns of words, or the targets, in the error of their conversion to numbers."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("could not convert string to float"):
            raise
        import pandas  # heavy

        table = pandas.DataFrame(X)
        is_word = table.apply(pandas.to_numeric, errors="coerce").isna() & table.notna()
        words = list(table.columns[is_word.any()])
        raise ValueError(
            f"columns {words} of X hold words; encode them first, for example by sklearn's OneHotEncoder in a pipeline."
            if words
            else "y holds words, but must hold numbers; WideBNNClassifier learns classes."
        ) from error
