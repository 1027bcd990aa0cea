"""Figures of slices through three modes of a log posterior (Hron 2022, Fig. 5)."""

from typing import Any

import numpy as np

from numpyro_wide.diagnostics import PosteriorSlice
from numpyro_wide.plots._axes import axes_or_new


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
