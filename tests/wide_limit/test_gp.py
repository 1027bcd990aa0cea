"""Gaussian process regression against scikit-learn and against the Gaussian density."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel

from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior
from tests.marks import parametrize

NUM_TRAIN, NUM_TEST = 12, 4


class Precomputed(Kernel):
    """A kernel that looks its values up: the inputs are row numbers of one matrix."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __call__(self, rows, columns=None, eval_gradient=False):
        columns = rows if columns is None else columns
        values = self.matrix[np.ix_(rows[:, 0].astype(int), columns[:, 0].astype(int))]
        return (values, np.empty((*values.shape, 0))) if eval_gradient else values

    def diag(self, rows):
        return np.diag(self(rows))

    def is_stationary(self):
        return False


def problem(num_outputs=None):
    """Return the kernel of all inputs, training rows first, and targets away from 0."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(NUM_TRAIN + NUM_TEST, 2))
    kernel, _ = fcn_kernel(2, "erf", w_std=1.4, b_std=0.3)(x)
    shape = (NUM_TRAIN,) if num_outputs is None else (NUM_TRAIN, num_outputs)
    return np.asarray(kernel), 1.5 + rng.normal(size=shape)


def parts(kernel):
    return kernel[:NUM_TRAIN, :NUM_TRAIN], kernel[NUM_TRAIN:, :NUM_TRAIN], kernel[NUM_TRAIN:, NUM_TRAIN:]


@parametrize("num_outputs", [None, 3], rest="slow")
@parametrize("noise_scale", [0.05, 0.7, np.linspace(0.1, 0.9, NUM_TRAIN)], ids=["low", "high", "rows"], rest="slow")
def test_agrees_with_scikit_learn(x64, noise_scale, num_outputs):
    kernel, targets = problem(num_outputs)
    index = np.arange(NUM_TRAIN + NUM_TEST)[:, None]
    oracle = GaussianProcessRegressor(Precomputed(kernel), alpha=noise_scale**2, optimizer=None)
    oracle.fit(index[:NUM_TRAIN], targets)
    expected_mean, expected_covariance = oracle.predict(index[NUM_TRAIN:], return_cov=True)
    mean, covariance = gp_posterior(*parts(kernel), targets, noise_scale)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-8)
    if num_outputs is not None:  # scikit-learn repeats it for each output
        covariance = np.repeat(np.asarray(covariance)[:, :, None], num_outputs, axis=2)
    np.testing.assert_allclose(covariance, expected_covariance, rtol=1e-7, atol=1e-10)
    evidence = gp_log_evidence(parts(kernel)[0], targets, noise_scale)
    np.testing.assert_allclose(evidence, oracle.log_marginal_likelihood_value_, rtol=1e-9)


def test_evidence_is_the_gaussian_density_with_its_constant(x64):
    kernel, targets = problem(2)
    covariance = parts(kernel)[0] + 0.3**2 * np.eye(NUM_TRAIN)
    expected = sum(scipy.stats.multivariate_normal(cov=covariance).logpdf(column) for column in targets.T)
    np.testing.assert_allclose(gp_log_evidence(parts(kernel)[0], targets, 0.3), expected, rtol=1e-10)


def test_evidence_has_the_closed_form_gradient(x64):
    kernel, targets = problem(2)
    train = jnp.asarray(parts(kernel)[0])
    gradients = jax.grad(gp_log_evidence, argnums=(0, 2))(train, targets, 0.3)
    inverse = np.linalg.inv(train + 0.09 * np.eye(NUM_TRAIN))
    alpha = inverse @ targets
    np.testing.assert_allclose(gradients[0], 0.5 * (alpha @ alpha.T - 2 * inverse), rtol=1e-7, atol=1e-9)
    expected = 0.3 * (np.sum(alpha**2) - 2 * np.trace(inverse))
    np.testing.assert_allclose(gradients[1], expected, rtol=1e-9)


def test_without_noise_the_data_are_interpolated(x64):
    kernel, targets = problem()
    train = parts(kernel)[0]
    mean, covariance = gp_posterior(train, train, train, targets, 0.0)
    np.testing.assert_allclose(mean, targets, rtol=1e-6)
    np.testing.assert_allclose(covariance, np.zeros_like(train), atol=1e-8)


def test_works_under_jit_and_vmap(x64):
    kernel, targets = problem()
    scales = jnp.array([0.1, 0.5])
    posterior = jax.jit(jax.vmap(lambda scale: gp_posterior(*parts(kernel), targets, scale)[0]))
    evidence = jax.jit(jax.vmap(lambda scale: gp_log_evidence(parts(kernel)[0], targets, scale)))
    for i, scale in enumerate(scales):
        expected = gp_posterior(*parts(kernel), targets, scale)[0]
        np.testing.assert_allclose(posterior(scales)[i], expected, rtol=1e-9)
        expected = gp_log_evidence(parts(kernel)[0], targets, scale)
        np.testing.assert_allclose(evidence(scales)[i], expected, rtol=1e-9)


@pytest.mark.as_compiled
def test_rounding_does_not_make_a_kernel_asymmetric():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 40)).astype("f")
    train = x @ (x / 40).T * (1 + 1e-6 * rng.normal(size=(200, 200)).astype("f"))
    mean, _ = gp_posterior(train, train, (train + train.T) / 2, x[:, 0], 1.0)
    assert mean.shape == (200,)


def test_a_negative_noise_under_jit_gives_nan_and_not_its_mirror_image():
    with jax.debug_nans(False):
        evidence = jax.jit(lambda scale: gp_log_evidence(jnp.eye(3), jnp.ones(3), scale))
        assert jnp.isnan(evidence(-0.5)) and jnp.isfinite(evidence(0.5))


@parametrize("dtype", [jnp.bfloat16, jnp.float16, int, bool], rest="slow")
def test_numbers_of_any_type_will_do(dtype):
    train = jnp.eye(3, dtype=dtype)
    mean, covariance = gp_posterior(train, train, train, [1, 0, 2], jnp.ones((), dtype))
    assert mean.dtype == covariance.dtype == jnp.float32
    np.testing.assert_allclose(mean, [0.5, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(gp_log_evidence(train, [1, 0, 2], 1), -2.5 * 0.5 - 1.5 * np.log(4 * np.pi), rtol=1e-6)
