"""Exact laws of linear networks against SciPy and brute force; and what the package has in closed form against them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive
from scipy import integrate, special, stats

from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior
from studies._linear_networks import (
    NOISE_SCALE,
    LinearLaw,
    draw_data,
    linear_network,
    log_scale_density,
    scale_and_slopes,
)
from studies._width_correction import width_correction

DATA = draw_data(3, scale=2.5)


def law_of(depth, width, data=DATA, **options):
    return LinearLaw(depth, width, data.x, data.y, NOISE_SCALE, **options)


@pytest.mark.parametrize("width", [1, 4, 16, 64])
def test_density_of_the_scale(width):
    """One layer has a gamma density, two have a Bessel function's, and the moments of all are products."""
    log_scale, log_density = log_scale_density(1, width)
    expected = stats.gamma.logpdf(np.exp(log_scale), width / 2, scale=2 / width) + log_scale
    np.testing.assert_allclose(log_density, expected, rtol=1e-9, atol=1e-9)
    log_scale, log_density = log_scale_density(2, width)
    near = np.abs(log_scale) < 1  # SciPy's function has the digits there
    root = width * np.exp(log_scale[near] / 2)
    log_bessel = np.log(special.kve(0, root)) - root
    expected = np.log(2) + width * np.log(width / 2) + width / 2 * log_scale[near] - 2 * special.gammaln(width / 2)
    np.testing.assert_allclose(log_density[near], expected + log_bessel, rtol=1e-7, atol=1e-7)
    for depth in (1, 2, 3):
        log_scale, log_density = log_scale_density(depth, width)
        step = log_scale[1] - log_scale[0]
        for power in (0, 1, 2):
            moment = step * np.sum(np.exp(log_density + power * log_scale))
            np.testing.assert_allclose(moment, stats.gamma(width / 2, scale=2 / width).moment(power) ** depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("width", [4, 64])
def test_nothing_is_left_of_the_step(depth, width):
    coarse, fine = law_of(depth, width), law_of(depth, width, step=0.0125)
    np.testing.assert_allclose(coarse.log_evidence, fine.log_evidence, rtol=1e-10)
    for one, other in zip(coarse.predict(DATA.x_new), fine.predict(DATA.x_new), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8)


def test_evidence_of_one_layer_by_adaptive_quadrature():
    def integrand(scale):
        covariance = scale * DATA.x.astype(float) @ DATA.x.T / 4 + NOISE_SCALE**2 * np.eye(10)
        return stats.gamma.pdf(scale, 2, scale=0.5) * stats.multivariate_normal.pdf(DATA.y, np.zeros(10), covariance)

    found = integrate.quad(integrand, 0, 60, points=[1, 5, 20], epsabs=0, limit=200)[0]
    np.testing.assert_allclose(law_of(1, 4).log_evidence, np.log(found), rtol=1e-9)


def gaussian_terms(features, targets):
    """Log evidence of targets (n,) given features (draw, n, d), their covariance, and its inverse times the targets."""
    covariance = features @ features.swapaxes(1, 2) + NOISE_SCALE**2 * np.eye(len(targets))
    solved = np.linalg.solve(covariance, np.broadcast_to(targets[:, None], (len(features), len(targets), 1)))
    return -0.5 * (solved[..., 0] @ targets + np.linalg.slogdet(2 * np.pi * covariance)[1]), covariance, solved


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_by_draws_of_all_hidden_weights(depth):
    """Brute force: networks of the prior, each weighted by the evidence that it has."""
    rng, num, width = np.random.default_rng(depth), 40_000, 4
    data = draw_data(3, scale=1.5)
    x = np.concatenate([data.x, data.x_new]).astype(float)
    features = x / x.shape[1] ** 0.5
    for _ in range(depth):
        features = features @ rng.normal(size=(num, features.shape[-1], width)) / width**0.5
    n = len(data.x)
    log_terms, noisy, solved = gaussian_terms(features[:, :n], data.y.astype(float))
    law = law_of(depth, width, data)
    weights = np.exp(log_terms - law.log_evidence)
    assert abs(weights.mean() - 1) < 4 * weights.std() / num**0.5 < 0.1
    cross = features[:, n:] @ features[:, :n].swapaxes(1, 2)
    means = (cross @ solved)[..., 0]
    mean, covariance = law.predict(data.x_new)
    close(weights[:, None] * (means - mean))
    given = features[:, n:] @ features[:, n:].swapaxes(1, 2)
    given -= cross @ np.linalg.solve(noisy, cross.swapaxes(1, 2))
    around = means - mean
    close(weights[:, None, None] * (given + around[:, :, None] * around[:, None] - covariance))
    variances = np.diagonal(given, axis1=1, axis2=2) + NOISE_SCALE**2
    densities = np.exp(law.log_density(data.x_new, data.y_new))
    close(weights[:, None] * (stats.norm.pdf(data.y_new, means, np.sqrt(variances)) - densities))


def close(terms):
    """Means over draws are zero within four and a half standard errors."""
    assert np.all(np.abs(terms.mean(0)) < 4.5 * terms.std(0) / len(terms) ** 0.5)


def test_one_row_alone_is_all_rows_together():
    law = law_of(2, 4)
    for x_new, y_new in zip(DATA.x_new, DATA.y_new, strict=True):
        joint = law.joint_log_density(x_new[None], y_new[None])
        np.testing.assert_allclose(law.log_density(x_new[None], y_new[None]), joint, rtol=1e-9)


@pytest.mark.parametrize("depth", [1, 3])
def test_scale_and_slopes_are_those_of_the_model(depth):
    model = linear_network("plain", depth, 5)
    draws = Predictive(model, num_samples=1000)(jax.random.key(0), jnp.asarray(DATA.x))
    scale, slopes = scale_and_slopes(draws, depth)
    one = {name: value[7] for name, value in draws.items() if name not in ("features", "y")}
    sites = trace(substitute(seed(model, 0), one)).get_trace(jnp.asarray(DATA.x_new))
    function = sites["features"]["value"] @ one["readout"]
    np.testing.assert_allclose(DATA.x_new @ slopes[7], function, rtol=1e-4)
    # Given Q the slopes are N(0, Q I / d_in).
    sizes = np.sum(4 * slopes**2 / scale[:, None], axis=1)
    assert stats.kstest(sizes, stats.chi2(4).cdf).pvalue > 1e-3
    log_scale, log_density = log_scale_density(depth, 5)
    cdf = np.cumsum(np.exp(log_density)) * (log_scale[1] - log_scale[0])
    assert stats.kstest(np.log(scale), lambda value: np.interp(value, log_scale + 0.025, cdf)).pvalue > 1e-3


@pytest.mark.parametrize("depth", [1, 3])
def test_the_limit_is_that_of_wide_networks(x64, depth):
    kernel = fcn_kernel(depth, "identity", w_std=1.0, b_std=0.0)
    x, x_new = (part.astype(float) for part in (DATA.x, DATA.x_new))
    blocks = kernel(x)[0], kernel(x_new, x)[0], kernel(x_new)[0]
    limit = gp_log_evidence(blocks[0], DATA.y.astype(float), NOISE_SCALE)
    mean, covariance = gp_posterior(*blocks, DATA.y.astype(float), NOISE_SCALE)

    def distances(width):
        law = law_of(depth, width, step=0.002)
        found = law.predict(x_new)
        return np.array([law.log_evidence - limit, *(found[0] - mean), *(found[1] - covariance).ravel()])

    near, nearer = distances(2000), distances(4000)
    assert np.max(np.abs(nearer)) < 0.03
    assert np.max(np.abs(2 * nearer - near)) < 1e-3  # what is left is of the order 1/width²


def test_width_correction_is_the_first_order_of_the_exact_law(x64):
    units = np.random.default_rng(0).normal(size=(4, 400_000)) / 2
    x, x_new = DATA.x.astype(float), DATA.x_new.astype(float)
    kernel, cross = x @ x.T / 4, x_new @ x.T / 4
    targets = DATA.y.astype(float)
    found = width_correction(x @ units, kernel, targets, NOISE_SCALE, units_new=x_new @ units, kernel_cross=cross)
    limit = gp_log_evidence(kernel, targets, NOISE_SCALE)
    limit_mean, _ = gp_posterior(kernel, cross, x_new @ x_new.T / 4, targets, NOISE_SCALE)

    def of_width(width):
        law = law_of(1, width, step=0.002)
        return width * np.array([law.log_evidence - limit, *(law.predict(x_new)[0] - limit_mean)])

    exact = 2 * of_width(8000) - of_width(4000)  # without the term of order 1/width
    evidence, mean = exact[0], exact[1:]
    assert abs(found.log_evidence - evidence) < 4 * found.log_evidence_error < 0.2 * abs(evidence)
    assert np.all(np.abs(found.mean - mean) < 4 * found.mean_error + 1e-3)
    assert np.max(np.abs(mean) / found.mean_error) > 5
