"""Noise by row: against NumPy and SciPy in double precision, against quadrature, and on data whose noise is known."""

import itertools
from functools import partial

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, Predictive
from numpyro.infer.util import log_density
from scipy.special import logsumexp

from numpyro_wide import ReadoutPredictive, collapse_readout, model_evidence, repriorise, wide_limit, wide_limit_draws
from numpyro_wide.diagnostics import to_arviz
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, NoiseNetwork, bnn

LEVEL, AMPLITUDE = 0.3, 0.8
# Rows, columns, outputs, units of the mean, depth and width of the noise: more rows than features and fewer, as many
# rows as outputs, linear noise.
SHAPES = [
    (7, 2, None, 4, 1, 5),
    pytest.param((3, 2, 3, 6, 2, 4), marks=pytest.mark.slow),
    pytest.param((6, 3, 2, 9, 0, 1), marks=pytest.mark.slow),
]
KEY = jax.random.key(0)
SCALES = {"w_std": 1.5, "b_std": 1.0, "readout_w_std": 2.0}  # in which a sine is an ordinary function


def problem_of(n, num_inputs, k, units, depth, width, rng_seed=0):
    """A model with noise by row, its data, and values of its sites but the readout."""
    rng = np.random.default_rng(rng_seed)
    model = bnn(FCN(1, units, "erf", b_std=0.5), k, NoiseNetwork(LEVEL, AMPLITUDE, depth, width))
    shapes = {"noise_level_base": (), "noise_amplitude_base": (), "noise.readout": (width if depth else num_inputs,)}
    for layer in range(depth):
        kernel = (width if layer else num_inputs, width)
        shapes |= {f"noise.hidden_{layer}.kernel": kernel, f"noise.hidden_{layer}.bias": (width,)}
    shapes |= {"hidden.hidden_0.kernel": (num_inputs, units), "hidden.hidden_0.bias": (units,)}
    values = {name: np.asarray(rng.normal(size=shape), "f") for name, shape in shapes.items()}
    values["noise_amplitude_base"] = np.float32(1 + 0.1 * rng_seed)  # so that rows differ
    x, y = rng.normal(size=(n, num_inputs)).astype("f"), rng.normal(size=(n, k) if k else n).astype("f")
    return model, x, y, values


def collapsed(model):
    return collapse_readout(model, readout="readout", features="features", observed="y")


def density_of(model, x, y, values):
    return log_density(model, (x, y), {}, values)[0]


def repriorised(model):
    return repriorise(model, readout="readout", features="features", targets="y", noise_scale="noise")


def noise_by_hand(values, x, depth, level=LEVEL, amplitude=AMPLITUDE):
    """The noise of each row, in double precision."""
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    unit = 1 / np.sqrt(np.sum(weights * np.tanh(points) ** 2) / np.sqrt(2 * np.pi))  # keeps the variance at one
    hidden, scale = np.asarray(x, float), np.sqrt(0.5)
    for layer in range(depth):
        kernel, bias = (np.asarray(values[f"noise.hidden_{layer}.{part}"], float) for part in ("kernel", "bias"))
        hidden = np.tanh(scale / np.sqrt(len(kernel)) * hidden @ kernel + np.sqrt(0.5) * bias)
        scale = np.sqrt(0.5) * unit
    output = hidden @ np.asarray(values["noise.readout"], float) / np.sqrt(hidden.shape[1]) * (unit if depth else 1)
    tau = amplitude * scipy.stats.halfnorm.ppf(scipy.stats.norm.cdf(float(values["noise_amplitude_base"])))
    return level * np.exp(float(values["noise_level_base"]) + tau * output)


def features_by_hand(values, x, units):
    """The features of the mean, in double precision: error functions of units of variance one."""
    kernel, bias = (np.asarray(values[f"hidden.hidden_0.{part}"], float) for part in ("kernel", "bias"))
    hidden = scipy.special.erf(np.sqrt(0.75 / len(kernel)) * np.asarray(x, float) @ kernel + 0.5 * bias)
    return hidden * np.sqrt(np.pi / (2 * np.arcsin(2 / 3)) / units)  # of 2 / π asin(2 / 3), Williams 1996


def dense(values, x, y, depth, units):
    """Log density of the other sites and the observations, the readout integrated out, in double precision."""
    features, noise = features_by_hand(values, x, units), noise_by_hand(values, x, depth)
    evidence = scipy.stats.multivariate_normal(np.zeros(len(x)), features @ features.T + np.diag(noise**2))
    prior = sum(scipy.stats.norm.logpdf(np.asarray(value, float)).sum() for value in values.values())
    return prior + sum(evidence.logpdf(column) for column in np.asarray(y, float).reshape(len(x), -1).T)


@pytest.mark.fault("readout/_repriorise.py", "and shape[0] in", "and shape[0] != shape[1] and shape[0] in")
@pytest.mark.fault("nn/_models.py", "jnp.exp(amplitude * (features @ readout))", "jnp.exp(features @ readout)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_densities_and_gradients_of_both_forms_are_those_of_the_dense_gaussian(shape):
    n, _, k, units, depth, _ = shape
    model, x, y, values = problem_of(*shape)
    expected = dense(values, x, y, depth, units)
    got, slopes = jax.jit(jax.value_and_grad(partial(density_of, collapsed(model), x, y)))(values)
    np.testing.assert_allclose(got, expected, rtol=2e-5)

    step = 1e-5
    for name in ("noise_level_base", "noise_amplitude_base", "noise.readout", "hidden.hidden_0.bias"):
        for place in itertools.islice(np.ndindex(values[name].shape), 3):
            moved = [{**values, name: np.array(values[name], float)} for _ in range(2)]
            moved[0][name][place] += step
            moved[1][name][place] -= step
            difference = dense(moved[0], x, y, depth, units) - dense(moved[1], x, y, depth, units)
            # Of the dense density, which is of double precision; ours keeps some five digits of its largest terms.
            np.testing.assert_allclose(slopes[name][place], difference / (2 * step), rtol=1e-3, atol=1e-3)

    phi = np.random.default_rng(1).normal(size=(units, k) if k else units).astype("f")
    got = jax.jit(partial(density_of, repriorised(model), x, y))({**values, "readout_base": phi})
    np.testing.assert_allclose(got, expected + scipy.stats.norm.logpdf(phi).sum(), rtol=2e-5)
    noise = jax.jit(lambda: trace(seed(substitute(model, values), KEY)).get_trace(x)["noise"]["value"])()
    assert noise.shape == (n,)
    np.testing.assert_allclose(noise, noise_by_hand(values, x, depth), rtol=1e-4)


def test_an_amplitude_of_zero_is_constant_noise():
    model, x, y, values = problem_of(*SHAPES[0])
    values["noise_amplitude_base"] = np.float32(-40.0)  # whose quantile is zero in single precision
    constant = bnn(FCN(1, 4, "erf", b_std=0.5), None, dist.LogNormal(np.log(LEVEL), 1.0))
    network = {name: value for name, value in values.items() if name.startswith(("noise.", "noise_amp"))}
    rest = {name: value for name, value in values.items() if name not in network}
    rest["noise_base"] = rest.pop("noise_level_base")
    prior = sum(scipy.stats.norm.logpdf(value).sum() for value in network.values())
    expected = jax.jit(partial(density_of, collapsed(constant), x, y))(rest) + prior
    got, slopes = jax.jit(jax.value_and_grad(partial(density_of, collapsed(model), x, y)))(values)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert all(np.isfinite(slope).all() for slope in slopes.values())
    np.testing.assert_array_equal(slopes["noise.readout"], -values["noise.readout"])  # that of the prior alone


@pytest.mark.slow
def test_predictions_at_other_rows_have_their_noise():
    shape = (8, 2, 2, 3, 1, 4)
    model, x, y, _ = problem_of(*shape)
    values = [problem_of(*shape, rng_seed=index)[3] for index in range(3)]
    draws = {name: np.stack([one[name] for one in values]) for name in values[0]}
    rng = np.random.default_rng(5)
    x_new, y_new = rng.normal(size=(8, 2)).astype("f"), rng.normal(size=(8, 2)).astype("f")
    means, covariances, noises = [], [], []
    for one in values:
        old, new = (features_by_hand(one, rows, 3) for rows in (x, x_new))
        weighted = (old / noise_by_hand(one, x, 1)[:, None] ** 2).T
        precision = np.eye(3) + weighted @ old
        noises.append(noise_by_hand(one, x_new, 1))
        covariances.append(new @ np.linalg.solve(precision, new.T))
        means.append(new @ np.linalg.solve(precision, weighted @ y))
    total = [np.diagonal(covariance) + noise**2 for covariance, noise in zip(covariances, noises, strict=True)]
    by_row = [
        scipy.stats.norm(mean, np.sqrt(variance)[:, None]).logpdf(y_new).sum(axis=1)
        for mean, variance in zip(means, total, strict=True)
    ]
    jointly = [
        scipy.stats.multivariate_normal(np.zeros(8), covariance + np.diag(noise**2)).logpdf((y_new - mean).T).sum()
        for mean, covariance, noise in zip(means, covariances, noises, strict=True)
    ]

    # The noise of the rows of the fit is among the draws of a chain, and no business of other rows.
    stale = {**draws, "noise": np.full((3, 8), 77.0, "f")}
    by_base = ReadoutPredictive(repriorised(model), {**stale, "readout_base": np.zeros((3, 3, 2), "f")}, (x, y))
    predictive = ReadoutPredictive(collapsed(model), stale, (x, y))
    for found in (predictive(KEY, x_new), by_base(KEY, x_new)):
        np.testing.assert_allclose(found["noise_scale"], np.repeat(np.array(noises)[..., None], 2, axis=2), rtol=1e-4)
        np.testing.assert_allclose(found["mean"], means, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found["predictive_variance"][..., 1], total, rtol=1e-3)
    expected = logsumexp(by_row, axis=0) - np.log(3)
    np.testing.assert_allclose(predictive.log_density(x_new, y_new), expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(predictive.joint_log_density(x_new, y_new), logsumexp(jointly) - np.log(3), rtol=1e-3)
    quantiles = predictive.summary(x_new).quantiles
    for level, at in quantiles.items():
        by_draw = [scipy.stats.norm(mean, np.sqrt(v)[:, None]).cdf(at) for mean, v in zip(means, total, strict=True)]
        np.testing.assert_allclose(np.mean(by_draw, axis=0), level, atol=1e-3)

    with_readout = {**draws, "readout": predictive.readout(KEY)}
    drawn = [Predictive(model, held)(KEY, x_new)["y"] for held in (with_readout, stale | with_readout)]
    np.testing.assert_array_equal(*drawn)


def by_quadrature(x, y):
    """Log evidence of a linear mean with linear noise, priors half as wide, and the mean of the level's coordinate."""
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    level, amplitude, slope = (part[..., None] for part in np.meshgrid(points, points, points))
    tau = scipy.stats.halfnorm.isf(scipy.stats.norm.sf(amplitude)) / 2
    variance = (LEVEL * np.exp(0.5 * level + tau * slope * x)) ** 2
    # One feature, x itself: the covariance is diag(variance) + x xᵀ (Sherman and Morrison).
    precision = 1 + np.sum(x**2 / variance, axis=-1)
    slope = (np.sum(x * y / variance, axis=-1) / precision)[..., None]
    squares = np.sum((y - slope * x) ** 2 / variance + slope**2 / len(x), axis=-1)
    log_density = -0.5 * (squares + np.sum(np.log(2 * np.pi * variance), axis=-1) + np.log(precision))
    log_terms = log_density + np.log(weights[:, None, None] * weights[:, None] * weights) - 1.5 * np.log(2 * np.pi)
    total = logsumexp(log_terms)
    return total, np.sum(np.exp(log_terms - total) * level[..., 0])


@pytest.mark.slow
def test_evidence_limit_draws_and_arviz_follow():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 1)).astype("f")
    y = (0.5 * x[:, 0] + 0.3 * np.exp(x[:, 0]) * rng.normal(size=6)).astype("f")
    noise = NoiseNetwork(dist.LogNormal(np.log(LEVEL), 0.5), dist.HalfNormal(0.5), depth=0)
    model = bnn(lambda x: x, None, noise)
    log_evidence, level = by_quadrature(x[:, 0].astype(float), y.astype(float))
    found = model_evidence(KEY, collapsed(model), x, y)
    assert abs(found.log_evidence - log_evidence) < 4 * found.standard_error < 0.5
    for wrapped in (collapsed(model), repriorised(model)):
        draws = wide_limit_draws(jax.random.key(1), wrapped, 2000, x, y)
        assert draws.pareto_shape < 0.7  # weighted, since the noise is latent
        # Draws of the prior are chosen again, some several times: fewer count than there are.
        assert abs(draws["noise_level_base"].mean() - level) < 4 * draws["noise_level_base"].std() / 500**0.5

    mcmc = MCMC(SplitHMC(wrapped), num_warmup=20, num_samples=20)
    mcmc.run(jax.random.key(2), x, y)
    idata = to_arviz(mcmc, wrapped, x, y, predictions=(x[:3],))
    assert idata["posterior"]["noise"].dims == ("chain", "draw", "rows")
    assert {"noise_level", "noise_amplitude", "noise.readout", "readout"} <= set(idata["posterior"].data_vars)
    noise, readout = (np.asarray(idata["posterior"][name], float) for name in ("noise", "readout"))
    expected = scipy.stats.norm(readout @ x.T, noise).logpdf(y)
    np.testing.assert_allclose(idata["log_likelihood"]["y"], expected, rtol=1e-4, atol=1e-4)
    assert idata["predictions"]["y"].shape == (1, 20, 3)


def noisy_sine(rng, num_rows, growth):
    """Inputs, a sine with noise that grows by a factor from one end to the other, and that noise."""
    x = rng.uniform(-1.7, 1.7, num_rows)
    noise = 0.1 * growth ** (x / 3.4)
    return x[:, None].astype("f"), (np.sin(2 * x) + noise * rng.normal(size=num_rows)).astype("f"), noise


@pytest.mark.slow
def test_known_noise_is_found_and_pays_what_theory_says():
    rng = np.random.default_rng(0)
    kernel = wide_limit.fcn_kernel(1, "erf", **SCALES)
    model = collapsed(bnn(FCN(1, 15, "erf"), None, NoiseNetwork(0.2), scales=SCALES))
    mcmc = MCMC(SplitHMC(model), num_warmup=150, num_samples=100, jit_model_args=True)
    grid = np.linspace(-0.9 * 1.7, 0.9 * 1.7, 31)
    for growth in (10.0, 1.0):
        x, y, noise = noisy_sine(rng, 400, growth)
        constant_noise = np.sqrt(np.mean(noise**2))
        x_test, y_test, noise_test = noisy_sine(rng, 1500, growth)
        mcmc.run(KEY, x, y)
        predictive = ReadoutPredictive(model, mcmc.get_samples(), (x, y))
        found = predictive(KEY, grid[:, None].astype("f"))["noise_scale"]
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(found), axis=0)), 0.1 * growth ** (grid / 3.4), rtol=0.2)
        # With one noise for all rows: the infinitely wide network, whose posterior is closed.
        train, cross, test = (kernel(*rows)[0] for rows in ((x,), (x_test, x), (x_test,)))
        mean, covariance = wide_limit.gp_posterior(train, cross, test, y, constant_noise)
        constant = scipy.stats.norm(mean, np.sqrt(np.diagonal(covariance) + constant_noise**2)).logpdf(y_test)
        gain = np.asarray(predictive.log_density(x_test, y_test), float) - constant
        if growth == 1.0:
            assert abs(gain.mean()) < constant.std() / len(gain) ** 0.5
        else:
            # Of known functions: the log of the root mean square less the mean of the logs.
            theory = np.log(np.sqrt(np.mean(noise_test**2))) - np.mean(np.log(noise_test))
            assert 0.35 < theory < 0.42
            # Both learn their noise from 400 rows, and lose some parameters' worth of nats over rows by that.
            assert abs(gain.mean() - theory) < 4 * gain.std() / len(gain) ** 0.5 + 10 / len(x)
