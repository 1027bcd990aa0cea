"""Pooled chains: what the report says of made-up predictions, and its densities against the regression scores."""

from itertools import combinations

import arviz as az
import numpy as np
import pytest

from numpyro_wide.diagnostics import log_predictive_density, pooling
from tests.marks import parametrize

RNG = np.random.default_rng(0)
Y = RNG.normal(size=30)
VARIANCE = RNG.uniform(0.5, 2.0, size=(4, 200, 30))


def settled(places):
    """Independent draws around a place for each chain."""
    return np.asarray(places)[:, None, None] + RNG.normal(size=(4, 200, 30))


def test_chains_that_agree_are_one_posterior():
    report = pooling(Y, settled([0, 0, 0, 0]), VARIANCE)
    assert report.unsettled == [] and report.between < 1.02
    assert report.advice.startswith("one posterior") and "one posterior" in str(report)


def test_chains_in_places_of_their_own_are_an_ensemble():
    report = pooling(Y, settled([0, 0, 1.5, 1.5]), VARIANCE)
    # Half of the chains 1.5 from the others: a variance of 0.75 between for one of 1 within.
    np.testing.assert_allclose(report.between, np.sqrt(1.75), rtol=0.05)
    assert report.unsettled == [] and report.advice.startswith("an ensemble")


def test_a_chain_on_its_way_is_named():
    mean = settled([0, 0, 0, 0])
    mean[2] += np.linspace(0, 4, 200)[:, None]
    report = pooling(Y, mean, VARIANCE)
    assert report.unsettled == [2] and "chains [2] still move" in str(report)


def test_few_predictions_that_disagree_by_chance_are_passed_over():
    mean = settled([0, 0, 0, 0])
    mean[..., :2] = settled([0, 5, 10, 15])[..., :2]
    assert pooling(Y, mean, VARIANCE).advice.startswith("one posterior")
    mean[..., :4] = settled([0, 5, 10, 15])[..., :4]
    assert pooling(Y, mean, VARIANCE).advice.startswith("an ensemble")


@parametrize("shape", [(30,), (15, 2)], rest="slow")
def test_densities_are_those_of_the_pools(shape):
    y, mean = Y.reshape(shape), settled([0, 0.5, 1.0, 3.0]).reshape(4, 200, *shape)
    variance = VARIANCE.reshape(mean.shape)
    report = pooling(y, mean, variance)
    for number in range(1, 5):
        expected = np.mean(
            [
                log_predictive_density(y, np.concatenate(mean[list(pool)]), np.concatenate(variance[list(pool)]))
                for pool in combinations(range(4), number)
            ]
        )
        np.testing.assert_allclose(report.by_number[number - 1], expected, rtol=1e-10)
    np.testing.assert_allclose(report.by_number[0], report.by_chain.mean(), rtol=1e-12)
    np.testing.assert_allclose(report.by_chain[3], log_predictive_density(y, mean[3], variance[3]), rtol=1e-12)


def test_many_chains_are_pooled_in_some_of_the_ways():
    mean = RNG.normal(size=(12, 20, 5))
    report = pooling(Y[:5], mean, np.ones_like(mean))
    assert report.by_number.shape == (12,)
    # A mixture's density is concave in its weights: more chains never lower the average over pools, but by chance.
    assert np.all(np.diff(report.by_number) > -0.01)


@pytest.mark.fault(
    "diagnostics/_pooling.py", "(rhat_squared(draws) - 1) * num_chains / (num_chains - 1)", "rhat_squared(draws) - 1"
)
def test_rhat_is_the_one_that_people_know():
    mean = settled([0, 0.3, 0.6, 0.9])
    report = pooling(Y, mean, np.ones_like(mean))
    expected = np.asarray(az.rhat({"x": mean}, method="identity")["x"])
    np.testing.assert_allclose(report.largest, expected.max(), rtol=1e-10)
    np.testing.assert_allclose(report.between, np.quantile(expected, 0.9, method="lower"), rtol=1e-10)
    halves = np.stack([mean[1, :100], mean[1, 100:]])
    within = np.asarray(az.rhat({"x": halves}, method="identity")["x"])
    np.testing.assert_allclose(report.within[1], np.quantile(within, 0.9, method="lower"), rtol=1e-10)
    assert f"the largest of a prediction {report.largest:.3f}" in str(report)


def test_chains_must_agree_about_variances_too():
    scale = np.array([1.0, 1.0, 0.01, 0.01])[:, None, None]
    assert pooling(Y, settled([0, 0, 0, 0]), scale * VARIANCE).advice.startswith("an ensemble")
    drift = np.geomspace(1, 100, 200)[None, :, None]
    assert pooling(Y, settled([0, 0, 0, 0]), drift * VARIANCE).unsettled == [0, 1, 2, 3]


def test_chains_that_never_moved_have_not_settled():
    mean, variance = settled([0, 0, 0, 0]), VARIANCE.copy()
    mean[1], variance[1] = 0.5, 1.0
    report = pooling(Y, mean, variance)
    assert report.unsettled == [1] and "chains [1] still move, or never did" in report.advice
    assert pooling(Y, np.zeros((2, 10, 30)), np.ones((2, 10, 30))).unsettled == [0, 1]


def test_entries_that_nothing_moves_agree_with_themselves_alone():
    mean = settled([0, 0, 0, 0])
    mean[..., :5] = 0.3
    assert pooling(Y, mean, np.ones_like(mean)).advice.startswith("one posterior")
    mean[0, :, :5] = 0.4
    assert pooling(Y, mean, np.ones_like(mean)).largest == np.inf


def test_as_many_chains_as_one_likes():
    mean = RNG.normal(size=(40, 10, 5))
    assert pooling(Y[:5], mean, np.ones_like(mean)).by_number.shape == (40,)
