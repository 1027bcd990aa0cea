"""Figures with matplotlib: every function takes ``ax=`` and returns the axes that it has drawn on."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_levels, whole_number
from numpyro_wide.calibration import Coverage, uniformity_band
from numpyro_wide.diagnostics._convergence import autocorrelation, rhat_squared
from numpyro_wide.diagnostics._scores import confidence_bins
from numpyro_wide.diagnostics._slices import PosteriorSlice

__all__ = [
    "plot_autocorrelation",
    "plot_coverage",
    "plot_ess_by_width",
    "plot_posterior_slice",
    "plot_probability_integral_transform",
    "plot_rank_ecdf",
    "plot_rank_histogram",
    "plot_reliability",
    "plot_rhat_by_steps",
]


def axes_or_new(ax: Any) -> Any:
    """Return the axes given, or those of a new figure."""
    if ax is not None:
        return ax
    from matplotlib import pyplot  # here, so that the package imports without a display

    return pyplot.subplots(figsize=(5, 3.5), layout="constrained")[1]


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


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_reliability(
    labels: ArrayLike,
    probs: ArrayLike,
    *,
    num_bins: int = 15,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    r"""Draw how often predictions of a confidence are right, over a histogram of the confidences.

    A row's confidence is its largest probability (Mathematics, :eq:`ece`). For every bin of confidences that is not
    empty a point stands at their mean and at the share of rows that are right, with its exact binomial interval
    $[B_{\alpha/2}(k, m - k + 1), B_{1 - \alpha/2}(k + 1, m - k)]$, where $k$ of the bin's $m$ rows are right and $B_q$
    is the quantile of a beta law (Clopper and Pearson 1934). Below the diagonal predictions are too sure. Bars are the
    bins' shares of all rows: their sum, each times its distance from the diagonal, is the
    :func:`~numpyro_wide.diagnostics.expected_calibration_error`.

    Args:
        labels: true classes, whole numbers from 0, (n,).
        probs: probabilities of the classes, (n, classes), or by draw, (draws, n, classes), whose mean is drawn.
        num_bins: number of bins of equal width.
        level: probability of the intervals, each by itself, in (0, 1).
        ax: matplotlib axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.errorbar``.

    Returns:
        The axes.

    Raises:
        ValueError: if shapes do not fit, rows are not probabilities, labels are not classes, there are no bins, or the
            level is out of range.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_reliability
        >>> probs = np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> ax = plot_reliability(np.array([0, 1, 1, 1]), probs, num_bins=10)
        >>> len(ax.patches)
        10
    """
    check_levels("level", level)
    bins = confidence_bins("plot_reliability(labels, probs)", labels, probs, num_bins)
    members, is_right, confidence = (np.asarray(values, np.float64) for values in bins)
    sizes = members.sum(axis=0)
    used = sizes > 0
    counts, hits = sizes[used], (is_right @ members)[used]
    heights, places = hits / counts, (confidence @ members)[used] / counts
    low, high = _binomial_interval(hits, counts, level)

    ax = axes_or_new(ax)
    edges = np.linspace(0, 1, len(sizes) + 1)
    ax.bar(edges[:-1], sizes / sizes.sum(), np.diff(edges), align="edge", color="0.85", edgecolor="white", zorder=0)
    ax.plot([0, 1], [0, 1], color="0.2", linewidth=1, linestyle="--", zorder=1)
    style: dict[str, Any] = {"fmt": "o", "color": "C0", "markersize": 4, "capsize": 2, "zorder": 2} | kwargs
    ax.errorbar(places, heights, np.stack([heights - low, high - heights]), **style)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence", ylabel="share of rows that are right")
    ax.set_title(f"{100 * level:g} % intervals; bars: share of all rows", fontsize="medium")
    return ax


def _binomial_interval(hits: np.ndarray, counts: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the exact intervals for the probability of a hit (Clopper and Pearson 1934)."""
    from scipy.stats import beta  # slow to import: not with the package

    tail = (1 - level) / 2
    # Where all or none are hits a law has no second parameter, and its quantile is the end of the scale.
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), counts - hits + 1), 0.0)
    high = np.where(hits < counts, beta.ppf(1 - tail, hits + 1, np.maximum(counts - hits, 1)), 1.0)
    return low, high


def plot_posterior_slice(
    slice_: PosteriorSlice, *, depth: float | None = None, ax: Any = None, colorbar: bool = True, cmap: str = "viridis"
) -> Any:
    """Draw a slice as contours of the log posterior below its highest value on the slice.

    Args:
        slice_: result of :func:`~numpyro_wide.diagnostics.posterior_slice`.
        depth: lowest level in nats, below which everything looks alike; by default the slice's lowest. Give the slices
            to be compared the same one.
        ax: matplotlib axes, or None for a new figure.
        colorbar: whether to draw a scale.
        cmap: name of a colour map.

    Returns:
        The axes.
    """
    ax = axes_or_new(ax)
    highest = max(np.nanmax(slice_.log_density), np.max(slice_.at_points))
    relative = slice_.log_density - highest
    depth = -float(np.nanmin(relative)) if depth is None else depth
    levels = np.linspace(-depth, 0, 21)
    contours = ax.contourf(*slice_.angles, relative, levels=levels, cmap=cmap, extend="min")
    ax.plot(*slice_.points.T, "o", color="white", markeredgecolor="black", markersize=6, label="modes")
    ax.set_aspect("equal")
    ax.set(xlabel="angle towards the second mode, radians", ylabel="angle at right angles to it, radians")
    if colorbar:
        ax.figure.colorbar(contours, ax=ax, label="log posterior − maximum, nats")
    return ax
