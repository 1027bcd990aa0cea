"""Effects and Sobol indices, against the dense posterior of each term in NumPy, and indices of known functions."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.diagnostics import effects
from numpyro_wide.nn import FCN, AdditiveNetwork, bnn
from numpyro_wide.plots import plot_effects
from numpyro_wide.wide_limit import WideLimitFit, fit
from tests.mistakes import Case

RNG = np.random.default_rng(0)
X, X_NEW = RNG.normal(size=(15, 2)), RNG.normal(size=(4, 2))
Y = X[:, 0] + X[:, 0] * X[:, 1] + 0.1 * RNG.normal(size=15)
LAW = RNG.normal(size=(8, 2))  # a power of two: points of low discrepancy hold all pairs of them alike
GRID = np.stack([np.ravel(part) for part in np.meshgrid(*LAW.T, indexing="ij")], axis=1)
TERMS = [(0,), (1,), (0, 1)]
SCALES = {"w_std": np.array([1.0, 0.7]), "b_std": np.array([0.5, 1.0]), "relevance": np.array([1.5, 0.8])}
ORDER_SCALE, CONSTANT, NOISE = np.array([1.2, 0.9]), 0.6, 0.2
NETWORK = AdditiveNetwork(2, 5, law=LAW, order_scale=ORDER_SCALE, readout_b_std=CONSTANT, **SCALES)


def fitted(network=NETWORK, **changes):
    return WideLimitFit("erf", 1, 0.0, NOISE, {}, {}, [], X, changes.pop("targets", Y), network=network, **changes)


def centred(column, x1, x2):
    """The arcsine kernel of one input less its means over the law (Williams 1996)."""
    w_var, b_var = SCALES["w_std"][column] ** 2, SCALES["b_std"][column] ** 2

    def kernel(x1, x2):
        sizes = [1 + 2 * (w_var * x**2 + b_var) for x in (x1, x2)]
        return 2 / np.pi * np.arcsin(2 * (w_var * np.outer(x1, x2) + b_var) / np.sqrt(np.outer(*sizes)))

    x1, x2, law = x1[:, column], x2[:, column], LAW[:, column]
    rows, columns = kernel(x1, law).mean(axis=1), kernel(law, x2).mean(axis=0)
    return SCALES["relevance"][column] ** 2 * (kernel(x1, x2) - rows[:, None] - columns + kernel(law, law).mean())


def prior(term, x1, x2):
    number = sum(len(other) == len(term) for other in TERMS)
    return ORDER_SCALE[len(term) - 1] ** 2 / number * np.prod([centred(i, x1, x2) for i in term], axis=0)


def posterior(term, x):
    """Mean and covariance of a term, (rows,) and (rows, rows)."""
    noisy = sum(prior(other, X, X) for other in TERMS) + CONSTANT**2 + NOISE**2 * np.eye(len(X))
    cross = prior(term, x, X)
    return cross @ np.linalg.solve(noisy, Y), prior(term, x, x) - cross @ np.linalg.solve(noisy, cross.T)


@pytest.mark.fault("diagnostics/_effects.py", "values = constant + noise + sum(", "values = constant + sum(")
@pytest.mark.fault("diagnostics/_effects.py", "basis = scale * _products(", "basis = scale**2 * _products(")
@pytest.mark.fault("diagnostics/_effects.py", "at_nodes = root[len(points) :]", "at_nodes = root[: len(nodes)]")
def test_terms_of_the_limit_are_the_dense_posterior():
    found = effects(fitted(), X_NEW, num_draws=4000)
    assert found.terms == TERMS
    for i, term in enumerate(TERMS):
        mean, covariance = posterior(term, X_NEW)
        np.testing.assert_allclose(found.mean[i], mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(found.sd[i], np.sqrt(np.diagonal(covariance)), rtol=1e-5)
        mean, covariance = posterior(term, GRID)  # of (mean + error)², averaged over the law
        expected, spread = np.mean(mean**2 + np.diagonal(covariance)), mean @ covariance @ mean / len(mean) ** 2
        deviation = np.sqrt(4 * spread + 2 * np.mean(covariance**2))
        draws = found.variances[:, i]
        assert abs(draws.mean() - expected) < 4 * deviation / np.sqrt(len(draws))
        np.testing.assert_allclose(draws.std(), deviation, rtol=0.15)
    shares = found.variances / found.variances.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.first, shares[:, :2], rtol=1e-10)
    np.testing.assert_allclose(found.total, shares[:, :2] + shares[:, 2:], rtol=1e-10)
    np.testing.assert_allclose(found.pairs, shares[:, 2:], rtol=1e-10)
    first_order = effects(fitted(), X_NEW, order=1, num_draws=10)
    assert first_order.terms == TERMS[:2] and first_order.pairs.shape == (10, 0)
    assert np.all(first_order.total > first_order.first)


@pytest.mark.fault(
    "diagnostics/_effects.py",
    "counts = random.multinomial(num_draws, weights)",
    "counts = random.multinomial(num_draws, np.full(len(weights), 1 / len(weights)))",
)
def test_draws_of_scales_are_averaged():
    both, weights = (fitted(), fitted(NETWORK.clone(relevance=0.1))), np.array([0.25, 0.75])
    found = effects(fitted(draws=both, weights=weights), X_NEW, num_draws=400)
    each = [effects(at, X_NEW, num_draws=400) for at in both]
    np.testing.assert_allclose(found.mean, 0.25 * each[0].mean + 0.75 * each[1].mean, rtol=1e-10)
    expected = 0.25 * each[0].first[:, 0].mean() + 0.75 * each[1].first[:, 0].mean()
    assert abs(found.first[:, 0].mean() - expected) < 4 * found.first[:, 0].std() / 20
    assert str(found).split("\n")[-1].split()[:2] == ["pairs", "0x1"]


def predicted(model=None):
    """Predictions at one draw of the hidden weights."""
    model = bnn(NETWORK, None, NOISE) if model is None else model
    wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
    draw = {f"hidden.{name}": jnp.asarray(RNG.normal(size=(1, 2, 5))) for name in ("kernel", "bias")}
    return ReadoutPredictive(wrapped, draw, (jnp.asarray(X), jnp.asarray(Y)))


@pytest.mark.as_compiled
@pytest.mark.fault(
    "diagnostics/_effects.py",
    "return np.take_along_axis(law, (uniform * len(law)).astype(int), axis=0)",
    "return ndtri(uniform)",
)
def test_terms_of_a_network_are_those_of_its_readouts_posterior(x64):
    predictive = predicted()
    found = effects(predictive, X_NEW, num_draws=500)

    params = {"params": {name[7:]: value[0] for name, value in predictive.draws.items()}}
    features, new, grid = (np.asarray(NETWORK.apply(params, jnp.asarray(x))) for x in (X, X_NEW, GRID))
    covariance = np.linalg.inv(np.eye(features.shape[1]) + features.T @ features / NOISE**2)
    mean = covariance @ features.T @ Y / NOISE**2
    for i in range(len(TERMS)):
        part = slice(5 * i, 5 * i + 5)
        sd = np.sqrt(np.diagonal(new[:, part] @ covariance[part, part] @ new[:, part].T))
        assert np.all(np.abs(found.mean[i] - new[:, part] @ mean[part]) < 4 * sd / np.sqrt(500))
        np.testing.assert_allclose(found.sd[i], sd, rtol=0.15)
        second = covariance[part, part] + np.outer(mean[part], mean[part])
        expected = np.mean(np.sum((grid[:, part] @ second) * grid[:, part], axis=1))
        draws = found.variances[:, i]
        assert abs(draws.mean() - expected) < 4 * draws.std() / np.sqrt(len(draws))


def test_a_figure_has_a_panel_for_each_term_and_one_of_indices():
    axes = plot_effects(effects(fitted(), X_NEW, num_draws=5), names=["a", "b"])
    assert [panel.get_xlabel() for panel in axes] == ["a", "b", "a", ""] and axes[2].get_ylabel() == "b"
    mean = effects(fitted(), X_NEW, num_draws=5).first.mean(axis=0)
    np.testing.assert_allclose([bar.get_height() for bar in axes[3].patches[:2]], mean)


def ishigami(u):
    x = np.pi * (2 * u - 1)
    return np.sin(x[:, 0]) + 7 * np.sin(x[:, 1]) ** 2 + 0.1 * x[:, 2] ** 4 * np.sin(x[:, 0])


def sobol_g(u):
    a = np.array([0.0, 1.0, 4.5, 9.0])
    return np.prod((np.abs(4 * u - 2) + a) / (1 + a), axis=1)


def friedman(u):
    return 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]


def true_indices(function, num_inputs, num=2**16):
    """First-order and total indices by SciPy (Saltelli 2010)."""
    uniform = [scipy.stats.uniform()] * num_inputs
    found = scipy.stats.sobol_indices(func=lambda u: function(u.T), n=num, dists=uniform, rng=0)
    return np.concatenate([found.first_order, found.total_order])


def intervals_hold(function, num_inputs, seed, num_rows=100):
    """Whether 90 % intervals of first-order and total indices hold the true ones, for one data set."""
    random = np.random.default_rng(seed)
    u = random.uniform(size=(num_rows, num_inputs))
    y = function(u)
    y = (y - y.mean()) / y.std() + 0.1 * random.normal(size=num_rows)
    network = AdditiveNetwork(2, 16, law="uniform")
    options = {"input_scale": True, "scales": "integrated", "num_restarts": 1, "progress_bar": False}
    found = effects(fit(12**0.5 * (u - 0.5), y, network=network, seed=seed, **options), u[:1], num_draws=400)
    low, high = np.quantile(np.concatenate([found.first, found.total], axis=1), [0.05, 0.95], axis=0)
    truth = true_indices(function, num_inputs)
    return (low <= truth) & (truth <= high)


def test_known_indices_are_those_of_the_literature():
    # Saltelli 2008.
    np.testing.assert_allclose(true_indices(ishigami, 3), [0.314, 0.442, 0.0, 0.558, 0.442, 0.244], atol=0.003)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "num_inputs"), [(ishigami, 3), (sobol_g, 4), (friedman, 5)])
def test_intervals_hold_the_indices_of_known_functions(function, num_inputs):
    held = np.mean([intervals_hold(function, num_inputs, seed) for seed in range(50)], axis=0)
    # Shares of draws are above zero, where some indices are.
    assert 0.8 <= np.mean(held[true_indices(function, num_inputs) > 0.01]) <= 0.97, held


CASES = [
    Case(lambda: effects(fitted(FCN(1, 5)), X), "units of this one see all inputs; take wide_limit.fit"),
    Case(lambda: effects(fitted(None), X), "units of this one see all inputs; take wide_limit.fit"),
    Case(lambda: effects(fitted(NETWORK.clone(dense=3)), X), "has a dense block, .* not identified"),
    Case(lambda: effects(fitted(), X, order=3), "order must be 1 or 2, as larger terms .*, but is 3"),
    Case(lambda: effects(fitted(), X[:, :1]), r"x must have rows of shape \(2,\), as in the fit"),
    Case(lambda: effects(predicted(), X[0]), r"x must have shape \(rows, d\), .* but has \(2,\)"),
    Case(lambda: effects(predicted(lambda x, y=None: bnn(NETWORK, None, NOISE)(x, y)), X), "take nn.bnn"),
    Case(lambda: effects(3, X), "effects take a result of wide_limit.fit, or a ReadoutPredictive, but", TypeError),
    Case(lambda: effects(fitted(likelihood="poisson"), X), "a fit with a normal likelihood, but it is"),
    Case(lambda: effects(fitted(targets=np.stack([Y, Y], axis=1)), X), "effects are of one output"),
    Case(lambda: plot_effects(effects(fitted(), X, num_draws=2), ax=[None]), "each of 4 panels, but holds 1"),
]


@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes(case):
    case.check()
