"""Surrogates fitted at the wide limit, against optimisers and integrals of SciPy and NumPyro's own likelihoods."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

from numpyro_wide import _checks, fitted_surrogate, wide_limit
from numpyro_wide.surrogates import class_contrasts
from numpyro_wide.wide_limit._likelihoods import Categorical
from numpyro_wide.wide_limit._surrogates import normal_pairs
from tests.marks import parametrize

# By name: NumPyro's own, observations of four rows, and what else the fit is told.
LIKELIHOODS = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=f), np.array([1, 1, 0, 1]), {}),
    "binomial": (lambda f: dist.Binomial(9, logits=f), np.array([9, 3, 0, 7]), {"total_count": 9}),
    "poisson": (lambda f: dist.Poisson(jnp.exp(f)), np.array([0, 4, 17, 2]), {}),
    "negative_binomial": (
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 2.5),
        np.array([0, 4, 17, 2]),
        {"concentration": 2.5},
    ),
}
X = np.array([[-1.0, 0.3], [0.2, 0.9], [1.1, -0.4], [1.0, 1.3]])
KERNEL = 0.3 + 2 * np.exp(-0.5 * ((X[:, None] - X[None]) ** 2).sum(-1))


def posterior(surrogate, kernel=KERNEL):
    """Mean, as a matrix, and covariance of a Gaussian process given a surrogate with one weight a row, densely."""
    targets = np.asarray(surrogate.targets, float).reshape(len(kernel), -1)
    noise = np.asarray(surrogate.noise_scale, float).reshape(-1) ** 2
    gain = kernel @ np.linalg.inv(kernel + np.diag(noise))
    return gain @ targets, kernel - gain @ kernel


def optimum(loss, size):
    """SciPy's, from zero, in double precision."""
    gradient = jax.jit(jax.value_and_grad(loss))
    found = minimize(lambda v: [np.asarray(part, float) for part in gradient(v)], np.zeros(size), jac=True, tol=1e-8)
    return found.x


@pytest.mark.fault("wide_limit/_variational.py", "np.clip((1 - explained) / weights, 0.0", "np.clip(1 - explained, 0.0")
@pytest.mark.fault("wide_limit/_variational.py", "state.mean + state.slope / weights[:, None], 1 /", "state.mean, 1 /")
@parametrize("name", LIKELIHOODS, rest="slow")
def test_it_is_the_best_gaussian_of_all(x64, name):
    """Of all Gaussians, those with full covariances included, none has a larger variational bound."""
    likelihood, y, options = LIKELIHOODS[name]
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    lower = np.tril_indices(4)

    def unpack(vector):
        root = jnp.zeros((4, 4)).at[lower].set(vector[4:])
        return vector[:4], root - jnp.diag(jnp.diag(root)) + jnp.diag(jnp.exp(jnp.diag(root)))

    def loss(vector):
        mean, root = unpack(vector)
        values = mean + jnp.sqrt(jnp.sum(root**2, axis=1)) * nodes[:, None]
        expected = jnp.sum(shares / shares.sum() @ likelihood(values).log_prob(y))
        gaussian, prior = (dist.MultivariateNormal(m, scale_tril=r) for m, r in ((mean, root), (jnp.zeros(4), L)))
        return dist.kl_divergence(gaussian, prior) - expected

    L = np.linalg.cholesky(KERNEL)
    mean, root = unpack(optimum(loss, 14))
    found_mean, found_covariance = posterior(fitted_surrogate(y, name, KERNEL, **options))
    np.testing.assert_allclose(found_mean[:, 0], mean, atol=2e-3)
    np.testing.assert_allclose(found_covariance, root @ root.T, atol=2e-3)


@pytest.mark.fault(
    "wide_limit/_likelihoods.py",
    "np.trace(averages.curvature, axis1=1, axis2=2) / self.basis.shape[1]",
    "np.trace(averages.curvature, axis1=1, axis2=2) / (self.basis.shape[1] + 1)",
)
@parametrize("contrasts", [False, True], rest="slow")
def test_classes_have_the_best_weights_that_they_can_share(x64, contrasts):
    """Against an optimiser over means and one weight a row, with integrals over the three logits by quadrature."""
    labels, prior = np.array([0, 2, 2, 1]), np.linalg.inv(KERNEL)
    nodes, shares = np.polynomial.hermite_e.hermegauss(14)
    columns = 2 if contrasts else 3
    basis = class_contrasts(3) if contrasts else np.eye(3)
    grid = np.stack(np.meshgrid(*[nodes] * columns), -1).reshape(-1, 1, columns)
    weight = np.prod(np.stack(np.meshgrid(*[shares / shares.sum()] * columns), -1).reshape(-1, columns), axis=1)

    def loss(vector):
        mean, sites = vector[:-4].reshape(4, columns), jnp.exp(vector[-4:])
        covariance = jnp.linalg.inv(prior + jnp.diag(sites))
        values = mean + jnp.sqrt(jnp.diag(covariance))[:, None] * grid
        expected = jnp.sum(weight @ dist.Categorical(logits=values @ basis.T).log_prob(labels))
        # KL(N(m, V) ‖ N(0, K)) of all columns.
        spread = columns * (jnp.trace(prior @ covariance) - jnp.linalg.slogdet(covariance)[1])
        return 0.5 * (spread + jnp.sum(mean * (prior @ mean))) - expected

    best = optimum(loss, 4 * columns + 4)
    options = {"num_classes": 3, "contrasts": contrasts}
    found = fitted_surrogate(labels, "categorical", KERNEL, **options)
    assert found.targets.shape == (4, columns) and found.noise_scale.shape == (4, 1)
    np.testing.assert_allclose(posterior(found)[0], best[:-4].reshape(4, columns), atol=0.02)
    np.testing.assert_allclose(found.noise_scale[:, 0] ** -2, np.exp(best[-4:]), rtol=0.02)
    # The 128 draws of a likelihood that is given as a function are rougher, and do.
    rough = fitted_surrogate(labels, lambda f: dist.Categorical(logits=f), KERNEL, **options)
    np.testing.assert_allclose(rough.noise_scale, found.noise_scale, rtol=0.1)


@pytest.mark.fault(
    "wide_limit/_likelihoods.py",
    "weight = (self.df + 1) / (self.df * self.scale**2 + residual**2)",
    "weight = self.df / (self.df * self.scale**2 + residual**2)",
)
def test_student_t_is_the_fixed_point_that_the_docstring_says():
    """Mean slopes are those of the likelihood, weights the mean precisions of the scale mixture; by SciPy's quad."""
    y, df, scale = np.array([0.3, -0.2, 8.0, 0.5]), 3.0, 0.4
    found = fitted_surrogate(y, "student_t", KERNEL, df=df, scale=scale)
    mean, covariance = posterior(found)

    def averages(m, v, y):
        weight = lambda f: (df + 1) / (df * scale**2 + (y - f) ** 2)  # noqa: E731
        density = lambda f: norm.pdf(f, m, v**0.5)  # noqa: E731
        span = {"limit": 200, "points": [m, y]}
        integral = lambda g: quad(g, m - 9 * v**0.5, m + 9 * v**0.5, **span)[0]  # noqa: E731
        return integral(lambda f: density(f) * weight(f)), integral(lambda f: density(f) * weight(f) * (y - f))

    weights, slopes = np.transpose(
        [averages(m, v, z) for m, v, z in zip(mean[:, 0], np.diag(covariance), y, strict=True)]
    )
    np.testing.assert_allclose(found.noise_scale**-2.0, weights, rtol=5e-3)
    np.testing.assert_allclose(KERNEL @ slopes, mean[:, 0], atol=5e-3)
    # The outlier is heard less than its neighbours, and its target stays near it.
    assert found.noise_scale[2] > 4 * found.noise_scale[0]
    assert abs(found.targets[2] - 8) < 1


@pytest.mark.fault(
    "linear_gaussian/_surrogate.py",
    "    targets: Array\n    noise_scale: Array",
    "    noise_scale: Array\n    targets: Array",
)
@pytest.mark.fault("wide_limit/_observations.py", "variance in sites], axis=1) ** 0.5", "variance in sites], axis=1)")
def test_a_gaussian_likelihood_is_its_own_surrogate():
    y = np.array([0.3, -0.2, 8.0, 0.5])
    found = fitted_surrogate(y, lambda f: dist.Normal(f, 0.3), KERNEL, offset=[0.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(found.targets, y - np.arange(4), atol=1e-5)
    np.testing.assert_allclose(found.noise_scale, 0.3, rtol=1e-6)


@parametrize("name", [*LIKELIHOODS, "student_t"], rest="slow")
def test_a_function_says_the_same_as_a_name(name):
    likelihood, y, options = LIKELIHOODS.get(name, (None, np.array([0.3, 0.4, 0.9, 0.2]), {"df": 9.0, "scale": 2.0}))
    likelihood = likelihood or (lambda f: dist.StudentT(9.0, f, 2.0))
    named = fitted_surrogate(y, name, KERNEL, offset=0.4, **options)
    found = fitted_surrogate(y, likelihood, KERNEL, offset=0.4)
    # The weight that Student's t has by name is another, but not by much where the scale is large.
    rtol = 0.4 if name == "student_t" else 2e-3
    np.testing.assert_allclose(found.noise_scale, named.noise_scale, rtol=rtol)
    np.testing.assert_allclose(posterior(found)[0], posterior(named)[0], atol=0.02 if name == "student_t" else 2e-3)


@parametrize("name", LIKELIHOODS, rest="slow")
def test_what_the_model_holds_says_the_same_as_a_name(name):
    """A function to NumPyro's distribution, with parameters by row, summed over rows or not."""
    likelihood, y, options = LIKELIHOODS[name]
    named = fitted_surrogate(y, name, KERNEL, offset=[0.4, 0.1, 0.2, 0.3], **options)
    for held in (likelihood, lambda f: likelihood(f).to_event(1)):
        found = fitted_surrogate(y, held, KERNEL, offset=[0.4, 0.1, 0.2, 0.3])
        np.testing.assert_allclose(found.targets, named.targets, atol=2e-3)
        np.testing.assert_allclose(found.noise_scale, named.noise_scale, rtol=1e-3)


@pytest.mark.fault("wide_limit/_surrogates.py", ")) / num_columns", "))")
@parametrize("contrasts", [False, True], rest="slow")
def test_what_a_classifier_holds_says_the_same_as_its_name(contrasts, monkeypatch):
    def by_draws(likelihood, mean, variance):
        return likelihood.averaged(mean, variance, normal_pairs(128, mean.shape))

    monkeypatch.setattr(Categorical, "expected", by_draws)  # as functions are averaged
    options = {"num_classes": 3, "contrasts": contrasts, "offset": [[0.1, 0.3, 0.0]]}
    named = fitted_surrogate([0, 2, 2, 1], "categorical", KERNEL, **options)
    found = fitted_surrogate([0, 2, 2, 1], lambda f: dist.Categorical(logits=f).to_event(1), KERNEL, **options)
    np.testing.assert_allclose(found.targets, named.targets, atol=1e-4)
    np.testing.assert_allclose(found.noise_scale, named.noise_scale, rtol=1e-4)
    # A multinomial of one trial is a categorical.
    held = lambda f: dist.Multinomial(1, logits=f)  # noqa: E731
    found = fitted_surrogate(np.eye(3)[[0, 2, 2, 1]], held, KERNEL, **options)
    np.testing.assert_allclose(found.targets, named.targets, atol=1e-4)


def test_columns_of_a_distribution_are_those_of_its_name():
    y, size = np.array([[0, 3], [4, 1], [17, 0], [2, 5]]), np.array([2.5, 0.7])
    held = lambda f: dist.NegativeBinomial2(jnp.exp(f), size).to_event(2)  # noqa: E731
    found = fitted_surrogate(y, held, KERNEL, offset=[[0.1, 0.2]])
    named = fitted_surrogate(y, "negative_binomial", KERNEL, concentration=size, offset=[[0.1, 0.2]])
    np.testing.assert_allclose(found.targets, named.targets, atol=2e-3)
    np.testing.assert_allclose(found.noise_scale, named.noise_scale, rtol=1e-3)


def test_a_distribution_without_a_name_is_the_fixed_point_of_its_derivatives():
    """Lengths with Gamma(3, 3 e^-f): slopes 3 y e^-f - 3 and curvatures 3 y e^-f, averaged by SciPy's quad."""
    y = np.array([0.5, 2.0, 9.0, 1.0])
    found = fitted_surrogate(y, lambda f: dist.Gamma(3.0, 3 * jnp.exp(-f)), KERNEL)
    mean, covariance = posterior(found)

    def average(m, v, y):
        within = (m - 9 * v**0.5, m + 9 * v**0.5)
        return quad(lambda f: norm.pdf(f, m, v**0.5) * 3 * y * np.exp(-f), *within, limit=200)[0]

    weights = np.array([average(m, v, z) for m, v, z in zip(mean[:, 0], np.diag(covariance), y, strict=True)])
    np.testing.assert_allclose(found.noise_scale**-2.0, weights, rtol=5e-3)
    np.testing.assert_allclose(KERNEL @ (weights - 3), mean[:, 0], atol=5e-3)


@parametrize("held", [False, True], rest="slow")
def test_a_row_of_no_trials_says_nothing(held):
    """What it is told of the other rows is the posterior without it, there and everywhere."""
    y, trials = np.array([9, 1, 0, 4]), np.array([9, 3, 0, 7])
    if held:
        found = fitted_surrogate(y, lambda f: dist.Binomial(trials, logits=f), KERNEL)
    else:
        found = fitted_surrogate(y, "binomial", KERNEL, total_count=trials)
    assert 40 < found.noise_scale[2] < 60
    rest = [0, 1, 3]
    without = fitted_surrogate(y[rest], "binomial", KERNEL[np.ix_(rest, rest)], total_count=trials[rest])
    gain = KERNEL[:, rest] @ np.linalg.inv(KERNEL[np.ix_(rest, rest)] + np.diag(without.noise_scale**2.0))
    mean, covariance = posterior(found)
    np.testing.assert_allclose(mean[:, 0], gain @ without.targets, atol=2e-3)
    np.testing.assert_allclose(covariance, KERNEL - gain @ KERNEL[rest], atol=3e-3)


def test_what_a_mask_hides_says_nothing():
    y, shown = np.array([0.3, -0.2, 8.0, 0.5]), np.array([True, True, False, True])
    found = fitted_surrogate(y, lambda f: dist.Normal(f, 0.3).mask(shown), KERNEL)
    np.testing.assert_allclose(found.targets[shown], y[shown], atol=1e-3)
    np.testing.assert_allclose(found.noise_scale[shown], 0.3, rtol=1e-5)
    assert found.noise_scale[2] > 40


def test_a_likelihood_that_is_not_concave_keeps_its_weights_positive():
    y = np.array([0.3, -0.2, 8.0, 0.5])
    found = fitted_surrogate(y, lambda f: dist.StudentT(3.0, f, 0.2), KERNEL)
    assert np.isfinite(found.targets).all() and np.isfinite(found.noise_scale).all()
    assert found.noise_scale[2] > 20 * found.noise_scale[0]


def test_outputs_are_fitted_one_by_one_with_parameters_of_their_own():
    y = np.array([[0, 3], [4, 1], [17, 0], [2, 5]])
    size = np.array([2.5, 0.7])
    both = fitted_surrogate(y, "negative_binomial", KERNEL, concentration=size, offset=[[0.1, 0.2]])
    assert both.targets.shape == both.noise_scale.shape == (4, 2)
    for i in range(2):
        one = fitted_surrogate(y[:, i], "negative_binomial", KERNEL, concentration=size[i], offset=0.1 * (i + 1))
        np.testing.assert_allclose(both.targets[:, i], one.targets, rtol=1e-5)
        np.testing.assert_allclose(both.noise_scale[:, i], one.noise_scale, rtol=1e-5)


def test_an_offset_of_logits_moves_the_classes():
    """What the offset says alone needs no readout: labels that it makes certain say nothing more."""
    offset = 20 * np.eye(3)[[0, 2, 2, 1]]
    found = fitted_surrogate([0, 2, 2, 1], "categorical", KERNEL, num_classes=3, offset=offset)
    np.testing.assert_allclose(posterior(found)[0], 0, atol=1e-2)


def test_double_precision_inside_whatever_the_user_has(x64):
    y = np.array([1, 1, 0, 1])
    double = fitted_surrogate(y, "bernoulli", KERNEL)
    with jax.enable_x64(False):
        single = fitted_surrogate(y, "bernoulli", KERNEL)
    assert double.targets.dtype == "float64" and single.targets.dtype == "float32"
    np.testing.assert_allclose(single.targets, double.targets, rtol=2e-7)


@pytest.mark.fault(
    "wide_limit/_variational.py",
    "weights = np.minimum(state.weights, total_weight / (len(state.weights) * self._prior))",
    "weights = state.weights",
)
@pytest.mark.slow
def test_weights_stay_within_what_single_precision_resolves():
    """Counts in the hundred thousands; the slope at the mean is the likelihood's all the same."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 4))
    kernel = 6 * np.asarray(wide_limit.fcn_kernel(1, "gelu", w_std=1.4, b_std=0.1)(x)[0], float)
    counts = rng.poisson(np.exp(9 + np.linalg.cholesky(kernel + 1e-3 * np.eye(150)) @ rng.normal(size=150)))
    found = fitted_surrogate(counts, "poisson", kernel)
    assert counts.max() > 1e5 and np.isfinite(found.targets).all()
    assert np.sum(np.diag(kernel) / np.asarray(found.noise_scale, float) ** 2) < 0.26 / np.finfo("f").eps
    np.testing.assert_allclose(posterior(found, kernel)[0][:, 0], np.log(counts + 0.5), atol=0.3)
    with jax.enable_x64(True):
        free = fitted_surrogate(counts, "poisson", kernel)
    # Where nothing is held back the weight of a large count is the rate.
    large = counts > 1000
    np.testing.assert_allclose(np.asarray(free.noise_scale)[large] ** -2.0, counts[large], rtol=0.05)


def test_a_kernel_in_single_precision_is_as_good():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 2)).astype("f")
    kernel = wide_limit.fcn_kernel(1, "erf", w_std=1.4, b_std=0.5)(x)[0]
    assert kernel.dtype == "float32" and np.linalg.eigvalsh(np.asarray(kernel, float)).min() < 0
    counts = rng.poisson(3000, size=60)
    found = fitted_surrogate(counts, "poisson", kernel, offset=8.0)
    assert np.isfinite(found.targets).all()


POISSON = lambda f: dist.Poisson(jnp.exp(f))  # noqa: E731


def bad_kernel():
    kernel = KERNEL.copy()
    kernel[0, 1] = kernel[1, 0] = 4.0
    return kernel


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1] * 4, "gamma", KERNEL), {}, "likelihood must be one of 'bernoulli', .* or a function .* but got 'gamma'"),
        (([1] * 4, "binomial", KERNEL), {}, "the likelihood 'binomial' needs 'total_count'"),
        (([1] * 4, "student_t", KERNEL), {"df": 3.0}, "the likelihood 'student_t' needs 'scale'"),
        (([1] * 4, "poisson", KERNEL), {"scale": 3.0}, "'scale' must not be given where the likelihood is 'poisson'"),
        (([1] * 4, POISSON, KERNEL), {"df": 3.0}, "'df' must not be given .* as a function; drop it"),
        (([1] * 4, "poisson", KERNEL), {"contrasts": True}, "contrasts belong to a categorical .* but .*'poisson'"),
        (([1] * 4, "categorical", KERNEL), {"num_classes": 1}, "num_classes must be a whole number of at least 2"),
        (([0, 1, 2, 3], "categorical", KERNEL), {"num_classes": 3}, "from 0 to 2, but they range from 0.0 to 3.0"),
        ((np.ones((4, 1)), "categorical", KERNEL), {"num_classes": 3}, r"class labels must have shape \(n,\), but got"),
        (([-1, 2, 0, 1], "poisson", KERNEL), {}, "must be whole numbers from 0 to inf, but .* from -1.0 to 2.0"),
        (([0.5, 2, 0, 1], "negative_binomial", KERNEL), {"concentration": 1.0}, "or are not whole"),
        (([1, 2, 0, 1], "bernoulli", KERNEL), {}, "must be whole numbers from 0 to 1"),
        (([1, 2, 0, 9], "binomial", KERNEL), {"total_count": [8, 8, 8, 8]}, "from 0 to total_count, at most 8"),
        (([1, 2, 0, 9], "binomial", KERNEL), {"total_count": 9.5}, "total_count must hold whole numbers"),
        (([1, 2, 0, 9], "negative_binomial", KERNEL), {"concentration": -1.0}, "concentration must be positive"),
        (([1, np.nan, 0, 9], "poisson", KERNEL), {}, "observations must not contain NaN, but 1 of its entries do"),
        (([1, np.inf, 0, 9], "student_t", KERNEL), {"df": 3.0, "scale": 1.0}, "observations must be finite"),
        ((3, "poisson", KERNEL), {}, r"observations must have shape \(n,\) or \(n, k\)"),
        (([1, 2, 0], "poisson", KERNEL), {}, r"kernel must have shape \(n, n\) = \(3, 3\), but got \(4, 4\)"),
        (([1] * 4, "poisson", np.triu(KERNEL)), {}, "kernel must be symmetric, but differs from its transpose"),
        (([1] * 4, "poisson", KERNEL * np.nan), {}, "kernel must not contain NaN"),
        (([1] * 4, "poisson", KERNEL + np.inf), {}, "kernel must be finite"),
        (([1] * 4, "poisson", 0 * KERNEL), {}, "kernel must be positive semidefinite and not zero"),
        (([1] * 4, "poisson", bad_kernel()), {}, "kernel must be positive semidefinite"),
        (([1] * 4, "poisson", KERNEL), {"offset": [1.0, 2.0]}, r"offset must broadcast against the shape \(4,\)"),
        (
            ([1.0] * 4, lambda f: dist.Normal(jnp.sqrt(f), 1.0), KERNEL),
            {},
            "the derivatives of the log likelihood must be finite",
        ),
        (([1] * 4, lambda f: dist.MultivariateNormal(f, np.eye(4)), KERNEL), {}, r"shape \(4,\), but gives \(\)"),
        (([1] * 4, lambda f: dist.Normal(f - f.mean(), 1), KERNEL), {}, "of a row must depend on .* that row alone"),
        (([1] * 4, lambda f: dist.Categorical(logits=f), KERNEL), {}, "say num_classes where each row has several"),
        (([1, 2, -1, 0], POISSON, KERNEL), {}, "the distribution Poisson can give, .* from -1.0 to 2.0"),
        (([1, 2, 0.5, 0], POISSON, KERNEL), {}, "the distribution Poisson can give, .* from 0.0 to 2.0"),
        (([1, 2, 0, 9], "binomial", KERNEL), {"total_count": -9}, "total_count must not be negative"),
        (([0, 2, 0, 1], "poisson", KERNEL), {"offset": np.nan}, "offset must not contain NaN"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        fitted_surrogate(*arguments, **options)


@pytest.mark.parametrize(
    ("observations", "options"), [([1j, 0, 1, 1], {}), (["a"] * 4, {}), ([0, 1, 1, 1], {"offset": 1j})]
)
def test_what_holds_no_real_numbers_is_refused(observations, options):
    with pytest.raises(TypeError, match="must hold real numbers, .* has the type"):
        fitted_surrogate(observations, "bernoulli", KERNEL, **options)


def test_what_is_given_can_be_changed_afterwards():
    y, kernel = np.array([1.0, 1.0, 0.0, 1.0]), KERNEL.copy()
    found = fitted_surrogate(y, "bernoulli", kernel)
    before = np.array(found.targets)
    y *= 5
    kernel *= 5
    np.testing.assert_array_equal(found.targets, before)


def test_traced_numbers_are_refused():
    with pytest.raises(TypeError, match="not known under jit, .* repriorise\\(..., surrogate=fitted_surrogate"):
        jax.jit(lambda y: fitted_surrogate(y, "poisson", KERNEL))(jnp.ones(4))


def test_a_fit_that_does_not_settle_says_so(monkeypatch):
    from numpyro_wide.wide_limit import _variational

    monkeypatch.setattr(_variational, "_MAX_STEPS", 1)
    with pytest.warns(RuntimeWarning, match="the surrogate's means and weights still move by"):
        fitted_surrogate([0, 4, 17, 2], "poisson", KERNEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()
        fitted_surrogate([0, 4, 17, 2], "poisson", KERNEL)


def test_a_fit_that_takes_long_shows_a_bar(bars, monkeypatch, capsys):
    likelihood, y, _ = LIKELIHOODS["poisson"]
    monkeypatch.setattr(_checks, "_PATIENCE", 0)
    for shown in (True, False):
        fitted_surrogate(y, likelihood, KERNEL, progress_bar=shown)
        assert ("surrogate: " in capsys.readouterr().err) == shown
