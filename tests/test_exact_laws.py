"""Kernels, forms, evidences and predictions held to the exact laws of linear networks.

A covering design: every kernel, form, width of 4, 16 and 64, and depth from one to three layers has its turn. The data
move log Q from its prior mean, by up to one and a half of its standard deviations where the network is narrow and deep.
"""

from functools import cache

import arviz
import jax
import numpy as np
import pytest
from numpyro.infer import MCMC
from scipy import stats
from scipy.special import logsumexp

from numpyro_wide import ReadoutPredictive, model_evidence
from numpyro_wide.diagnostics import wide_enough
from studies._linear_networks import NOISE_SCALE, LinearLaw, draw_data, linear_network, scale_and_slopes
from tests.marks import parametrize
from tests.mcmc.cases import KERNELS, WITH_NUTS

DATA = draw_data(3, scale=2.5)
NUM_CHAINS, NUM_SAMPLES = 8, 250


def law_of(depth, width, data=DATA):
    return LinearLaw(depth, width, data.x, data.y, NOISE_SCALE)


@cache  # two tests look at some of them
def draws_of(name, form, depth, width):
    """Model, and draws of all chains one after another."""
    model = linear_network(form, depth, width)
    mcmc = MCMC(
        {**KERNELS, **WITH_NUTS}[name](model),
        num_warmup=200,
        num_samples=NUM_SAMPLES,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(0), DATA.x, DATA.y)
    return model, mcmc.get_samples()


def check(values, truth, label, bias=0.0):
    """Compare a mean over draws with the truth, in standard errors by the effective number of draws."""
    values = np.asarray(values, float).reshape(NUM_CHAINS, NUM_SAMPLES)
    size = float(arviz.ess(values, method="mean"))
    assert size > 300, label
    assert abs(values.mean() - truth) < 4.5 * values.std() / size**0.5 + bias, label


def check_weights(draws, law, share=0.0):
    """Compare Q and the function at new inputs, first and second moments, with the law.

    Args:
        draws: draws of all weights.
        law: the exact law.
        share: share of the variances that may be bias.
    """
    scale, slopes = scale_and_slopes(draws, law.depth)
    centre = law.average(np.log(law.scales))
    variance = law.average((np.log(law.scales) - centre) ** 2)
    around = np.log(scale) - centre
    check(around, 0.0, "log Q", bias=share * variance**0.5)
    check(around**2, variance, "variance of log Q", bias=share * variance)
    mean, covariance = law.predict(DATA.x_new)
    around = slopes @ DATA.x_new.T.astype(float) - mean
    for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2)):
        size = (covariance[i, i] * covariance[j, j]) ** 0.5
        check(around[:, i] * around[:, j], covariance[i, j], f"covariance {i}, {j}", bias=share * size)
    for i in range(3):
        check(around[:, i], 0.0, f"mean {i}", bias=share * covariance[i, i] ** 0.5)


@pytest.mark.as_compiled
@parametrize(
    ("name", "form", "depth", "width"),
    [
        ("split", "collapsed", 1, 16),
        ("langevin", "repriorised", 2, 16),
        ("pcn", "collapsed", 2, 64),
        ("pcnl", "repriorised", 3, 64),
        ("microcanonical", "plain", 2, 16),
        ("microcanonical-unadjusted", "collapsed", 1, 4),
        ("nuts", "plain", 3, 4),
    ],
    rest="slow",
)
def test_kernels_draw_from_the_exact_posterior(name, form, depth, width):
    model, draws = draws_of(name, form, depth, width)
    law = law_of(depth, width)
    if form == "plain":
        check_weights(draws, law)
        return
    predictive = ReadoutPredictive(model, draws, (DATA.x, DATA.y))
    readout = predictive.readout(jax.random.key(1))
    # The unadjusted kernel allows itself a bias of this share of a variance.
    check_weights({**draws, "readout": readout}, law, share=0.05 if name == "microcanonical-unadjusted" else 0.0)


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_predictions.py", "None] * noise_scale[:, None] ** 2", "None] * noise_scale[:, None]")
@parametrize(
    ("name", "form", "depth", "width"), [("split", "collapsed", 1, 16), ("langevin", "repriorised", 2, 16)], rest="slow"
)
def test_predictions_with_the_readout_integrated_out(name, form, depth, width):
    model, draws = draws_of(name, form, depth, width)
    predictive, law = ReadoutPredictive(model, draws, (DATA.x, DATA.y)), law_of(depth, width)
    found = predictive(jax.random.key(2), DATA.x_new)
    mean, covariance = law.predict(DATA.x_new)
    means, variances = (np.asarray(found[name], float) for name in ("mean", "predictive_variance"))
    for i in range(3):
        check(means[:, i], mean[i], f"mean {i}")
        second = variances[:, i] + (means[:, i] - mean[i]) ** 2
        check(second, covariance[i, i] + NOISE_SCALE**2, f"predictive variance {i}")
    exact = law.log_density(DATA.x_new, DATA.y_new)
    ratios = np.exp(stats.norm.logpdf(DATA.y_new, means, np.sqrt(variances)) - exact)
    for i in range(3):
        check(ratios[:, i], 1.0, f"density {i}")
    log_densities = predictive.log_density(DATA.x_new, DATA.y_new)
    np.testing.assert_allclose(log_densities, exact + np.log(ratios.mean(0)), atol=2e-3)
    exact = law.joint_log_density(DATA.x_new, DATA.y_new)
    log_ratios = joint_log_densities(draws, law.depth) - exact
    check(np.exp(log_ratios), 1.0, "joint density")
    joint = predictive.joint_log_density(DATA.x_new, DATA.y_new)
    np.testing.assert_allclose(joint, exact + logsumexp(log_ratios) - np.log(log_ratios.size), atol=5e-3)


def joint_log_densities(draws, depth):
    """Log density of all new rows given the others and the hidden weights of each draw, in float64."""
    features = np.concatenate([DATA.x, DATA.x_new]).astype(float) / DATA.x.shape[1] ** 0.5
    for layer in range(depth):
        kernel = np.asarray(draws[f"hidden.hidden_{layer}.kernel"], float)
        features = features @ kernel / kernel.shape[-1] ** 0.5
    targets = np.concatenate([DATA.y, DATA.y_new]).astype(float)

    def log_evidence(num_rows):
        rows, y = features[:, :num_rows], targets[:num_rows]
        covariance = rows @ rows.swapaxes(1, 2) + NOISE_SCALE**2 * np.eye(num_rows)
        solved = np.linalg.solve(covariance, np.broadcast_to(y[:, None], (len(rows), num_rows, 1)))
        return -0.5 * (solved[..., 0] @ y + np.linalg.slogdet(2 * np.pi * covariance)[1])

    return log_evidence(len(targets)) - log_evidence(len(DATA.y))


# Over 200 repetitions, and of plain networks: studies/exact_laws.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "depth", "width", "method"), [("collapsed", 2, 64, "stepping-stone"), ("repriorised", 1, 16, "bridge")]
)
def test_evidence_is_exact_within_its_errors(form, depth, width, method):
    model, num = linear_network(form, depth, width), 6
    lengths = {"num_chains": 4, "num_warmup": 100, "num_samples": 200}
    scores = []
    for seed in range(num):
        data = draw_data(seed)
        found = model_evidence(jax.random.key(seed), model, data.x, data.y, method=method, **lengths)
        assert found.is_trusted and found.standard_error < 0.2
        scores.append((found.log_evidence - law_of(depth, width, data).log_evidence) / found.standard_error)
    assert np.sum(np.square(scores)) < stats.chi2(num).ppf(0.999)
    assert abs(np.mean(scores)) < 3.3 / num**0.5


@pytest.mark.as_compiled
@parametrize(("form", "depth", "width"), [("collapsed", 1, 64), ("repriorised", 2, 16), ("plain", 3, 4)], rest="slow")
def test_evidence_by_draws_of_the_limit(form, depth, width):
    data = draw_data(3, scale=1.0)
    model = linear_network(form, depth, width)
    row = wide_enough(jax.random.key(0), model, data.x, data.y, num_draws=5000, batch_size=100).rows["model"]
    exact = law_of(depth, width, data)
    assert abs(row.log_evidence - exact.log_evidence) < 4 * row.log_evidence_error < 0.6
