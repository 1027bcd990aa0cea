"""Warnings of rows that may have decided a fit: copies of others, and targets far out."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

from numpyro_wide.machine import double_precision

if TYPE_CHECKING:
    from numpyro_wide.wide_limit.fitted_limit import WideLimitFit

_SMALL_NOISE = 0.1  # of the targets' root mean square: the evidence of copied rows goes far below
# From how many rows on one can be told from the others. How far it must lie from what they predict: in robust standard
# deviations of such residuals, and, for where a function is steep they are large too, in those of the other targets.
_FEWEST_ROWS, _FAR, _FAR_OF_TARGETS = 10, 20.0, 5.0
_ONE_OF = 50  # of so many rows one may be far out, and be told


def warn_of_far_rows(found: "WideLimitFit") -> None:
    """Warn if one row, or few of many, hold most of the squared residuals and lie far outside of the others."""
    if len(found.inputs) < _FEWEST_ROWS:
        return
    with double_precision():
        residuals = found.left_out()
    distances, targets = np.abs(residuals - np.median(residuals, axis=0)), found.targets.reshape(residuals.shape)
    few = max(1, len(residuals) // _ONE_OF)
    for distance, target in zip(distances.T, targets.T, strict=True):
        rows = np.argsort(-distance)[:few]
        share = np.sum(distance[rows] ** 2) / max(np.sum(distance**2), np.finfo(float).tiny)
        bound = max(_FAR * 1.4826 * np.median(distance), _FAR_OF_TARGETS * np.std(np.delete(target, rows)))
        rows = rows[distance[rows] > bound]
        if share > 0.5 and len(rows):
            row = int(rows[0])
            warnings.warn(
                f"{len(rows)} of {len(residuals)} rows, row {row} with the target {target[row]:.4g} the farthest, lie "
                f"up to {distance[row]:.2g} from what the other rows predict, and hold most of the sum of squared "
                f"residuals: the fitted noise, {found.noise_scale:.2g}, and the scales are decided by them. Correct or "
                "drop them if they are mistakes; otherwise transform the targets (take logarithms), or use a "
                "likelihood with heavy tails.",
                UserWarning,
                stacklevel=3,  # whoever calls fit
            )
            return


def warn_of_copies(found: "WideLimitFit") -> None:
    """Warn if the noise is small and rows repeat others."""
    inputs, targets, noise_scale = found.inputs, found.targets, found.noise_scale
    if noise_scale >= _SMALL_NOISE * np.sqrt(np.mean(targets**2)):
        return
    rows = np.column_stack([inputs.reshape(len(inputs), -1), targets])
    num_copies = len(inputs) - len(np.unique(rows, axis=0))
    if num_copies:
        warnings.warn(
            f"the fitted noise, {noise_scale:.2g}, is small beside the targets, and {num_copies} of {len(inputs)} rows "
            "repeat the inputs and targets of others: copies pass for measurements without noise. If they are copies, "
            "fit to distinct rows, those of numpy.unique(numpy.column_stack([x, y]), axis=0).",
            UserWarning,
            stacklevel=3,  # whoever calls fit
        )
