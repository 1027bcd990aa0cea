"""Axes to draw on."""

from typing import Any


def axes_or_new(ax: Any) -> Any:
    """Return the axes given, or those of a new figure."""
    if ax is not None:
        return ax
    from matplotlib import pyplot  # here, so that the package imports without a display

    return pyplot.subplots(figsize=(5, 3.5), layout="constrained")[1]
