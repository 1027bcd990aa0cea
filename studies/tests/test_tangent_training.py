"""A study's gradient flow of linearised networks, against dense matrix exponentials."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

from numpyro_wide.wide_limit import empirical_ntk, fcn_kernel, gp_posterior, linearize
from studies._tangent_training import flow_operator, gradient_flow
from tests.marks import parametrize

TIMES = (0.0, 1e-6, 0.3, 5.0, 200.0)


def kernels(num_train=6, num_test=3):
    """Both kernels of training inputs, and of test with training inputs, with those of the test inputs; targets."""
    rng = np.random.default_rng(1)
    x, x_test = rng.normal(size=(num_train, 2)), rng.normal(size=(num_test, 2))
    kernel = fcn_kernel(2, "erf", w_std=1.4, b_std=0.3)
    return (kernel(x), kernel(x_test, x), kernel(x_test)), 1.5 + rng.normal(size=num_train)


def dense_smoother(ntk_train, ntk_cross, time):
    """Θ* Θ⁻¹ (I − exp(−tΘ)) as it is written."""
    learned = np.eye(len(ntk_train)) - scipy.linalg.expm(-time * np.asarray(ntk_train))
    return np.asarray(ntk_cross) @ np.linalg.solve(ntk_train, learned)


@parametrize("time", TIMES, rest="slow")
def test_the_flow_is_a_linear_map_of_the_targets(x64, time):
    (train, cross, _), targets = kernels()
    start, test_start = 0.3 * targets, np.arange(3.0)
    expected = test_start + dense_smoother(train[1], cross[1], time) @ (targets - start)
    found = gradient_flow(train[1], cross[1], targets, time, initial_train=start, initial_test=test_start)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def test_at_infinite_time_the_data_are_interpolated(x64):
    (train, cross, _), targets = kernels()
    np.testing.assert_allclose(gradient_flow(train[1], train[1], targets), targets, rtol=1e-8)
    expected = dense_smoother(train[1], cross[1], 1e6) @ targets
    np.testing.assert_allclose(gradient_flow(train[1], cross[1], targets), expected, rtol=1e-8)


def test_training_the_readout_alone_gives_the_posterior_mean(x64):
    """With the NNGP kernel as its tangent kernel, the flow from zero is the posterior mean without noise."""
    (train, cross, test), targets = kernels()
    expected, _ = gp_posterior(train[0], cross[0], test[0], targets, 0.0)
    np.testing.assert_allclose(gradient_flow(train[0], cross[0], targets), expected, rtol=1e-6, atol=1e-9)


def test_several_outputs_are_trained_side_by_side(x64):
    (train, cross, _), targets = kernels()
    both = jnp.stack([targets, -2 * targets + 1], axis=1)
    found = gradient_flow(train[1], cross[1], both, 2.0)
    for column in range(2):
        alone = gradient_flow(train[1], cross[1], both[:, column], 2.0)
        np.testing.assert_allclose(found[:, column], alone, rtol=1e-10)


@pytest.mark.slow
def test_a_linearised_network_follows_the_closed_form(x64, make_network):
    """Runge-Kutta on the parameters of the linearised network, against the flow of its predictions."""
    network = make_network()
    f = lambda params, x: network(params, x)[:, 0]  # noqa: E731
    params0 = network.init(jax.random.key(0), [2, 16, 1])
    rng = np.random.default_rng(2)
    x, x_test, targets = rng.normal(size=(5, 2)), rng.normal(size=(3, 2)), 1.0 + rng.normal(size=5)
    f_lin, (flat0, unravel) = linearize(f, params0), ravel_pytree(params0)
    velocity = jax.grad(lambda flat: -0.5 * jnp.sum((f_lin(unravel(flat), x) - targets) ** 2))

    def step(flat, _):
        h = 0.01
        k1 = velocity(flat)
        k2 = velocity(flat + h / 2 * k1)
        k3 = velocity(flat + h / 2 * k2)
        k4 = velocity(flat + h * k3)
        return flat + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    trained, _ = jax.jit(lambda flat: jax.lax.scan(step, flat, length=300))(flat0)
    ntk = jax.jit(lambda x1, x2: empirical_ntk(f, params0, x1, x2))
    closed_form = gradient_flow(
        ntk(x, x), ntk(x_test, x), targets, 3.0, initial_train=f(params0, x), initial_test=f(params0, x_test)
    )
    np.testing.assert_allclose(f_lin(unravel(trained), x_test), closed_form, rtol=1e-6)


def test_derivatives_where_eigenvalues_repeat(x64):
    """Against the derivative of a matrix exponential, which knows no eigenvalues."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(7, 7)))[0]
    ntk = (vectors * np.array([2.0, 2.0, 2.0, 1.0, 1.0 + 1e-9, 0.03, 0.01])) @ vectors.T
    direction = rng.normal(size=(7, 7))
    direction = direction + direction.T

    def dense(s, time):
        # the upper right block of exp([[−tΘ, tI], [0, 0]]) is Θ⁻¹ (I − exp(−tΘ))
        upper = jnp.concatenate([-time * (ntk + s * direction), time * jnp.eye(7)], axis=1)
        exponential = jax.scipy.linalg.expm(jnp.concatenate([upper, jnp.zeros((7, 14))]))
        return exponential[:7, 7:]

    spectral = lambda s, time: flow_operator(ntk + s * direction, time)  # noqa: E731
    oracle, rule = (jax.jit(jax.jacfwd(function, argnums=(0, 1))) for function in (dense, spectral))
    for time in (1e-9, 1e-4, 0.003, 0.05, 1.0, 30.0):
        np.testing.assert_allclose(spectral(0.0, time), dense(0.0, time), rtol=1e-9, atol=1e-12 * time)
        for actual, expected in zip(rule(0.0, time), oracle(0.0, time), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-10 * np.max(np.abs(expected)))


def test_gradients_of_the_flow_are_right(x64):
    rng = np.random.default_rng(4)
    corners = jnp.eye(4)  # equidistant inputs: eigenvalues repeat
    x_test, targets = rng.normal(size=(2, 4)), rng.normal(size=4)

    @jax.jit
    def summary(w_std, time):
        kernel = fcn_kernel(1, "relu", w_std=w_std, b_std=0.2)
        return jnp.sum(gradient_flow(kernel(corners)[1], kernel(x_test, corners)[1], targets, time) ** 2)

    gradient = jax.jit(jax.grad(summary, argnums=(0, 1)))
    for time in (0.4, 8.0):
        for index, shift in enumerate(np.eye(2) * 1e-6):
            up, down = (summary(1.2 + sign * shift[0], time + sign * shift[1]) for sign in (1, -1))
            np.testing.assert_allclose(gradient(1.2, time)[index], (up - down) / 2e-6, rtol=1e-6, atol=1e-9)
    up, down = summary(1.2 + 1e-6, jnp.inf), summary(1.2 - 1e-6, jnp.inf)
    np.testing.assert_allclose(gradient(1.2, jnp.inf)[0], (up - down) / 2e-6, rtol=1e-6)
    assert gradient(1.2, jnp.inf)[1] == 0


@parametrize("dtype", [np.float32, np.float64], rest="slow")
def test_repeated_inputs_learn_the_mean_of_their_targets(x64, dtype):
    x = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype)
    targets = np.array([1.0, 3.0, 5.0], dtype)

    @jax.jit
    def predictions(w_std):
        _, ntk = fcn_kernel(1, "relu", w_std=w_std, b_std=0.1)(x)
        return gradient_flow(ntk, ntk, targets)

    tolerance = 1e3 * np.finfo(dtype).eps
    np.testing.assert_allclose(predictions(1.3), [2.0, 2.0, 5.0], rtol=tolerance)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(predictions))(1.3), np.zeros(3), atol=tolerance)
