"""What kernels, Gaussian processes and fits of the wide limit refuse, and what users are told."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from numpyro_wide import wide_limit
from numpyro_wide.nn import CNN, FCN, WideResNet
from numpyro_wide.wide_limit import empirical_ntk, fcn_kernel, gp_log_evidence, gp_posterior
from tests.mistakes import Case

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
Y = np.sin(2 * X[:, 0])
GP = {
    "kernel_train": np.eye(3),
    "kernel_cross": np.ones((2, 3)),
    "kernel_test": np.eye(2),
    "targets": np.ones(3),
    "noise_scale": 0.1,
}
EVIDENCE = {name: GP[name] for name in ("kernel_train", "targets", "noise_scale")}
W, ROWS = jnp.ones(3), jnp.ones((2, 3))


def linear(w, x):
    return x @ w


IMAGES = jnp.ones((2, 4, 4, 1))


def rows():
    """Kernels of two vectors, from which a rule begins."""
    return wide_limit.Inputs(ROWS, ROWS, None).vectors()


def kernel_of(changes):
    arguments = {"depth": 2, "activation": "relu", "w_std": 1.0, "b_std": 0.1} | changes
    return fcn_kernel(arguments.pop("depth"), arguments.pop("activation"), **arguments)


@functools.cache
def fitted():
    return wide_limit.fit(X[:5], Y[:5], num_restarts=1)


CASES = [
    Case(
        lambda: kernel_of({"activation": "swish"}),
        r"activation must be one of 'erf', 'gelu', 'identity', 'relu', 'tanh' or a function, but got 'swish'",
    ),
    Case(
        lambda: wide_limit.kernel(linen.Dense(3)),
        r"the Dense has no rule.*'FCN', 'CNN', 'WideResNet'.*register_kernel",
        TypeError,
    ),
    Case(lambda: wide_limit.kernel(CNN), "not the class CNN itself", TypeError),
    Case(
        lambda: wide_limit.kernel(FCN(1, 1), block_size=0), "block_size must be a whole number of at least 1, but got 0"
    ),
    Case(
        lambda: wide_limit.kernel(FCN(1, 1))(np.ones(3)),
        r"x1 must have at least one row .*shape \(3,\); write a single input as x\[None\], a single column",
    ),
    Case(lambda: wide_limit.kernel(FCN(1, 1))(np.array([[1.0, np.inf]])), "x1 must be finite"),
    Case(
        lambda: wide_limit.kernel(CNN(0, 1, padding="VALID"))(np.ones((1, 4, 4, 1))),
        "depth must be a whole number of at least 1, but got 0",
    ),
    Case(
        lambda: wide_limit.kernel(WideResNet(0, 1))(np.ones((1, 4, 4, 1))),
        "num_blocks must be a whole number of at least 1, but got 0",
    ),
    Case(
        lambda: wide_limit.kernel(FCN(-1, 1))(np.ones((1, 4))), "depth must be a whole number of at least 0, but got -1"
    ),
    Case(
        lambda: wide_limit.kernel(FCN(1, 1))(np.ones((2, 3)), np.ones((2, 4))),
        r"x1 and x2 must have rows of one shape, but got \(2, 3\) and \(2, 4\)",
    ),
    Case(lambda: wide_limit.kernel(CNN(1, 1))(np.ones((2, 3))), r"inputs must be images"),
    Case(
        lambda: wide_limit.kernel(CNN(2, 1, padding="VALID"))(np.ones((1, 4, 4, 1))),
        "a filter of 3 pixels does not fit into 2 with the padding 'VALID'",
    ),
    Case(lambda: rows().convolution(1.0, 0.0), "a convolution needs images"),
    Case(
        lambda: wide_limit.Inputs(IMAGES, IMAGES, None).images().plus(rows()),
        r"a sum needs units at the same pixels.*\(2, 2, 4, 4\) and \(2, 2\)",
    ),
    Case(
        lambda: wide_limit.fit(np.ones((40, 4, 4, 1)), Y, network=CNN(1, 1), input_scale=True),
        "unexpected keyword argument 'input_scale'",
        TypeError,
    ),
    Case(
        lambda: wide_limit.fit(X, np.where(Y > 0, "a", "b"), likelihood="bernoulli"),
        "y must hold real numbers",
        TypeError,
    ),
    Case(
        lambda: wide_limit.fit(X, np.where(Y > 0, 1, -1), likelihood="bernoulli"),
        "observations of a bernoulli likelihood must be whole numbers from 0 to 1, but they range from -1",
    ),
    Case(lambda: wide_limit.fit(X, Y, likelihood="categorical", num_classes=3), "whole numbers from 0 to 2"),
    Case(lambda: wide_limit.fit(X, 4 * (Y > 0), likelihood="categorical"), "but y holds '0', '4'; pass num_classes"),
    Case(lambda: wide_limit.fit(X, np.zeros(len(X)), likelihood="categorical"), "two at least, but y holds '0'"),
    Case(lambda: wide_limit.fit(X, np.eye(2)[1 * (Y > 0)], likelihood="categorical", num_classes=2), "take argmax"),
    Case(lambda: wide_limit.fit(X, Y, likelihood="softmax"), "likelihood must be one of"),
    Case(lambda: wide_limit.fit(X, Y > 0, likelihood="binomial"), "needs 'total_count'"),
    Case(lambda: wide_limit.fit(X, Y, num_classes=2), "'num_classes' must not be given"),
    Case(lambda: wide_limit.fit(X, Y, noise_scale=0.0), "noise_scale must be positive"),
    Case(lambda: wide_limit.fit(X, Y, noise_scale=np.ones(len(X))), "must be one number for all"),
    Case(
        lambda: wide_limit.fit(X, np.ones(len(X)), likelihood="poisson", noise_scale=0.1),
        "'noise_scale' must not be given",
    ),
    Case(lambda: wide_limit.fit(X, Y, offset=1.0), "'offset' must not be given"),
    Case(
        lambda: wide_limit.fit(X, 1 * (Y > 0), likelihood="bernoulli", structure="additive"),
        "fitted to numbers, not to labels; pass structure='dense'",
    ),
    Case(lambda: wide_limit.fit(X, Y, structure="sparse"), "structure must be one of 'dense'"),
    Case(
        lambda: wide_limit.fit(X, Y, structure="additive", order=9),
        r"order must be at most the number of columns, \d, but is 9",
    ),
    Case(
        lambda: wide_limit.fit(np.append(X, 0 * X[:, :1], axis=1), Y, structure="additive"),
        r"columns \[\d\] of x are constant.*leave them out",
    ),
    Case(lambda: wide_limit.fit(X, Y, network=[]), "there is no architecture to fit"),
    Case(lambda: kernel_of({"depth": -1}), "depth must be a whole number of at least 0, but got -1"),
    Case(lambda: kernel_of({"depth": 1.5}), "depth must be a whole number.*1.5"),
    Case(lambda: kernel_of({"depth": True}), "depth must be a whole number.*True"),
    Case(lambda: kernel_of({"w_std": -1.0}), "w_std must not be negative or NaN, but got -1.0"),
    Case(lambda: kernel_of({"readout_b_std": float("nan")}), "readout_b_std must not be negative or NaN"),
    Case(lambda: kernel_of({"b_std": [0.1, 0.2, 0.3]}), r"b_std must have the shape \(\) or \(2,\), but has \(3,\)"),
    Case(lambda: kernel_of({"readout_w_std": [1.0, 2.0]}), r"readout_w_std must have the shape \(\), but has \(2,\)"),
    Case(lambda: kernel_of({"block_size": 0}), "block_size must be a whole number of at least 1, but got 0"),
    Case(lambda: kernel_of({})(np.ones(3), None), r"x1 must have at least one row .*shape \(3,\).*x\[None\]"),
    Case(lambda: kernel_of({})(np.ones((0, 3)), None), "at least one row"),
    Case(lambda: kernel_of({})(np.ones((2, 3)), np.ones((2, 4))), r"rows of one shape, but got \(2, 3\) and \(2, 4\)"),
    Case(lambda: kernel_of({})(np.array([[1.0, np.nan]]), None), "x1 must not contain NaN"),
    Case(lambda: kernel_of({})(np.ones((2, 2)), np.array([[1.0, np.nan]])), "x2 must not contain NaN"),
    Case(
        lambda: gp_posterior(**{**GP, "kernel_train": np.ones((3, 2))}),
        r"kernel_train must be a square matrix.*\(3, 2\)",
    ),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "kernel_train": np.ones((3, 2))}),
        r"kernel_train must be a square matrix.*\(3, 2\)",
    ),
    Case(lambda: gp_posterior(**{**GP, "kernel_test": np.ones(2)}), r"kernel_test must be a square matrix.*\(2,\)"),
    Case(
        lambda: gp_posterior(**{**GP, "kernel_cross": np.ones((3, 2))}),
        r"\(n_test, n_train\) = \(2, 3\), but got \(3, 2\). Transpose it.",
    ),
    Case(lambda: gp_posterior(**{**GP, "targets": np.ones(4)}), r"targets must have shape .* n_train = 3.*got \(4,\)"),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "targets": np.ones(4)}),
        r"targets must have shape .* n_train = 3.*got \(4,\)",
    ),
    Case(lambda: gp_posterior(**{**GP, "targets": np.array([1.0, np.nan, 2.0])}), "targets must not contain NaN"),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "targets": np.array([1.0, np.nan, 2.0])}),
        "targets must not contain NaN",
    ),
    Case(lambda: gp_posterior(**{**GP, "kernel_cross": np.full((2, 3), np.nan)}), "kernel_cross must not contain NaN"),
    Case(lambda: gp_posterior(**{**GP, "noise_scale": -0.1}), "noise_scale must not be negative or NaN, but got -0.1"),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "noise_scale": -0.1}),
        "noise_scale must not be negative or NaN, but got -0.1",
    ),
    Case(
        lambda: gp_posterior(**{**GP, "noise_scale": np.ones(2)}),
        r"noise_scale must be a number or .*\(3,\), but got \(2,\)",
    ),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "noise_scale": np.ones(2)}),
        r"noise_scale must be a number or .*\(3,\), but got \(2,\)",
    ),
    Case(
        lambda: gp_posterior(**{**GP, "kernel_train": np.eye(3) + np.eye(3, k=1)}),
        "kernel_train must be symmetric.*by up to 1, its largest entry being 1",
    ),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "kernel_train": np.eye(3) + np.eye(3, k=1)}),
        "kernel_train must be symmetric.*by up to 1, its largest entry being 1",
    ),
    Case(
        lambda: gp_posterior(**{**GP, "kernel_test": np.eye(2) + 0.01 * np.eye(2, k=1)}),
        "kernel_test must be symmetric",
    ),
    Case(
        lambda: gp_posterior(**{**GP, "kernel_train": -np.eye(3)}),
        "not positive definite in float32: raise noise_scale",
    ),
    Case(
        lambda: gp_log_evidence(**{**EVIDENCE, "kernel_train": -np.eye(3)}),
        "not positive definite in float32: raise noise_scale",
    ),
    Case(lambda: gp_log_evidence(jnp.array([[1.0, 2.0], [2.0, 1.0]]), jnp.ones(2), 0.1), "not positive definite"),
    Case(lambda: empirical_ntk(lambda w, x: jnp.sum(x @ w), W, ROWS), r"one row for each of the 2 rows .*\(\)"),
    Case(lambda: empirical_ntk(lambda w, x: (x, x), W, ROWS), "one row for each .*ShapeDtypeStruct"),
    Case(lambda: empirical_ntk(linear, W, ROWS, block_size=-1), "block_size .* but got -1"),
    Case(
        lambda: wide_limit.fit(X[:, 0], Y),
        r"x must have at least one row and one column, \(n, d_in\); flatten images, but has shape \(40,\)",
    ),
    Case(lambda: wide_limit.fit(X[:0], Y[:0]), "at least one row"),
    Case(lambda: wide_limit.fit(X, Y[:5]), "targets"),
    Case(lambda: wide_limit.fit(X, np.where(Y > 0.5, np.nan, Y)), "NaN"),
    Case(
        lambda: wide_limit.fit(X, np.append(Y[1:], np.inf)),
        r"y must be finite, but 1 of its entries are infinite, the first in row \d+; drop or",
    ),
    Case(
        lambda: wide_limit.fit(np.append(X[1:], [[0, -np.inf]], axis=0), Y),
        "x must be finite, but 1 of its",
    ),
    Case(
        lambda: wide_limit.fit(X, Y + 1j),
        "y must hold real numbers, .* complex128",
        TypeError,
    ),
    Case(lambda: wide_limit.fit(X, ["a"] * 40), "y must hold real numbers", TypeError),
    Case(lambda: wide_limit.fit(X, Y, input_scale=np.ones(2)), "input_scale must be True or False"),
    Case(
        lambda: wide_limit.fit(X, Y, input_scale=("compare",)),
        r"or both to compare, \(False, True\), but got \('compare',\)",
    ),
    Case(lambda: wide_limit.fit(X, Y, input_scale=()), "no architecture"),
    Case(lambda: wide_limit.fit(X, Y, activation="swish"), "activation must be one of .* or a function"),
    Case(lambda: wide_limit.fit(X, Y, depth=0), "depth must be"),
    Case(lambda: wide_limit.fit(X, Y, depth=()), "no architecture"),
    Case(lambda: jax.jit(lambda x: wide_limit.fit(x, Y).log_evidence)(X), "jit", TypeError),
    Case(lambda: fitted().predict(X[:0]), "x_new is empty; give at least one row"),
    Case(
        lambda: fitted().nngp(X, X[:, :1]), r"x2 must have rows of shape \(2,\), as in the fit, but has shape \(40, 1\)"
    ),
    Case(lambda: wide_limit.fit(X, Y, scales="all"), "scales must be one of 'mode', 'integrated'"),
    Case(
        lambda: wide_limit.fit(X, np.ones(40), likelihood="poisson", scales="integrated"),
        "integrated over with a normal likelihood only, not 'poisson'; take 'mode'",
    ),
    Case(
        lambda: fitted().log_density(X, Y[:3]),
        r"y_new must have shape \(40,\), as its rows are predicted, but has \(3,\)",
    ),
    Case(
        lambda: dataclasses.replace(fitted(), likelihood="poisson").log_density(X, Y),
        "a log density is of a normal likelihood, but it is 'poisson'; call predict",
    ),
    Case(lambda: fitted().nngp(X[0]), r"x1 must have rows .* but has shape \(2,\)"),
    Case(lambda: fitted().nngp(np.nan * X), "x1 .*NaN"),
    Case(lambda: wide_limit.fit(X[:5], np.ones((5, 0))), r"targets must have shape .* got \(5, 0\)"),
    Case(
        lambda: fitted().predict(X[:, :1]),
        r"x_new must have rows of shape \(2,\), as in the fit, but has shape \(40, 1\)",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes(case):
    with jax.debug_nans(False):
        case.check()
