"""Figures of calibration: histograms of ranks and transforms, rank distribution functions, coverage."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import whole_number
from numpyro_wide.calibration import Coverage
from numpyro_wide.calibration.internal import uniformity_band
from numpyro_wide.plots._axes import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_rank_histogram(
    ranks: ArrayLike,
    num_draws: int,
    *,
    num_bins: int | None = None,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw a histogram of ranks with the simultaneous band of uniform ones (Talts 2018, Figure 1).

    Args:
        ranks: ranks of one scalar, (num_simulations,), as ``calibration.sbc_ranks`` gives them.
        num_draws: number of draws that they are ranks among.
        num_bins: number of bins; by default at most 30 and one for every 20 simulations, if possible with equally
            many ranks in each. Where they differ, heights and band are densities relative to uniform all the same.
        level: probability that a histogram of uniform ranks is inside the band everywhere.
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.bar``.

    Returns:
        The axes.

    Raises:
        ValueError: for ranks of several scalars, of which each has a figure of its own; or for ranks that are not whole
            numbers from 0 to ``num_draws``.
    """
    num_draws = whole_number("num_draws", num_draws)
    ranks = _one_scalar(ranks)
    _check_ranks("", ranks, num_draws)
    num_bins = _default_bins(len(ranks), num_draws) if num_bins is None else whole_number("num_bins", num_bins)
    edges = np.linspace(0, num_draws + 1, num_bins + 1).round()
    ax = _histogram(np.histogram(ranks, edges)[0], edges / (num_draws + 1), level, ax, kwargs)
    ax.set_xlabel("normalised rank")
    ax.set_title(_band_title(level), fontsize="medium")
    return ax


def plot_probability_integral_transform(
    values: ArrayLike,
    *,
    num_bins: int | None = None,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw a histogram of the transforms of what was observed, with the simultaneous band of uniform ones.

    A hump in the middle tells of predictions that are too wide, high ends of predictions that are too narrow, and a
    slope of a bias (Gneiting, Balabdaoui and Raftery 2007).

    Args:
        values: numbers in [0, 1], (n,), as ``diagnostics.probability_integral_transform`` gives them for one output.
        num_bins: number of bins of equal width; by default one for every 20 values, at least 5 and at most 30.
        level: probability that a histogram of n independent uniform values is inside the band everywhere. Counts are
            binomial in each bin.
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.bar``.

    Returns:
        The axes.

    Raises:
        ValueError: for values of several outputs, of which each has a figure of its own; or for values outside [0, 1].
    """
    values = np.asarray(values)
    _check_transforms(values)
    num_bins = _most_bins(len(values)) if num_bins is None else whole_number("num_bins", num_bins)
    edges = np.linspace(0, 1, num_bins + 1)
    ax = _histogram(np.histogram(values, edges)[0], edges, level, ax, kwargs)
    ax.set_xlabel("probability integral transform")
    ax.set_title(_band_title(level, "calibrated predictions"), fontsize="medium")
    return ax


def plot_rank_ecdf(
    ranks: "ArrayLike | Mapping[str, ArrayLike]",
    num_draws: int,
    *,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw the difference of the ranks' distribution function from the uniform one, with its simultaneous band.

    Without bins, it shows more of small samples than a histogram, and several scalars fit into one figure
    (Säilynoja 2022). A curve above zero on the left and below it on the right tells of too narrow posteriors.

    Args:
        ranks: (num_simulations,), or a dictionary of arrays (num_simulations, ...) as ``calibration.sbc_ranks`` gives.
        num_draws: number of draws that they are ranks among.
        level: probability that the curve of *one* uniform rank is inside the band everywhere.
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.step``.

    Returns:
        The axes.

    Raises:
        ValueError: for ranks that are not whole numbers from 0 to ``num_draws``.
    """
    num_draws = whole_number("num_draws", num_draws)
    curves = _scalars(ranks if isinstance(ranks, Mapping) else {"": ranks})
    for label, values in curves.items():
        _check_ranks(label, values, num_draws)
    ax = axes_or_new(ax)
    points = np.arange(num_draws + 2)
    uniform = points / (num_draws + 1)
    for label, values in curves.items():
        below = np.mean(values[:, None] < points, axis=0)
        ax.step(uniform, below - uniform, where="post", label=label, **{"linewidth": 1.2} | kwargs)
    low, high = uniformity_band(uniform, len(next(iter(curves.values()))), level=level)
    ax.fill_between(uniform, low - uniform, high - uniform, color="0.5", alpha=0.25, linewidth=0, zorder=0)
    ax.axhline(0, color="0.2", linewidth=1, linestyle="--")
    ax.set(xlim=(0, 1), xlabel="normalised rank", ylabel="ECDF minus uniform")
    _finish(ax, level, list(curves))
    return ax


def plot_coverage(
    coverage: "Coverage | Mapping[str, Coverage]", *, level: float = 0.95, ax: "Axes | None" = None, **kwargs: Any
) -> "Axes":
    """Draw empirical against nominal coverage, with the simultaneous band of an exact posterior.

    Args:
        coverage: what ``calibration.tarp`` returns, or the dictionary of ``calibration.expected_coverage``.
        level: probability that *one* curve of an exact posterior is inside the band everywhere.
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.plot``.

    Returns:
        The axes.
    """
    ax = axes_or_new(ax)
    named = coverage if isinstance(coverage, Mapping) else {"": coverage}
    curves = _scalars({name: np.moveaxis(found.empirical, -1, 0) for name, found in named.items()})
    some = next(iter(named.values()))
    nominal = np.concatenate([[0], some.nominal, [1]])
    for label, empirical in curves.items():
        ends = np.concatenate([[0], empirical, [1]])
        ax.plot(nominal, ends, label=label, **{"linewidth": 1.4} | kwargs)
    low, high = uniformity_band(nominal, some.num_simulations, level=level)
    ax.fill_between(nominal, low, high, color="0.5", alpha=0.25, linewidth=0, zorder=0)
    ax.plot([0, 1], [0, 1], color="0.2", linewidth=1, linestyle="--")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="credibility level", ylabel="empirical coverage")
    _finish(ax, level, list(curves))
    return ax


def _histogram(counts: np.ndarray, edges: np.ndarray, level: float, ax: Any, style: dict[str, Any]) -> Any:
    """Draw bars of densities relative to uniform on [0, 1], and their band."""
    ax = axes_or_new(ax)
    num_values, masses = int(counts.sum()), np.diff(edges)
    low, high = uniformity_band(masses, num_values, level=level, cumulative=False)
    style = {"color": "C0", "alpha": 0.75, "edgecolor": "white", "linewidth": 0.5} | style
    ax.bar(edges[:-1], counts / num_values / masses, masses, align="edge", **style)
    low, high = (np.append(band, band[-1]) for band in (low / masses, high / masses))  # the last step, too
    ax.fill_between(edges, low, high, step="post", color="0.5", alpha=0.3, linewidth=0, zorder=3)
    ax.axhline(1, color="0.2", linewidth=1, linestyle="--")
    ax.set(xlim=(0, 1), ylim=(0, None), ylabel="density relative to uniform")
    return ax


def _check_transforms(values: np.ndarray) -> None:
    if values.ndim != 1 or not values.size:
        raise ValueError(
            f"a histogram shows the transforms of one output, (n,), but got shape {values.shape}. Draw one for each "
            "output with ax=: those of a row depend on each other, for which the band does not hold."
        )
    is_right = (values >= 0) & (values <= 1)
    if not is_right.all():
        raise ValueError(
            f"values must be in [0, 1], but {int((~is_right).sum())} of {values.size} are not, such as "
            f"{values[~is_right][0]}; pass them as diagnostics.probability_integral_transform gives them."
        )


def _one_scalar(ranks: ArrayLike) -> np.ndarray:
    ranks = np.asarray(ranks)
    if ranks.ndim != 1:
        raise ValueError(
            f"a histogram shows the ranks of one scalar, (num_simulations,), but got shape {ranks.shape}. Draw one for "
            "each component with ax=, or all together with plot_rank_ecdf."
        )
    return ranks


def _check_ranks(label: str, ranks: np.ndarray, num_draws: int) -> None:
    is_rank = (ranks >= 0) & (ranks <= num_draws) & (ranks == np.round(ranks))
    if not is_rank.all():
        raise ValueError(
            f"ranks{f' of {label!r}' if label else ''} must be whole numbers from 0 to num_draws = {num_draws}, but "
            f"{int((~is_rank).sum())} of {ranks.size} are not, such as {ranks[~is_rank][0]}; pass them as "
            "calibration.sbc_ranks gives them, with the number of draws that they are ranks among."
        )


def _default_bins(num_simulations: int, num_draws: int) -> int:
    """Return the largest divisor of the number of ranks that is not far below what the simulations can fill."""
    most = min(_most_bins(num_simulations), num_draws + 1)
    return next((bins for bins in range(most, most // 2, -1) if (num_draws + 1) % bins == 0), most)


def _most_bins(num_values: int) -> int:
    return min(30, max(5, num_values // 20))


def _scalars(groups: "Mapping[str, ArrayLike]") -> dict[str, np.ndarray]:
    """Return one entry for each scalar component of arrays (m, ...), named as ``name[i, j]``."""
    found = {}
    for name, values in groups.items():
        array = np.asarray(values)
        for index in np.ndindex(array.shape[1:]):
            component = f"[{', '.join(map(str, index))}]" if index else ""
            found[f"{name}{component}"] = array[(slice(None), *index)]
    return found


def _finish(ax: "Axes", level: float, labels: list[str]) -> None:
    ax.set_title(_band_title(level), fontsize="medium")
    if labels != [""]:
        ax.legend(frameon=False, fontsize="small", ncols=1 + (len(labels) > 6))


def _band_title(level: float, where: str = "exact posterior") -> str:
    return f"band: {100 * level:g} % simultaneous, {where}"
