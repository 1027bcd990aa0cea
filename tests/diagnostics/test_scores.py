"""Scores of predicted numbers: against quadrature, SciPy, closed forms of one Gaussian, and simulated data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from sklearn.metrics import accuracy_score, log_loss

from numpyro_wide import _mixture as _gaussian_mixtures
from numpyro_wide.diagnostics import (
    classification_scores,
    crps,
    expected_calibration_error,
    interval_coverage,
    log_predictive_density,
    probability_integral_transform,
    regression_scores,
    rmse,
)
from tests.marks import parametrize

SCORES = [rmse, log_predictive_density, crps, interval_coverage, probability_integral_transform, regression_scores]


def predictions(shape, seed=0, spread=2.0):
    """Observations near 3, and means and variances with deviations that differ among draws and entries."""
    rng = np.random.default_rng(seed)
    mean, variance = 3 + spread * rng.normal(size=shape), np.exp(rng.normal(size=shape))
    return 3 + 2 * rng.normal(size=shape[1:]), mean, variance


def crps_by_quadrature(y, mean, variance):
    """∫ (F(x) − 1{x ≥ y})² dx."""
    scale = np.sqrt(variance)
    low, high = min(y, (mean - 9 * scale).min()), max(y, (mean + 9 * scale).max())

    def below(x):
        return stats.norm.cdf(x, mean, scale).mean()

    options = {"epsabs": 1e-12, "epsrel": 1e-12, "limit": 200}
    return (
        quad(lambda x: below(x) ** 2, low, y, **options)[0] + quad(lambda x: (1 - below(x)) ** 2, y, high, **options)[0]
    )


@pytest.mark.fault("_mixture.py", "return total / (2 * len(mean) ** 2)", "return total / len(mean) ** 2")
@pytest.mark.fault("_mixture.py", "2 * pairs.sum(axis=0)", "pairs.sum(axis=0)")
@parametrize("num_draws", [1, 2, 7], rest="slow")
def test_crps_against_quadrature(num_draws):
    y, mean, variance = predictions((num_draws, 6))
    y[0] = 20.0  # far outside
    expected = [crps_by_quadrature(y[i], mean[:, i], variance[:, i]) for i in range(6)]
    found = crps(y, mean, variance, pointwise=True)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert crps(y, mean, variance) == pytest.approx(np.mean(expected), rel=1e-9)


@pytest.mark.fault("_mixture.py", "np.ceil(2 * (high - low)", "np.ceil(2 / 7 * (high - low)")
@parametrize("spread", [0.0, 1.0, 60.0], rest="slow")
def test_pairs_and_integral_agree(spread):
    _, mean, variance = predictions((40, 3), seed=1, spread=spread)
    pairs = _gaussian_mixtures.spread_by_pairs(mean + 1e3, np.sqrt(variance))
    integral = _gaussian_mixtures.spread_by_integral(mean + 1e3, np.sqrt(variance))
    np.testing.assert_allclose(integral, pairs, rtol=1e-12)


def test_many_draws_take_either_way_by_entry(monkeypatch):
    """Entries whose draws are near to each other go by the integral, others by pairs, in blocks of a few."""
    y, mean, variance = predictions((300, 5), seed=2)
    variance = np.clip(variance, 0.5, 2.0)
    mean[:, 1] *= 100
    used = _gaussian_mixtures._num_points(mean, np.sqrt(variance)) < 150
    assert used.tolist() == [True, False, True, True, True]
    whole = crps(y, mean, variance, pointwise=True)
    np.testing.assert_allclose(whole[:2], [crps_by_quadrature(y[i], mean[:, i], variance[:, i]) for i in (0, 1)])
    monkeypatch.setattr(_gaussian_mixtures, "BLOCK", 700)
    np.testing.assert_allclose(crps(y, mean, variance, pointwise=True), whole, rtol=1e-13)


@pytest.mark.fault("_mixture.py", "log_values, axis=0) - np.log(len(log_values))", "log_values, axis=0)")
def test_scores_of_one_gaussian():
    """The closed form of Gneiting & Raftery 2007, §4.2, SciPy's density and distribution function."""
    y, mean, variance = predictions((50,), seed=3)[0] + np.arange(50) / 10, np.full(50, 2.0), np.linspace(0.5, 4, 50)
    scale = np.sqrt(variance)
    z = (y - mean) / scale
    expected = scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    for with_draws in (lambda x: x, lambda x: x[None], lambda x: np.stack([x, x, x])):
        arguments = y, with_draws(mean), with_draws(variance)
        np.testing.assert_allclose(crps(*arguments, pointwise=True), expected, rtol=1e-12)
        np.testing.assert_allclose(
            log_predictive_density(*arguments, pointwise=True), stats.norm.logpdf(y, mean, scale), rtol=1e-12
        )
        np.testing.assert_allclose(probability_integral_transform(*arguments), stats.norm.cdf(z), rtol=1e-12)
        assert rmse(*arguments) == rmse(*arguments[:2]) == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)), rel=1e-12)
        low, high = stats.norm.interval(0.6, mean, scale)
        assert interval_coverage(*arguments, level=0.6) == np.mean((y >= low) & (y <= high))


@parametrize("shape", [(4, 9), (4, 9, 2)], rest="slow")
def test_mixtures_against_scipy(shape):
    y, mean, variance = predictions(shape, seed=4)
    density = stats.norm.pdf(y, mean, np.sqrt(variance)).mean(0)
    np.testing.assert_allclose(log_predictive_density(y, mean, variance, pointwise=True), np.log(density), rtol=1e-10)
    assert log_predictive_density(y, mean, variance) == pytest.approx(np.mean(np.log(density)), rel=1e-10)
    transform = probability_integral_transform(y, mean, variance)
    np.testing.assert_allclose(transform, stats.norm.cdf(y, mean, np.sqrt(variance)).mean(0), rtol=1e-12)
    assert rmse(y, mean) == pytest.approx(np.sqrt(np.mean((y - mean.mean(0)) ** 2)), rel=1e-12)
    assert crps(y, mean, variance, pointwise=True).shape == shape[1:]


def test_density_far_from_every_draw():
    """Where the density itself underflows: the nearest draw decides, less log 2 for its weight."""
    found = log_predictive_density(np.array([100.0]), np.array([[0.0], [10.0]]), np.ones((2, 1)))
    assert found == pytest.approx(-0.5 * 90**2 - 0.5 * np.log(2 * np.pi) - np.log(2), rel=1e-12)
    assert log_predictive_density(np.array([1e200]), np.array([0.0]), np.array([1.0])) == -np.inf


def test_calibrated_predictions():
    """Observations from the mixture itself: uniform transforms, nominal coverage, best scores among their like."""
    _, mean, variance = predictions((5, 4000), seed=5)
    rng = np.random.default_rng(6)
    which = rng.integers(5, size=4000), np.arange(4000)
    y = mean[which] + np.sqrt(variance[which]) * rng.normal(size=4000)
    transform = probability_integral_transform(y, mean, variance)
    assert stats.kstest(transform, "uniform").pvalue > 0.05
    assert stats.kstest(probability_integral_transform(y, mean, 3 * variance), "uniform").pvalue < 1e-4
    for level in (0.5, 0.9):
        error = np.sqrt(level * (1 - level) / 4000)
        assert abs(interval_coverage(y, mean, variance, level) - level) < 2.5 * error
        assert interval_coverage(y, mean, variance / 4, level) < level - 4 * error
    for other in (mean, variance * 2), (mean, variance / 2), (mean + 0.5, variance):
        assert log_predictive_density(y, *other) < log_predictive_density(y, mean, variance)
        assert crps(y, *other) > crps(y, mean, variance)


@pytest.mark.fault("diagnostics/_scores.py", " - np.log(units)", " + np.log(units)")
@parametrize(("shape", "scale"), [((3, 30), 7.0), ((3, 30, 2), 7.0), ((3, 30, 2), np.array([7.0, 0.2]))], rest="slow")
def test_scale_gives_the_scores_of_rescaled_numbers(shape, scale):
    y, mean, variance = predictions(shape, seed=7)
    found = regression_scores(y, mean, variance, scale=scale)
    rescaled = regression_scores(y * scale, mean * scale, variance * scale**2)
    assert found == pytest.approx(rescaled, rel=1e-12)
    assert list(found)[:4] == ["rmse", "log_predictive_density", "crps", "coverage_90"]
    assert found["rmse"] == pytest.approx(rmse(y * scale, mean * scale), rel=1e-12)
    assert found["crps"] == pytest.approx(crps(y * scale, mean * scale, variance * scale**2), rel=1e-12)
    assert found["coverage_90"] == interval_coverage(y, mean, variance)
    plain = log_predictive_density(y, mean, variance)
    assert found["log_predictive_density"] == pytest.approx(plain - np.mean(np.log(scale)), rel=1e-12)


@pytest.mark.fault("diagnostics/_scores.py", "squared_error) / (2 * root)", "squared_error) / root")
def test_standard_errors_are_the_deviations_over_samples():
    """2000 samples of 200 rows: deviations of the scores against the mean of the errors that are reported."""
    rng = np.random.default_rng(8)
    y, mean, variance = rng.normal(size=(2000, 200)), np.full((1, 200), 0.3), np.full((1, 200), 1.5)
    found = [regression_scores(sample, mean, variance) for sample in y]
    for name in ("rmse", "log_predictive_density", "crps", "coverage_90"):
        deviation = np.std([scores[name] for scores in found])
        error = np.mean([scores[f"{name}_se"] for scores in found])
        np.testing.assert_allclose(error, deviation, rtol=0.06)  # four standard errors of a deviation, 1/√4000 each
    share = found[0]["coverage_90"]
    assert found[0]["coverage_90_se"] == pytest.approx(np.sqrt(share * (1 - share) / 200), rel=1e-12)


@pytest.mark.fault("diagnostics/_scores.py", "by_entry.reshape(len(by_entry), -1).mean(axis=1)", "by_entry.reshape(-1)")
def test_outputs_of_a_row_count_once():
    """A second output equal to the first brings no further information."""
    y, mean, variance = predictions((3, 40), seed=9)
    once = regression_scores(y, mean, variance)
    assert regression_scores(*(np.stack([x, x], -1) for x in (y, mean, variance))) == pytest.approx(once, rel=1e-12)


def test_one_row_and_no_error():
    found = regression_scores(np.zeros(1), np.zeros((2, 1)), np.ones((2, 1)))
    assert found["rmse"] == found["rmse_se"] == 0
    assert (found["coverage_90"], found["coverage_90_se"]) == (1, 0)
    assert np.isnan([found["crps_se"], found["log_predictive_density_se"]]).all()


def test_single_precision_is_computed_in_double():
    """An offset of 1e6, exact in float32: float32 would have lost the deviations of 1/8."""
    y, mean, variance = (np.round(8 * x) / 8 for x in predictions((6, 20), seed=10, spread=10.0))
    y, mean, variance = y + 2**20, mean + 2**20, variance + 0.125
    single = [jnp.asarray(x, jnp.float32) for x in (y, mean, variance)]
    assert regression_scores(*single) == regression_scores(y, mean, variance)


Y, MEAN, VARIANCE = np.zeros(4), np.zeros((3, 4)), np.ones((3, 4))


# Calibration and its relatives: by hand, against scikit-learn, and on predictions calibrated by design ----------------


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
    overconfidence = float(sharp.max(-1).mean() - (sharp.argmax(-1) == labels).mean())
    assert expected_calibration_error(sharp, labels) > overconfidence - 1e-4 > 0.05


def test_likelihood_and_accuracy_against_scikit_learn(x64):
    probs, labels = random_probs((200, 5), seed=4), np.random.default_rng(5).integers(5, size=200)
    expected = log_loss(labels, probs, labels=np.arange(5))
    scores = classification_scores(labels, probs)
    np.testing.assert_allclose(scores["negative_log_likelihood"], expected, rtol=1e-10)
    np.testing.assert_allclose(scores["accuracy"], accuracy_score(labels, probs.argmax(-1)))
    assert classification_scores(np.array([1, 0]), binary(1.0, 0.3))["negative_log_likelihood"] == np.inf
    assert classification_scores(np.array([0, 0]), binary(1.0, 1.0))["negative_log_likelihood"] == 0
    # Ties go to the first class.
    assert classification_scores(np.array([0, 1]), binary(0.5, 0.5))["accuracy"] == 0.5


@pytest.mark.as_compiled
def test_batches_and_jit():
    probs = random_probs((3, 2, 40, 4), seed=6)
    common = np.random.default_rng(7).integers(4, size=40)
    own = np.random.default_rng(8).integers(4, size=(3, 2, 40))
    error = expected_calibration_error
    by_row = [[error(p, common) for p in row] for row in probs]
    np.testing.assert_allclose(jax.jit(error)(probs, common), by_row, rtol=1e-5)
    by_row = [[error(p, y) for p, y in zip(*rows, strict=True)] for rows in zip(probs, own, strict=True)]
    np.testing.assert_allclose(error(probs, own), by_row, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(error, (0, None))(probs, common), error(probs, common), rtol=1e-6)


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


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_that_is_no_class_gives_nan_under_jit(label):
    compiled = jax.jit(expected_calibration_error)
    assert np.isnan(compiled(binary(0.3, 0.6), np.array([0, label])))
    expected = expected_calibration_error(binary(0.3, 0.6), [0, 1])
    np.testing.assert_allclose(compiled(binary(0.3, 0.6), np.array([0, 1])), expected)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_will_do(dtype):
    probs = jnp.asarray(binary(0.25, 0.5), dtype)
    assert expected_calibration_error(probs, np.array([1, 0])).dtype == np.float32
    scores = classification_scores(np.array([0, 0]), probs)
    np.testing.assert_allclose(scores["negative_log_likelihood"], 1.5 * np.log(2), rtol=1e-6)
