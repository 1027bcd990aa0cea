"""Kernels of finite networks, their convergence, the linearised twin and the drift of the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.flatten_util import ravel_pytree

from numpyro_wide.wide_limit import empirical_ntk, fcn_kernel, linearize
from studies._tangent_training import drift_monitor
from tests.marks import parametrize

WIDTHS = (16, 64, 256)
NUM_SEEDS = 48


def inputs(num=4, dim=3, seed=0):
    return np.random.default_rng(seed).normal(size=(num, dim))


@pytest.mark.as_compiled
@parametrize("activation", ["erf", "relu"], rest="slow")
def test_kernels_approach_their_limits_like_one_over_root_width(make_network, activation):
    x = jnp.asarray(inputs(3), jnp.float32)
    network = make_network({"erf": jax.lax.erf, "relu": jax.nn.relu}[activation])
    scales = dict(zip(("w_std", "b_std"), network.hidden, strict=True))
    scales |= dict(zip(("readout_w_std", "readout_b_std"), network.readout, strict=True))
    limits = jnp.stack(fcn_kernel(2, activation, **scales)(x))

    def squared_errors(rng_key, width):
        params = network.init(rng_key, [3, width, width, 1])
        features = network.features(params, x)
        nngp = features @ features.T
        ntk = empirical_ntk(lambda p, x: network(p, x)[:, 0], params, x)
        return jnp.mean((jnp.stack([nngp, ntk]) - limits) ** 2, axis=(1, 2))

    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    mean_square = jax.jit(
        lambda keys, width: jnp.mean(jax.lax.map(lambda key: squared_errors(key, width), keys), axis=0),
        static_argnums=1,
    )
    errors = [mean_square(keys, width) for width in WIDTHS]
    log_errors = 0.5 * np.log(np.stack(errors))  # (widths, 2)
    steps = np.log(WIDTHS) - np.mean(np.log(WIDTHS))
    slopes = steps @ log_errors / np.sum(steps**2)
    # At worst a kernel's entries err together, so that a mean square has the spread of a χ² with one degree
    # of freedom for each seed: 1/√(2 seeds) in the log of its root. Four standard errors of the fitted slope.
    tolerance = 4 / np.sqrt(2 * NUM_SEEDS * np.sum(steps**2))
    np.testing.assert_allclose(slopes, [-0.5, -0.5], atol=tolerance)


def dense_ntk(f, params, x1, x2):
    """J Jᵀ from the Jacobian with respect to the flattened parameters, (n1, n2, k, k)."""
    flat, unravel = ravel_pytree(params)
    jacobians = [jax.jacfwd(lambda p, x=x: f(unravel(p), x))(flat) for x in (x1, x2)]
    return jnp.einsum("ikp,jlp->ijkl", *jacobians)


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_empirical.py", "ikp,jlp->jikl", "ikp,jlp->jilk")
@parametrize("block_size", [None, 3], rest="slow")
def test_several_outputs_and_blocks(x64, make_network, block_size):
    network = make_network()
    # with one hidden layer the kernel would be symmetric in the two outputs
    params = network.init(jax.random.key(1), [3, 5, 4, 2])
    x1, x2 = inputs(4), inputs(5, seed=1)
    expected = dense_ntk(network, params, x1, x2)
    ntk = jax.jit(lambda *xs: empirical_ntk(network, params, *xs, block_size=block_size))
    np.testing.assert_allclose(ntk(x1, x2), expected, rtol=1e-10)
    np.testing.assert_allclose(ntk(x1), dense_ntk(network, params, x1, x1), rtol=1e-10)
    average = jax.jit(lambda *xs: empirical_ntk(network, params, *xs, block_size=block_size, average_outputs=True))
    np.testing.assert_allclose(average(x1, x2), np.trace(expected, axis1=2, axis2=3) / 2, rtol=1e-10)


def test_a_network_with_one_output_has_a_matrix_as_kernel(x64):
    w = jnp.array([1.0, -2.0, 0.5])
    f = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    x1, x2 = inputs(4), inputs(2, seed=1)
    slopes1, slopes2 = (1 - np.tanh(x @ np.asarray(w)) ** 2 for x in (x1, x2))
    expected = np.outer(slopes1, slopes2) * (x1 @ x2.T)
    np.testing.assert_allclose(empirical_ntk(f, w, x1, x2), expected, rtol=1e-12)
    np.testing.assert_allclose(empirical_ntk(f, w, x1, x2, average_outputs=True), expected, rtol=1e-12)


@pytest.mark.as_compiled
def test_blocks_bound_the_memory(make_network):
    network = make_network()
    params = network.init(jax.random.key(0), [3, 100, 100, 1])
    x = jax.ShapeDtypeStruct((200, 3), jnp.float32)

    def temporaries(block_size):
        ntk = jax.jit(lambda x: empirical_ntk(network, params, x, block_size=block_size))
        return ntk.lower(x).compile().memory_analysis().temp_size_in_bytes

    jacobian_row = 4 * 100 * 100
    assert temporaries(5) < 40 * jacobian_row
    assert temporaries(None) > 200 * jacobian_row


@pytest.mark.as_compiled
def test_works_with_flax_and_inputs_of_any_shape(x64):
    class Convolution(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(linen.relu(linen.Conv(3, (2, 2))(x)).mean(axis=(1, 2)))

    module, images = Convolution(), inputs(3, dim=16).reshape(3, 4, 4, 1)
    params = jax.tree.map(lambda leaf: leaf.astype(float), module.init(jax.random.key(0), images))
    with jax.numpy_rank_promotion("allow"):  # flax's Dense promotes its bias
        ntk = empirical_ntk(module.apply, params, images, block_size=2)
        np.testing.assert_allclose(ntk, dense_ntk(module.apply, params, images, images), rtol=1e-9)


def test_works_with_nnx():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.readout = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.readout(nnx.relu(self.hidden(x)))

    graph, params = nnx.split(Network(nnx.Rngs(0)))
    f = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    x = jnp.asarray(inputs(3), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        kernels = jax.jit(lambda params: (empirical_ntk(linearize(f, params), params, x), dense_ntk(f, params, x, x)))
        np.testing.assert_allclose(*kernels(params), rtol=1e-4, atol=1e-5)


def test_the_kernel_can_be_differentiated(x64):
    f = lambda w, x: jnp.sin(x @ w)  # noqa: E731
    x, w = inputs(3), jnp.array([0.3, -0.2, 0.9])
    closed = lambda w: jnp.sum(jnp.outer(jnp.cos(x @ w), jnp.cos(x @ w)) * (x @ x.T))  # noqa: E731
    for block_size in (None, 2):
        total = jax.jit(lambda w, size=block_size: jnp.sum(empirical_ntk(f, w, x, block_size=size)))
        np.testing.assert_allclose(jax.grad(total)(w), jax.grad(closed)(w), rtol=1e-10)


def test_the_linearised_network_is_the_tangent(x64, make_network):
    network = make_network()
    params0 = network.init(jax.random.key(0), [3, 8, 2])
    direction = network.init(jax.random.key(1), [3, 8, 2])
    x = inputs(5)
    f_lin = jax.jit(linearize(network, params0))
    at = lambda step: jax.tree.map(lambda p, d: p + step * d, params0, direction)  # noqa: E731
    flat0, unravel = ravel_pytree(params0)
    jacobian = jax.jit(jax.jacfwd(lambda flat: network(unravel(flat), x)))(flat0)
    expected = network(params0, x) + jacobian @ (3.0 * ravel_pytree(direction)[0])
    np.testing.assert_allclose(f_lin(at(3.0), x), expected, rtol=1e-10, atol=1e-12)
    remainders = [jnp.max(jnp.abs(f_lin(at(step), x) - network(at(step), x))) for step in (1e-3, 5e-4)]
    np.testing.assert_allclose(remainders[0] / remainders[1], 4.0, rtol=0.02)  # second order
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), at(1.0), at(2.0))
    batched = jax.vmap(f_lin, in_axes=(0, None))(batch, x)
    np.testing.assert_allclose(batched[1], f_lin(at(2.0), x), rtol=1e-12, atol=1e-14)


def test_the_kernel_of_the_linearised_network_does_not_drift(x64, make_network):
    network = make_network()
    params0, params = (network.init(jax.random.key(seed), [3, 8, 2]) for seed in range(2))
    x = inputs(4)
    drift = drift_monitor(linearize(network, params0), params0, x)(params)
    assert drift.sup_norm < 1e-12
    assert drift_monitor(network, params0, x)(params).sup_norm > 0.1


@pytest.mark.slow
def test_the_monitor_reports_drift_and_smallest_eigenvalue(x64, make_network):
    network = make_network()
    params0, params = (network.init(jax.random.key(seed), [3, 8, 2]) for seed in range(2))
    x = inputs(4)
    before, after = (dense_ntk(network, p, x, x) for p in (params0, params))
    monitor = drift_monitor(network, params0, x, block_size=3)
    drift = jax.lax.map(monitor, jax.tree.map(lambda *leaves: jnp.stack(leaves), params0, params))
    expected = np.max(np.linalg.norm(after - before, axis=(2, 3)))
    np.testing.assert_allclose(drift.sup_norm, [0.0, expected], rtol=1e-10, atol=1e-13)
    matrices = [kernel.transpose(0, 2, 1, 3).reshape(8, 8) for kernel in (before, after)]
    np.testing.assert_allclose(
        drift.smallest_eigenvalue, [np.linalg.eigvalsh(matrix)[0] for matrix in matrices], rtol=1e-8
    )


@parametrize("integer", [np.int64, jnp.int32], rest="slow")
def test_integers_of_any_kind_count_rows(integer):
    network, params, x = lambda w, x: jnp.tanh(x @ w), jnp.ones(3), jnp.eye(3)
    expected = empirical_ntk(network, params, x, block_size=2)
    np.testing.assert_array_equal(empirical_ntk(network, params, x, block_size=integer(2)), expected)


@pytest.mark.slow
def test_a_wider_network_drifts_less(make_network):
    network = make_network()
    x = jnp.asarray(inputs(4), jnp.float32)
    targets = jnp.array([1.0, -1.0, 2.0, 0.0])
    f = lambda params, x: network(params, x)[:, 0]  # noqa: E731

    def drift(rng_key, width):
        params0 = network.init(rng_key, [3, width, 1])
        descend = jax.grad(lambda params: 0.5 * jnp.sum((f(params, x) - targets) ** 2))
        step = lambda params, _: (jax.tree.map(lambda p, g: p - 0.1 * g, params, descend(params)), None)  # noqa: E731
        return drift_monitor(f, params0, x)(jax.lax.scan(step, params0, length=30)[0]).sup_norm

    keys = jax.random.split(jax.random.key(0), 10)
    narrow, wide = (jnp.mean(jax.jit(jax.vmap(lambda k, w=w: drift(k, w)))(keys)) for w in (32, 512))
    # 4 times less for a drift like 1/√width; half of it, since ten seeds are few
    assert narrow > 2 * wide
