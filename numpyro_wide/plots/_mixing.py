"""Figures of mixing: effective sample size by width, R-hat by steps, autocorrelation by lag."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide.diagnostics import rhat_squared
from numpyro_wide.diagnostics.internal import autocorrelation
from numpyro_wide.plots._axes import axes_or_new


def plot_ess_by_width(
    ess: Mapping[str, Mapping[int, ArrayLike | Mapping[str, float]]],
    *,
    ax: Any = None,
    ylabel: str = "effective sample size per gradient",
) -> Any:
    """Draw effective sample size against layer width, mean and range, as in Figures 7 and 11 of Hron 2022.

    Args:
        ess: effective sample sizes by label and width: the sizes over projections, an array, or their "mean", "min"
            and "max", as :func:`~numpyro_wide.diagnostics.projected_ess` gives them.
        ax: matplotlib axes, or None for a new figure.
        ylabel: label of the axis of the sizes.

    Returns:
        The axes.

    Example:
        >>> from numpyro_wide.plots import plot_ess_by_width
        >>> ess = {"plain": {32: [0.01, 0.02], 64: [0.01, 0.03]}, "repriorised": {32: [0.1, 0.2], 64: [0.2, 0.3]}}
        >>> ax = plot_ess_by_width(ess)
        >>> ax.get_xlabel(), ax.get_yscale()
        ('width', 'log')
    """
    ax = axes_or_new(ax)
    all_widths = sorted({width for by_width in ess.values() for width in by_width})
    for (label, by_width), marker in zip(ess.items(), _markers(ess), strict=True):
        widths = sorted(by_width)
        mean, least, largest = np.transpose([_summary(by_width[width]) for width in widths])
        _line_and_band(ax, np.asarray(widths), mean, least, largest, marker=marker, markersize=4, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(all_widths, [str(width) for width in all_widths])
    ax.set(xlabel="width", ylabel=ylabel)
    ax.legend()
    return ax


def plot_rhat_by_steps(
    draws: Mapping[str, ArrayLike], *, thinning: int = 1, num_points: int = 25, ax: Any = None
) -> Any:
    r"""Draw $\hat R^2 - 1$ of the first steps by their number: mean, and a band to the largest (Hron 2022, Figure 9).

    Args:
        draws: draws by label, (chain, draw, ...), such as :func:`~numpyro_wide.diagnostics.project` gives.
        thinning: number of steps of the chain for each draw.
        num_points: number of points on each line.
        ax: matplotlib axes, or None for a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: if there are fewer than two chains or ten draws.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_rhat_by_steps
        >>> draws = np.random.default_rng(0).normal(size=(3, 100, 5))
        >>> plot_rhat_by_steps({"independent": draws}).get_xlabel()
        'steps'
    """
    ax = axes_or_new(ax)
    for label, values in draws.items():
        array = np.asarray(values)
        if array.ndim < 2 or array.shape[0] < 2 or array.shape[1] < 10:
            raise ValueError(
                f"R-hat needs draws (chain, draw, ...) of at least two chains and ten draws, but {label!r} has shape "
                f"{array.shape}."
            )
        counts = np.unique(np.geomspace(5, array.shape[1], num_points).round().astype(int))
        excess = [rhat_squared(array[:, :count]).ravel() - 1 for count in counts]
        mean, largest = np.transpose([(np.mean(values), np.max(values)) for values in excess])
        _line_and_band(ax, thinning * counts, mean, mean, largest, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlabel="steps", ylabel=r"$\hat R^2 - 1$")
    ax.legend()
    return ax


def plot_autocorrelation(
    draws: Mapping[str, ArrayLike], *, max_lag: int = 50, thinning: int = 1, ax: Any = None
) -> Any:
    """Draw autocorrelation against lag: mean over dimensions, and a band from least to largest.

    Args:
        draws: draws by label, (chain, draw, ...), such as :func:`~numpyro_wide.diagnostics.project` gives.
        max_lag: largest lag, in draws.
        thinning: number of steps of the chain for each draw.
        ax: matplotlib axes, or None for a new figure.

    Returns:
        The axes.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_autocorrelation
        >>> draws = np.random.default_rng(0).normal(size=(3, 100, 5))
        >>> plot_autocorrelation({"independent": draws}).get_ylabel()
        'autocorrelation'
    """
    ax = axes_or_new(ax)
    ax.axhline(0.0, color="0.7", linewidth=1)
    for label, values in draws.items():
        correlation = autocorrelation(values, max_lag=max_lag)
        correlation = correlation.reshape(len(correlation), -1)
        lags = thinning * np.arange(len(correlation))
        _line_and_band(ax, lags, correlation.mean(1), correlation.min(1), correlation.max(1), label=label)
    ax.set(xlabel="lag, steps", ylabel="autocorrelation", xlim=(0, None), ylim=(None, 1))
    ax.legend()
    return ax


def _line_and_band(ax: Any, x: ArrayLike, mean: ArrayLike, least: ArrayLike, largest: ArrayLike, **style: Any) -> None:
    (line,) = ax.plot(x, mean, **style)
    ax.fill_between(x, least, largest, color=line.get_color(), alpha=0.2, linewidth=0)


def _markers(labels: Iterable[str]) -> list[str]:
    return ["osD^vP*X"[i % 8] for i, _ in enumerate(labels)]


def _summary(sizes: ArrayLike | Mapping[str, float]) -> tuple[float, float, float]:
    if isinstance(sizes, Mapping):
        return sizes["mean"], sizes["min"], sizes["max"]
    array = np.asarray(sizes)
    return float(array.mean()), float(array.min()), float(array.max())
