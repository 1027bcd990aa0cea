"""What the default precision must deliver, and what no precision may break on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.datasets import load_digits

from numpyro_wide import linear_gaussian as lg
from tests.conftest import enable_x64
from tests.linear_gaussian import oracle
from tests.marks import parametrize

VARIANTS = ("feature", "data", "data-cholesky")

DEGENERATE = {
    "tall": np.random.default_rng(0).normal(size=(7, 4)),
    "wide": np.random.default_rng(0).normal(size=(4, 7)),
    "square": np.random.default_rng(0).normal(size=(5, 5)),
    "repeated rows": np.repeat(np.random.default_rng(0).normal(size=(2, 6)), 3, axis=0),
    "zero": np.zeros((5, 4)),
    "rank one": np.ones((4, 6)),
    "identity": np.eye(6, 4),  # all eigenvalues repeat
}


@pytest.mark.as_compiled
@parametrize("is_double", [False, True], ids=["float32", "float64"], rest="slow")
@parametrize("kind", DEGENERATE, rest="slow")
def test_no_nan_in_values_or_gradients(kind, is_double):
    with enable_x64(is_double):
        features = jnp.asarray(DEGENERATE[kind], float)
        n, d = features.shape
        targets, phi = jnp.ones((n, 2)), jnp.full((d, 2), 0.3)

        @jax.jit
        def all_gradients(features, noise_scale):
            def total(features, noise_scale, phi):
                terms = []
                for variant in VARIANTS:
                    readout, log_abs_det = lg.readout_map(features, targets, phi, noise_scale, variant=variant)
                    terms += [jnp.sin(readout).sum(), log_abs_det]
                    inverse = lg.readout_inverse_map(features, targets, phi, noise_scale, variant=variant)
                    terms += [jnp.sin(inverse).sum(), lg.log_evidence(features, targets, noise_scale, variant)]
                return jnp.stack(terms)

            return total(features, noise_scale, phi), jax.jacrev(total, (0, 1, 2))(features, noise_scale, phi)

        for noise_scale in (0.01, 1.0):
            leaves = jax.tree.leaves(all_gradients(features, noise_scale))
            assert all(jnp.isfinite(leaf).all() for leaf in leaves)
            if not is_double and noise_scale < 1:
                continue  # condition numbers of 1e5 and more leave float32 few common digits
            # The variants agree on what they share: log-determinant and evidence, and their gradients.
            for leaf in leaves:
                for first in (1, 3):
                    shared = np.asarray(leaf)[first::4]
                    oracle.close(shared[1], shared[0], 1e-9 if is_double else 2e-3)
                    oracle.close(shared[2], shared[0], 1e-9 if is_double else 2e-3)


@pytest.mark.as_compiled
def test_collapsed_energy_differences_in_float32():
    """Digits, three GELU layers of width 512: a leapfrog step apart, float32 is within 0.05 of float64."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = (pixels[:1024] - pixels[:1024].mean()) / pixels[:1024].std()
    targets = np.eye(10)[labels[:1024]] - 0.1
    rng = np.random.default_rng(0)
    widths = (64, 512, 512, 512)
    state = [rng.normal(size=shape) for shape in itertools.pairwise(widths)]
    moves = [rng.normal(size=weights.shape) for weights in state]

    def potential(weights):
        hidden = jnp.asarray(inputs)
        for layer in weights:
            hidden = jax.nn.gelu(np.sqrt(2 / layer.shape[0]) * hidden @ layer, approximate=False)
        return lg.log_evidence(np.sqrt(2 / 512) * hidden, targets, 0.1)

    differences = {}
    for is_double in (False, True):
        with enable_x64(is_double):
            evaluate = jax.jit(potential)
            paths = [[w + step * v for w, v in zip(state, moves, strict=True)] for step in (0.0, 0.01, 0.02, 0.05)]
            values = np.array([evaluate(jax.tree.map(jnp.asarray, path)) for path in paths], np.float64)
            differences[is_double] = np.diff(values)
    assert np.abs(differences[True]).min() > 0.5  # they do differ
    np.testing.assert_allclose(differences[False], differences[True], atol=0.05)


shapes = st.sampled_from([(1, 1, 1), (3, 6, 2), (6, 3, 1), (5, 5, 2)])
log_scales = st.floats(-3, 3)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, rank=st.integers(0, 6), log_scales=st.tuples(log_scales, log_scales), seed=st.integers(0, 99))
@pytest.mark.as_compiled
@parametrize("is_double", [False, True], ids=["float32", "float64"], rest="slow")
def test_map_is_a_bijection_at_every_scale_and_rank(is_double, shape, rank, log_scales, seed):
    n, d, k = shape
    rng = np.random.default_rng(seed)
    rank = min(rank, n, d)
    feature_scale, noise_scale = 10.0 ** np.array(log_scales)
    with enable_x64(is_double):
        features = jnp.asarray(feature_scale * rng.normal(size=(n, rank)) @ rng.normal(size=(rank, d)), float)
        targets, phi = jnp.asarray(rng.normal(size=(n, k)), float), jnp.asarray(rng.normal(size=(d, k)), float)
        found = {v: round_trip(features, targets, phi, noise_scale, v) for v in VARIANTS}
        eps = jnp.finfo(features.dtype).eps
        # The inverse undoes the map up to rounding, which the smallest posterior deviation magnifies.
        ratio = jnp.linalg.norm(features) / noise_scale
        magnified = min(1.0 + float(ratio), float(eps) ** -0.5) * (1 + abs(float(jnp.abs(targets).max() / noise_scale)))
        for recovered, readout, log_abs_det in found.values():
            assert jnp.isfinite(readout).all()
            assert log_abs_det <= 1e-3
            assert jnp.abs(recovered - phi).max() < 1e3 * eps * magnified**2 + 1e3 * eps
        log_abs_dets = [float(x[2]) for x in found.values()]
        # Rounding of the Gram matrix may change each of its d pivots by as much as the map's smallest regulariser adds,
        # and with it half a logarithm in each output.
        lost = 0.5 * np.log(2) * d * k * min(1.0, float(eps * ratio**2))
        np.testing.assert_allclose(log_abs_dets, log_abs_dets[0], rtol=1e-2, atol=(1e-3 if is_double else 0.2) + lost)


@jax.jit
def _round_trip_by_variant(features, targets, phi, noise_scale):
    def one(variant):
        readout, log_abs_det = lg.readout_map(features, targets, phi, noise_scale, variant=variant)
        recovered = lg.readout_inverse_map(features, targets, readout, noise_scale, variant=variant)
        return recovered, readout, log_abs_det

    return {variant: one(variant) for variant in VARIANTS}


def round_trip(features, targets, phi, noise_scale, variant):
    return _round_trip_by_variant(features, targets, phi, noise_scale)[variant]


@pytest.mark.fault(
    "linear_gaussian/_evidence.py",
    "above_rounding(self.regulariser, self.rounding)",
    "above_rounding(self.regulariser, 0.1 * self.rounding)",
)
@pytest.mark.fault("linear_gaussian/_evidence.py", "jnp.where(variance < least, jnp.nan, variance)", "variance")
@pytest.mark.fault(
    "linear_gaussian/_problem.py",
    "resolved()\n        mean, covariance = standard.for_each_output(posterior_moments)",
    "representable()\n        mean, covariance = standard.for_each_output(posterior_moments)",
)
@pytest.mark.as_compiled
@parametrize("variant", VARIANTS, rest="slow")
@parametrize(("n", "d"), [(6, 4), (4, 6)], rest="slow")
@pytest.mark.usefixtures("nans_allowed")
def test_noise_that_is_lost_in_rounding_gives_nan_and_no_wrong_number(variant, n, d):
    """At a norm of the features of 1e15 and a noise of 1 float32 once gave an evidence that was 32 nats off."""
    features = np.float32(1e15) * np.random.default_rng(0).normal(size=(n, d)).astype("f")
    targets, phi = np.ones(n, "f"), np.ones(d, "f")
    assert np.isnan(lg.log_evidence(features, targets, 1.0, variant))
    problem = lg.ReadoutProblem.of(features, targets, 1.0, variant=variant)
    assert np.isnan(problem.draw(phi)).all()
    assert all(np.isnan(part).all() for part in problem.predict(features))
    assert all(np.isnan(part).all() for part in problem.posterior())
    assert np.isfinite(lg.readout_map(features, targets, phi, 1.0, variant=variant)[0]).all()
    # A tenth of the norm's rounding is the border: just above it digits are lost, not the whole number.
    small = np.float32(1e-15) * features
    noise_scale = 1.1 * np.sqrt(0.1 * np.finfo("f").eps) * np.linalg.norm(small)
    targets = small @ phi + noise_scale * np.random.default_rng(1).normal(size=n).astype("f")
    case = oracle.random_case(n, d, None)._replace(features=small.astype(float), targets=targets.astype(float))
    expected = oracle.evidence(case._replace(noise_scale=np.array(noise_scale)))
    np.testing.assert_allclose(lg.log_evidence(small, targets, noise_scale), expected, atol=0.5)
    # Moments, which are not refined, are lost below ten times that variance.
    for factor, is_lost in ((2.8, True), (3.0, False)):
        problem = lg.ReadoutProblem.of(small, targets, factor * noise_scale, variant=variant)
        for part in (*problem.predict(small), *problem.posterior(), problem.draw(phi)):
            assert np.isnan(part).all() == is_lost


def test_half_precision_lists_and_tables_are_taken_as_single_precision():
    features, targets = np.random.default_rng(0).normal(size=(5, 3)), np.arange(5)
    expected = lg.log_evidence(features.astype(np.float16).astype("f"), targets.astype("f"), 0.5)
    for half in (
        features.astype(np.float16),
        jnp.asarray(features.astype(np.float16)),
        features.astype(np.float16).tolist(),
    ):
        found = lg.log_evidence(half, targets.tolist(), 0.5)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert jnp.isfinite(lg.log_evidence(jnp.asarray(features, jnp.bfloat16), targets, 0.5))
    for other in (features.astype(object), features.astype(str), features + 1j):
        with pytest.raises(TypeError, match=r"features must hold real numbers, but it has the type"):
            lg.log_evidence(other, targets, 0.5)


@pytest.mark.fault(
    "linear_gaussian/_problem.py", "array if is_known(value) else jnp.where(array > 0, array, jnp.nan)", "array"
)
@pytest.mark.as_compiled
@pytest.mark.usefixtures("nans_allowed")
def test_negative_scales_under_jit_are_not_their_mirror_image():
    features, targets, phi = np.eye(4, 3), np.ones(4), np.ones(3)

    @jax.jit
    def everything(noise_scale, prior_scale, regulariser):
        readout, log_abs_det = lg.readout_map(features, targets, phi, noise_scale, regulariser, prior_scale=prior_scale)
        return log_abs_det, readout.sum(), lg.log_evidence(features, targets, noise_scale, prior_scale=prior_scale)

    assert all(map(jnp.isfinite, everything(0.5, 1.0, 0.3)))
    assert jnp.isnan(everything(-0.5, 1.0, 0.3)[2])
    assert all(map(jnp.isnan, everything(0.5, -1.0, 0.3)))
    assert all(map(jnp.isnan, everything(0.5, 1.0, -0.3)[:2]))


@pytest.mark.fault("linear_gaussian/_evidence.py", "share = 1.0 if is_by_rows and", "share = 0.1 if is_by_rows and")
@pytest.mark.as_compiled
@pytest.mark.parametrize("is_explained", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_evidence_near_its_border_is_right_in_every_variant(variant, is_explained, nans_allowed):
    """A noise variance in the rounding of the eigenvalues of fewer directions than rows: they were off by 1e5."""
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(50, 30)) / 30**0.5).astype("f")
    border = np.finfo("f").eps * (1.0 if variant.startswith("data") else 0.1)
    for share in (1.1 * border, 3 * border):
        noise = np.sqrt(share * np.sum(features**2)).astype("f")
        targets = (is_explained * features @ rng.normal(size=30) + noise * rng.normal(size=50)).astype("f")
        if not is_explained:
            targets /= noise  # of size one
        covariance = features.astype(float) @ features.T.astype(float) + float(noise) ** 2 * np.eye(50)
        expected = multivariate_normal(np.zeros(50), covariance).logpdf(targets)
        found = lg.log_evidence(features, targets, noise, variant)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0.5)
        assert np.isnan(lg.log_evidence(features, targets, 0.9 * noise, variant)) == (share < 2 * border)
