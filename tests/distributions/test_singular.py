"""Degenerate normals and dropout rows as distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.stats

from numpyro_wide.distributions import BernoulliDropout, DegenerateNormal, GaussianDropout
from tests.marks import parametrize

ROWS = np.array([[1.0, -2.0, 0.5], [0.3, 0.4, -1.2]])
LOC = np.array([0.5, -1.0, 2.0])
BASIS = np.array([[1.0, 0.5], [0.2, -1.0], [-0.3, 0.4]])
SCALE = np.array([0.7, 1.9])


def examples():
    return [
        DegenerateNormal(LOC, BASIS, SCALE),
        DegenerateNormal(np.stack([LOC, -LOC]), BASIS, SCALE),
        BernoulliDropout(ROWS, 0.3),
        BernoulliDropout(ROWS, np.array([0.3, 0.6]), temperature=0.2),
        GaussianDropout(ROWS, 0.8),
        GaussianDropout(ROWS[0], np.array([0.5, 2.0])),
    ]


@parametrize("index", range(6), rest="slow")
def test_shapes_moments_support_and_transformations(index):
    d = examples()[index]
    n = 40000
    draws = jax.jit(lambda d, key: d.sample(key, (n,)))(d, jax.random.key(index))
    assert draws.shape == (n, *d.batch_shape, *d.event_shape) == d.shape((n,))
    assert bool(jnp.all(d.support(draws)))
    assert not bool(jnp.any(d.support(draws + jnp.array([0.1, 0.2, 0.3]))))
    error = 6 * np.sqrt(np.asarray(d.variance) / n)
    assert np.all(np.abs(draws.mean(0) - d.mean) < error)
    np.testing.assert_allclose(draws.var(0), d.variance, rtol=0.06)
    factor, weights = d.covariance_factor()
    np.testing.assert_allclose(jnp.sum(weights[..., None, :] * factor**2, -1), d.variance, rtol=1e-5)
    # The entropy is the expectation of −log q in the same measure.
    log_q = jax.vmap(d.log_prob)(draws)
    assert log_q.shape == (n, *d.batch_shape)
    np.testing.assert_allclose(-log_q.mean(0), d.entropy(), atol=0.03)
    np.testing.assert_array_equal(d.log_prob(draws + jnp.array([0.1, 0.2, 0.3])), -jnp.inf)
    leaves, treedef = jax.tree.flatten(d)
    again = jax.tree.unflatten(treedef, leaves)
    np.testing.assert_array_equal(again.log_prob(draws[0]), d.log_prob(draws[0]))
    assert again.support == d.support
    assert d.expand((4, *d.batch_shape)).sample(jax.random.key(0)).shape == (4, *d.batch_shape, 3)


def test_degenerate_density_in_coordinates(x64):
    q, r = np.linalg.qr(BASIS)
    d = DegenerateNormal(LOC, BASIS, SCALE)
    point = LOC + BASIS @ np.array([0.4, -1.1])
    covariance = r @ np.diag(SCALE**2) @ r.T
    expected = scipy.stats.multivariate_normal(np.zeros(2), covariance).logpdf(q.T @ (point - LOC))
    np.testing.assert_allclose(d.log_prob(point), expected, rtol=1e-10)
    # Orthonormal columns need no volume term.
    orthonormal = DegenerateNormal(LOC, q, SCALE)
    expected = scipy.stats.norm(0, SCALE).logpdf(q.T @ (point - LOC)).sum()
    np.testing.assert_allclose(orthonormal.log_prob(point), expected, rtol=1e-10)
    full = DegenerateNormal(LOC, np.linalg.cholesky(np.cov(np.random.default_rng(0).normal(size=(3, 9)))), np.ones(3))
    proper = dist.MultivariateNormal(LOC, scale_tril=full.basis)
    np.testing.assert_allclose(full.log_prob(point), proper.log_prob(point), rtol=1e-8)


def test_gaussian_dropout_density_integrates_to_one(x64):
    d = GaussianDropout(ROWS[0], 0.6)
    s = np.linspace(-8, 10, 4001)
    density = jnp.exp(d.log_prob(s[:, None] * ROWS[0]))
    length = s * np.linalg.norm(ROWS[0])
    np.testing.assert_allclose(np.trapezoid(density, length), 1.0, rtol=1e-8)


def test_bernoulli_draws_are_atoms_and_the_relaxed_gradient_has_a_value():
    d = BernoulliDropout(ROWS, 0.4, temperature=0.05)
    draws = d.sample(jax.random.key(0), (2000,))
    zero = np.all(draws == 0, -1)
    assert np.all(zero | np.all(draws == np.float32(ROWS), -1))
    np.testing.assert_allclose(zero.mean(0), 0.4, atol=0.05)

    def mean_first(rate, temperature):
        draws = BernoulliDropout(ROWS[0], rate, temperature=temperature).sample(jax.random.key(0), (200000,))
        return draws[:, 0].mean()

    # d/dp E[w] = −θ; without a temperature draws have no slope in the rate.
    np.testing.assert_allclose(jax.grad(mean_first)(0.4, 0.2), -ROWS[0, 0], atol=0.05)
    assert jax.grad(mean_first)(0.4, None) == 0
    assert np.isfinite(jax.grad(mean_first)(1.0, 0.2))


@parametrize("index", range(6), rest="slow")
def test_gradients_are_finite_and_vmap_works(index):
    d = examples()[index]
    value = d.sample(jax.random.key(1))

    def loss(d):
        return jnp.sum(jnp.where(jnp.isfinite(d.log_prob(value)), d.log_prob(value), 0.0)) + jnp.sum(
            d.sample(jax.random.key(2))
        )

    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(jax.grad(loss)(d)))
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.vmap(d.sample)(keys).shape == (3, *d.shape())


@parametrize("dtype", [jnp.float16, jnp.bfloat16, int], rest="slow")
def test_numbers_of_any_type_will_do(dtype):
    line = DegenerateNormal(jnp.zeros(2, dtype), jnp.ones((2, 1), dtype), jnp.ones(1, dtype))
    assert line.log_prob(line.sample(jax.random.key(0))).dtype == jnp.float32
    np.testing.assert_allclose(
        line.log_prob(jnp.zeros(2, dtype)), -0.5 * np.log(2 * np.pi) - 0.5 * np.log(2), rtol=1e-6
    )
    rows = BernoulliDropout([[1, 2]], 0.25)
    np.testing.assert_allclose(np.exp(rows.log_prob(jnp.array([[0, 0]], dtype))), 0.25, rtol=1e-6)
