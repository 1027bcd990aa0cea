"""Importance weights turn a guide that is not exact into the posterior, and say when they cannot."""

import jax
import numpy as np
import optax
import pytest
from amortized_cases import INTERCEPT, SCALE, SLOPE, linear_guide, normal_model

from numpyro_wide import AmortizedForwardKL

X = 2.5
MEAN = SLOPE * X + INTERCEPT


def weighted(offset, factor):
    """A guide that is off by some standard deviations, and too wide or too narrow."""
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x")
    params = {"slope": SLOPE, "intercept": INTERCEPT + offset * SCALE, "scale": factor * SCALE}
    return trainer.importance_sample(jax.random.key(0), params, {"x": X}, 4000)


def test_wide_guide_is_corrected():
    sample = weighted(0.5, 1.5)
    weights, theta = np.exp(sample.log_weights), np.asarray(sample.samples["theta"])
    assert weights.sum() == pytest.approx(1, rel=1e-4)
    assert sample.effective_sample_size == pytest.approx(1 / np.sum(weights**2), rel=1e-3)
    assert 2000 < sample.effective_sample_size < 4000
    assert theta.mean() == pytest.approx(MEAN + 0.5 * SCALE, abs=4 * 1.5 * SCALE / 4000**0.5)
    mean = np.sum(weights * theta)
    error = SCALE / sample.effective_sample_size**0.5
    assert mean == pytest.approx(MEAN, abs=4 * error)
    assert np.sqrt(np.sum(weights * (theta - mean) ** 2)) == pytest.approx(SCALE, abs=4 * error)
    assert sample.pareto_k < 0.5


def test_exact_guide_has_equal_weights():
    sample = weighted(0.0, 1.0)
    assert sample.effective_sample_size == pytest.approx(4000, rel=1e-3)
    np.testing.assert_allclose(sample.log_weights, -np.log(4000), atol=1e-3)


def test_narrow_guide_is_found_out():
    # The weights' tail has the shape 1 - 0.25^2 = 0.94.
    assert 0.7 < weighted(0.0, 0.25).pareto_k < 1.1
