"""The error of the evidence in float32: estimated without float64, and held to it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide import linear_gaussian as lg
from numpyro_wide.linear_gaussian import ReadoutProblem
from tests.conftest import enable_x64
from tests.marks import parametrize

SHAPES = [(50, 100), (50, 10), (120, 30), (90, 200)]
VARIANTS = ("feature", "data", "data-cholesky")


def features_of(kind, n, d, rng):
    """Features of full rank, and networks of a line and of five columns, of low rank and of a slowly falling one."""
    if kind == "normal":
        return rng.normal(size=(n, d))
    x = np.linspace(-1, 1, n)[:, None] if kind != "five columns" else rng.normal(size=(n, 5))
    z = x @ rng.normal(0, 2, size=(x.shape[1], d)) + (kind == "relu") * rng.normal(size=d)
    return np.maximum(z, 0) if kind == "relu" else np.tanh(z)


def exact(features, targets, noise_scale):
    features, targets, variance = features.astype(float), targets.astype(float), float(noise_scale) ** 2
    factor = np.linalg.cholesky(features @ features.T + variance * np.eye(len(features)))
    whitened = np.linalg.solve(factor, targets)
    log_det = 2 * np.log(np.diag(factor)).sum() + len(features) * np.log(2 * np.pi)
    return -0.5 * (np.sum(whitened**2) + targets.shape[1] * log_det)


@partial(jax.jit, static_argnames="variant")
def estimate_and_value(features, targets, noise_scale, variant):
    problem = ReadoutProblem.of(features, targets, noise_scale, variant=variant)
    return problem.evidence_error(), problem.log_evidence()


def random_problem(kind, shape, num_outputs, rng):
    """Noises, scales of the features, offsets and amplitudes of the targets over four orders of magnitude."""
    n, d = shape
    noise_scale, scale = 10 ** rng.uniform(-3, 1), 10 ** rng.uniform(-1.5, 2.5)
    offset, amplitude = 10 ** rng.uniform(-1, 3.5), 10 ** rng.uniform(-1, 2)
    features = scale * features_of(kind, n, d, rng)
    noise = noise_scale * rng.normal(size=(n, num_outputs))
    targets = offset + amplitude * np.sin(3 * np.linspace(-1, 1, n))[:, None] + noise
    return features.astype("f"), targets.astype("f"), np.float32(noise_scale)


@pytest.mark.usefixtures("nans_allowed")
@pytest.mark.fault("linear_gaussian/_evidence.py", "2 * eps * (by_output + size + log_det_term)", "2 * eps * size")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_is_seldom_below_the_error_and_never_far(shape):
    ratios, is_told, errors = [], [], []
    rng = np.random.default_rng(11)
    for kind in ("normal", "tanh", "relu", "five columns"):
        for num_outputs in (1, 3):
            for _ in range(12):
                problem = random_problem(kind, shape, num_outputs, rng)
                estimate, value = estimate_and_value(*problem, "auto")
                if not np.isfinite(value):
                    assert estimate == np.inf
                    continue
                errors.append(abs(float(value) - exact(*problem)))
                ratios.append(errors[-1] / float(estimate))
                is_told.append(estimate > 0.1)
    ratios, is_told, errors = np.array(ratios), np.array(is_told), np.array(errors)
    assert len(ratios) > 40
    assert ratios.max() < 2
    assert np.median(ratios) > 0.01
    # From a tenth of a nat on it is said, and what is said has a reason.
    assert not np.any(errors[~is_told] > 0.2)
    assert np.mean(errors[is_told] > 1e-3) > 0.8


@pytest.mark.usefixtures("nans_allowed")
@parametrize("variant", VARIANTS, rest="slow")
def test_every_variant_has_its_own(variant):
    rng = np.random.default_rng(3)
    for kind in ("tanh", "relu", "five columns"):
        for _ in range(8):
            problem = random_problem(kind, (40, 60), 1, rng)
            estimate, value = estimate_and_value(*problem, variant)
            if np.isfinite(value) and np.isfinite(estimate):
                assert abs(float(value) - exact(*problem)) < 3 * estimate


def large_targets():
    """Targets of 2000 + 10 sin under a prior scale of 300, which once were 3.7 nats off, and 2.3 between draws."""
    x = np.linspace(-1, 1, 50)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        hidden = np.tanh(x[:, None] @ rng.normal(0, 2, size=(1, 100)))
        targets = 2000 + 10 * np.sin(4 * x) + 5 * rng.normal(size=50)
        yield (300 / 10 * hidden).astype("f"), targets[:, None].astype("f"), np.float32(5)


@pytest.mark.usefixtures("nans_allowed")
@pytest.mark.fault("linear_gaussian/_roots.py", "mean + length * step, residual - length * moved", "mean, residual")
@pytest.mark.as_compiled
def test_targets_along_the_features_keep_their_digits():
    for problem in large_targets():
        estimate, value = estimate_and_value(*problem, "auto")
        # Of numbers of four million float32 keeps quarters: four of them, whatever order the machine sums in.
        expected = exact(*problem)
        assert abs(float(value) - expected) < min(4 * np.spacing(np.float32(abs(expected))), estimate)


@pytest.mark.usefixtures("nans_allowed")
@parametrize("variant", VARIANTS, rest="slow")
@parametrize("shape", [(50, 100), (100, 50)], rest="slow")
def test_gradients_are_those_of_float64_where_targets_lie_along_the_features(variant, shape):
    """In reverse and in forward mode, with the value that goes with them."""
    rng = np.random.default_rng(1)
    features = (3 * features_of("tanh", *shape, rng)).astype("f")
    targets = (100 + np.sin(np.linspace(-4, 4, shape[0])))[:, None].astype("f")
    inverse = np.linalg.inv(features.astype(float) @ features.T.astype(float) + 0.25 * np.eye(shape[0]))
    alpha = inverse @ targets
    expected = alpha @ (alpha.T @ features) - inverse @ features
    evidence = partial(lg.log_evidence, variant=variant)
    value, gradient = jax.jit(jax.value_and_grad(evidence))(features, targets, 0.5)
    direction = rng.normal(size=shape).astype("f")
    _, tangent = jax.jvp(lambda x: evidence(x, targets, 0.5), (features,), (direction,))
    np.testing.assert_allclose(value, evidence(features, targets, 0.5), atol=0.5)
    np.testing.assert_allclose(value, exact(features, targets, 0.5), atol=0.5)
    size = np.linalg.norm(expected)
    # Tests are compiled quickly, with sums that lose a digit: 0.003 otherwise, and up to 0.26 without the refinement.
    assert np.linalg.norm(gradient - expected) < 0.06 * size
    np.testing.assert_allclose(tangent, np.sum(gradient * direction), atol=0.06 * size)


@pytest.mark.usefixtures("nans_allowed")
@pytest.mark.as_compiled
def test_noise_of_every_shape_and_double_precision():
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(12, 30)), rng.normal(size=(12, 2))
    for shape in [(), (2,), (12, 1), (12, 2)]:
        error = ReadoutProblem.of(features, targets, np.full(shape, 0.1), prior_scale=3.0).evidence_error()
        assert error.shape == () and 0 < error < 1e-2
    with enable_x64(True):
        error = ReadoutProblem.of(jnp.asarray(features), jnp.asarray(targets), 0.1, prior_scale=3.0).evidence_error()
        assert error.dtype == jnp.float64 and 0 < error < 1e-11


# Evidence and its gradient at sizes whose factors are computed by halves, against NumPy's dense formulas --------------
NOISE_SCALE = 0.3


def dense(features, targets):
    """Log density and (α αᵀ − k K⁻¹) Ψ, from an LU inverse of K."""
    gram = features @ features.T + NOISE_SCALE**2 * np.eye(len(features))
    inverse = np.linalg.inv(gram)
    alpha, num_outputs = inverse @ targets, targets.shape[1]
    normaliser = np.linalg.slogdet(gram)[1] + len(features) * np.log(2 * np.pi)
    return -0.5 * (np.sum(targets * alpha) + num_outputs * normaliser), (
        alpha @ alpha.T - num_outputs * inverse
    ) @ features


# Even and odd rows, few and more columns, more features than rows and fewer.
@pytest.mark.usefixtures("x64")
@pytest.mark.fault("linear_gaussian/_linalg.py", "-lower_right @ (factor", "lower_right @ (factor")
@pytest.mark.fault("linear_gaussian/_linalg.py", " + below.T @ below", "")
@parametrize(("n", "d", "k"), [(150, 170, 1), (151, 170, 2), (151, 160, 5), (170, 151, 1), (301, 290, 3)], rest="slow")
def test_evidence_and_gradient_by_halves(n, d, k):
    rng = np.random.default_rng(n + d + k)
    features, targets = rng.normal(size=(2, n, d)) / np.sqrt(d), rng.normal(size=(n, k))
    found = jax.value_and_grad(lambda features: lg.log_evidence(features, jnp.asarray(targets), NOISE_SCALE))
    batch = jax.jit(jax.vmap(found))(features)
    for chain in range(2):
        value, gradient = dense(features[chain], targets)
        alone = jax.jit(found)(features[chain])
        for got in (alone, (batch[0][chain], batch[1][chain])):
            np.testing.assert_allclose(got[0], value, rtol=1e-9)
            np.testing.assert_allclose(got[1], gradient, atol=1e-8 * np.abs(gradient).max())
