"""Choice of the readout's scale of class labels, by the probabilities of labels that are left out in folds."""

import numpy as np

from numpyro_wide.surrogates.internal import Observations
from numpyro_wide.wide_limit._objectives import Bound

_NUM_FOLDS = 3
_STEP = 0.5 * np.log(10)  # between the readout's scales that are tried
_MOST = 5  # of them, above the bound's own
_BOUND = 4.0  # of the logarithm, in standard deviations a priori


def choose_readout(bound: Bound, logarithms: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the logarithms with the best readout's scale in their place, and its mean log probability of a label.

    The Gaussian of a bound lies inside of where the labels let the logits be, which costs more the larger they may be:
    the bound is largest at scales whose probabilities are far too unsure.

    Args:
        bound: objective of the rows that folds are made of.
        logarithms: logarithms of all scales over their medians.
    """
    place, spread = bound.problem.readout, bound.problem.spreads[bound.problem.readout]
    tried = []
    for step in range(-1, _MOST + 1):
        moved = logarithms.copy()
        moved[place] = np.clip(moved[place] + step * _STEP, -_BOUND * spread, _BOUND * spread)
        score = left_out(bound.gram(moved), bound.observations)
        tried.append((score * len(bound.problem.inputs) - 0.5 * (moved[place] / spread) ** 2, moved, score))
    _, logarithms, score = max(tried, key=lambda one: one[0])
    return logarithms, score


def left_out(gram: np.ndarray, observations: Observations) -> float:
    """Return the mean log probability of labels, each given the folds that it is not in; folds share classes out.

    Args:
        gram: covariance of a logit between rows, (n, n).
        observations: labels, (n,).
    """
    labels = observations.values.astype(int)
    folds = np.empty(len(labels), int)
    folds[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % _NUM_FOLDS
    found = []
    for fold in np.unique(folds):
        kept, out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        known, cross = gram[np.ix_(kept, kept)], gram[np.ix_(out, kept)]
        sites = observations[kept].fitted(known)
        probs = observations[out].predicted([site.condition(known)(cross, np.diagonal(gram)[out]) for site in sites])
        probs = probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)
        found.append(np.log(np.maximum(probs[np.arange(len(out)), labels[out]], 1e-300)))
    return float(np.mean(np.concatenate(found)))
