"""The evidence by sums over blocks of rows, against the dense form in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.linear_gaussian._row_blocks import BlockedProblem, RowFeatures, as_features
from tests.marks import parametrize

RNG = np.random.default_rng(0)
NOISES = {
    "of all": (0.3, 1),
    "by output": (np.array([0.2, 0.3, 0.4]), 3),
    "by row": (RNG.uniform(0.2, 0.5, (47, 1)), 3),
}


def network(weights, x):
    return jnp.tanh(x @ weights) / np.sqrt(weights.shape[1]).astype(x.dtype)


def plain(weights, x, y, noise, scale):
    return ReadoutProblem.of(network(weights, x), y, noise, prior_scale=scale).log_evidence()


def blocked(weights, x, y, noise, scale, block_size=16):
    features = RowFeatures.of(lambda rows: network(weights, rows), x, block_size)
    return BlockedProblem.of(features, y, noise, scale).log_evidence()


@pytest.mark.fault("linear_gaussian/_row_blocks.py", "block_size) >= first_row", "block_size) >= 0")
@pytest.mark.fault("linear_gaussian/_row_blocks.py", "alpha @ sums.mean.T - features @ shared,", "alpha @ sums.mean.T,")
@parametrize("kind", NOISES, rest="slow")
def test_value_and_gradient_of_the_dense_form(kind):
    noise, num_outputs = NOISES[kind]
    with jax.enable_x64(True):
        x, weights = jnp.asarray(RNG.normal(size=(47, 3))), jnp.asarray(RNG.normal(size=(3, 10)))
        args = weights, x, jnp.asarray(RNG.normal(size=(47, num_outputs))), jnp.asarray(noise), jnp.asarray(0.7)
        expected, found = (jax.jit(jax.value_and_grad(f, tuple(range(5))))(*args) for f in (plain, blocked))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-10), expected, found)


@parametrize("kind", NOISES, rest="slow")
def test_leave_one_out_of_the_dense_form(kind):
    noise, num_outputs = NOISES[kind]
    x, weights, y = RNG.normal(size=(47, 3)), RNG.normal(size=(3, 10)), RNG.normal(size=(47, num_outputs))
    with jax.enable_x64(True):
        features = RowFeatures.of(lambda rows: network(jnp.asarray(weights), rows), jnp.asarray(x), 16)
        found = BlockedProblem.of(features, y, noise, 0.7).leave_one_out()
        expected = ReadoutProblem.of(network(weights, x), y, noise, prior_scale=0.7).leave_one_out()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-9), expected, found)


@pytest.mark.fault("linear_gaussian/_row_blocks.py", "jnp.sqrt(variance)[:, None, None] * sums.inverse", "sums.inverse")
@pytest.mark.fault("linear_gaussian/_row_blocks.py", "sums.inverse * scale[None, None]", "sums.inverse")
@pytest.mark.fault("linear_gaussian/_row_blocks.py", "return self.root[0].T @ columns", "return self.root[0] @ columns")
@parametrize("kind", NOISES, rest="slow")
def test_posterior_of_the_normal_equations(kind):
    noise, num_outputs = NOISES[kind]
    x, weights, y = RNG.normal(size=(47, 3)), RNG.normal(size=(3, 10)), RNG.normal(size=(47, num_outputs))
    phi, new = RNG.normal(size=(10, num_outputs)), RNG.normal(size=(5, 10))
    with jax.enable_x64(True):
        features = RowFeatures.of(lambda rows: network(jnp.asarray(weights), rows), jnp.asarray(x), 16)
        problem = BlockedProblem.of(features, y, noise, 0.7)
        found = problem.solved()
        mean, variance, draw = found.predict(jnp.asarray(new), phi)
        joint_mean, joint = found.predict_jointly(jnp.asarray(new))
        np.testing.assert_allclose(found.log_evidence, problem.log_evidence(), rtol=1e-12)
        readout = np.asarray(found.draw(phi))
        np.testing.assert_allclose(draw, new @ readout, rtol=1e-10)
        np.testing.assert_allclose(joint_mean, mean, rtol=1e-10)
    dense, noise = np.tanh(x @ weights) / np.sqrt(10), np.broadcast_to(noise, y.shape)
    for output in range(num_outputs):
        precision = dense.T / noise[:, output] ** 2
        covariance = np.linalg.inv(precision @ dense + np.eye(10) / 0.7**2)
        np.testing.assert_allclose(mean[:, output], new @ covariance @ precision @ y[:, output], rtol=1e-8)
        of_new, share = new @ covariance @ new.T, min(output, len(joint) - 1)
        np.testing.assert_allclose(joint[share], of_new, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(variance[:, output], np.diagonal(of_new), rtol=1e-8)
        root, center = np.asarray(found.root[share]), np.asarray(found.mean[:, output])
        np.testing.assert_allclose(readout[:, output] - center, root.T @ phi[:, output], rtol=1e-8, atol=1e-12)


@pytest.mark.as_compiled
def test_features_by_blocks_and_dense_ones_are_used_alike():
    x, y = RNG.normal(size=(47, 3)), RNG.normal(size=47)
    with jax.enable_x64(True):
        by_blocks = RowFeatures.of(lambda rows: jnp.tanh(2 * rows), jnp.asarray(x), 16)
        dense = jnp.tanh(2 * x)
        assert as_features(by_blocks) is by_blocks and as_features(np.asarray(dense)).shape == (47, 3)
        found = []
        for features, test_features in [(by_blocks, by_blocks), (by_blocks, dense), (dense, by_blocks), (dense, dense)]:
            kind = BlockedProblem if features is by_blocks else ReadoutProblem
            problem = kind.of(features, y, 0.3, prior_scale=0.7)
            mean, variance, _ = problem.solved().predict(test_features)
            norms = jnp.sum(jnp.asarray(features) ** 2, axis=1)
            found.append((problem.log_evidence(), problem.solved().draw(jnp.ones(3)).shape, mean, variance, norms))
        for other in found[:-1]:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), other, found[-1])


@pytest.mark.as_compiled
def test_chains_are_vectorised():
    x, y = RNG.normal(size=(40, 3)).astype("f"), RNG.normal(size=40).astype("f")
    chains = jnp.asarray(RNG.normal(size=(2, 3, 10)), "float32")
    found = jax.vmap(lambda weights: blocked(weights, x, y, 0.3, 1.0))(chains)
    np.testing.assert_allclose(found, [plain(weights, x, y, 0.3, 1.0) for weights in chains], rtol=1e-5)


@pytest.mark.as_compiled
def test_many_rows_keep_their_digits_or_the_estimate_says_so():
    x = RNG.normal(size=(50_000, 4)).astype("f")
    y = (np.sin(x[:, 0]) + 0.1 * RNG.normal(size=len(x))).astype("f")
    weights = RNG.normal(size=(4, 32)).astype("f")
    features = RowFeatures.of(lambda rows: network(weights, rows), jnp.asarray(x), 1000)
    problem = BlockedProblem.of(features, y, 0.1)
    dense = np.tanh(x.astype(float) @ weights) / np.sqrt(32)
    gram = dense.T @ dense + 0.1**2 * np.eye(32)
    mean = np.linalg.solve(gram, dense.T @ y)
    quadratic = (np.sum((y - dense @ mean) ** 2) + 0.1**2 * mean @ mean) / 0.1**2
    log_det = np.linalg.slogdet(gram)[1] + (len(x) - 32) * np.log(0.1**2)
    expected = -0.5 * (quadratic + log_det + len(x) * np.log(2 * np.pi))
    assert abs(float(problem.log_evidence()) - expected) < max(0.1, float(problem.evidence_error()))


@pytest.mark.as_compiled
def test_noise_lost_in_rounding_is_nan_and_the_estimate_infinite():
    x = np.ones((64, 2), "f")  # features of rank one
    problem = BlockedProblem.of(RowFeatures.of(lambda rows: 1e3 * rows, jnp.asarray(x), 10), x[:, 0], 1e-3)
    with jax.debug_nans(False):
        assert np.isnan(problem.log_evidence())
        assert np.isinf(problem.evidence_error())


@pytest.mark.parametrize(
    ("noise", "scale", "message"),
    [
        (np.ones((40, 2), "f"), 1.0, "noise_scale may vary over rows or over outputs"),
        (0.1, np.ones((3, 2), "f"), "outputs share the readout's prior scale"),
    ],
)
def test_scales_that_blocks_cannot_share_are_refused(noise, scale, message):
    features = RowFeatures.of(lambda rows: rows, jnp.ones((40, 3)), 8)
    with pytest.raises(ValueError, match=message):
        BlockedProblem.of(features, np.ones((40, 2), "f"), noise, scale)
