"""Summary of predictions: moments and quantiles of their mixture over draws, as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax import Array
from scipy.special import ndtr

_MOST_ROWS = 20  # of a table; more are shown by the first and last half of them


@dataclass(frozen=True, repr=False)
class PredictiveSummary:
    """Predictions as one distribution for each row, the mixture over draws with the noise included.

    It shows itself as a table. Classes have probabilities, and nothing else.

    Attributes:
        mean: mean of the mixture, (m,) or (m, k); None for classes.
        standard_deviation: standard deviation of the mixture, of the shape of ``mean``; None for classes.
        quantiles: quantiles of the mixture by their level, each of the shape of ``mean``.
        probs: probabilities of the classes, (m, classes), or of a one, (m,); None for other likelihoods.
    """

    mean: np.ndarray | None = None
    standard_deviation: np.ndarray | None = None
    quantiles: dict[float, np.ndarray] = field(default_factory=dict)
    probs: np.ndarray | None = None

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the table by their heading, (m,) each."""
        parts: dict[str, np.ndarray | None] = {"mean": self.mean, "sd": self.standard_deviation}
        parts |= {f"{100 * level:g}%": values for level, values in self.quantiles.items()}
        parts["p"] = self.probs
        found = {}
        for name, values in parts.items():
            if values is None:
                continue
            if values.ndim == 1:
                found[name] = values
            else:
                by_column = values.reshape(values.shape[0], -1).T
                found |= {f"{name}[{index}]": column for index, column in enumerate(by_column)}
        return found

    def __str__(self) -> str:
        heading, rows = self._table()
        widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heading, *rows]
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heading, rows = self._table()
        top = "".join(f"<th>{cell}</th>" for cell in heading)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = self.columns()
        num_rows = len(next(iter(columns.values())))
        shown: list[int | None] = list(range(num_rows))
        if num_rows > _MOST_ROWS:
            shown = [*range(_MOST_ROWS // 2), None, *range(num_rows - _MOST_ROWS // 2, num_rows)]
        rows = [
            ["..."] * (len(columns) + 1)
            if row is None
            else [str(row), *(f"{values[row]:.4g}" for values in columns.values())]
            for row in shown
        ]
        return ["row", *columns], rows


def summarise(found: dict[str, Array], observed: str, levels: Sequence[float]) -> PredictiveSummary:
    """Summarise predictions over their draws.

    Args:
        found: predictions, (draw, m, ...) each.
        observed: name of the observed site, under which they hold draws with noise.
        levels: levels of the quantiles, between 0 and 1.
    """
    values = {name: np.asarray(draws, float) for name, draws in found.items()}
    probs = values["probs"].mean(axis=0) if "probs" in values else None
    if probs is not None:
        return PredictiveSummary(probs=probs)
    mean, variance = values["mean"], values["predictive_variance"]
    deviation = np.sqrt(variance.mean(axis=0) + mean.var(axis=0))
    if "variance" in values:  # each draw's prediction is a Gaussian
        scale = np.sqrt(variance)

        def share_below(at: np.ndarray) -> np.ndarray:
            return ndtr((at - mean) / scale).mean(axis=0)

        far = 10 * scale.max(axis=0)
        quantiles = {level: _root(share_below, level, mean.min(0) - far, mean.max(0) + far) for level in levels}
    else:
        quantiles = {level: np.quantile(values[observed], level, axis=0, method="inverted_cdf") for level in levels}
    return PredictiveSummary(mean.mean(axis=0), deviation, quantiles)


def _root(increasing: Callable, level: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return where an increasing function has a value, entry by entry, by halving: 40 times, to 1e-12 of the range."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_below = increasing(middle) < level
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)
