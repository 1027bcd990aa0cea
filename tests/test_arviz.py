"""Weights: Pareto-smoothed, whichever generation of ArviZ gives them, and tempered."""

import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from numpyro_wide._arviz import effective_share, next_temperature, pareto_smoothed


@pytest.mark.parametrize("shift", [0.0, -3000.0, 3000.0])
@pytest.mark.parametrize(("shape", "num_draws"), [(0.3, 2000), (0.9, 2000), (0.5, 400)])
def test_the_shape_is_that_of_a_pareto_law_wherever_the_ratios_lie(shape, num_draws, shift):
    """Weights u^-k have a tail of shape k."""
    log_ratios = -shape * np.log(np.random.default_rng(0).uniform(size=num_draws)) + shift
    log_weights, found = pareto_smoothed(log_ratios)
    assert abs(found - shape) < 4 * (1 + shape) / np.sqrt(3 * num_draws**0.5)
    np.testing.assert_allclose(logsumexp(log_weights), 0, atol=1e-6)
    # The bulk stays in proportion.
    low = np.argsort(log_ratios)[: num_draws // 2]
    np.testing.assert_allclose(np.ptp((log_weights - log_ratios)[low]), 0, atol=1e-6)


@pytest.mark.fault("_arviz.py", "_MIN_DRAWS = 25", "_MIN_DRAWS = 2")
@pytest.mark.parametrize("num_draws", [1, 4, 20, 24])
def test_few_draws_have_no_tail(num_draws):
    log_ratios = np.append(np.random.default_rng(0).normal(size=num_draws - 1), -np.inf if num_draws > 1 else 0) - 1000
    log_weights, shape = pareto_smoothed(log_ratios)
    assert shape == np.inf
    np.testing.assert_allclose(np.exp(log_weights), softmax(log_ratios), rtol=1e-9)


def test_a_tail_of_equal_weights_stays_as_it_is():
    log_weights, _ = pareto_smoothed(np.append(np.full(900, -1.0), np.zeros(100)))
    np.testing.assert_allclose(np.exp(log_weights[:900]), np.exp(-1) / (900 * np.exp(-1) + 100), rtol=1e-6)


@pytest.mark.fault("_arviz.py", "beta + float(np.exp(low))", "float(np.exp(low))")
def test_next_temperature_of_gaussian_log_weights():
    """Weights exp(Δ s x) of normal x are worth exp(-Δ² s²) of their number."""
    log_weights = 100 + 8 * np.random.default_rng(0).normal(size=200_000)
    step = next_temperature(0.5, log_weights, 0.25) - 0.5
    np.testing.assert_allclose(step, np.sqrt(np.log(4)) / 8, rtol=0.02)
    assert next_temperature(0.9, log_weights, 0.25) == 1.0
    with_zeros = np.concatenate([log_weights, [-np.inf]])
    np.testing.assert_allclose(next_temperature(0.5, with_zeros, 0.25) - 0.5, step, rtol=1e-3)
    np.testing.assert_allclose(effective_share(8 * np.random.default_rng(1).normal(size=10) * 0), 1.0)
