"""What both estimators share: arguments, reports, ArviZ."""

import logging
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from numpyro_wide._checks import check_one_of, whole_number
from numpyro_wide.machine import precision

_logger = logging.getLogger("numpyro_wide.estimators")


@dataclass
class Report:
    """A page of headings with lines below them. Printing it gives the page; lines are logged as they come.

    Attributes:
        title: first line.
        sections: lines by heading, in the order in which they came.
    """

    title: str
    sections: dict[str, list[str]] = field(default_factory=dict)

    def add(self, heading: str, *lines: str) -> None:
        """Append lines below a heading, which is made where there is none yet.

        Args:
            heading: name of the section.
            *lines: sentences, or lines of a table.
        """
        for line in lines:
            _logger.info("%s: %s", heading, line)
        self.sections.setdefault(heading, []).extend(part for line in lines for part in line.split("\n"))

    def announce(self, line: str) -> None:
        """Say what will be done before it is begun, aloud: a long run should surprise nobody.

        Args:
            line: sentence.
        """
        _logger.warning(line)
        self.sections.setdefault("Plan", []).append(line)

    def __str__(self) -> str:
        parts = [self.title, "=" * len(self.title)]
        for heading, lines in self.sections.items():
            parts += ["", heading, *(f"  {line}" for line in lines)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<h3>{escape(self.title)}</h3>"]
        for heading, lines in self.sections.items():
            parts.append(f"<h4>{escape(heading)}</h4><pre>{escape(chr(10).join(lines))}</pre>")
        return "".join(parts)


SECONDS = 600.0  # of work where no budget is given
WIDTH = 50  # hidden units where nothing else is said: on the benchmark's tables wider ones gain little


class WideBNN(BaseEstimator):
    """Base of the estimators: their parameters, and what comes out of every fit."""

    _methods: tuple[str, ...] = ()
    _columns: np.ndarray
    _posterior: Any
    mcmc_: Any
    model_: Any
    model_args_: Any
    method_: str

    def __init__(
        self,
        *,
        hidden: Any = "auto",
        method: str = "auto",
        time_budget: float | None = None,
        num_chains: int = 4,
        random_state: Any = None,
        progress_bar: bool = False,
    ):
        self.hidden = hidden
        self.method = method
        self.time_budget = time_budget
        self.num_chains = num_chains
        self.random_state = random_state
        self.progress_bar = progress_bar

    def _checked_parameters(self) -> tuple[int | None, int | None, float, np.random.RandomState]:
        """Return depth and width, None where they are to be found, the seconds of the budget, and a generator."""
        check_one_of("method", self.method, self._methods)
        whole_number("num_chains", self.num_chains)
        budget = SECONDS if self.time_budget is None else self.time_budget
        if not isinstance(budget, Real) or isinstance(budget, bool) or not 0 < float(budget) < np.inf:
            raise ValueError(
                f"time_budget must be a positive number of seconds, or None for {SECONDS:g} at the most, but is "
                f"{self.time_budget!r}."
            )
        depth, width = _architecture(self.hidden)
        return depth, width, float(budget), check_random_state(self.random_state)

    @property
    def predictive_(self) -> Any:
        """The predictive of the draws, of standardised numbers; None for the limit."""
        check_is_fitted(self)
        return getattr(self._posterior, "predictive", None)

    def _kept(self, inputs: np.ndarray) -> np.ndarray:
        """Return the columns that vary; where none does, one of zeros."""
        return inputs[:, self._columns] if len(self._columns) else np.zeros((len(inputs), 1))

    def to_arviz(self) -> Any:
        """Hand the chains over to ArviZ: draws of the unwrapped network, and log likelihoods by row.

        Returns:
            What :func:`~numpyro_wide.diagnostics.to_arviz` gives.

        Raises:
            ValueError: if no chains were run; ``method="chains"`` runs them.
        """
        from numpyro_wide.diagnostics._to_arviz import to_arviz

        check_is_fitted(self)
        if self.mcmc_ is None:
            raise ValueError(
                f'there are no chains to hand over: the fit ended with "{self.method_}"; fit with method="chains".'
            )
        draw = next(iter(self.mcmc_.get_samples().values()))
        with precision(draw.dtype == np.float64):  # that the chains ran in
            return to_arviz(self.mcmc_, self.model_, *jax.tree.map(jnp.asarray, self.model_args_))


class Standardiser(NamedTuple):
    """Shift and scale that give the training rows mean zero and variance one, of the shape of a row."""

    loc: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, train: np.ndarray) -> "Standardiser":
        """Take them from training rows (n, ...)."""
        loc, scale = np.mean(train, axis=0, dtype=float), np.std(train, axis=0, dtype=float)
        # Rounding of a constant column leaves a deviation that is not quite zero.
        return cls(loc, np.where(scale <= 1e-12 * np.abs(loc), 1.0, scale))


def standardised(standardiser: Standardiser, values: np.ndarray) -> np.ndarray:
    """Return rows without units in float64, which small noise needs.

    Args:
        standardiser: mean and scale.
        values: rows in their units, (n, ...).
    """
    return (values - standardiser.loc) / standardiser.scale


def _architecture(hidden: Any) -> tuple[int | None, int | None]:
    """Return the number of hidden layers and their width, None each where both are to be found."""
    if isinstance(hidden, str) and hidden == "auto":
        return None, None
    if not isinstance(hidden, tuple | list) or not hidden:
        raise ValueError(
            f'hidden must be "auto" or the widths of the hidden layers, such as (50,) or (50, 50), but is {hidden!r}.'
        )
    widths = {whole_number("the width of a hidden layer", width) for width in hidden}
    if len(widths) > 1:
        raise ValueError(
            f"the hidden layers must be of one width, but hidden is {', '.join(map(str, hidden))}; give "
            "the same number for each, or build the network with numpyro_wide.nn."
        )
    return len(hidden), widths.pop()
