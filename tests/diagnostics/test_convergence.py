"""Effective sample size and R-hat against their definitions, closed forms, NumPyro's and ArviZ's."""

import arviz as az
import jax
import numpy as np
import pytest
from numpyro.diagnostics import autocorrelation as numpyro_autocorrelation
from scipy.signal import lfilter

from numpyro_wide.diagnostics import _convergence as _chains
from numpyro_wide.diagnostics import (
    effective_sample_size,
    function_ess,
    projected_ess,
    random_projections,
    rhat_squared,
)
from numpyro_wide.diagnostics._convergence import autocorrelation
from tests.marks import parametrize


def ar1(correlation, num_chains, num_draws, columns=(), seed=0):
    """Stationary draws x_{t+1} = ρ x_t + √(1 − ρ²) ξ, (chain, draw, *columns), mean 3 and variance 4."""
    noise = np.random.default_rng(seed).normal(size=(num_chains, num_draws, *columns))
    noise[:, 1:] *= np.sqrt(1 - correlation**2)
    return 3.0 + 2.0 * lfilter([1.0], [1.0, -correlation], noise, axis=1)


def equation_7(draws):
    """One dimension (chain, draw), by the sums that are written in the paper."""
    num_chains, num_draws = draws.shape
    deviations = draws - draws.mean()
    total = 0.0
    for lag in range(1, num_draws):
        rho = np.mean(deviations[:, :-lag] * deviations[:, lag:]) / np.mean(deviations**2)
        if rho < 0:
            break
        total += (1 - lag / num_draws) * rho
    return num_chains * num_draws / (1 + 2 * total)


@pytest.mark.fault("diagnostics/_convergence.py", "np.arange(1, num_draws)[:, None", "np.arange(num_draws - 1)[:, None")
@parametrize("correlation", [-0.5, 0.0, 0.7, 0.97], rest="slow")
def test_ess_is_equation_7(correlation):
    draws = ar1(correlation, 3, 157, (2, 4))
    expected = np.apply_along_axis(lambda column: equation_7(column.reshape(3, 157)), 0, draws.reshape(3 * 157, 2, 4))
    np.testing.assert_allclose(effective_sample_size(draws), expected, rtol=1e-10)


def test_ess_does_not_depend_on_how_columns_are_blocked(monkeypatch):
    draws = ar1(0.5, 2, 50, (7,))
    whole = effective_sample_size(draws)
    monkeypatch.setattr(_chains, "_BLOCK", 250)
    np.testing.assert_array_equal(effective_sample_size(draws), whole)


@parametrize("correlation", [0.0, 0.5, 0.9], rest="slow")
def test_ess_of_an_autoregression(correlation):
    """(1 − ρ) / (1 + ρ) of the draws; stopping at the first negative autocorrelation costs a little."""
    num_draws = 40_000
    ess = effective_sample_size(ar1(correlation, 4, num_draws, (20,)), per_step=True)
    expected = (1 - correlation) / (1 + correlation)
    np.testing.assert_allclose(ess.mean(), expected, rtol=0.03)
    np.testing.assert_allclose(ess, expected, rtol=0.15)


@parametrize("correlation", [0.3, 0.9], rest="slow")
def test_ess_agrees_with_arviz(correlation):
    """Both estimate the same size, of the mean; they differ in where they stop."""
    draws = ar1(correlation, 4, 20_000, (10,))
    arviz = np.asarray(az.ess({"x": draws}, method="mean")["x"])
    ratios = effective_sample_size(draws) / arviz
    assert abs(ratios.mean() - 1) < 0.02 and np.abs(ratios - 1).max() < 0.08


def test_ess_of_antithetic_draws_is_capped():
    """Where ArviZ counts a negative correlation as a gain, the sum of equation 7 is empty."""
    assert effective_sample_size(ar1(-0.6, 1, 1000)) == 1000.0


def test_ess_falls_when_chains_disagree():
    draws = ar1(0.3, 2, 1000)
    assert effective_sample_size(draws + np.array([[-5.0], [5.0]])) < 0.01 * effective_sample_size(draws)


def test_ess_per_step_and_per_gradient():
    draws, num_grad = ar1(0.5, 2, 100), np.arange(200).reshape(2, 100)
    ess = effective_sample_size(draws)
    np.testing.assert_allclose(effective_sample_size(draws, per_step=True), ess / 200)
    np.testing.assert_allclose(effective_sample_size(draws, num_grad=num_grad), ess / num_grad.sum())
    np.testing.assert_allclose(effective_sample_size(draws, num_grad=50), ess / 50)


def test_autocorrelation_is_numpyro_s_for_one_chain():
    draws = ar1(0.8, 1, 333, (3,))
    expected = numpyro_autocorrelation(draws[0], bias=False)
    np.testing.assert_allclose(autocorrelation(draws), expected, atol=1e-12)


def test_float32_draws_far_from_zero():
    draws = (ar1(0.9, 2, 2000) + 1e4).astype(np.float32)
    np.testing.assert_allclose(effective_sample_size(draws), equation_7(draws.astype(float)), rtol=1e-6)
    np.testing.assert_allclose(rhat_squared(draws), rhat_squared(draws.astype(float)), rtol=1e-9)


def test_rhat_squared_and_arviz_s_rhat():
    num_chains, num_draws = 5, 60
    draws = ar1(0.9, num_chains, num_draws, (4,))
    classical = np.asarray(az.rhat({"x": draws}, method="identity")["x"]) ** 2
    between = classical - (num_draws - 1) / num_draws
    expected = 1 + (num_chains - 1) / num_chains * num_draws / (num_draws - 1) * between
    np.testing.assert_allclose(rhat_squared(draws), expected, rtol=1e-10)


def test_rhat_squared_is_all_variance_over_the_variance_within():
    draws = ar1(0.9, 3, 40, (2, 3))
    np.testing.assert_allclose(rhat_squared(draws), draws.var((0, 1)) / draws.var(1).mean(0), rtol=1e-10)


def test_constant_draws_have_no_ess_and_no_rhat():
    draws = np.full((2, 10, 2), 0.1, np.float32)
    assert np.isnan(effective_sample_size(draws)).all() and np.isnan(rhat_squared(draws)).all()
    draws[1] = 0.2
    assert (rhat_squared(draws) == np.inf).all()


@parametrize("num_chains", [2, 3], rest="slow")
def test_rounding_is_no_variance_of_constants(num_chains):
    """The mean of equal numbers is not that number in float64."""
    draws = np.full((num_chains, 1000), 0.1)
    assert np.isnan(rhat_squared(draws))
    draws[0] = 0.3
    assert rhat_squared(draws) == np.inf
    draws[0] = ar1(0.5, 1, 1000)[0]
    np.testing.assert_allclose(rhat_squared(draws), draws.var() / (draws[0].var() / num_chains), rtol=1e-10)
    draws[1, 3] = np.nan
    assert np.isnan(rhat_squared(draws))


@parametrize("dtype", [bool, np.int8], rest="slow")
def test_discrete_draws_are_read_as_floats(dtype):
    draws = ((ar1(0.5, 2, 200, (3,)) > 3) * 120).astype(dtype)
    draws[0, ::5] *= np.array(-1, np.int8) if dtype is np.int8 else False  # a range that int8 does not hold
    for function in (effective_sample_size, rhat_squared, autocorrelation):
        np.testing.assert_allclose(function(draws), function(draws.astype(float)), rtol=1e-12)
    key = jax.random.key(0)
    project = random_projections(key, ["a"], num_projections=5)
    projections = project({"a": draws[0, 7]})
    np.testing.assert_array_equal(projections, project({"a": draws[0, 7].astype(np.float32)}))


def test_no_dimensions_have_no_ess():
    empty = np.zeros((2, 5, 0))
    assert effective_sample_size(empty).shape == effective_sample_size(empty, per_step=True).shape == (0,)
    assert rhat_squared(empty).shape == (0,)


def test_projected_ess_gives_mean_least_and_largest_of_both_estimators():
    samples = {"a": ar1(0.9, 2, 500, (3, 5)), "b": ar1(0.1, 2, 500, (4,), seed=1)}
    key = jax.random.key(0)
    project = random_projections(key, samples, num_projections=20)
    projections = np.asarray(jax.vmap(jax.vmap(project))(samples))
    arviz = np.asarray(az.ess({"x": projections})["x"])
    own = effective_sample_size(projections)
    for method, ess in {"bulk": arviz, "autocorrelation": own}.items():
        found = projected_ess(samples, key, num_projections=20, method=method)
        assert list(found) == ["mean", "min", "max"]
        np.testing.assert_allclose(list(found.values()), [ess.mean(), ess.min(), ess.max()])
    assert own.min() < own.mean() < own.max()


def test_sites_without_entries_are_no_part_of_a_projection():
    some = random_projections(jax.random.key(0), ["a", "b"])({"a": np.zeros(0), "b": np.ones(3)})
    assert np.isfinite(some).all()


def test_more_chains_than_draws_are_asked_about():
    key, ungrouped = jax.random.key(0), {"w": ar1(0.5, 1, 60, (10, 2))[0]}
    calls = [
        lambda: projected_ess(ungrouped, key, method="autocorrelation"),
        lambda: function_ess(lambda draw: draw["w"], ungrouped, key, method="autocorrelation"),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match=r"60 chains of 10 draws each; .*group_by_chain=True") as found:
            call()
        assert [warning.filename for warning in found] == [__file__]
