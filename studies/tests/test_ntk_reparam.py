"""A study's NTK reparametrisation against dense Jacobians of a small network, and exact where that is linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_wide.wide_limit import linearize
from studies._ntk_reparam import log_det_series, ntk_map
from tests.marks import parametrize

NOISE = 0.3


@pytest.fixture
def problem(x64, make_network):
    """A network with two outputs, parameters, inputs and targets."""
    rng = np.random.default_rng(0)
    network = make_network()
    phi = network.init(jax.random.key(0), [3, 12, 2])
    x = jnp.asarray(rng.normal(size=(4, 3)))
    return network, phi, x, network(phi, x) + 0.2 + 0.4 * rng.normal(size=(4, 2))


def dense(network, phi, x, targets):
    """J, r̃ and the matrix H of eq. 12, all dense."""
    flat, unravel = ravel_pytree(phi)
    f = lambda flat: network(unravel(flat), x).reshape(-1)  # noqa: E731
    jacobian = np.asarray(jax.jit(jax.jacfwd(f))(flat))
    residuals = np.asarray(targets).reshape(-1) - f(flat)
    weights = np.linalg.solve(NOISE * np.eye(8) + jacobian @ jacobian.T, residuals)
    curvature = jax.jit(jax.hessian(lambda flat: jnp.asarray(weights) @ f(flat)))(flat)
    return flat, jacobian, weights, np.asarray(curvature)


def test_the_map_and_the_estimate_agree_with_dense_matrices(problem):
    network, phi, x, targets = problem
    flat, jacobian, weights, curvature = dense(*problem)
    assert 0.1 < np.max(np.abs(np.linalg.eigvalsh(curvature))) < 0.6  # the series converges, and matters
    num_probes, order = 500, 6
    theta, log_det = jax.jit(
        lambda phi: ntk_map(
            network, phi, x, targets, NOISE, rng_key=jax.random.key(1), num_probes=num_probes, order=order
        )
    )(phi)
    np.testing.assert_allclose(ravel_pytree(theta)[0], flat + jacobian.T @ weights, rtol=1e-9)
    first = np.linalg.slogdet(
        np.eye(len(flat)) - jacobian.T @ np.linalg.solve(NOISE * np.eye(8) + jacobian @ jacobian.T, jacobian)
    )[1]
    second = np.linalg.slogdet(np.eye(len(flat)) + curvature)[1]
    # Hutchinson's variance with Rademacher vectors is twice the squared off-diagonal part.
    off_diagonal = curvature - np.diag(np.diag(curvature))
    tolerance = 4 * np.sqrt(2 * np.sum(off_diagonal**2) / num_probes)
    np.testing.assert_allclose(log_det, first + second, atol=tolerance)


@parametrize("order", [1, 2, 5], rest="slow")
def test_the_series_is_unbiased_for_its_truncation(x64, order):
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(3, 3))
    matrix = 0.12 * (matrix + matrix.T) + np.diag([0.3, -0.2, 0.4])
    # All eight sign vectors in three dimensions average to the trace; as a tree of unlike leaves.
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1)
    powers = [np.linalg.matrix_power(matrix, j) for j in range(1, order + 1)]
    truncation = sum((-1) ** (j + 1) / j * np.trace(power) for j, power in enumerate(powers, 1))
    per_sign = sum(
        (-1) ** (j + 1) / j * np.einsum("is,ij,js->s", signs, power, signs) for j, power in enumerate(powers, 1)
    )
    np.testing.assert_allclose(np.mean(per_sign), truncation)

    def matvec(tree):
        product = matrix @ jnp.concatenate([tree["a"], tree["b"]])
        return {"a": product[:1], "b": product[1:]}

    like = {"a": jnp.zeros(1), "b": jnp.zeros(2)}
    one = jax.jit(jax.vmap(lambda key: log_det_series(matvec, like, key, num_probes=1, order=order)))
    estimates = np.asarray(one(jax.random.split(jax.random.key(0), 400)))
    assert np.max(np.min(np.abs(estimates[:, None] - per_sign), axis=1)) < 1e-12
    np.testing.assert_allclose(np.mean(estimates), truncation, atol=4 * np.std(estimates) / 20)


def test_is_exact_where_the_network_is_linear(problem):
    """R is then the map to the posterior, with the regulariser as noise variance (Hron 2022, eq. 3 for all weights)."""
    network, phi, x, targets = problem
    f_lin = linearize(network, phi)
    unravel = ravel_pytree(phi)[1]

    def both(flat):
        theta, log_det = ntk_map(f_lin, unravel(flat), x, targets, NOISE, rng_key=jax.random.key(2))
        return ravel_pytree(theta)[0], log_det

    start = ravel_pytree(phi)[0]
    jacobian, _ = jax.jit(jax.jacfwd(both))(start)
    np.testing.assert_allclose(jax.jit(both)(start + 0.3)[1], np.linalg.slogdet(jacobian)[1], rtol=1e-9)


def test_gradients_of_the_estimate_are_its_own(problem):
    network, phi, x, targets = problem
    flat, unravel = ravel_pytree(phi)
    direction = np.random.default_rng(3).normal(size=flat.shape)
    estimate = jax.jit(
        lambda s: ntk_map(network, unravel(flat + s * direction), x, targets, NOISE, rng_key=jax.random.key(4))[1]
    )
    expected = (estimate(1e-5) - estimate(-1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(estimate))(0.0), expected, rtol=1e-6)
