"""A dense float64 oracle of the conjugate readout: NumPy and SciPy, one output at a time."""

from typing import NamedTuple

import numpy as np
from scipy.stats import multivariate_normal


class Case(NamedTuple):
    """Arguments of the functions under test, as NumPy arrays."""

    features: np.ndarray
    targets: np.ndarray
    phi: np.ndarray
    noise_scale: np.ndarray
    prior_loc: np.ndarray
    prior_scale: np.ndarray


def random_case(n, d, k, noise_shape=(), prior_shape=(), seed=0):
    """Features, targets and everything else drawn at random; ``k=None`` gives vectors."""
    rng = np.random.default_rng(seed)
    columns = () if k is None else (k,)
    return Case(
        features=rng.normal(size=(n, d)) * rng.uniform(0.3, 2.0, d),
        targets=rng.normal(size=(n, *columns)) + 1.5,
        phi=rng.normal(size=(d, *columns)),
        noise_scale=rng.uniform(0.2, 0.9, noise_shape),
        prior_loc=rng.normal(size=prior_shape) if prior_shape else np.array(0.0),
        prior_scale=rng.uniform(0.5, 2.0, prior_shape) if prior_shape else np.array(1.0),
    )


def per_output(case, variance=None):
    """Yields (features, targets, noise variances (n,), prior loc (d,), prior sd (d,)) of each output."""
    variance = case.noise_scale**2 if variance is None else variance
    targets = case.targets.reshape(len(case.targets), -1)
    variances = np.broadcast_to(variance, case.targets.shape).reshape(targets.shape)
    loc = np.broadcast_to(case.prior_loc, case.phi.shape).reshape(-1, targets.shape[1])
    scale = np.broadcast_to(case.prior_scale, case.phi.shape).reshape(-1, targets.shape[1])
    for j in range(targets.shape[1]):
        yield case.features, targets[:, j], variances[:, j], loc[:, j], scale[:, j]


def posterior(case, variance=None):
    """Mean (d, k) and covariances (k, d, d) by inverting the precision."""
    means, covariances = [], []
    for features, targets, variances, loc, scale in per_output(case, variance):
        covariance = np.linalg.inv(np.diag(scale**-2.0) + (features.T / variances) @ features)
        means.append(covariance @ (loc / scale**2 + features.T @ (targets / variances)))
        covariances.append(covariance)
    return np.stack(means, axis=1), np.stack(covariances)


def evidence(case):
    """Log density of the targets under their marginal, by SciPy."""
    total = 0.0
    for features, targets, variances, loc, scale in per_output(case):
        covariance = (features * scale**2) @ features.T + np.diag(variances)
        total += multivariate_normal.logpdf(targets, features @ loc, covariance)
    return total


def close(actual, expected, tolerance=1e-9):
    """Relative to the largest element."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * (1 + np.abs(expected).max()))
