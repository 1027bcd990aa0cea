"""Bridges between two distributions whose normalisers are known, without a model."""

import jax
import numpy as np
import pytest
from scipy import stats

from numpyro_wide.evidence import _chains, _methods
from numpyro_wide.evidence import _methods as _overlap

SHIFT, SCALE = 1.5, 0.7
LOG_RATIO = 3.0 + np.log(SCALE)  # of the normalisers of exp(3 - (x - SHIFT)² / (2 SCALE²)) and exp(-x² / 2)


def log_ratios(x):
    return 3 - 0.5 * ((x - SHIFT) / SCALE) ** 2 + 0.5 * x**2


def draws(seed, num_lower, num_upper):
    rng = np.random.default_rng(seed)
    return log_ratios(rng.normal(size=num_lower)), log_ratios(SHIFT + SCALE * rng.normal(size=num_upper))


@pytest.mark.fault("evidence/_methods.py", "share = num_upper / (num_lower + num_upper)", "share = 0.5")
@pytest.mark.parametrize(("num_lower", "num_upper"), [(2000, 2000), (500, 4000)])
def test_bridge_of_two_gaussians(num_lower, num_upper):
    found = [_overlap.bridge(*draws(seed, num_lower, num_upper)) for seed in range(100)]
    errors = np.array([bridge.log_ratio - LOG_RATIO for bridge in found])
    told = np.array([np.sqrt(np.var(b.lower) / num_lower + np.var(b.upper) / num_upper) for b in found])
    assert abs(errors.mean()) < 4 * errors.std() / 10
    assert abs(errors.std() / told.mean() - 1) < 0.3  # of 100 standard deviations, 4 errors of 7 %
    x = np.linspace(-12, 12, 20001)
    first, second = stats.norm.pdf(x), stats.norm.pdf(x, SHIFT, SCALE)
    share = num_upper / (num_lower + num_upper)
    overlap = np.sum(first * second / (share * second + (1 - share) * first)) * (x[1] - x[0])
    np.testing.assert_allclose(np.mean([bridge.overlap for bridge in found]), overlap, rtol=0.02)


def test_effective_sizes_change_the_weights_and_not_what_is_estimated():
    lower, upper = draws(0, 20_000, 20_000)
    found = _overlap.bridge(lower, upper, (20_000.0, 500.0))
    error = np.sqrt(np.var(found.lower) / lower.size + np.var(found.upper) / upper.size)
    assert abs(found.log_ratio - LOG_RATIO) < 4 * error < 0.1


def test_distributions_that_differ_by_a_constant_have_no_error():
    found = _overlap.bridge(np.full(10, -7.0), np.full(20, -7.0))
    np.testing.assert_allclose([found.log_ratio, found.overlap], [-7, 1], rtol=1e-12)
    assert np.ptp(found.lower) == np.ptp(found.upper) == 0


def test_draws_without_density_count_as_such():
    lower, upper = draws(1, 4000, 4000)
    half = np.where(np.arange(8000) < 4000, -np.inf, 0.0)
    half[4000:] = lower  # half of the lower draws lie where the upper density is zero
    np.testing.assert_allclose(_overlap.bridge(half, upper).log_ratio, LOG_RATIO - np.log(2), atol=0.1)


def test_resampling_copies_by_weight():
    weights = np.array([0.5, 0.1, 0.0, 0.4])
    with np.errstate(divide="ignore"):
        counts = np.mean(
            [np.bincount(_chains.resample(jax.random.key(k), np.log(weights), 6), minlength=4) for k in range(50)], 0
        )
    # Each count is within one of its share, and uniform places make it so on average.
    np.testing.assert_allclose(counts, 6 * weights, atol=0.25)
    assert counts[2] == 0


@pytest.mark.fault("evidence/_methods.py", "np.var(terms, ddof=1) / size)", "np.var(terms, ddof=1) / terms.size)")
def test_errors_count_the_autocorrelation_of_chains():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(8, 3000))
    chain = np.zeros_like(noise)
    for i in range(1, noise.shape[1]):
        chain[:, i] = 0.8 * chain[:, i - 1] + noise[:, i]
    error, size = _overlap.squared_error(chain)
    exact = 1 / (1 - 0.8) ** 2 / chain.size  # long-run variance of an autoregression
    np.testing.assert_allclose(error, exact, rtol=0.3)
    np.testing.assert_allclose(size, chain.size / 9, rtol=0.3)
    assert _overlap.squared_error(np.ones((2, 5))) == (0.0, 10.0) and _overlap.rhat(np.ones((2, 5))) == 1.0
    assert _overlap.rhat(chain + np.arange(8)[:, None]) > 1.2


@pytest.mark.fault("evidence/_methods.py", "influence[k + 1] -= pair.upper", "influence[k + 1] += pair.upper")
def test_error_of_a_sum_counts_draws_that_serve_two_bridges():
    """On the path N(x; 0, 1) exp(-2 β (x - 1.5)²) all is Gaussian; draws are independent, of 4 temperatures."""
    betas, rng = np.array([0.0, 0.1, 0.4, 1.0]), np.random.default_rng(0)
    precision = 1 + 4 * betas
    truth = stats.norm.logpdf(1.5, 0, 1.25**0.5) + 0.5 * np.log(2 * np.pi / 4)
    found = []
    for _ in range(60):
        x = (rng.normal(size=(8, 60, 4)) + 6 * betas / precision**0.5) / precision**0.5
        found.append(_methods._sum_of_bridges(betas, list(np.moveaxis(-2 * (x - 1.5) ** 2, -1, 0))))
    errors = np.array([one.log_evidence - truth for one in found])
    told = np.mean([one.standard_error for one in found])
    assert abs(errors.mean()) < 4 * told / 60**0.5
    assert abs(errors.std() / told - 1) < 0.3  # 3 standard deviations of that ratio
    assert found[0].method == "stepping-stone" and list(found[0].inverse_temperatures) == [0.1, 0.4, 1.0]
