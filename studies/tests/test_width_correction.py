"""Corrections in 1/width against quadrature, derivatives by JAX, and networks drawn from their prior."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior
from studies._width_correction import width_correction
from tests.marks import parametrize

NOISE = 0.4


def units_and_targets(num_units, num_outputs=None, num_train=5, num_new=2):
    """Units of an erf layer with biases, training rows first, the kernel of all inputs, and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_train + num_new, 2))
    targets = 1.5 * rng.normal(size=(num_train,) if num_outputs is None else (num_train, num_outputs))
    weights = rng.normal(size=(3, num_units))
    arguments = 1.3 / 2**0.5 * x @ weights[:2] + 0.5 * weights[2]
    units = 0.9 * np.asarray(jax.lax.erf(arguments))
    kernel = np.asarray(fcn_kernel(1, "erf", w_std=1.3, b_std=0.5, readout_w_std=0.9, readout_b_std=0.3)(x)[0])
    return units, kernel, targets


@parametrize("y", [0.3, 2.0], rest="slow")
def test_one_random_scale_against_quadrature(x64, y):
    """Units z ~ N(0, 1) at one input, 0.7 z at another: the kernel of d units is chi-squared over d."""
    z = np.random.default_rng(1).normal(size=400_000)
    found = width_correction(
        z[None], np.eye(1), np.array([y]), NOISE, units_new=0.7 * z[None], kernel_cross=np.array([[0.7]])
    )
    log_limit = scipy.stats.norm.logpdf(y, scale=np.hypot(1, NOISE))
    mean_limit = 0.7 * y / (1 + NOISE**2)

    def of_width(width):
        def averaged(function):
            def integrand(g):
                evidence = np.exp(scipy.stats.norm.logpdf(y, scale=np.sqrt(g + NOISE**2)) - log_limit)
                return scipy.stats.gamma.pdf(g, width / 2, scale=2 / width) * evidence * function(g)

            reach = 10 * (2 / width) ** 0.5
            return scipy.integrate.quad(integrand, 1 - reach, 1 + reach, epsabs=1e-13, epsrel=1e-12)[0]

        evidence = averaged(lambda g: 1.0)
        mean = averaged(lambda g: 0.7 * y * g / (g + NOISE**2)) / evidence
        return width * np.log(evidence), width * (mean - mean_limit)

    one, two = (np.array(of_width(width)) for width in (2000, 4000))
    evidence, mean = 2 * two - one  # without the term of order 1/width
    assert found.log_evidence_error < 0.02 and found.mean_error[0] < 0.02
    assert abs(found.log_evidence - evidence) < 4 * found.log_evidence_error + 1e-3
    assert abs(found.mean[0] - mean) < 4 * found.mean_error[0] + 1e-3
    assert abs(evidence) > 20 * found.log_evidence_error  # there is something to be seen


@parametrize("num_outputs", [None, 3], rest="slow")
def test_derivatives_of_the_gaussian_process_agree(x64, num_outputs):
    """The same moments, with second derivatives of the evidence and of the mean taken by JAX, unit by unit."""
    units, kernel, targets = units_and_targets(200, num_outputs)
    train, cross, test = kernel[:5, :5], kernel[5:, :5], kernel[5:, 5:]

    def at(change_train, change_cross):
        mean, _ = gp_posterior(train + change_train, cross + change_cross, test, targets, NOISE)
        return gp_log_evidence(train + change_train, targets, NOISE), mean

    outer = jax.vmap(lambda unit: (jnp.outer(unit[:5], unit[:5]), jnp.outer(unit[5:], unit[:5])))(units.T)
    around = jax.tree.map(lambda matrices: matrices - matrices.mean(0), outer)
    zeros = (jnp.zeros((5, 5)), jnp.zeros((2, 5)))

    def first(*change):
        return jax.jvp(at, zeros, change)[1]

    def second(*change):
        return jax.jvp(lambda *point: jax.jvp(at, point, change)[1], zeros, change)[1]

    slope, direction = jax.vmap(first)(*around)
    bend, mean_bend = jax.vmap(second)(*around)
    evidence = jnp.mean(0.5 * bend + 0.5 * slope**2)
    mean = jnp.mean(0.5 * mean_bend + slope.reshape(-1, *[1] * (targets.ndim)) * direction, axis=0)
    found = width_correction(units[:5], train, targets, NOISE, units_new=units[5:], kernel_cross=cross)
    np.testing.assert_allclose(found.log_evidence, evidence, rtol=1e-9)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-8)
    assert found.mean.shape == found.mean_error.shape == (2, *targets.shape[1:])


def test_errors_are_those_of_repetitions(x64):
    units, kernel, targets = units_and_targets(200_000)
    cut = np.split(units, 200, axis=1)
    runs = [
        width_correction(part[:5], kernel[:5, :5], targets, NOISE, units_new=part[5:], kernel_cross=kernel[5:, :5])
        for part in cut
    ]
    for name in ("log_evidence", "mean"):
        values = np.stack([getattr(run, name) for run in runs])
        errors = np.stack([getattr(run, f"{name}_error") for run in runs])
        # A standard deviation of 200 repetitions is known to 5 %; the tails of units are heavy.
        np.testing.assert_allclose(np.std(values, axis=0), errors.mean(0), rtol=0.25)


@pytest.mark.slow
def test_evidence_and_mean_of_networks_approach_it(x64):
    """Networks of 30 and 60 units, drawn from their prior: what they change is the correction over the width."""
    units, kernel, targets = units_and_targets(400_000)
    units, targets = jnp.asarray(units), jnp.asarray(targets)
    train, cross, test = kernel[:5, :5], kernel[5:, :5], kernel[5:, 5:]
    found = width_correction(units[:5], train, targets, NOISE, units_new=units[5:], kernel_cross=cross)
    limit, mean_limit = gp_log_evidence(train, targets, NOISE), gp_posterior(train, cross, test, targets, NOISE)[0]

    def of_width(key, width):
        """Weight and mean of networks, with units chosen again and again from those that there are."""

        @jax.vmap
        def network(key):
            chosen = units[:, jax.random.randint(key, (width,), 0, units.shape[1])]
            own = chosen @ chosen.T / width + 0.3**2  # and the readout's bias
            mean, _ = gp_posterior(own[:5, :5], own[5:, :5], own[5:, 5:], targets, NOISE)
            return jnp.exp(gp_log_evidence(own[:5, :5], targets, NOISE) - limit), mean

        weights, means = jax.lax.map(network, jax.random.split(key, (80, 500)))
        weights, means = weights.ravel(), means.reshape(-1, 2)
        average = jnp.average(means, axis=0, weights=weights)
        error = jnp.sqrt(jnp.mean((weights[:, None] * (means - average)) ** 2, axis=0) / weights.size)
        return jnp.log(weights.mean()), weights.std() / weights.size**0.5, average - mean_limit, error

    for key, width in zip(jax.random.split(jax.random.key(0)), (30, 60), strict=True):
        evidence, error, shift, shift_error = of_width(key, width)
        # What is neglected is smaller than what is not by the size of the correction itself.
        neglected = 5 * abs(float(found.log_evidence)) / width**2 * (1 + abs(float(found.log_evidence)))
        assert abs(evidence - found.log_evidence / width) < 4 * error + neglected
        assert np.all(abs(shift - found.mean / width) < 4 * shift_error + 20 * np.max(abs(found.mean)) / width**2)
        assert abs(found.log_evidence / width) > 4 * error  # it is seen


def test_compiles_and_agrees_in_single_precision():
    units, kernel, targets = (np.asarray(part, np.float32) for part in units_and_targets(20_000))
    with jax.enable_x64(True):
        exact = width_correction(*(np.float64(part) for part in (units[:5], kernel[:5, :5], targets)), NOISE)
    found = jax.jit(width_correction)(units[:5], kernel[:5, :5], targets, NOISE)
    assert found.log_evidence.dtype == np.float32
    np.testing.assert_allclose(found.log_evidence, exact.log_evidence, rtol=1e-3)
    np.testing.assert_allclose(found.log_evidence_error, exact.log_evidence_error, rtol=1e-3)


@pytest.mark.slow
def test_every_network_of_units_of_three_kinds(x64):
    """By brute force: all numbers of units of each kind, at three widths, which leaves an error of order 1/width³."""
    rng = np.random.default_rng(7)
    kinds, y = rng.normal(size=(4, 3)), np.array([0.8, -1.1, 1.6])  # three training rows and a new one
    kernel = kinds @ kinds.T / 3
    found = width_correction(
        np.tile(kinds[:3], 4000),
        kernel[:3, :3],
        y,
        NOISE,
        units_new=np.tile(kinds[3:], 4000),
        kernel_cross=kernel[3:, :3],
    )

    def predicted(kernels):
        """Log evidence and predictive mean of each kernel."""
        covariance = kernels[:, :3, :3] + NOISE**2 * np.eye(3)
        solved = np.linalg.solve(covariance, np.broadcast_to(y[:, None], (len(kernels), 3, 1)))[..., 0]
        logdet = np.linalg.slogdet(2 * np.pi * covariance)[1]
        return -0.5 * (solved @ y + logdet), np.sum(kernels[:, 3, :3] * solved, axis=1)

    def of_width(width):
        first, second = (numbers.ravel() for numbers in np.mgrid[: width + 1, : width + 1])
        inside = first + second <= width
        counts = np.stack([first, second, width - first - second])[:, inside].T
        log_evidence, mean = predicted(np.einsum("ij,aj,bj->iab", counts / width, kinds, kinds))
        log_terms = log_evidence + scipy.stats.multinomial.logpmf(counts, width, np.full(3, 1 / 3))
        total = scipy.special.logsumexp(log_terms)
        limit, limit_mean = (part[0] for part in predicted(kernel[None]))
        return np.array([width * (total - limit), width * (np.exp(log_terms - total) @ mean - limit_mean)])

    one, two, four = map(of_width, (80, 160, 320))
    once = 2 * two - one, 2 * four - two
    evidence, mean = (4 * once[1] - once[0]) / 3
    np.testing.assert_allclose(found.log_evidence, evidence, rtol=2e-3)
    np.testing.assert_allclose(found.mean[0], mean, rtol=2e-3)
    assert abs(evidence) > 0.1 and abs(mean) > 0.1
