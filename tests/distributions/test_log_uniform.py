"""The log-uniform penalty against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from numpyro_wide import log_uniform_kl


def grid():
    edges = [0.0, np.nextafter(1, 0), 1.0, np.nextafter(1, 2), 30.0, np.nextafter(30, 31)]
    return np.concatenate([edges, np.geomspace(1e-12, 1e8, 1500)])


def penalty(u):
    """Poisson-weighted digammas in float64, and beyond u = 200 their asymptotic series."""
    if u < 200:
        k = np.arange(700)
        log_weight = scipy.special.xlogy(k, u) - u - scipy.special.gammaln(k + 1)
        return 0.5 * (np.log(2) + np.sum(np.exp(log_weight) * scipy.special.digamma(k + 0.5)))
    j = np.arange(1, 12)
    odd = np.cumprod(2.0 * j - 1)
    return 0.5 * np.log(2 * u) - np.sum(odd / (2 * j * (2 * u) ** j))


def slope(u):
    root = np.sqrt(u)
    return np.where(u > 0, scipy.special.dawsn(root) / np.where(u > 0, root, 1), 1)


def check(tolerance):
    u = grid()
    loc = jnp.asarray(np.sqrt(2 * u))
    values = log_uniform_kl(loc, 1.0)
    assert values.dtype == loc.dtype
    np.testing.assert_allclose(values, [penalty(x) for x in u], atol=tolerance, rtol=tolerance)
    gradient = jax.jit(jax.vmap(jax.grad(log_uniform_kl, (0, 1))))(loc, jnp.ones_like(loc))
    # u = loc²/2 at scale 1, so the chain rule gives g loc and −g loc².
    np.testing.assert_allclose(gradient[0], slope(u) * np.sqrt(2 * u), atol=1e-30, rtol=tolerance)
    np.testing.assert_allclose(gradient[1], -slope(u) * 2 * u, atol=1e-30, rtol=tolerance)


@pytest.mark.fault("distributions/_log_uniform.py", "2.0 * high) - _polynomial(tail, 0.5 / high)", "2.0 * high)")
def test_value_and_gradient_in_float64(x64):
    check(1e-9)


@pytest.mark.as_compiled
def test_value_and_gradient_in_float32():
    check(2e-6)


@pytest.mark.slow
def test_quadrature(x64):
    # KL + entropy is E log|w|; a Gauss-Hermite rule on each side of the singularity would be slow, so
    # integrate in log|w|, where the integrand is smooth.
    t = np.linspace(-60, 6, 200001)
    for mu, sigma in ((0.0, 0.7), (1.3, 0.7), (-4.0, 1.1)):
        density = sum(np.exp(-0.5 * ((s * np.exp(t) - mu) / sigma) ** 2) for s in (1, -1)) * np.exp(t)
        density /= sigma * np.sqrt(2 * np.pi)
        expected = np.trapezoid(t * density, t)
        # E log(1/q p) = −½ log(2πe σ²) + E log|w|; without its constant the penalty is E log(|w|/σ).
        np.testing.assert_allclose(log_uniform_kl(mu, sigma), expected - np.log(sigma), atol=1e-8)


def test_extremes_and_higher_derivatives(x64):
    gradients = jax.jit(jax.grad(log_uniform_kl, (0, 1)))
    for loc, scale in ((0.0, 1.0), (1.0, 1e-150), (1e150, 1.0), (1e-200, 1.0), (5.0, 1e6)):
        gradient = gradients(loc, scale)
        assert np.all(np.isfinite(gradient))
    curvature = jax.jit(jax.grad(jax.grad(lambda v: log_uniform_kl(jnp.sqrt(2 * v), 1.0))))
    for u in (0.3, 2.0, 50.0):
        # dg/du = ((1 − 2u g) − g) / 2u
        np.testing.assert_allclose(curvature(u), (1 - 2 * u * slope(u) - slope(u)) / (2 * u), rtol=1e-6)
