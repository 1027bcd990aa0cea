"""Additive networks' limit, and fits of structure: closed forms, quadrature, draws, differences."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide import wide_limit
from numpyro_wide.machine import double_precision
from numpyro_wide.nn import AdditiveNetwork
from numpyro_wide.nn._additive_problem import AdditiveProblem, structured_network
from numpyro_wide.wide_limit._fit import Evidence
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X, X2, LAW = (RNG.normal(0.2, 1.0, size=(num, 4)) for num in (5, 3, 6))
SCALES = {
    "w_std": np.array([0.5, 1.5, 1.0, 0.8]),
    "b_std": 0.7,
    "relevance": np.array([1.0, 0.4, 2.0, 1.2]),
    "order_scale": np.array([1.0, 2.0, 0.5]),
}
NETWORK = AdditiveNetwork(3, 4, "erf", law=LAW, **SCALES, readout_b_std=0.6)


def by_double_loop(terms, x1, x2):
    """The kernel of units of erf (Williams 1996), centred by sums over the law, of one pair of rows at a time."""

    def units(i, x, z):
        a, b, c = (SCALES["w_std"][i] ** 2 * p * q + SCALES["b_std"] ** 2 for p, q in ((x, x), (z, z), (x, z)))
        return 2 / np.pi * np.arcsin(2 * c / np.sqrt((1 + 2 * a) * (1 + 2 * b)))

    def centred(i, x, z):
        means = np.mean([units(i, x, v) + units(i, u, z) - units(i, u, v) for u in LAW[:, i] for v in LAW[:, i]])
        return SCALES["relevance"][i] ** 2 * (units(i, x, z) - means)

    found = np.full((len(x1), len(x2)), 0.36)
    for (row, x), (column, z) in itertools.product(enumerate(x1), enumerate(x2)):
        for term in terms:
            variance = SCALES["order_scale"][len(term) - 1] ** 2 / sum(len(other) == len(term) for other in terms)
            found[row, column] += variance * np.prod([centred(i, x[i], z[i]) for i in term])
    return found


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_additive.py", "(-1) ** (k - 1) * polynomials", "polynomials")
@pytest.mark.fault("wide_limit/_additive.py", "- 0.5 * mean(", "- 1.0 * mean(")
@pytest.mark.fault("wide_limit/_duals.py", "w_var * (x1 - x2) ** 2", "w_var * (x1 - x2)")
@parametrize("which", [None, [(0,), (2,), (3, 1), (0, 2, 3)]], rest="slow")
def test_kernels_are_sums_over_effects(x64, which):
    network = NETWORK.clone(which=which)
    kernel = wide_limit.kernel(network, block_size=2)
    np.testing.assert_allclose(kernel(X, X2)[0], by_double_loop(network.terms(4), X, X2), rtol=1e-12)
    np.testing.assert_allclose(kernel(X)[0], by_double_loop(network.terms(4), X, X), rtol=1e-12)


@parametrize("activation", ["erf", "tanh"], rest="slow")
def test_kernels_are_moments_of_the_network(x64, activation):
    """By quadrature over all four parameters of units of two inputs: one unit for each node."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    grid = np.stack(np.meshgrid(*[nodes] * 4, indexing="ij")).reshape(2, 2, -1)
    weight = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * 4, indexing="ij")), axis=0).ravel()
    scales = {"w_std": [0.3, 0.5], "b_std": [0.3, 0.4], "order_scale": [1.0, 2.0]}
    network = AdditiveNetwork(2, len(weight), activation, law=LAW[:, :2], **scales)
    features = network.apply({"params": {"kernel": grid[0], "bias": grid[1]}}, X[:3, :2])
    moments = (features * np.tile(len(weight) * weight, 3)) @ features.T
    np.testing.assert_allclose(wide_limit.kernel(network).nngp(X[:3, :2]), moments, atol=1e-6)


@pytest.mark.fault("wide_limit/_additive.py", "units.product + share * units.tangent", "units.product")
@pytest.mark.slow
def test_finite_networks_have_both_kernels_on_average():
    """The mean over draws, of features and of gradients, at any width; a dense block has its own limit."""
    x, network = jnp.asarray(X, jnp.float32), NETWORK.clone(width=2)

    def draw(key):
        key_network, key_readout = jax.random.split(key)
        params = network.init(key_network, x)
        features = network.apply(params, x)
        readout = jax.random.normal(key_readout, features.shape[1:])
        slopes = jax.tree.leaves(jax.jacrev(lambda params: network.apply(params, x) @ readout)(params))
        nngp = features @ features.T
        return jnp.stack([nngp, nngp + sum(rows.reshape(5, -1) @ rows.reshape(5, -1).T for rows in slopes)])

    drawn = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 2000)))
    limit = np.stack(wide_limit.kernel(network)(x))
    errors = (drawn.mean(0) - limit) / (drawn.std(0) / 2000**0.5)
    assert np.abs(errors).max() < 4.5
    dense = {"dense": 8, "depth": 2, "dense_w_std": 1.2, "dense_b_std": 0.3, "dense_scale": 0.8, "input_scale": 0.5}
    block = wide_limit.fcn_kernel(2, "erf", w_std=1.2, b_std=0.3, readout_w_std=0.8, input_scale=0.5)(x)
    np.testing.assert_allclose(
        np.stack(wide_limit.kernel(network.clone(**dense))(x)), limit + np.stack(block), rtol=1e-5
    )


@pytest.mark.as_compiled
@pytest.mark.fault("nn/_additive_problem.py", "1 if above == left else 2", "1")
@pytest.mark.fault("nn/_additive_problem.py", "by_means[left] += of_columns", "pass")
@pytest.mark.fault("nn/_additive_problem.py", "among -= 0.5 *", "among -= 0.0 *")
@parametrize("depth, by_input, which", [(0, True, None), (2, False, [(0,), (1, 2)])], rest="slow")
def test_slopes_of_the_evidence(depth, by_input, which):
    """Against differences, over several tiles; the kernel is that of the network that a fit gives."""
    x = RNG.normal(size=(140, 5))
    network = structured_network("erf", 2, depth, x).clone(which=which)
    with double_precision():
        problem = AdditiveProblem.of_network(network, x, 1.0, by_input=by_input, has_noise=True)
        evidence, logarithms = Evidence(problem, np.sin(x[:, 0])), 0.3 * RNG.normal(size=len(problem.spreads))
        slopes = [
            (evidence(logarithms + step)[0] - evidence(logarithms - step)[0]) / 2e-5
            for step in 1e-5 * np.eye(len(logarithms))
        ]
        np.testing.assert_allclose(evidence(logarithms)[1], slopes, rtol=1e-5, atol=1e-5)
        fitted = problem.fields(problem.scales(logarithms), logarithms)["network"]
        expected = np.asarray(wide_limit.kernel(fitted).nngp(x))
        np.testing.assert_allclose(problem.gram(logarithms), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.as_compiled
@parametrize(
    "function, best",
    [
        (lambda x: np.cos(2 * x[:, 0]) + x[:, 1] * x[:, 2], "additive"),
        (lambda x: np.sin(x @ [1.5, 1.0, -1.0]), "dense"),
    ],
    rest="slow",
)
def test_the_evidence_prefers_the_structure_of_the_function(function, best):
    random = np.random.default_rng(0)
    x, x_new = random.uniform(-1.5, 1.5, size=(2, 60, 3))  # few rows say little of far ones
    y = function(x) + 0.02 * random.normal(size=60)
    fit = wide_limit.fit(x, y, structure=("dense", "additive"), num_restarts=1, num_rows=60)
    assert [row["structure"] for row in fit.table] == [best, *{"additive", "dense"} - {best}]
    assert fit.table[0]["log_marginal"] > fit.table[1]["log_marginal"] + 5
    mean, _ = fit.predict(x_new)
    assert np.sqrt(np.mean((mean - function(x_new)) ** 2)) < 0.15 * np.std(function(x_new))
    if best == "additive":
        kernel = wide_limit.kernel(fit.network)
        with double_precision():
            both = np.asarray(kernel.nngp(np.concatenate([x, x_new])))
        weights = np.linalg.solve(both[:60, :60] + fit.noise_scale**2 * np.eye(60), y)
        np.testing.assert_allclose(mean, both[60:, :60] @ weights, atol=1e-6)
        assert "additive" in str(fit)


@pytest.mark.slow
def test_all_structures_are_compared_under_auto():
    x = RNG.normal(size=(20, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = wide_limit.fit(x, x[:, 0] ** 2, structure="auto", num_restarts=1)
    assert {(row["structure"], row["order"]) for row in fit.table} == {("dense", 0), ("additive", 2), ("both", 2)}
