"""The object behind the array functions: the same numbers, one cast and check, a tree of arrays."""

import jax
import numpy as np
import pytest

from numpyro_wide import linear_gaussian as lg
from numpyro_wide.linear_gaussian import ReadoutProblem
from tests.linear_gaussian import oracle

CASE = oracle.random_case(6, 4, 2, (6, 1), (4, 2), seed=2)
TEST = np.random.default_rng(3).normal(size=(3, 4))


def problem_of(**change):
    return ReadoutProblem.of(
        CASE.features, CASE.targets, CASE.noise_scale, prior_loc=CASE.prior_loc, prior_scale=CASE.prior_scale, **change
    )


@jax.jit
def by_methods(problem, phi):
    readout, log_abs_det = problem.map(phi)
    return {
        "map": (readout, log_abs_det),
        "inverse": problem.inverse_map(readout),
        "evidence": problem.log_evidence(),
        "posterior": problem.posterior(),
    }


@pytest.mark.as_compiled
def test_methods_and_functions_agree_and_a_problem_goes_through_jit():
    found = by_methods(problem_of(), CASE.phi)
    data, prior = CASE[:2], {"prior_loc": CASE.prior_loc, "prior_scale": CASE.prior_scale}
    readout, log_abs_det = lg.readout_map(*data, CASE.phi, CASE.noise_scale, **prior)
    expected = {
        "map": (readout, log_abs_det),
        "inverse": lg.readout_inverse_map(*data, readout, CASE.noise_scale, **prior),
        "evidence": lg.log_evidence(*data, CASE.noise_scale, **prior),
        "posterior": lg.readout_posterior(*data, CASE.noise_scale, **prior),
    }
    jax.tree.map(lambda one, other: oracle.close(one, other, 1e-4), found, expected)


def test_joint_predictions_have_the_variances_on_the_diagonal():
    problem = problem_of()
    mean, variance, _ = problem.predict(TEST)
    joint_mean, covariance = problem.predict_jointly(TEST)
    oracle.close(joint_mean, mean, 1e-5)
    oracle.close(np.diagonal(np.asarray(covariance), axis1=1, axis2=2).T, variance, 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problem_of().map(np.ones(4)), r"phi must have shape \(4, 2\).* but got \(4,\); give both"),
        (lambda: problem_of().draw(np.ones((5, 2))), r"phi must have shape \(4, 2\).* but got \(5, 2\)"),
        (lambda: problem_of().inverse_map(np.ones((4, 3))), r"readout must have shape \(4, 2\).* but got \(4, 3\)"),
        (lambda: problem_of().predict(TEST[:, :3]), r"test_features must have shape \(m, 4\).* but got \(3, 3\)"),
        (lambda: problem_of().predict_jointly(TEST[0]), r"test_features must have shape \(m, 4\).* but got \(4,\)"),
        (lambda: problem_of().predict(TEST, residuals=np.ones(6)), r"residuals must broadcast against shape \(6, 2\)"),
        (lambda: problem_of().check_readout("readout 'w'", (3, 2)), r"readout 'w' must have shape \(4, 2\) to go with"),
        (
            lambda: ReadoutProblem.of(np.ones((6, 4)), np.ones((6, 1)), 0.3).map(np.ones(4)),
            r"phi must have shape \(4, 1\).* give targets of shape \(6,\)",
        ),
        (
            lambda: ReadoutProblem.of(np.ones((6, 4)), np.ones(6), 0.3, prior_loc=np.ones(6)),
            r"prior_loc must broadcast against shape \(4,\), but got \(6,\); the readout has one row for each of the 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
