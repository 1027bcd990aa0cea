"""Quasi-KL: closed forms, the limits that define it, and its agreement with KL."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats
from numpyro.distributions.kl import kl_divergence

from numpyro_wide.distributions import BernoulliDropout, DegenerateNormal, GaussianDropout, quasi_kl, register_quasi_kl
from tests.marks import parametrize

RNG = np.random.default_rng(3)
MEAN = np.array([0.3, -0.7, 1.1])
ROOT = np.array([[1.2, 0.0, 0.0], [0.4, 0.8, 0.0], [-0.5, 0.3, 1.5]])
SIGMA = ROOT @ ROOT.T
AXIS_PLANE = np.eye(3)[:, :2]
TILTED_PLANE = np.linalg.qr(RNG.normal(size=(3, 2)))[0]


def prior():
    return dist.MultivariateNormal(MEAN, scale_tril=ROOT)


def gaussian_kl(mean, covariance):
    gap = mean - MEAN
    precision = np.linalg.inv(SIGMA)
    log_dets = np.linalg.slogdet(SIGMA)[1] - np.linalg.slogdet(covariance)[1]
    return 0.5 * (np.trace(precision @ covariance) + gap @ precision @ gap - len(mean) + log_dets)


@parametrize(
    ("basis", "scale"),
    [(np.eye(3)[:, :1], [0.7]), (TILTED_PLANE[:, :1], [0.7]), (AXIS_PLANE, [0.7, 1.6]), (TILTED_PLANE, [0.7, 1.6])],
    ids=["axis line", "tilted line", "axis plane", "tilted plane"],
    rest="slow",
)
def test_theorem_5_blurred_planes(x64, basis, scale):
    """KL(Q * N(0, I/m) ‖ P) + ½(D − K) log(2πe/m) → QKL, with an error of order 1/m."""
    loc = np.array([0.2, 0.5, -0.4])
    limit = quasi_kl(DegenerateNormal(loc, basis, np.array(scale)), prior())
    errors = []
    for m in (1e2, 1e4, 1e6):
        covariance = basis @ np.diag(np.square(scale)) @ basis.T + np.eye(3) / m
        constant = 0.5 * (3 - len(scale)) * np.log(2 * np.pi * np.e / m)
        errors.append(abs(gaussian_kl(loc, covariance) + constant - limit))
    assert errors[2] < 1e-4
    assert errors[1] < 0.02 * errors[0] and errors[2] < 0.02 * errors[1]


@pytest.mark.slow
def test_theorem_5_gaussian_dropout(x64):
    row = np.array([0.6, -1.1, 0.8])
    m, alpha = 1e7, 0.4
    covariance = alpha * np.outer(row, row) + np.eye(3) / m
    blurred = gaussian_kl(row, covariance) + np.log(2 * np.pi * np.e / m)
    np.testing.assert_allclose(quasi_kl(GaussianDropout(row, alpha), prior()), blurred, atol=1e-5)


@pytest.mark.fault(
    "distributions/_quasi_kl.py", "0.5 * q.variance / jnp.square(p.scale) - p.log_prob(q.mean)", "-p.log_prob(q.mean)"
)
def test_theorem_4_blurred_atoms(x64):
    """For atoms K is 0; the KL of the mixture by quadrature around each atom in two dimensions."""
    row, rate, scale = np.array([0.8, -0.5]), 0.3, 1.3
    limit = quasi_kl(BernoulliDropout(row, rate), dist.Normal(0.0, scale))
    x, weight = np.polynomial.hermite_e.hermegauss(20)
    z = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2)
    w = np.outer(weight, weight).ravel() / (2 * np.pi)
    errors = []
    for m in (1e2, 1e3, 1e4):
        kl = 0.0
        for mass, atom in ((rate, np.zeros(2)), (1 - rate, row)):
            points = atom + z / np.sqrt(m)
            q = sum(
                p * scipy.stats.multivariate_normal(a, np.eye(2) / m).pdf(points)
                for p, a in ((rate, np.zeros(2)), (1 - rate, row))
            )
            log_p = scipy.stats.norm(0, scale).logpdf(points).sum(-1)
            kl += mass * np.sum(w * (np.log(q) - log_p))
        errors.append(abs(kl + np.log(2 * np.pi * np.e / m) - limit))
    assert errors[2] < 1e-4
    assert errors[2] < 0.2 * errors[1] < 0.04 * errors[0]


@pytest.mark.fault("distributions/_singular.py", "self.rate) - xlog1py(1.0 - self.rate, -self.rate)", "self.rate)")
@pytest.mark.slow
def test_theorem_4_discretised(x64):
    """Both put on the cells of ever finer grids; s is -D log of a cell's side. The cell of an atom has another mean
    log density than the atom: by half a cell times its slope, at most, and a term of second order."""
    row, rate, scale = np.array([0.8, -0.5]), 0.3, 1.3
    limit = quasi_kl(BernoulliDropout(row, rate), dist.Normal(0.0, scale))
    errors = []
    for side in (2.0**-2, 2.0**-7, 2.0**-12):
        kl = 0.0
        for mass, atom in ((rate, np.zeros(2)), (1 - rate, row)):
            edge = side * np.floor(atom / side)
            cell = scipy.stats.norm.cdf(edge + side, scale=scale) - scipy.stats.norm.cdf(edge, scale=scale)
            kl += mass * (np.log(mass) - np.log(cell).sum())
        errors.append(abs(kl + 2 * np.log(side) - limit))
        assert errors[-1] < (1 - rate) * side / 2 * np.abs(row).sum() / scale**2 + side**2
    assert errors[2] < 0.1 * errors[1] < 0.01 * errors[0]


@pytest.mark.fault("distributions/_quasi_kl.py", "0.5 * trace - p.log_prob(q.mean)", "-p.log_prob(q.mean)")
@pytest.mark.slow
def test_proposition_7_blurred_lines_tend_to_the_best_one(x64):
    """A line blurred by N(0, τI), a aᵀ + τI, fitted by KL: at its best ‖a‖² is the leading variance less τ."""
    variances, vectors = np.linalg.eigh(SIGMA)

    def fit(divergence):
        start = np.array([0.5, -0.2, 0.9])
        best = scipy.optimize.minimize(jax.value_and_grad(divergence), start, jac=True, options={"gtol": 1e-8}).x
        return best * np.sign(best @ vectors[:, -1])

    def blurred(a, tau):
        covariance = jnp.outer(a, a) + tau * jnp.eye(3)
        log_det = jnp.linalg.slogdet(covariance)[1]
        return 0.5 * (jnp.trace(jnp.linalg.solve(SIGMA, covariance)) - log_det)

    def on_the_line(a):
        length = jnp.linalg.norm(a)
        p = dist.MultivariateNormal(jnp.zeros(3), covariance_matrix=SIGMA)
        return quasi_kl(DegenerateNormal(jnp.zeros(3), a[:, None] / length, length[None]), p)

    limit = fit(on_the_line)
    np.testing.assert_allclose(limit, np.sqrt(variances[-1]) * vectors[:, -1], atol=1e-5)
    for tau in (1e-1, 1e-2, 1e-3):
        gap = np.linalg.norm(fit(lambda a, tau=tau: blurred(a, tau)) - limit)
        np.testing.assert_allclose(gap, np.sqrt(variances[-1]) - np.sqrt(variances[-1] - tau), rtol=0.02)


def test_equals_the_formula_sheet(x64):
    variances, dim, rank = np.array([0.5, 2.0]), 3, 2
    q = DegenerateNormal(np.zeros(3), TILTED_PLANE, np.sqrt(variances))
    p = dist.MultivariateNormal(np.zeros(3), covariance_matrix=SIGMA)
    expected = (
        -0.5 * np.log(variances).sum()
        + 0.5 * np.trace(TILTED_PLANE.T @ np.linalg.inv(SIGMA) @ TILTED_PLANE @ np.diag(variances))
        + 0.5 * np.linalg.slogdet(SIGMA)[1]
        + 0.5 * (dim - rank) * np.log(2 * np.pi)
        - rank / 2
    )
    np.testing.assert_allclose(quasi_kl(q, p), expected, rtol=1e-12)
    rate, s, row = 0.2, 1.7, np.array([1.0, 2.0, -0.5])
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    expected = -entropy + 1.5 * np.log(2 * np.pi * s**2) + (1 - rate) * row @ row / (2 * s**2)
    np.testing.assert_allclose(quasi_kl(BernoulliDropout(row, rate), dist.Normal(0, s)), expected, rtol=1e-12)


@pytest.mark.fault("distributions/_quasi_kl.py", "(1.0 - q.rate) * at_row", "at_row")
@parametrize(
    ("kind_of_q", "parameters"),
    [
        (DegenerateNormal, ([0.2, 0.5, -0.4], TILTED_PLANE, [0.7, 1.6])),
        (BernoulliDropout, ([1.0, 2.0, -0.5], 0.3)),
        (GaussianDropout, ([1.0, 2.0, -0.5], 0.4)),
    ],
    ids=["DegenerateNormal", "BernoulliDropout", "GaussianDropout"],
    rest="slow",
)
@parametrize("kind", ["normal", "vector normal", "multivariate", "laplace"], rest="slow")
def test_closed_forms_against_draws(kind_of_q, parameters, kind):
    q = kind_of_q(*map(np.asarray, parameters))
    loc, scale = np.array([0.3, -0.7, 1.1]), np.array([1.2, 0.6, 2.0])
    p = {
        "normal": dist.Normal(loc, scale),
        "vector normal": dist.Normal(loc, scale).to_event(1),
        "multivariate": prior(),
        "laplace": dist.Laplace(loc, scale),
    }[kind]
    n = 100000
    draws = q.sample(jax.random.key(0), (n,))
    log_p = p.log_prob(draws)
    samples = q.log_prob(draws) - (log_p if p.event_dim else log_p.sum(-1))
    closed = quasi_kl(q, p, num_samples=n, rng_key=jax.random.key(1))
    assert closed.shape == ()
    assert abs(samples.mean() - closed) < 7 * samples.std() / np.sqrt(n)


def test_batches_wrappers_and_masks(x64):
    rows = RNG.normal(size=(4, 3))
    q = BernoulliDropout(rows, 0.3)
    each = quasi_kl(q, dist.Normal(0.0, 2.0))
    one = [quasi_kl(BernoulliDropout(row, 0.3), dist.Normal(0.0, 2.0)) for row in rows]
    np.testing.assert_allclose(each, one)
    matrix = quasi_kl(q.to_event(1), dist.Normal(0.0, 2.0).expand([4, 3]).to_event(2))
    np.testing.assert_allclose(matrix, each.sum())
    np.testing.assert_allclose(
        quasi_kl(q, prior().expand([4])), [quasi_kl(BernoulliDropout(r, 0.3), prior()) for r in rows]
    )
    np.testing.assert_allclose(quasi_kl(BernoulliDropout(rows[0], 0.3).expand([4]), dist.Normal(0.0, 2.0)), each[0])
    batch = dist.Normal(np.arange(12.0).reshape(4, 3), 2.0)
    per_row = [quasi_kl(BernoulliDropout(r, 0.3), dist.Normal(batch.loc[i], 2.0)) for i, r in enumerate(rows)]
    np.testing.assert_allclose(quasi_kl(q, batch), per_row)
    mask = np.array([True, False, True, False])
    np.testing.assert_allclose(quasi_kl(q.mask(mask), dist.Normal(0.0, 2.0)), each * mask)
    with pytest.raises(ValueError, match="masked prior and a q without a mask.*mask the guide's site as well"):
        quasi_kl(dist.Normal(np.zeros(4), 0.5), dist.Normal(0.0, 2.0).mask(mask))


def test_is_kl_where_there_is_a_density(x64):
    q, p = dist.Normal(np.array([0.2, 1.0]), 0.5).to_event(1), dist.Normal(np.zeros(2), 2.0).to_event(1)
    np.testing.assert_array_equal(quasi_kl(q, p), kl_divergence(q, p))
    full = DegenerateNormal(np.array([0.2, 0.5, -0.4]), np.linalg.qr(RNG.normal(size=(3, 3)))[0], np.array([0.5, 1, 2]))
    covariance = (full.basis * full.scale**2) @ full.basis.T
    proper = dist.MultivariateNormal(full.loc, covariance_matrix=covariance)
    np.testing.assert_allclose(quasi_kl(full, prior()), kl_divergence(proper, prior()), rtol=1e-9)
    # No closed form in NumPyro either: draws.
    gumbel = dist.Gumbel(0.3, 1.2)
    estimate = quasi_kl(gumbel, dist.Normal(0.0, 2.0), num_samples=200000)
    grid = np.linspace(-6, 30, 20001)
    log_q = np.asarray(gumbel.log_prob(grid))
    exact = np.trapezoid(np.exp(log_q) * (log_q - scipy.stats.norm(0, 2).logpdf(grid)), grid)
    np.testing.assert_allclose(estimate, exact, atol=0.02)


def test_lower_bound_is_reached_by_the_restricted_prior(x64):
    # −log ∫_S p over the line of N(0, I): the line through 0 has mass (2π)^(-(D-1)/2).
    line = DegenerateNormal(np.zeros(3), TILTED_PLANE[:, :1], np.ones(1))
    np.testing.assert_allclose(quasi_kl(line, dist.Normal(0.0, 1.0)), np.log(2 * np.pi), rtol=1e-12)


def test_transformations_and_gradients():
    def value(loc, scale, row, rate, alpha):
        p = dist.MultivariateNormal(jnp.asarray(MEAN), scale_tril=jnp.asarray(ROOT))
        q = (DegenerateNormal(loc, TILTED_PLANE, scale), BernoulliDropout(row, rate), GaussianDropout(row, alpha))
        return sum(quasi_kl(x, p) for x in q)

    value = jax.jit(value)
    arguments = jnp.ones(3), jnp.ones(2), jnp.ones(3), jnp.array(0.4), jnp.array(0.3)
    one = value(*arguments)
    batched = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), arguments)
    np.testing.assert_allclose(jax.jit(jax.vmap(value))(*batched)[0], one, rtol=1e-5)
    assert all(np.all(np.isfinite(g)) for g in jax.jit(jax.grad(value, (0, 1, 2, 3, 4)))(*arguments))


def test_registered_rules_are_used():
    class Point(dist.Delta):
        pass

    register_quasi_kl(Point, dist.Gumbel)(lambda q, p: jnp.asarray(42.0))
    assert quasi_kl(Point(1.0), dist.Gumbel(0.0, 1.0)) == 42
