"""Natural parameters against SciPy, and the convexity that they are for."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from numpyro.distributions import biject_to

from numpyro_wide import natural
from tests.conftest import enable_x64
from tests.marks import parametrize


class Case(NamedTuple):
    family: Callable
    size: int
    log_density: Callable  # (eta, value) -> SciPy's log density of one value
    values: np.ndarray  # in the support, asymmetric


def loc_scale(eta):
    variance = -0.5 / eta[1]
    return eta[0] * variance, variance**0.5


def multivariate_normal(eta, value):
    precision = -np.array([[2 * eta[2], eta[3]], [eta[3], 2 * eta[4]]])
    covariance = np.linalg.inv(precision)
    return scipy.stats.multivariate_normal(covariance @ eta[:2], covariance).logpdf(value)


def truncated_normal(eta, value):
    loc, scale = loc_scale(eta)
    return scipy.stats.truncnorm(-loc / scale, (1 - loc) / scale, loc=loc, scale=scale).logpdf(value)


CASES = [
    Case(natural.Normal, 2, lambda eta, v: scipy.stats.norm(*loc_scale(eta)).logpdf(v), np.array([-0.7, 2.3, 4.0])),
    Case(natural.MultivariateNormal, 5, multivariate_normal, np.array([[-0.7, 1.0], [2.0, 2.3], [0.1, -3.0]])),
    Case(natural.TruncatedNormal, 2, truncated_normal, np.array([0.05, 0.6, 0.9])),
]
families = parametrize("case", CASES, rest="slow", ids=lambda case: case.family.__name__)
NUM_SEGMENTS, NUM_POINTS = 40, 9


def points_on_segments(starts, ends):
    """Points on the segments between rows of two arrays, (segments, points, size)."""
    weights = np.linspace(0.0, 1.0, NUM_POINTS)[:, None]
    return np.asarray(starts)[:, None] + weights * (np.asarray(ends) - np.asarray(starts))[:, None]


def random_points(case):
    """Points of segments between random natural parameters, (segments, points, size)."""
    real = 1.5 * np.random.default_rng(0).normal(0.3, 1.0, (2, NUM_SEGMENTS, case.size))
    return points_on_segments(*jax.jit(lambda real: biject_to(natural.domain(case.family))(real))(real))


def is_strictly_convex(log_densities):
    """Whether the loss −mean log q has positive second differences on all segments, by more than rounding."""
    losses = -np.mean(np.asarray(log_densities).reshape(NUM_SEGMENTS, NUM_POINTS, -1), axis=-1)
    return bool(np.all(np.diff(losses, 2, axis=1) > 1e-12 * np.max(np.abs(losses))))


@families
def test_densities_gradients_and_convexity(x64, case):
    """Against SciPy and differences of it; convexity in η of E_p[−log q(θ; η)], p the values (Lemma 1)."""
    points = random_points(case)
    etas = points.reshape(-1, case.size)
    log_density = lambda eta, values: case.family(eta).log_prob(values)  # noqa: E731

    @jax.jit
    def evaluate(etas, values):
        both = lambda eta: (log_density(eta, values), jax.jacrev(log_density)(eta, values))  # noqa: E731
        return jax.vmap(both)(etas)

    log_densities, scores = evaluate(etas, case.values)
    assert is_strictly_convex(log_densities)
    oracle = lambda eta: np.array([case.log_density(eta, value) for value in case.values])  # noqa: E731
    for index in (0, 100, -1):
        eta = etas[index]
        np.testing.assert_allclose(log_densities[index], oracle(eta), rtol=1e-10, atol=1e-12)
        for actual, direction in zip(scores[index].T, 1e-5 * np.eye(case.size), strict=True):
            expected = (oracle(eta + direction) - oracle(eta - direction)) / 2e-5
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
    values = case.values.astype(np.float32) if case.values.dtype == float else case.values
    single = evaluate(etas.astype(np.float32), values)
    assert single[1].dtype == jnp.float32
    exact = evaluate(etas.astype(np.float32).astype(float), values.astype(case.values.dtype))
    near = np.max(np.abs(exact[0]), axis=1) < 50  # far out in the tails a nearly singular precision amplifies rounding
    np.testing.assert_allclose(single[0][near], exact[0][near], rtol=2e-5, atol=5e-5)
    np.testing.assert_allclose(single[1][near], exact[1][near], rtol=1e-4, atol=1e-4)


@families
def test_batches_shifts_parameters_and_maps(x64, case):
    real = jnp.asarray(np.random.default_rng(5).normal(0.3, 1.0, (2, 3, case.size)))
    shift, value = jnp.linspace(-1.0, 1.0, case.size), jnp.asarray(case.values[1])

    @jax.jit  # the distributions are pytrees
    def everything(real):
        transform = biject_to(natural.domain(case.family))
        etas = transform(real)
        jacobians = jax.vmap(jax.vmap(jax.jacfwd(transform)))(real)
        log_det = transform.log_abs_det_jacobian(real, etas), jnp.linalg.slogdet(jacobians)[1]
        return etas, case.family(etas - shift, shift=shift), transform.inv(etas), log_det

    etas, batch, back, log_det = everything(real)
    assert batch.batch_shape == (2, 3)
    np.testing.assert_allclose(back, real, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(*log_det, atol=1e-10)
    assert np.all(natural.domain(case.family)(etas))
    log_density = jax.jit(lambda eta: case.family(eta).log_prob(value))
    one_by_one = [[log_density(eta) for eta in row] for row in etas]
    np.testing.assert_allclose(batch.log_prob(value), one_by_one, rtol=1e-10)
    np.testing.assert_allclose(natural.parameters(batch), etas, rtol=1e-9, atol=1e-12)


@parametrize(
    ("log_density", "coordinates"),
    [
        (lambda m: dist.Normal(m[0], jnp.exp(m[1])).log_prob(jnp.array([-0.7, 2.3])), "loc and log scale"),
        (lambda m: dist.Normal(m[0], jnp.abs(m[1]) + 0.1).log_prob(jnp.array([-0.7, 2.3])), "loc and scale"),
        (lambda m: dist.VonMises(m[0], jnp.exp(m[1])).log_prob(jnp.array([-3.0, 0.4, 2.0])), "loc and concentration"),
        (lambda m: dist.Gamma(jnp.exp(m[0]), 1 / jnp.exp(m[1])).log_prob(jnp.array([0.2, 4.0])), "shape and scale"),
    ],
    rest="slow",
)
def test_by_means_and_scales_it_is_not_convex(x64, log_density, coordinates):
    points = points_on_segments(*(1.5 * np.random.default_rng(0).normal(0.3, 1.0, (2, NUM_SEGMENTS, 2))))
    assert not is_strictly_convex(jax.jit(jax.vmap(jax.vmap(log_density)))(points))


def test_closed_divergences_of_numpyro_apply(x64):
    p, q = (natural.Normal(jnp.array(eta)) for eta in ([1.0, -2.0], [-0.5, -0.3]))
    expected = np.log(q.scale / p.scale) + (p.variance + (p.loc - q.loc) ** 2) / (2 * q.variance) - 0.5
    np.testing.assert_allclose(dist.kl_divergence(p, q), expected, rtol=1e-12)


@pytest.mark.as_compiled
def test_an_interval_far_from_the_mean():
    """Thirty standard deviations out it is an exponential's tail, in float32, on both sides."""
    value = np.array([2.01, 2.3])
    for sign in (1.0, -1.0):
        low, high = sorted((2.0 * sign, 3.0 * sign))
        q = natural.TruncatedNormal(natural.parameters(dist.Normal(sign * 0.5, 0.05)), low=low, high=high)
        expected = scipy.stats.truncnorm(30, 50, loc=0.5, scale=0.05).logpdf(value)
        np.testing.assert_allclose(q.log_prob(sign * jnp.asarray(value)), expected, rtol=1e-4)


@pytest.mark.as_compiled
@pytest.mark.fault("natural.py", "= jnp.maximum(begin, -half_width), jnp.minimum(end, half_width)", "= begin, end")
@pytest.mark.fault("natural.py", "mode = stop_gradient(jnp.clip(loc, low, high))", "mode = jnp.clip(loc, low, high)")
@parametrize("is_double", [False, True], rest="slow")
@parametrize(
    "eta",
    [[0, -1e-14], [1e-8, -1e-8], [5, -1e-3], [-20, -0.5], [-400, -5], [3000, -0.5], [10, -10], [5e5, -5e5]],
    rest="slow",
)
def test_an_interval_against_adaptive_quadrature(eta, is_double):
    """Nearly uniform, nearly exponential, many deviations from the mean, and narrow: density, slopes, draws."""
    with enable_x64(is_double):
        eta = jnp.asarray(eta, float)
        first, second = map(float, eta)
        value, mode = float(jnp.asarray(0.3)), min(max(-first / (2 * second), 0.0), 1.0)
        cuts = sorted({min(max(mode + sign * 10.0**-size, 0.0), 1.0) for sign in (-1, 1) for size in range(1, 7)})

        def log_form(x):
            return (x - mode) * (first + second * (x + mode))

        def moment(power):
            form = lambda x: (x - mode) ** power * np.exp(log_form(x))  # noqa: E731
            ends = [0.0, *cuts, mode, 1.0]
            return sum(scipy.integrate.quad(form, *pair, epsabs=0)[0] for pair in itertools.pairwise(sorted(ends)))

        mass, shift, square = map(moment, range(3))
        mean, deviation = mode + shift / mass, (square / mass - (shift / mass) ** 2) ** 0.5
        q = natural.TruncatedNormal(eta)
        log_prob, slopes = jax.value_and_grad(lambda eta: natural.TruncatedNormal(eta).log_prob(value))(eta)
        tolerance = 1e-9 if is_double else 1e-6
        np.testing.assert_allclose(log_prob, log_form(value) - np.log(mass), rtol=tolerance, atol=tolerance)
        of_eta = [value - mean, value**2 - mean**2 - deviation**2]
        np.testing.assert_allclose(slopes, of_eta, rtol=1e-6 if is_double else 2e-3)
        draws = q.sample(jax.random.key(0), (4000,))
        assert bool(jnp.all((draws >= 0) & (draws <= 1)))
        np.testing.assert_allclose(draws.mean(), mean, atol=4 * deviation / 4000**0.5)
        np.testing.assert_allclose(draws.std(), deviation, rtol=0.1)


@pytest.mark.as_compiled
@pytest.mark.fault("natural.py", "quantile -= step - stop_gradient(step)", "quantile -= 0 * step")
def test_quantiles_of_an_interval_and_their_slopes(x64):
    def exact(loc, scale):
        return scipy.stats.truncnorm(-loc / scale, (1 - loc) / scale, loc=loc, scale=scale).ppf(0.3)

    def found(loc, scale):
        return natural.NaturalTruncatedNormal(dist.Normal(loc, scale), 0.0, 1.0).icdf(0.3)

    for loc, scale in ((0.3, 0.5), (-2.0, 0.6), (4.0, 1.0)):
        np.testing.assert_allclose(found(loc, scale), exact(loc, scale), rtol=1e-10)
        slopes = [(exact(loc + a, scale + b) - exact(loc - a, scale - b)) / 2e-5 for a, b in ((1e-5, 0), (0, 1e-5))]
        np.testing.assert_allclose(jax.grad(found, (0, 1))(loc, scale), slopes, rtol=1e-5)
    far = natural.NaturalTruncatedNormal(dist.Normal(-20.0, 1.0), 0.0, 1.0)
    np.testing.assert_allclose(far.cdf(jnp.array([-1.0, 0.03, 2.0])), [0, 1 - np.exp(-0.6), 1], atol=2e-3)
    np.testing.assert_allclose(far.cdf(far.icdf(jnp.array([0.1, 0.9]))), [0.1, 0.9], rtol=1e-9)
    ends = natural.NaturalTruncatedNormal(dist.Normal(-9.0, 0.5), 0.0, 1.0).icdf(jnp.array([-0.1, 0.0, 1.0, 1.1]))
    np.testing.assert_allclose(ends, [np.nan, 0.0, 1.0, np.nan], atol=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: natural.Normal(jnp.zeros(3)), r"Normal takes its 2 natural parameters along the last .*\(3,\)"),
        (lambda: natural.MultivariateNormal(jnp.zeros(4)), r"D\(D \+ 3\)/2 natural parameters.*got shape \(4,\)"),
        (lambda: natural.Normal(jnp.zeros(2)), r"outside their space .*\[0. 0.\]. Give a `shift`"),
        (lambda: natural.MultivariateNormal(jnp.array([0.0, 0.0, -0.5, 2.0, -0.5])), "outside their space"),
        (lambda: natural.Normal(jnp.array([jnp.nan, -1.0])), "outside their space"),
        (lambda: natural.domain(dist.Normal), "natural.MultivariateNormal, natural.Normal, .*Normal"),
        (lambda: natural.parameters(dist.Cauchy()), "families of numpyro_wide.natural, but got Cauchy"),
    ],
)
def test_refuses_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()
