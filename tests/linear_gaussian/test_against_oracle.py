"""Maps, inverses, log-determinants, evidence and posterior against the dense oracle, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

from numpyro_wide import linear_gaussian as lg
from tests.linear_gaussian import oracle
from tests.marks import parametrize

pytestmark = pytest.mark.usefixtures("x64")

SIZES = (1, 2, 5, 17, 40)
# Every pair of sizes of any two of n, d and k occurs.
SHAPES = [(n, d, SIZES[(i + j) % 5]) for i, n in enumerate(SIZES) for j, d in enumerate(SIZES)]
VARIANTS = ("feature", "data", "data-cholesky")
NOISE_SHAPES = [(), (7, 1), (3,), (7, 3)]
PRIOR_SHAPES = [(), (1,), "rows", "full"]


def map_and_jacobian(case, variant, regulariser=None):
    def forward(phi):
        return lg.readout_map(
            case.features,
            case.targets,
            phi,
            case.noise_scale,
            regulariser,
            variant,
            prior_loc=case.prior_loc,
            prior_scale=case.prior_scale,
        )[0]

    return jax.jit(forward), jax.jit(jax.jacobian(forward))


@partial(jax.jit, static_argnames="variant")
def everything(case, basis, test_features, variant):
    """All that is computed for a case by one variant, compiled together."""
    prior = {"prior_loc": case.prior_loc, "prior_scale": case.prior_scale}
    data = case.features, case.targets
    by_name = {"variant": variant, **prior}

    def forward(phi):
        return lg.readout_map(*data, phi, case.noise_scale, **by_name)[0]

    readout, log_abs_det = lg.readout_map(*data, case.phi, case.noise_scale, **by_name)
    problem = lg.ReadoutProblem.of(*data, case.noise_scale, **by_name)
    return {
        "readout": readout,
        "log_abs_det": log_abs_det,
        "phi": lg.readout_inverse_map(*data, readout, case.noise_scale, **by_name),
        "draw": problem.draw(case.phi),
        "map_mean": forward(jnp.zeros_like(case.phi)),
        "root": jax.vmap(lambda direction: jax.jvp(forward, (case.phi,), (direction,))[1])(basis),
        "evidence": lg.log_evidence(*data, case.noise_scale, **by_name),
        "posterior": lg.readout_posterior(*data, case.noise_scale, **prior),
        "predictive": problem.predict(test_features)[:2],
    }


def check_everything(case, variant):
    d, k = case.phi.shape
    test_features = np.random.default_rng(9).normal(size=(3, d))
    basis = np.repeat(np.eye(d)[:, :, None], k, axis=2)  # one unit vector at a time, in every output at once
    found = everything(case, basis, test_features, variant)
    mean, covariances = oracle.posterior(case)
    oracle.close(found["evidence"], oracle.evidence(case))
    oracle.close(found["phi"], case.phi)
    oracle.close(found["draw"], found["readout"])
    oracle.close(found["log_abs_det"], 0.5 * np.linalg.slogdet(covariances)[1].sum())
    oracle.close(found["map_mean"], mean)
    root = np.einsum("baj->jab", found["root"])
    oracle.close(root @ root.transpose(0, 2, 1), covariances)
    oracle.close(found["posterior"][0], mean)
    oracle.close(np.broadcast_to(found["posterior"][1], covariances.shape), covariances)
    oracle.close(found["predictive"][0], test_features @ mean)
    oracle.close(found["predictive"][1], np.einsum("ma,jab,mb->mj", test_features, covariances, test_features))
    return found, covariances


@pytest.mark.fault("linear_gaussian/_roots.py", "self._whitened(targets) + scaled", "self._whitened(targets) - scaled")
@pytest.mark.fault("linear_gaussian/_roots.py", "transpose=True), -0.5 *", "transpose=True), 0.5 *")
@pytest.mark.fault("linear_gaussian/_roots.py", "add_diagonal(factor, scale), features @ phi", "factor, features @ phi")
@pytest.mark.fault("linear_gaussian/_roots.py", "self.inverse_gram @ targets -", "self.inverse_gram @ targets +")
@pytest.mark.fault("linear_gaussian/_evidence.py", "* jnp.sum(alpha**2) + jnp.sum(mean**2)", "* jnp.sum(alpha**2)")
@pytest.mark.fault("linear_gaussian/_evidence.py", "+ num_outputs * log_normaliser)", "+ log_normaliser)")
@pytest.mark.fault("linear_gaussian/_evidence.py", "remainder) + variance * row_sums_of_squares(weights)", "remainder)")
@parametrize(("n", "d", "k"), SHAPES, rest="slow")
def test_every_size(n, d, k):
    case = oracle.random_case(n, d, k, seed=n + 50 * d)
    for variant in VARIANTS:
        check_everything(case, variant)


@pytest.mark.fault("linear_gaussian/_problem.py", "self._factorised) - standard", "self._factorised) + standard")
@parametrize("d", [4, 9], rest="slow")
@pytest.mark.parametrize("noise_shape", NOISE_SHAPES)
@parametrize("prior_shape", PRIOR_SHAPES, rest="slow")
def test_noise_and_priors_of_every_shape(d, noise_shape, prior_shape):
    prior_shape = {"rows": (d, 1), "full": (d, 3)}.get(prior_shape, prior_shape)
    case = oracle.random_case(7, d, 3, noise_shape, prior_shape, seed=1)
    for variant in VARIANTS:
        found, covariances = check_everything(case, variant)
        is_shared = np.allclose(covariances, covariances[0], rtol=1e-12)
        assert found["posterior"][1].ndim == (2 if is_shared else 3)


@pytest.mark.parametrize("variant", VARIANTS)
@parametrize(("noise_shape", "factor"), [((), 10.0), ((6, 1), 0.3), ((), 1e12)], rest="slow")
def test_regulariser_is_the_noise_variance_of_the_map(variant, noise_shape, factor):
    case = oracle.random_case(6, 4, 2, noise_shape, (4, 2), seed=3)
    regulariser = factor * case.noise_scale**2
    forward, jacobian = map_and_jacobian(case, variant, regulariser)
    mean, covariances = oracle.posterior(case, regulariser)
    oracle.close(forward(np.zeros((4, 2))), mean)
    blocks = np.einsum("ajbj->jab", np.asarray(jacobian(case.phi)))
    oracle.close(blocks @ blocks.transpose(0, 2, 1), covariances)
    if factor == 1e12:  # the standard parametrisation
        oracle.close(forward(case.phi), case.prior_loc + case.prior_scale * case.phi, 1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("n", "d"), [(6, 4), (4, 6)])
def test_vectors_are_single_columns(variant, n, d):
    vector, matrix = oracle.random_case(n, d, None, seed=4), oracle.random_case(n, d, 1, seed=4)
    for noise in (0.3, np.linspace(0.2, 0.5, n)):
        column = noise if np.ndim(noise) == 0 else noise[:, None]
        one = lg.readout_map(vector.features, vector.targets, vector.phi, noise, variant=variant)
        other = lg.readout_map(matrix.features, matrix.targets, matrix.phi, column, variant=variant)
        oracle.close(one[0], other[0][:, 0])
        oracle.close(one[1], other[1])
        oracle.close(
            lg.log_evidence(vector.features, vector.targets, noise, variant),
            lg.log_evidence(matrix.features, matrix.targets, column, variant),
        )


@pytest.mark.parametrize("variant", VARIANTS)
@parametrize("noise_shape", NOISE_SHAPES, rest="slow")
def test_evidence_identity(variant, noise_shape):
    """log p(W) + log p(Y | W) + log |det| = log N(φ; 0, I) + log evidence."""
    case = oracle.random_case(7, 5, 3, noise_shape, (5, 3), seed=5)
    prior = {"prior_loc": case.prior_loc, "prior_scale": case.prior_scale}
    readout, log_abs_det = lg.readout_map(
        case.features, case.targets, case.phi, case.noise_scale, variant=variant, **prior
    )
    noise = jnp.broadcast_to(case.noise_scale, case.targets.shape)
    term_by_term = (
        norm.logpdf(readout, case.prior_loc, case.prior_scale).sum()
        + norm.logpdf(case.targets, case.features @ readout, noise).sum()
        + log_abs_det
    )
    evidence = lg.log_evidence(case.features, case.targets, case.noise_scale, variant, **prior)
    oracle.close(term_by_term, norm.logpdf(case.phi).sum() + evidence)


def check_gradient(function, *args):
    """The gradient in two random directions against central differences."""
    rng = np.random.default_rng(10)
    gradient = jax.jit(jax.grad(function, tuple(range(len(args)))))(*args)
    evaluate = jax.jit(function)
    for _ in range(2):
        direction = [rng.normal(size=np.shape(x)) for x in args]
        step = 1e-6
        up = evaluate(*[x + step * v for x, v in zip(args, direction, strict=True)])
        down = evaluate(*[x - step * v for x, v in zip(args, direction, strict=True)])
        slope = sum(np.sum(g * v) for g, v in zip(gradient, direction, strict=True))
        size = np.sqrt(sum(np.sum(g**2) for g in gradient) * sum(np.sum(v**2) for v in direction))
        assert abs((up - down) / (2 * step) - slope) < 1e-5 * size


@pytest.mark.fault("linear_gaussian/_roots.py", "0] * scale_dot / scale - diagonal(F).sum()", "0] * scale_dot / scale")
@pytest.mark.fault("linear_gaussian/_evidence.py", "mean.T - num_outputs * solved", "mean.T - solved")
@pytest.mark.fault(
    "linear_gaussian/_evidence.py", "(jnp.sum(alpha**2) - num_outputs * trace_inverse)", "jnp.sum(alpha**2)"
)
@pytest.mark.parametrize("variant", VARIANTS)
@parametrize(
    ("n", "d", "noise_shape"),
    [
        *((6, 4, ()), (4, 6, ()), (5, 5, ()), (6, 4, (6, 1)), (4, 6, (4, 1)), (4, 6, (2,)), (6, 4, (6, 2))),
        *((140, 131, ()), (131, 140, ())),  # triangular inverses in blocks
    ],
    rest="slow",
)
def test_gradients_against_finite_differences(variant, n, d, noise_shape):
    case = oracle.random_case(n, d, 2, noise_shape, seed=6)
    weights = np.random.default_rng(7).normal(size=(d, 2))

    def through_map(features, targets, phi, noise_scale, regulariser):
        readout, log_abs_det = lg.readout_map(features, targets, phi, noise_scale, regulariser, variant)
        return jnp.sum(weights * readout) + log_abs_det

    def through_inverse(features, targets, readout, noise_scale):
        return jnp.sum(weights * lg.readout_inverse_map(features, targets, readout, noise_scale, variant=variant))

    def through_evidence(features, targets, noise_scale):
        return lg.log_evidence(features, targets, noise_scale, variant)

    check_gradient(through_map, *case[:4], 2 * case.noise_scale**2)
    check_gradient(through_inverse, *case[:4])
    check_gradient(through_evidence, *case[:2], case.noise_scale)


@parametrize("variant", VARIANTS, rest="slow")
def test_evidence_in_forward_mode(variant):
    case = oracle.random_case(6, 4, 2, seed=6)
    args = case.features, case.targets, case.noise_scale
    tangents = tuple(np.ones_like(x) for x in args)
    _, forward = jax.jvp(partial(lg.log_evidence, variant=variant), args, tangents)
    reverse = jax.grad(partial(lg.log_evidence, variant=variant), (0, 1, 2))(*args)
    oracle.close(forward, sum(np.sum(x) for x in reverse))


def test_evidence_has_second_derivatives():
    case = oracle.random_case(5, 3, 2, seed=8)

    def squared_slope(features, noise_scale):
        slopes = jax.grad(lg.log_evidence, (0, 2))(features, case.targets, noise_scale)
        return sum(jnp.sum(x**2) for x in slopes)

    check_gradient(squared_slope, case.features, case.noise_scale)


@parametrize("variant", (*VARIANTS, "auto"), rest="slow")
def test_batches_by_vmap(variant):
    cases = [oracle.random_case(6, 4, 2, seed=seed) for seed in range(3)]
    stacked = [np.stack(x) for x in zip(*[(c.features, c.targets, c.phi, c.noise_scale) for c in cases], strict=True)]

    def both(features, targets, phi, noise_scale):
        readout, log_abs_det = lg.readout_map(features, targets, phi, noise_scale, variant=variant)
        value, gradient = jax.value_and_grad(lg.log_evidence, (0, 2))(features, targets, noise_scale, variant)
        return readout, log_abs_det, value, gradient

    batched = jax.jit(jax.vmap(both))(*stacked)
    for i in range(3):
        single = both(*[x[i] for x in stacked])
        jax.tree.map(lambda many, one: oracle.close(many[i], one), batched, single)  # noqa: B023
