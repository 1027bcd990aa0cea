"""Calibration and its relatives: by hand, against scikit-learn, and on predictions calibrated by design."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

from numpyro_wide.diagnostics import (
    accuracy,
    classification_scores,
    expected_calibration_error,
    negative_log_likelihood,
    predictive_entropy,
)
from tests.marks import parametrize


def binary(*largest):
    """Two classes, the first the more probable, with these probabilities."""
    p = np.array(largest)
    return np.stack([p, 1 - p], -1)


def random_probs(shape, seed=0):
    return np.random.default_rng(seed).dirichlet(0.4 * np.ones(shape[-1]), shape[:-1])


def test_calibration_error_by_hand():
    # Bins of ten: two inputs at 0.8 and 0.85, one of them right; one at 0.62, right; one at 0.95, wrong.
    probs, labels = binary(0.8, 0.85, 0.62, 0.95), np.array([0, 1, 0, 1])
    expected = (abs(1 - 1.65) + abs(1 - 0.62) + abs(0 - 0.95)) / 4
    np.testing.assert_allclose(expected_calibration_error(probs, labels, num_bins=10), expected, rtol=1e-6)
    # One bin alone: mean confidence against accuracy, whose errors may cancel.
    np.testing.assert_allclose(expected_calibration_error(probs, labels, num_bins=1), abs(2 - 3.22) / 4, rtol=1e-6)


@pytest.mark.parametrize("num_bins", [1, 4, 15, 100])
def test_calibration_error_against_a_histogram(x64, num_bins):
    probs, labels = random_probs((500, 4)), np.random.default_rng(1).integers(4, size=500)
    largest, right = probs.max(-1), probs.argmax(-1) == labels
    edges = np.arange(num_bins + 1) / num_bins
    sizes, hits = np.histogram(largest, edges)[0], np.histogram(largest, edges, weights=right.astype(float))[0]
    sums = np.histogram(largest, edges, weights=largest)[0]
    used = sizes > 0
    expected = np.sum(sizes[used] / 500 * np.abs(hits[used] / sizes[used] - sums[used] / sizes[used]))
    np.testing.assert_allclose(expected_calibration_error(probs, labels, num_bins), expected, rtol=1e-12)


@parametrize("num_bins", [2, 5, 10, 15], rest="slow")
def test_certain_predictions_and_those_on_an_edge(num_bins):
    certain = binary(1.0, 1.0, 1.0, 1.0)
    assert expected_calibration_error(certain, np.array([0, 0, 0, 0]), num_bins) == 0
    assert expected_calibration_error(certain, np.array([1, 1, 1, 1]), num_bins) == 1
    np.testing.assert_allclose(expected_calibration_error(certain, np.array([0, 1, 0, 0]), num_bins), 0.25)
    # On every edge k/B and just below it, the first right and the second wrong: the edge belongs to the bin above,
    # so each bin holds its left edge, right, and a number just below its right edge, wrong.
    k = np.arange(num_bins // 2 + 1, num_bins)
    at, below = np.float32(k) / np.float32(num_bins), np.nextafter(np.float32(k) / np.float32(num_bins), np.float32(0))
    probs = binary(*at, *below).astype(np.float32)
    labels = np.repeat([0, 1], len(k))
    bins = np.concatenate([k, k - 1])
    gap = np.where(labels == 0, 1.0, 0.0) - probs[:, 0]
    expected = sum(abs(gap[bins == b].sum()) for b in range(num_bins)) / max(1, len(bins))
    if len(k):
        np.testing.assert_allclose(expected_calibration_error(probs, labels, num_bins), expected, rtol=1e-5)


def test_perfectly_calibrated_predictions():
    """Labels drawn from the probabilities themselves: an error of order 1/√n, and half as large for four times n."""
    errors = {}
    for n in (4000, 64000):
        probs = random_probs((n, 3), seed=2)
        labels = (np.random.default_rng(3).random((n, 1)) > probs.cumsum(-1)).sum(-1).clip(0, 2)
        errors[n] = float(expected_calibration_error(probs, labels))
        # The expected gap of B bins of n/B independent inputs is at most √(B/n)/2.
        assert errors[n] < 0.5 * np.sqrt(15 / n)
    assert errors[64000] < 0.6 * errors[4000]
    # Sharpened probabilities are over-confident and their error does not go away.
    sharp = probs**3 / np.sum(probs**3, -1, keepdims=True)
    overconfidence = float(sharp.max(-1).mean() - accuracy(labels, sharp))
    assert expected_calibration_error(sharp, labels) > overconfidence - 1e-4 > 0.05


def test_likelihood_and_accuracy_against_scikit_learn(x64):
    probs, labels = random_probs((200, 5), seed=4), np.random.default_rng(5).integers(5, size=200)
    expected = log_loss(labels, probs, labels=np.arange(5))
    np.testing.assert_allclose(negative_log_likelihood(labels, probs), expected, rtol=1e-10)
    np.testing.assert_allclose(accuracy(labels, probs), accuracy_score(labels, probs.argmax(-1)))
    assert negative_log_likelihood(np.array([1, 0]), binary(1.0, 0.3)) == np.inf
    assert negative_log_likelihood(np.array([0, 0]), binary(1.0, 1.0)) == 0
    # Ties go to the first class.
    assert accuracy(np.array([0, 1]), binary(0.5, 0.5)) == 0.5


def test_entropy():
    probs = np.array([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(predictive_entropy(probs), [0, np.log(3), np.log(2)], atol=1e-6)
    gradient = jax.grad(lambda p: predictive_entropy(p).sum())(jnp.array([[0.7, 0.3]]))
    np.testing.assert_allclose(gradient, [[-np.log(0.7) - 1, -np.log(0.3) - 1]], rtol=1e-5)


def test_batches_and_jit():
    probs = random_probs((3, 2, 40, 4), seed=6)
    common = np.random.default_rng(7).integers(4, size=40)
    own = np.random.default_rng(8).integers(4, size=(3, 2, 40))
    for measure in (expected_calibration_error, negative_log_likelihood, accuracy):
        by_row = [[measure(common, p) for p in row] for row in probs]
        np.testing.assert_allclose(jax.jit(measure)(common, probs), by_row, rtol=1e-5)
        by_row = [[measure(y, p) for p, y in zip(*rows, strict=True)] for rows in zip(probs, own, strict=True)]
        np.testing.assert_allclose(measure(own, probs), by_row, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(measure, (None, 0))(common, probs), measure(common, probs), rtol=1e-6)
    assert predictive_entropy(probs).shape == (3, 2, 40)


def test_the_calibration_error_takes_either_order():
    probs, labels = random_probs((50, 3)), np.random.default_rng(1).integers(3, size=50)
    expected = expected_calibration_error(probs, labels, 5)
    assert expected_calibration_error(labels, probs, 5) == expected
    assert expected_calibration_error(jnp.asarray(labels), jnp.asarray(probs), num_bins=5) == expected
    assert expected_calibration_error(labels=labels, probs=probs, num_bins=5) == expected
    assert expected_calibration_error(labels.tolist(), probs.tolist(), num_bins=5) == expected
    # One-hot probabilities may be whole numbers, before labels as before.
    assert expected_calibration_error(np.eye(3, dtype=int), np.array([0, 1, 2])) == 0


@pytest.mark.fault("diagnostics/_scores.py", "gap * (members @ np.sign(gap @ members))", "np.abs(gap)")
def test_all_scores_and_their_errors_by_hand():
    # Bins of five: 0.9 and 0.85 in one, right and wrong; 0.7, right, in another.
    labels, probs = np.array([0, 1, 0]), binary(0.9, 0.85, 0.7)
    scores = classification_scores(labels, probs, num_bins=5)
    losses = -np.log([0.9, 0.15, 0.7])
    signed = np.array([-(1 - 0.9), -(0 - 0.85), 1 - 0.7])  # the first bin is too sure, the other not enough
    expected = {
        "accuracy": 2 / 3,
        "negative_log_likelihood": losses.mean(),
        "expected_calibration_error": (abs(1 - 1.75) + 0.3) / 3,
        "accuracy_se": np.sqrt(2 / 3 * 1 / 3 / 3),
        "negative_log_likelihood_se": losses.std(ddof=1) / np.sqrt(3),
        "expected_calibration_error_se": signed.std(ddof=1) / np.sqrt(3),
    }
    assert list(scores) == list(expected) and all(type(score) is float for score in scores.values())
    np.testing.assert_allclose(list(scores.values()), list(expected.values()), rtol=1e-5)


def test_all_scores_are_those_of_the_mean_over_draws():
    probs, labels = random_probs((7, 60, 4)), np.random.default_rng(1).integers(4, size=60)
    scores, of_mean = classification_scores(labels, probs), probs.mean(0)
    assert scores == pytest.approx(classification_scores(labels, of_mean), rel=1e-5)
    np.testing.assert_allclose(scores["accuracy"], accuracy(labels, of_mean), rtol=1e-6)
    np.testing.assert_allclose(scores["negative_log_likelihood"], negative_log_likelihood(labels, of_mean), rtol=1e-5)
    error = expected_calibration_error(of_mean, labels)
    np.testing.assert_allclose(scores["expected_calibration_error"], error, rtol=1e-5)


def test_the_errors_are_the_spread_over_data_sets(x64):
    rng = np.random.default_rng(0)
    names = ("accuracy", "negative_log_likelihood", "expected_calibration_error")
    found = []
    for _ in range(400):
        truth = rng.dirichlet(0.4 * np.ones(3), 500)
        labels = (rng.random((500, 1)) > truth.cumsum(-1)).sum(-1).clip(0, 2)
        sharp = truth**3 / np.sum(truth**3, -1, keepdims=True)
        found.append(classification_scores(labels, 0.01 / 3 + 0.99 * sharp, num_bins=5))
    for name in names:
        spread = np.std([scores[name] for scores in found], ddof=1)
        error = np.sqrt(np.mean([scores[f"{name}_se"] ** 2 for scores in found]))
        np.testing.assert_allclose(error, spread, rtol=0.15, err_msg=name)


def test_scores_of_one_row_and_of_an_impossible_label():
    one = classification_scores(np.array([0]), binary(0.8))
    assert one["accuracy_se"] == 0 and np.isnan(one["negative_log_likelihood_se"])
    impossible = classification_scores(np.array([1, 0, 0]), binary(1.0, 0.7, 0.8))
    assert impossible["negative_log_likelihood"] == np.inf and np.isnan(impossible["negative_log_likelihood_se"])


@pytest.mark.as_compiled
@parametrize("measure", [expected_calibration_error, negative_log_likelihood, accuracy], rest="slow")
@parametrize("label", [-1, 2], rest="slow")
def test_a_label_that_is_no_class_gives_nan_under_jit(measure, label):
    compiled = jax.jit(measure)
    assert np.isnan(compiled(np.array([0, label]), binary(0.3, 0.6)))
    np.testing.assert_allclose(compiled(np.array([0, 1]), binary(0.3, 0.6)), measure([0, 1], binary(0.3, 0.6)))


@parametrize("dtype", [np.float16, jnp.bfloat16], rest="slow")
def test_half_precision_will_do(dtype):
    probs = jnp.asarray(binary(0.25, 0.5), dtype)
    assert negative_log_likelihood(np.array([1, 0]), probs).dtype == np.float32
    np.testing.assert_allclose(negative_log_likelihood(np.array([0, 0]), probs), 1.5 * np.log(2), rtol=1e-6)
