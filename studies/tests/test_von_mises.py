"""The von Mises distribution in natural parameters, from the uniform one to nearly a point, against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from studies._von_mises import VonMises

CONCENTRATIONS = (1e-6, 1e-3, 0.3, 0.4999, 0.5001, 2.0, 29.9, 30.1, 1e3, 1e4, 1e6)
LOC = 1.2


def eta_of(concentration):
    return concentration * np.array([np.cos(LOC), np.sin(LOC)])


def oracle(eta, value):
    """Log density and its gradient, from SciPy's scaled Bessel functions in float64."""
    concentration = np.hypot(*eta)
    gap = np.angle(np.exp(1j * (value - np.arctan2(eta[1], eta[0]))))
    log_density = -2 * concentration * np.sin(gap / 2) ** 2 - np.log(2 * np.pi * scipy.special.i0e(concentration))
    mean_length = scipy.special.i1e(concentration) / scipy.special.i0e(concentration)
    point = np.array([np.cos(value), np.sin(value)])
    return log_density, point - mean_length * eta / concentration


def log_density(eta, value):
    return VonMises(eta).log_prob(value)


@pytest.mark.as_compiled
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keeps_its_digits(x64, dtype):
    etas = np.stack([eta_of(concentration) for concentration in CONCENTRATIONS]).astype(dtype)
    values = (LOC + 1.3 / np.sqrt(1 + np.array(CONCENTRATIONS))).astype(dtype)
    actual = jax.jit(jax.vmap(jax.value_and_grad(log_density)))(etas, values)
    eps = np.finfo(dtype).eps
    for eta, value, log_prob, score in zip(etas.astype(float), values.astype(float), *actual, strict=True):
        expected, expected_score = oracle(eta, value)
        # An angle is rounded by ε: at distance s from the mean this costs ε κ s, and s√κ is 1.3 here.
        np.testing.assert_allclose(log_prob, expected, rtol=20 * eps, atol=10 * eps * np.sqrt(1 + np.hypot(*eta)))
        np.testing.assert_allclose(score, expected_score, rtol=100 * eps, atol=10 * eps)


@pytest.mark.as_compiled
@pytest.mark.parametrize("mean", [0.0, 0.7, -2.3])
def test_the_normaliser_is_learned_at_large_concentrations(mean):
    """The derivative in κ at the mean, 1 − I₁/I₀ ≈ 1/(2κ), drowns in rounding where it is a difference."""
    concentrations, direction = np.array([1e2, 1e4, 1e6]), jnp.array([jnp.cos(mean), jnp.sin(mean)])
    along = jax.grad(lambda concentration: log_density(concentration * direction, mean))
    expected = 1 - scipy.special.ive(1, concentrations) / scipy.special.ive(0, concentrations)
    np.testing.assert_allclose(jax.jit(jax.vmap(along))(concentrations.astype(np.float32)), expected, rtol=1e-5)


def test_is_smooth_at_zero():
    value = 0.7
    point = np.array([np.cos(value), np.sin(value)])

    @jax.jit
    def derivatives(eta):
        first = jax.grad(lambda eta: VonMises(eta + 1e-4).log_prob(value))(eta)
        return log_density(eta, value), jax.grad(log_density)(eta, value), first

    log_prob, score, shifted = derivatives(jnp.zeros(2))
    np.testing.assert_allclose(log_prob, -np.log(2 * np.pi), rtol=1e-6)
    np.testing.assert_allclose(score, point, rtol=1e-6)
    np.testing.assert_allclose(shifted, point - 0.5e-4, rtol=1e-6)


def test_second_derivatives_are_the_covariance_of_the_statistics(x64):
    concentrations = [0.0, 0.3, 20.0, 40.0]
    hessians = jax.jit(jax.vmap(lambda eta: jax.hessian(log_density)(eta, 0.3)))
    angles = np.linspace(-np.pi, np.pi, 20_001)[1:]
    for concentration, hessian in zip(
        concentrations, hessians(np.stack([eta_of(concentration) for concentration in concentrations])), strict=True
    ):
        mass = np.exp(concentration * (np.cos(angles - LOC) - 1))
        covariance = np.cov(np.stack([np.cos(angles), np.sin(angles)]), aweights=mass, ddof=0)
        np.testing.assert_allclose(hessian, -covariance, rtol=1e-7, atol=1e-12)


def test_draws_have_the_right_moments():
    concentrations, num_draws = np.array([0.0, 1.5, 1e4]), 20_000
    distribution = VonMises(np.stack([eta_of(c) for c in concentrations]).astype(np.float32))
    gaps = np.asarray(distribution.sample(jax.random.key(0), (num_draws,)), float) - LOC
    mean_length = scipy.special.i1e(concentrations) / scipy.special.i0e(concentrations)
    for sample, expected in ((np.cos(gaps), mean_length), (np.sin(gaps), 0)):
        assert np.all(np.abs(np.mean(sample, axis=0) - expected) < 4 * np.std(sample, axis=0) / num_draws**0.5)
    np.testing.assert_allclose(distribution.variance, 1 - mean_length, rtol=2e-3)
