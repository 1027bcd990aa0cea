"""What scores and statistics of draws refuse, and what users are told; mistakes with runs stand with those runs."""

from functools import partial

import jax
import numpy as np
import pytest

from numpyro_wide.diagnostics import (
    classification_scores,
    crps,
    effective_sample_size,
    expected_calibration_error,
    function_ess,
    interval_coverage,
    log_predictive_density,
    pooling,
    probability_integral_transform,
    projected_ess,
    random_projections,
    regression_scores,
    rhat_squared,
    rmse,
)
from tests.mistakes import Case

KEY = jax.random.key(0)
Y, MEAN, VARIANCE = np.zeros(4), np.zeros((3, 4)), np.ones((3, 4))
CHAINS = np.random.default_rng(0).normal(size=(2, 100))
SAMPLES = {"w": np.zeros((2, 10, 3))}
SCORES = [rmse, log_predictive_density, crps, interval_coverage, probability_integral_transform, regression_scores]
NO_KEY = r"rng_key must be a PRNG key, such as jax.random.key\(0\), but is an int"


def binary(*largest):
    """Two classes, the first the more probable, with these probabilities."""
    p = np.array(largest)
    return np.stack([p, 1 - p], -1)


SCORE_MISTAKES = [
    ((np.zeros(()), MEAN, VARIANCE), r"y must have shape \(n,\) or \(n, k\), .* but has \(\)"),
    ((np.zeros(0), np.zeros((3, 0)), np.ones((3, 0))), r"at least one entry, but has \(0,\)"),
    ((Y[:, None], MEAN, VARIANCE), r"mean must have the shape of y, \(4, 1\), .* but has \(3, 4\)"),
    ((Y, MEAN.T, VARIANCE.T), r"but has \(4, 3\); .*np.moveaxis"),
    ((Y, MEAN[:0], VARIANCE[:0]), r"but has \(0, 4\)"),
    ((Y, MEAN, VARIANCE[:, :1]), r"variance must have the shape of mean, \(3, 4\), but has \(3, 1\); .*broadcast_to"),
    ((Y * np.nan, MEAN, VARIANCE), "y must not contain NaN, but 4 of its entries do"),
    ((Y, MEAN * np.nan, VARIANCE), "mean must not contain NaN"),
    ((Y, MEAN, VARIANCE * np.nan), "variance must not contain NaN"),
    ((Y, MEAN - np.inf, VARIANCE), "mean must be finite, but 12 of its entries are infinite"),
    ((Y, MEAN, 0 * VARIANCE), "variance must be positive everywhere, but is 0.0 somewhere; .*add the noise's"),
    ((Y, MEAN, -VARIANCE), "variance must be positive everywhere, but is -1.0"),
]
PROBS_MISTAKES = [
    ((np.array([0]), np.full(4, 0.25)), r"\(\.\.\., n, classes\)"),
    ((np.zeros(4, int), np.full((4, 1), 1.0)), "stack 1 - p and p"),
    ((np.zeros(0, int), np.ones((0, 2)) / 2), "n at least 1"),
    ((np.eye(2), binary(0.5, 0.5)), r"labels\.argmax\(-1\)"),
    ((np.zeros(3, int), binary(0.5, 0.5)), r"got \(3,\)"),
    ((np.array(0), binary(0.5, 0.5)), r"got \(\)"),
    ((np.array([0, 2]), binary(0.5, 0.5)), "between 0 and 1, got 0 to 2"),
    ((np.array([-1, 0]), binary(0.5, 0.5)), "between 0 and 1"),
    ((np.array([0]), np.array([[2.0, -1.0]])), "softmax"),
    ((np.array([0]), np.array([[2.0, 3.0]])), "softmax"),
    ((np.array([0]), np.array([[np.nan, 1.0]])), "softmax"),
]


def each(functions, arguments, message, error=ValueError, **options):
    """The same mistake with each of several functions."""
    return [Case(partial(function, *arguments, **options), message, error) for function in functions]


CASES = [
    *(case for arguments, message in SCORE_MISTAKES for case in each(SCORES, arguments, message)),
    *each(SCORES, (np.array(["a"] * 4), MEAN, VARIANCE), "must hold real numbers", TypeError),
    *(
        case
        for level in (0, 1, 90, np.nan)
        for case in each(
            [interval_coverage], (Y, MEAN, VARIANCE, level), r"level must lie between 0 and 1, such as 0\.9"
        )
    ),
    Case(
        lambda: regression_scores(Y, MEAN, VARIANCE, scale=0.0), "scale must be a positive, finite number, .*but is 0.0"
    ),
    *(
        Case(partial(regression_scores, Y, MEAN, VARIANCE, scale=wrong), "scale must be a positive")
        for wrong in (np.inf, np.nan, np.ones(4))
    ),
    Case(
        lambda: regression_scores(Y[:, None], MEAN[..., None], VARIANCE[..., None], scale=np.ones(3)),
        "finite number, or one for each output, but is",
    ),
    *(case for arguments, message in PROBS_MISTAKES for case in each([expected_calibration_error], arguments, message)),
    *(
        case
        for num_bins in (0, -1, 2.5, True)
        for case in each([expected_calibration_error], (binary(0.5), np.array([0]), num_bins), "num_bins")
    ),
    *each([classification_scores], (binary(0.5, 0.5), np.array([0, 1])), "the order is class"),
    *(
        case
        for labels, probs in (((2, 3), (3, 2)), ((3,), (2, 2, 3, 2)), ((3,), (2,)))
        for case in each(
            [classification_scores],
            (np.zeros(labels, int), np.full(probs, 0.5)),
            r"labels must have shape \(n,\) and probs \(n, classes\) or",
        )
    ),
    *(
        case
        for shape in ((200, 30), (1, 200, 30), (4, 3, 30), (4, 200, 29))
        for case in each([pooling], (np.zeros(30), np.zeros(shape), np.ones(shape)), r"mean|shape")
    ),
    *each(
        [pooling],
        (np.zeros(30), np.zeros((4, 200, 30)), np.ones((4, 200, 30))),
        "rhat_limit must be above 1",
        rhat_limit=1.0,
    ),
    *(
        case
        for shape in ((100,), (2, 1, 3))
        for case in each(
            [effective_sample_size, rhat_squared],
            (np.zeros(shape),),
            r"\(chain, draw, ...\) with at least two draws, but got .*group_by_chain",
        )
    ),
    *each([effective_sample_size], (CHAINS,), "per_step or per gradient, not both", per_step=True, num_grad=10),
    Case(lambda: random_projections(KEY, ["a"])({"a": np.zeros(0)}), "nothing to project"),
    Case(lambda: projected_ess(SAMPLES, 0), NO_KEY, TypeError),
    Case(lambda: function_ess(lambda draw: draw["w"], SAMPLES, 0), NO_KEY, TypeError),
    Case(lambda: random_projections(0, ["w"]), NO_KEY, TypeError),
    Case(
        lambda: projected_ess(SAMPLES, KEY, num_projections=0),
        "num_projections must be a whole number of at least 1, but got 0",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes(case):
    case.check()
