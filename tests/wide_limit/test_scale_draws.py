"""Scales integrated over, against dense quadrature of the evidence and the prior in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from numpyro_wide import wide_limit
from numpyro_wide.machine import double_precision
from numpyro_wide.nn import FCN, AdditiveNetwork
from numpyro_wide.wide_limit import _scale_draws
from numpyro_wide.wide_limit._fit import Evidence
from numpyro_wide.wide_limit._scale_draws import ScalePosterior, draw_scales
from numpyro_wide.wide_limit._scale_problem import ScaleProblem, hessian, problem_type

RNG = np.random.default_rng(0)
X = RNG.normal(size=(9, 1))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=9)
X_NEW, Y_NEW = np.array([[-1.0], [0.3], [3.0]]), np.array([-0.5, 0.5, 2.0])
SPREADS = np.array([0.5, 0.5, 1.0, 1.5])  # of w_std, b_std, readout_w_std and noise_scale, as documented
SIZE = np.sqrt(np.mean(Y**2))
MEDIANS = np.array([1.0, 0.5, SIZE * FCN(1, 1, "erf").scales()["readout_w_std"], 0.3 * SIZE])
WEIGHTED, CHAINS = 2.0, -1.0  # bounds of the shape under which draws are weighted, and chains are run


def erf_kernels(x1, x2, w_std, b_std, readout_w_std):
    """Williams (1996), one hidden layer, of scales (s,): (s, n1, n2)."""
    w_var, b_var, size = (np.square(scale)[:, None, None] for scale in (w_std, b_std, readout_w_std))
    squares = [1 + 2 * (w_var * x[:, 0] ** 2 + b_var) for x in (x1, x2)]
    inner = 2 * (w_var * np.outer(x1, x2) + b_var)
    return size * 2 / np.pi * np.arcsin(inner / np.sqrt(squares[0].swapaxes(1, 2) * squares[1]))


@pytest.fixture(scope="module")
def quadrature():
    """Weights, means, variances with noise and logarithms of the noise on a grid of four scales."""
    points = [np.linspace(-4, 4, num) for num in (17, 17, 17, 65)]  # the noise is known best
    by_first = []
    for first in points[0]:
        grid = np.stack([np.ravel(part) for part in np.meshgrid([first], *points[1:], indexing="ij")], axis=1)
        *scales, noise = (MEDIANS * np.exp(SPREADS * grid)).T
        noisy = erf_kernels(X, X, *scales) + np.square(noise)[:, None, None] * np.eye(len(X))
        chol, cross = np.linalg.cholesky(noisy), erf_kernels(X_NEW, X, *scales)
        solved = np.linalg.solve(noisy, Y[:, None])[..., 0]
        log_det = 2 * np.sum(np.log(np.diagonal(chol, axis1=1, axis2=2)), axis=1)
        log_weights = -0.5 * (solved @ Y + log_det + np.sum(grid**2, axis=1))
        explained = np.sum(cross * np.linalg.solve(noisy, cross.swapaxes(1, 2)).swapaxes(1, 2), axis=2)
        variance = np.diagonal(erf_kernels(X_NEW, X_NEW, *scales), axis1=1, axis2=2) - explained
        by_first.append((log_weights, np.einsum("sij,sj->si", cross, solved), variance + noise[:, None] ** 2, noise))
    log_weights, means, variances, noise = map(np.concatenate, zip(*by_first, strict=True))
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum(), means, variances, np.log(noise)


@pytest.mark.as_compiled
@pytest.mark.parametrize("bound", [WEIGHTED, CHAINS], ids=["weighted", "chains"])
def test_the_mixture_is_that_of_the_quadrature(bound, quadrature, monkeypatch):
    monkeypatch.setattr(_scale_draws, "_POOR_SHAPE", bound)
    monkeypatch.setattr(_scale_draws, "_NUM_PROPOSALS", 1000 if bound == WEIGHTED else 100)
    monkeypatch.setattr(_scale_draws, "_NUM_KEPT", 200)
    fit = wide_limit.fit(X, Y, scales="integrated", num_restarts=1, seed=1)
    weights, means, variances, log_noise = quadrature
    num_draws = 0.5 / np.sum(fit.weights**2)  # effective ones, of weights or of a chain

    def check(found, values):
        mean = weights @ values
        deviation = np.sqrt(weights @ (values - mean) ** 2)
        assert np.all(np.abs(found - mean) < 4 * deviation / np.sqrt(num_draws))

    mean, variance = fit.predict(X_NEW, with_noise=True)
    check(mean, means)
    check(variance + mean**2, variances + means**2)
    check(np.exp(fit.log_density(X_NEW, Y_NEW)), scipy.stats.norm.pdf(Y_NEW, means, np.sqrt(variances)))
    logarithms = np.log([draw.noise_scale for draw in fit.draws])
    for power in (1, 2):
        check(fit.weights @ logarithms**power, log_noise**power)
    by_chains = bound == CHAINS
    assert (fit.rhat is not None) == by_chains and f"{len(fit.draws)} draws " in str(fit)
    if by_chains:
        assert {"w_std", "b_std", "readout_w_std", "noise_scale"} == fit.rhat.keys()
        assert max(np.max(value) for value in fit.rhat.values()) < 1.05


def posterior(network=None, noise_scale=None):
    options = {"inputs": X, "size": SIZE, "by_input": False, "has_noise": noise_scale is None}
    with double_precision():
        problem = (
            ScaleProblem.of("erf", 1, **options)
            if network is None
            else problem_type(network).of_network(network, **options)
        )
        problem = replace(problem, known_noise=noise_scale)
        mode = np.zeros(len(problem.spreads))
        return ScalePosterior(problem, Y, mode, hessian(Evidence(problem, Y), mode)[1])


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_scale_draws.py", "return prior - gp_log_evidence(", "return -gp_log_evidence(")
@pytest.mark.fault(
    "wide_limit/_scale_draws.py", 'scales.pop("noise_scale", problem.known_noise)', "problem.known_noise"
)
@pytest.mark.parametrize("noise_scale", [None, 0.2])
@pytest.mark.parametrize("network", [None, FCN(1, 1, "erf"), AdditiveNetwork(1, 1)], ids=["none", "dense", "additive"])
def test_the_traced_density_is_that_of_numpy(network, noise_scale, x64):
    at = posterior(network, noise_scale)
    place = RNG.normal(size=len(at.center))
    np.testing.assert_allclose(at.potential(place), -at.log_density(at.logarithms(place)), rtol=1e-9)


@pytest.mark.fault("wide_limit/_scale_draws.py", "log_posterior - log_proposal)", "log_posterior)")
@pytest.mark.fault("wide_limit/_scale_draws.py", "self.center, self.basis = self.logarithms(mean),", "self.basis =")
@pytest.mark.slow
def test_poor_weights_are_mended_by_better_coordinates(quadrature, monkeypatch):
    at, (weights, *_, log_noise) = posterior(), quadrature
    at.center, at.basis = 1.0 * SPREADS, 0.8 * np.diag(SPREADS)
    random, poor = np.random.default_rng(0), at.center
    draws = draw_scales(at, random, False)
    assert draws.pareto_shape < _scale_draws._POOR_SHAPE and not np.any(at.center == poor)
    monkeypatch.setattr(_scale_draws, "_NUM_PROPOSALS", 4000)
    places, _, log_weights, _ = _scale_draws._weighted(at, random, False)
    found, by_weight = at.logarithms(places)[:, 3] + np.log(MEDIANS[-1]), np.exp(log_weights)
    for values, known in (
        (found, log_noise),
        ((found - weights @ log_noise) ** 2, (log_noise - weights @ log_noise) ** 2),
    ):
        mean = weights @ known
        error = np.sqrt(weights @ (known - mean) ** 2 * np.sum(by_weight**2))
        assert abs(by_weight @ values - mean) < 4 * error


@pytest.mark.fault("wide_limit/_scale_draws.py", "if shape <= _POOR_SHAPE or number", "if number")
@pytest.mark.parametrize(("shapes", "num_rounds"), [([0.6], 1), ([0.9, 0.8, 0.6], 3), ([0.9] * 8, 8)], ids=str)
def test_rounds_go_on_while_weights_are_poor(shapes, num_rounds, monkeypatch):
    at, rounds = posterior(), []

    def weighted(at, random, progress_bar):
        rounds.append(at.center)
        places = random.normal(size=(100, len(at.center)))
        return places, np.zeros(100), np.full(100, -np.log(100)), shapes[len(rounds) - 1]

    monkeypatch.setattr(_scale_draws, "_weighted", weighted)
    monkeypatch.setattr(_scale_draws, "_by_chains", lambda *args: "chains")
    draws = draw_scales(at, np.random.default_rng(0), False)
    assert len(rounds) == num_rounds and (draws == "chains") == (shapes[-1] > 0.7)
    np.testing.assert_array_equal(at.center, rounds[-1])  # the draws' own coordinates


@pytest.mark.fault(
    "wide_limit/_scale_draws.py", "softmax(next_temperature(0.0, log_weights, _EFFECTIVE) * log", "softmax(log"
)
def test_coordinates_are_made_from_a_quarter_of_the_draws_at_least():
    random = np.random.default_rng(0)
    for spread, fewest, most in ((0.5, 300, 400), (3.0, 100, 115), (30.0, 100, 160)):
        log_weights = spread * random.normal(size=400)
        weights = _scale_draws._flattened(log_weights)
        assert fewest <= 1 / np.sum(weights**2) <= most
        powers = np.diff(np.log(weights)) / np.diff(log_weights)
        np.testing.assert_allclose(powers, powers[0])


def test_extreme_scales_have_no_weight():
    of_rank_one = np.array([-50.0, 0.0, 0.0, -50.0])
    assert posterior().log_density(of_rank_one) == -np.inf


@pytest.mark.fault("wide_limit/_scale_draws.py", "sums = np.cumsum(weights)", "sums = np.cumsum(np.ones(len(weights)))")
def test_resampling_keeps_the_weights_to_one_draw():
    weights = RNG.dirichlet(np.ones(20))
    rows, counts = _scale_draws._resampled(weights, RNG)
    times = np.zeros(20)
    times[rows] = counts
    assert counts.sum() == _scale_draws._NUM_KEPT and np.all(np.abs(times - 50 * weights) < 1)


@pytest.mark.as_compiled
def test_many_rows_of_poor_weights_are_told(monkeypatch):
    monkeypatch.setattr(_scale_draws, "_POOR_SHAPE", CHAINS)
    monkeypatch.setattr(_scale_draws, "_MOST_WORK", 8.0)
    with pytest.warns(UserWarning, match="Pareto shape of .* 9 rows with 4 scales are too many for chains .*most 8"):
        wide_limit.fit(X, Y, scales="integrated", num_restarts=1)


@pytest.mark.fault("wide_limit/_limit.py", "sum(w * fit.nngp(x1, x2)", "sum(w * self.draws[0].nngp(x1, x2)")
@pytest.mark.fault("wide_limit/_limit.py", ":, None] + (fit.noise_scale**2", ":, None] + (self.noise_scale**2")
def test_several_outputs_and_the_kernel_are_mixtures():
    targets = np.column_stack([Y, Y**2])
    fit = wide_limit.fit(X, targets, scales="integrated", num_restarts=1)
    mean, variance = fit.predict(X_NEW)
    each = [draw.predict(X_NEW) for draw in fit.draws]
    means, variances = (np.stack(part) for part in zip(*each, strict=True))
    np.testing.assert_allclose(mean, np.tensordot(fit.weights, means, 1), rtol=1e-10)
    second = np.tensordot(fit.weights, variances[..., None] + means**2, 1)
    np.testing.assert_allclose(variance, second - mean**2, rtol=1e-8)
    noise = fit.weights @ np.square([draw.noise_scale for draw in fit.draws])
    np.testing.assert_allclose(fit.predict(X_NEW, with_noise=True)[1] - variance, noise, rtol=1e-8)
    kernels = np.stack([draw.nngp(X_NEW, X) for draw in fit.draws])
    np.testing.assert_allclose(fit.nngp(X_NEW, X), np.tensordot(fit.weights, kernels, 1), rtol=1e-10)


def test_a_fit_at_the_mode_has_no_draws():
    targets = np.column_stack([Y, Y**2])
    fit = wide_limit.fit(X, targets, num_restarts=1)
    (mean, variance), (_, noisy) = fit.predict(X_NEW), fit.predict(X_NEW, with_noise=True)
    assert not fit.draws and fit.pareto_shape is None
    np.testing.assert_allclose(noisy, variance + fit.noise_scale**2, rtol=1e-12)
    by_output = scipy.stats.norm.logpdf(targets[:3], mean, np.sqrt(noisy)[:, None])
    np.testing.assert_allclose(fit.log_density(X_NEW, targets[:3]), by_output.sum(axis=1), rtol=1e-10)
