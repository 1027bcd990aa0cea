"""Mixtures of Gaussians over draws: moments by sampling, and quantiles invert SciPy's distribution function."""

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq
from scipy.special import logsumexp

from numpyro_wide import _mixture

RNG = np.random.default_rng(0)
MEAN, VARIANCE, Y = 3 + RNG.normal(size=(3, 5)), np.exp(RNG.normal(size=(3, 5))), 3 + RNG.normal(size=5)
WEIGHTS = np.array([1, 3, 2]) / 6


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_moments_are_those_of_samples(weights):
    mean, variance = _mixture.moments(MEAN, VARIANCE, weights)
    chosen = RNG.choice(3, 400_000, p=weights)
    samples = MEAN[chosen] + np.sqrt(VARIANCE[chosen]) * RNG.normal(size=(400_000, 5))
    np.testing.assert_allclose(mean, samples.mean(axis=0), atol=5 * np.sqrt(variance.max() / 400_000))
    np.testing.assert_allclose(variance, samples.var(axis=0), rtol=0.02)


def test_quantiles_by_root_finding():
    levels = np.array([0.01, 0.3, 0.5, 0.9, 0.999])
    found = _mixture.quantile(levels, MEAN, VARIANCE)
    for i, level in enumerate(levels):

        def below(at, i=i):
            return stats.norm.cdf(at, MEAN[:, i], np.sqrt(VARIANCE[:, i])).mean() - levels[i]

        np.testing.assert_allclose(found[i], brentq(below, -50, 50, xtol=1e-12), atol=1e-9, err_msg=str(level))


def test_rows_of_several_outputs_share_their_draw():
    by_draw = _mixture.component_log_density(Y, MEAN, VARIANCE)
    np.testing.assert_allclose(by_draw, stats.norm.logpdf(Y, MEAN, np.sqrt(VARIANCE)), rtol=1e-12)
    expected = logsumexp(by_draw.sum(axis=1) + np.log(WEIGHTS))
    np.testing.assert_allclose(_mixture.log_average(by_draw.sum(axis=1), WEIGHTS), expected, rtol=1e-12)
