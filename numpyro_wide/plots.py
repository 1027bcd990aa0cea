"""Figures with matplotlib: every function takes ``ax=`` and returns the axes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike
from scipy.special import ndtri

from numpyro_wide import _mixture
from numpyro_wide._checks import check_level, check_ranks, whole_number
from numpyro_wide.calibration import Coverage, uniformity_band
from numpyro_wide.diagnostics._effects import Effects
from numpyro_wide.diagnostics._scores import averaged, binned
from numpyro_wide.diagnostics._summary import entries_by_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from numpyro_wide.amortized import AmortizedRunResult

__all__ = [
    "plot_coverage",
    "plot_effects",
    "plot_ess_by_width",
    "plot_prediction",
    "plot_rank_ecdf",
    "plot_reliability",
    "plot_training",
]


def plot_prediction(
    x: ArrayLike,
    predictions: Mapping[str, ArrayLike],
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    level: float = 0.9,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw the mean prediction over one input, and central intervals of the function and of observations with noise.

    Args:
        x: one input, in any order, (m,) or (m, 1).
        predictions: result of :class:`~numpyro_wide.ReadoutPredictive` at these inputs: ``"mean"``, and ``"variance"``
            or ``"predictive_variance"`` or both, each (draws, m).
        data: inputs and targets to draw as points, (n,) or (n, 1), and (n,).
        level: probability of each interval.
        ax: axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.plot``, for the mean.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_prediction
        >>> draws = np.zeros((10, 5))
        >>> ax = plot_prediction(np.linspace(-1, 1, 5), {"mean": draws, "variance": draws + 0.1})
    """
    check_level(level)
    mean = np.asarray(predictions["mean"], float)
    inputs = np.asarray(x, float)
    if mean.ndim != 2 or inputs.size != mean.shape[1]:
        raise ValueError(
            "plot_prediction draws one output over one input, x of m numbers and predictions (draws, m), but got x of "
            f"shape {inputs.shape} and a mean of shape {mean.shape}; pass one column of each."
        )
    inputs = inputs.ravel()
    order = np.argsort(inputs)
    ax = _axes_or_new(ax)
    style = {"color": "C0", "label": "mean"} | kwargs
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    for name, quantity, alpha in (("predictive_variance", "observations", 0.15), ("variance", "function", 0.35)):
        if name in predictions:
            variance = np.asarray(predictions[name], float)
            low, high = (_mixture.quantile(tail, mean, variance)[order] for tail in tails)
            label = f"{quantity}, {100 * level:g} %"
            ax.fill_between(inputs[order], low, high, label=label, alpha=alpha, linewidth=0, color=style["color"])
    ax.plot(inputs[order], mean.mean(axis=0)[order], **style)
    if data is not None:
        ax.plot(*(np.ravel(values) for values in data), "k.", label="data")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_rank_ecdf(
    ranks: "ArrayLike | Mapping[str, ArrayLike]",
    num_draws: int,
    *,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw the ranks' distribution function minus the uniform one, with its simultaneous band (Säilynoja 2022).

    Args:
        ranks: (num_simulations,), or a dictionary of arrays (num_simulations, ...).
        num_draws: number of draws that they are ranks among.
        level: probability that *one* uniform curve is inside the band.
        ax: axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.step``.
    """
    num_draws = whole_number("num_draws", num_draws)
    named = ranks if isinstance(ranks, Mapping) else {"": ranks}
    curves = entries_by_name({name: np.asarray(values) for name, values in named.items()}, 1)
    for label, values in curves.items():
        check_ranks(f"ranks of {label!r}" if label else "ranks", values, num_draws)
    ax = _axes_or_new(ax)
    points = np.arange(num_draws + 2)
    uniform = points / (num_draws + 1)
    for label, values in curves.items():
        below = np.mean(values[:, None] < points, axis=0)
        ax.step(uniform, below - uniform, where="post", label=label, **{"linewidth": 1.2} | kwargs)
    low, high = uniformity_band(uniform, len(next(iter(curves.values()))), level=level)
    _draw_band(ax, uniform, (low - uniform, high - uniform), level, list(curves))
    ax.axhline(0, **_REFERENCE)
    ax.set(xlim=(0, 1), xlabel="normalised rank", ylabel="ECDF minus uniform")
    return ax


def plot_coverage(
    coverage: "Coverage | Mapping[str, Coverage]", *, level: float = 0.95, ax: "Axes | None" = None, **kwargs: Any
) -> "Axes":
    """Draw empirical against nominal coverage, with the simultaneous band of an exact posterior.

    ``coverage`` is the result of ``calibration.tarp`` or ``calibration.expected_coverage``; ``level`` and ``ax`` are as
    for :func:`plot_rank_ecdf`, and ``kwargs`` those of ``Axes.plot``.
    """
    ax = _axes_or_new(ax)
    named = coverage if isinstance(coverage, Mapping) else {"": coverage}
    curves = entries_by_name({name: np.moveaxis(estimate.empirical, -1, 0) for name, estimate in named.items()}, 1)
    first_estimate = next(iter(named.values()))
    nominal = np.concatenate([[0], first_estimate.nominal, [1]])
    for label, empirical in curves.items():
        ax.plot(nominal, np.concatenate([[0], empirical, [1]]), label=label, **{"linewidth": 1.4} | kwargs)
    _draw_band(ax, nominal, uniformity_band(nominal, first_estimate.num_simulations, level=level), level, list(curves))
    ax.plot([0, 1], [0, 1], **_REFERENCE)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="credibility level", ylabel="empirical coverage")
    return ax


def plot_ess_by_width(
    ess: Mapping[str, Mapping[int, ArrayLike | Mapping[str, float]]],
    *,
    ax: "Axes | None" = None,
    ylabel: str = "effective sample size per gradient",
) -> "Axes":
    """Draw effective sample size against layer width, mean and range (Hron 2022, Figures 7 and 11).

    Args:
        ess: sizes by label and width, an array or the result of :func:`~numpyro_wide.diagnostics.projected_ess`.
        ax: axes, or None for a new figure.
        ylabel: label of the vertical axis.

    Example:
        >>> from numpyro_wide.plots import plot_ess_by_width
        >>> ax = plot_ess_by_width({"plain": {32: [0.01, 0.02], 64: [0.01, 0.03]}, "repriorised": {32: [0.1, 0.2]}})
    """
    ax = _axes_or_new(ax)
    all_widths = sorted({width for by_width in ess.values() for width in by_width})
    for index, (label, by_width) in enumerate(ess.items()):
        widths = sorted(by_width)
        mean, least, largest = np.transpose([_mean_and_range(by_width[width]) for width in widths])
        (line,) = ax.plot(widths, mean, marker="osD^vP*X"[index % 8], markersize=4, label=label)
        ax.fill_between(widths, least, largest, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(all_widths, [str(width) for width in all_widths])
    ax.set(xlabel="width", ylabel=ylabel)
    ax.legend()
    return ax


def plot_reliability(
    labels: ArrayLike,
    probs: ArrayLike,
    *,
    num_bins: int = 15,
    level: float = 0.95,
    ax: "Axes | None" = None,
    **kwargs: Any,
) -> "Axes":
    """Draw accuracy against confidence by bin, over a histogram of the confidences.

    The intervals are exact binomial ones (Clopper and Pearson 1934).

    Args:
        labels: true classes, whole numbers from 0, (n,).
        probs: class probabilities, (n, classes) or (draws, n, classes).
        num_bins: number of bins of equal width.
        level: probability of each interval.
        ax: axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.errorbar``.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.plots import plot_reliability
        >>> ax = plot_reliability(np.array([0, 1, 1]), np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7]]))
    """
    from scipy.stats import binomtest  # slow

    check_level(level)
    members, is_right, confidence = binned(*averaged("plot_reliability(labels, probs)", labels, probs), num_bins)
    sizes = members.sum(axis=0)
    used = sizes > 0
    counts, hits = sizes[used], (is_right @ members)[used]
    heights, places = hits / counts, (confidence @ members)[used] / counts
    by_bin = zip(hits.astype(int), counts.astype(int), strict=True)
    low, high = np.transpose([binomtest(*hits_and_count).proportion_ci(level) for hits_and_count in by_bin])

    ax = _axes_or_new(ax)
    edges = np.linspace(0, 1, len(sizes) + 1)
    ax.bar(edges[:-1], sizes / sizes.sum(), np.diff(edges), align="edge", color="0.85", edgecolor="white", zorder=0)
    ax.plot([0, 1], [0, 1], zorder=1, **_REFERENCE)
    style: dict[str, Any] = {"fmt": "o", "color": "C0", "markersize": 4, "capsize": 2, "zorder": 2} | kwargs
    ax.errorbar(places, heights, np.stack([heights - low, high - heights]), **style)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence", ylabel="accuracy")
    ax.set_title(f"{100 * level:g} % intervals; bars: share of all rows", fontsize="medium")
    return ax


def plot_training(result: "AmortizedRunResult", *, ax: "Axes | None" = None, **kwargs: Any) -> "Axes":
    """Draw the loss of a training run and, where simulations were held out, theirs with the step that was best.

    A held-out loss that rises while the loss falls is a sign of too few simulations for the number of steps, or of too
    little weight decay. The line is an average over a hundredth of the steps.

    Args:
        result: result of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`.
        ax: axes, or None for a new figure.
        **kwargs: keyword arguments of ``Axes.plot``, for the loss.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import AmortizedForwardKL
        >>> from numpyro_wide.plots import plot_training
        >>> def model():
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 2)), 1))
        >>> def guide(observed):
        ...     numpyro.sample("mu", dist.Normal(numpyro.param("slope", 0.0) * observed["y"], 1))
        >>> trainer = AmortizedForwardKL(model, guide, numpyro.optim.Adam(0.02), observed="y")
        >>> ax = plot_training(trainer.run(jax.random.key(0), 400, held_out=100, progress_bar=False))
    """
    losses, last = np.asarray(result.losses), int(result.state.step)
    ax = _axes_or_new(ax)
    window = max(len(losses) // 100, 1)
    blocks = np.ma.masked_invalid(losses[: len(losses) // window * window].reshape(-1, window))
    steps = last - len(losses) + window * (np.arange(len(blocks)) + 0.5)
    ax.plot(steps, blocks.mean(axis=1).filled(np.nan), label="loss", **{"linewidth": 1.2} | kwargs)
    if (held_out := result.state.held_out) is not None:
        ax.plot(held_out.steps, held_out.losses, marker="o", markersize=3, linewidth=1.2, label="held out")
        ax.axvline(int(held_out.best_step), color="0.5", linewidth=1, linestyle="--", label="best")
    ax.set(xlabel="step", ylabel="loss in nats")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_effects(
    effects: Effects,
    *,
    names: Sequence[str] | None = None,
    level: float = 0.9,
    num_pairs: int = 3,
    ax: "Sequence[Axes] | None" = None,
) -> np.ndarray:
    """Draw effects: curves of single inputs over a rug of rows, pairs by the colour of rows, Sobol indices as bars.

    Args:
        effects: result of :func:`~numpyro_wide.diagnostics.effects`.
        names: names of the inputs.
        level: probability of the bands, and of the intervals of indices.
        num_pairs: largest number of pairs to draw, those of the largest indices.
        ax: axes of all panels, single inputs, pairs and indices in this order; None for a new figure.

    Returns:
        The axes, (panels,).

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> from numpyro_wide.diagnostics import effects
        >>> from numpyro_wide.plots import plot_effects
        >>> x = np.random.default_rng(0).normal(size=(40, 2))
        >>> fit = wide_limit.fit(x, x[:, 0] * x[:, 1], structure="additive", num_restarts=1)
        >>> len(plot_effects(effects(fit, x), names=["dose", "age"]))
        4
    """
    check_level(level)
    names = [f"x{column}" for column in range(effects.x.shape[1])] if names is None else names
    singles = [index for index, term in enumerate(effects.terms) if len(term) == 1]
    pairs = [index for index, term in enumerate(effects.terms) if len(term) == 2]
    pairs = [pairs[index] for index in np.argsort(-effects.pairs.mean(axis=0))[:num_pairs]]
    panels = _panels(len(singles) + len(pairs) + 1, ax)
    for panel, index in zip(panels, singles, strict=False):
        (column,) = effects.terms[index]
        rows = np.argsort(effects.x[:, column])
        x, mean = effects.x[rows, column], effects.mean[index, rows]
        half = ndtri((1 + level) / 2) * effects.sd[index, rows]
        panel.plot(x, mean, linewidth=1.2)
        panel.fill_between(x, mean - half, mean + half, alpha=0.3, linewidth=0)
        panel.plot(x, np.full(len(x), 0.03), "|", color="0.2", markersize=6, transform=panel.get_xaxis_transform())
        panel.set(xlabel=names[column], ylabel="effect")
        if panel is not panels[0]:
            panel.sharey(panels[0])
    size = np.max(np.abs(effects.mean[pairs]), initial=0.0)
    for panel, index in zip(panels[len(singles) :], pairs, strict=False):
        first, second = effects.terms[index]
        style = {"c": effects.mean[index], "s": 18, "cmap": "RdBu_r", "vmin": -size, "vmax": size}
        points = panel.scatter(*effects.x[:, [first, second]].T, edgecolors="0.6", linewidths=0.3, **style)
        panel.figure.colorbar(points, ax=panel, label="effect")
        panel.set(xlabel=names[first], ylabel=names[second])
    tails, places = [(1 - level) / 2, (1 + level) / 2], np.arange(len(names))
    for offset, label in ((-0.2, "first"), (0.2, "total")):
        draws = getattr(effects, label)
        mean, (low, high) = draws.mean(axis=0), np.quantile(draws, tails, axis=0)
        error = np.maximum([mean - low, high - mean], 0.0)
        panels[-1].bar(places + offset, mean, 0.4, yerr=error, label=label, error_kw={"linewidth": 1})
    panels[-1].set_xticks(places, names)
    panels[-1].set(ylabel="Sobol index")
    panels[-1].legend(frameon=False, fontsize="small")
    return panels


def _panels(num: int, ax: "Sequence[Axes] | None") -> np.ndarray:
    """Return so many axes, of a new figure if there are none."""
    if ax is not None:
        axes = np.ravel(np.asarray(ax, object))
        if len(axes) != num:
            raise ValueError(f"ax must hold an axes for each of {num} panels, but holds {len(axes)}.")
        return axes
    from matplotlib import pyplot  # needs a display

    columns = min(num, 4)
    shape = -(-num // columns), columns
    _, axes = pyplot.subplots(*shape, figsize=(3 * columns, 2.6 * shape[0]), layout="constrained", squeeze=False)
    for panel in axes.ravel()[num:]:
        panel.remove()
    return axes.ravel()[:num]


_REFERENCE: dict[str, Any] = {"color": "0.2", "linewidth": 1, "linestyle": "--"}  # the line of an exact posterior


def _axes_or_new(ax: "Axes | None") -> "Axes":
    if ax is not None:
        return ax
    from matplotlib import pyplot  # needs a display

    return pyplot.subplots(figsize=(5, 3.5), layout="constrained")[1]


def _draw_band(ax: "Axes", x: np.ndarray, band: tuple[np.ndarray, np.ndarray], level: float, labels: list[str]) -> None:
    """Draw the simultaneous band, its title, and the legend of the curves."""
    ax.fill_between(x, *band, color="0.5", alpha=0.25, linewidth=0, zorder=0)
    ax.set_title(f"band: {100 * level:g} % simultaneous, exact posterior", fontsize="medium")
    if labels != [""]:
        ax.legend(frameon=False, fontsize="small", ncols=1 + (len(labels) > 6))


def _mean_and_range(sizes: Any) -> tuple[float, float, float]:
    if isinstance(sizes, Mapping):
        return sizes["mean"], sizes["min"], sizes["max"]
    return np.mean(sizes), np.min(sizes), np.max(sizes)
