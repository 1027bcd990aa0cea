"""The classifier two-sample test against the accuracy of the best classifier, in closed form."""

import jax
import numpy as np
import pytest
import scipy.stats

from numpyro_wide import _checks
from numpyro_wide.calibration import c2st
from tests.marks import parametrize

KEY = jax.random.key(0)


def normals(number, loc, scale, seed):
    return loc + scale * np.random.default_rng(seed).normal(size=(number, 2))


@pytest.mark.fault(
    "calibration.py",
    "features = (np.concatenate([sample, exact_sample]) - loc) / scale",
    "features = np.concatenate([sample, exact_sample]) + 0 * (loc + scale)",
)
@parametrize(
    ("loc", "scale", "expected"),
    [
        (0.0, 1.0, 0.5),
        # Of distance 1.5 √2 in units of the scale.
        (1.5, 1.0, scipy.stats.norm.cdf(1.5 / 2**0.5)),
        # The likelihood ratio of circles depends on the radius alone: r² = 2 log(4)·4/3 is where both densities agree.
        (0.0, 2.0, 0.5 * (1 + (1 - 4 ** (-4 / 3)) - (1 - 4 ** (-1 / 3)))),
    ],
    rest="slow",
)
def test_accuracy_is_that_of_the_best_classifier(loc, scale, expected):
    units = np.array([1e3, 1e-3])  # of which nothing depends
    draws, reference = units * normals(1500, loc, scale, 1), units * normals(1500, 0.0, 1.0, 2)
    found = c2st(KEY, {"a": draws[:, 0], "b": draws[:, 1:]}, {"b": reference[:, 1:], "a": reference[:, 0]})
    assert found == pytest.approx(expected, abs=0.03)
    assert found == c2st(KEY, draws, reference)


@pytest.mark.parametrize(
    ("draws", "reference", "message"),
    [
        (np.zeros((20, 2)), np.zeros((30, 2)), r"shapes \(20, 2\) and \(30, 2\), draws in front; thin the longer"),
        (np.zeros((20, 2)), np.zeros((20, 3)), r"shapes \(20, 2\) and \(20, 3\)"),
        ({"a": np.zeros(20)}, {"b": np.zeros(20)}, "of the same sites"),
        (np.zeros(5), np.zeros(5), "draws must hold ten draws or more"),
        ({"a": np.zeros(20), "b": np.zeros(19)}, np.zeros(20), "ten draws or more, along the first axis"),
        (np.full(20, np.nan), np.zeros(20), "distances need finite points"),
    ],
)
def test_mistakes(draws, reference, message):
    with pytest.raises(ValueError, match=message):
        c2st(KEY, draws, reference)


@pytest.mark.slow
def test_a_bar_is_over_the_folds(bars, monkeypatch, capsys):
    monkeypatch.setattr(_checks, "_PATIENCE", 0)
    for shown in (True, False):
        c2st(KEY, normals(50, 0.0, 1.0, 1), normals(50, 0.0, 1.0, 2), progress_bar=shown)
        assert ("classifiers: 100%" in capsys.readouterr().err) == shown
