"""Exact readouts and predictions after collapsing, wide-limit draws, and draws from guides."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct

from numpyro_wide import ReadoutPredictive, collapse_readout, guide_draws, linear_gaussian, repriorise, wide_limit_draws
from numpyro_wide.linear_gaussian._row_blocks import BlockedProblem, RowFeatures
from numpyro_wide.readout import ReadoutMarginal
from tests.marks import parametrize
from tests.models import network, small_data

SITES = {"readout": "w", "features": "features", "observed": "y"}
ARGUMENTS = {"readout": "w", "features": "features", "targets": "y", "noise_scale": "sigma"}


def hidden_draws(num_draws=4, key=0):
    """Prior draws of the hidden sites."""
    draws = Predictive(network, num_samples=num_draws, return_sites=["hidden", "sigma"])
    return draws(jax.random.key(key), jnp.zeros((2, 1)))


def features_of(draw, x):
    sites = trace(seed(numpyro.handlers.substitute(network, draw), jax.random.key(0))).get_trace(x)
    return sites["features"]["value"]


@pytest.mark.as_compiled
@pytest.mark.usefixtures("x64")
def test_predictions_are_those_of_a_gaussian_process():
    """Scikit-learn's GP with the linear kernel of each draw's features."""
    x, y = small_data()
    x_test = np.linspace(-1.5, 1.5, 7)[:, None]
    draws = hidden_draws()
    predictive = ReadoutPredictive(collapse_readout(network, **SITES), draws, (x, y), batch_size=3)
    found = predictive(jax.random.key(1), x_test)
    assert found["mean"].shape == found["variance"].shape == found["y"].shape == (4, 7, 1)
    for i in range(4):
        draw = {name: value[i] for name, value in draws.items()}
        features, test_features = features_of(draw, x), features_of(draw, x_test)
        kernel = 1.2**2 * DotProduct(sigma_0=0, sigma_0_bounds="fixed")
        gp = GaussianProcessRegressor(kernel, alpha=float(draw["sigma"]) ** 2, optimizer=None)
        gp.fit(features, y - features @ np.full((21, 1), 0.3))
        mean, std = gp.predict(test_features, return_std=True)
        mean = mean + test_features.sum(1) * 0.3
        np.testing.assert_allclose(found["mean"][i, :, 0], mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(found["variance"][i, :, 0], std**2, rtol=1e-5, atol=1e-9)
    moments = predictive.moments(x_test)
    assert set(moments) == {"mean", "variance", "predictive_variance", "noise_scale"}
    for name, values in moments.items():
        np.testing.assert_array_equal(values, found[name])


@pytest.mark.as_compiled
@pytest.mark.fault("linear_gaussian/_evidence.py", "@ phi - jnp.sqrt(variance) * weights @ residuals", "@ phi")
@pytest.mark.fault("readout/_predictions.py", "return fit.prior_loc + self._readout(", "return self._readout(")
@pytest.mark.fault(
    "readout/_predictions.py",
    'new.loc + function + moments["noise_scale"] * noise.astype(mean.dtype)',
    "new.loc + function",
)
@pytest.mark.filterwarnings("ignore:1 of 1 chains hardly move")
def test_draws_have_the_exact_moments():
    """Many draws at one hidden state: readout against its posterior, observations against the predictive."""
    x, y = small_data()
    num_draws = 20000
    draws = jax.tree.map(lambda v: jnp.repeat(v[:1], num_draws, axis=0), hidden_draws(key=3))
    predictive = ReadoutPredictive(collapse_readout(network, **SITES), draws, (x, y))
    readouts = np.asarray(predictive.readout(jax.random.key(2)), float)
    assert readouts.shape == (num_draws, 21, 1)
    draw = {name: value[0] for name, value in draws.items()}
    mean, covariance = linear_gaussian.readout_posterior(
        features_of(draw, x), y, draw["sigma"], prior_loc=0.3, prior_scale=1.2
    )
    standard_error = np.sqrt(np.diagonal(covariance) / num_draws)
    assert np.abs((readouts.mean(0) - mean)[:, 0] / standard_error).max() < 4.5
    np.testing.assert_allclose(np.cov(readouts[:, :, 0].T), covariance, atol=6 * 1.2**2 / num_draws**0.5)

    found = predictive(jax.random.key(4), x[:5])
    total_variance = found["variance"][0, :, 0] + draw["sigma"] ** 2
    z = (found["y"].mean(0) - found["mean"][0])[:, 0] / np.sqrt(total_variance / num_draws)
    assert np.abs(z).max() < 4.5
    np.testing.assert_allclose(found["y"][:, :, 0].var(0), total_variance, rtol=6 / num_draws**0.5)


@pytest.mark.slow
def test_several_outputs_and_vectors():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))
    for shape in ((), (2,)):

        def model(x, y=None, shape=shape):
            scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
            features = numpyro.deterministic("features", scale * x)
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3, *shape]).to_event(1 + len(shape)))
            numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1 + len(shape)), obs=y)

        predictive = ReadoutPredictive(
            collapse_readout(model, **SITES), {"scale": jnp.ones(5)}, (x,), {"y": jnp.ones((6, *shape))}
        )
        assert predictive.readout(jax.random.key(0)).shape == (5, 3, *shape)
        assert predictive(jax.random.key(0), x[:4])["y"].shape == (5, 4, *shape)


def test_wide_limit_draws_are_prior_hidden_weights_and_exact_readouts():
    x, y = small_data()
    wrapped = repriorise(network, **ARGUMENTS)
    draws = wide_limit_draws(jax.random.key(0), wrapped, 3000, x, y, weighted=False)
    assert set(draws) == {"hidden", "sigma", "w", "w_base"}
    for name, scale in (("hidden", 1.0), ("w_base", 1.0)):
        assert abs(draws[name].mean()) < 5 / draws[name].size ** 0.5
        np.testing.assert_allclose(draws[name].std(), scale, rtol=5 / draws[name].size ** 0.5)
    first = {name: value[0] for name, value in draws.items() if name in ("hidden", "sigma")}
    expected, _ = linear_gaussian.readout_map(
        features_of(first, x), y, draws["w_base"][0], first["sigma"], prior_loc=0.3, prior_scale=1.2
    )
    np.testing.assert_allclose(draws["w"][0], expected, atol=2e-3)


@pytest.mark.fault("readout/_transform.py", "return self._inverse(exact(standard_normal))", "return standard_normal")
def test_wide_limit_draws_do_not_depend_on_the_regulariser():
    x, y = small_data()
    options = ARGUMENTS | {"noise_scale": 0.2}
    fixed = numpyro.handlers.substitute(network, {"sigma": 0.2})
    draws = [
        wide_limit_draws(jax.random.key(0), repriorise(fixed, **options, regulariser=value), 50, x, y)["w"]
        for value in (None, 100.0)
    ]
    np.testing.assert_allclose(*draws, atol=5e-3)


@pytest.mark.slow
def test_guide_draws_hold_the_fitted_readout():
    """Predictions from the guide's draws follow the data; NumPyro's own route falls back on the prior."""
    x, y = small_data()
    wrapped = repriorise(network, **ARGUMENTS)
    guide = AutoNormal(wrapped)
    svi = SVI(wrapped, guide, numpyro.optim.Adam(0.02), Trace_ELBO(num_particles=4))
    params = svi.run(jax.random.key(0), 600, x, y, progress_bar=False).params
    draws = guide_draws(jax.random.key(1), wrapped, guide, params, 200, x, y)
    assert set(draws) == {"hidden", "sigma", "w", "w_base"}
    fitted = Predictive(network, draws)(jax.random.key(2), x)["y"].mean(0)
    # The unwrapped model cannot know better; the wrapped one refuses to run so.
    trapped = Predictive(network, guide=guide, params=params, num_samples=200)(jax.random.key(2), x)["y"].mean(0)
    with pytest.raises(ValueError, match="value of 'w_base' is given, but the model is run without obs"):
        Predictive(wrapped, guide=guide, params=params, num_samples=5)(jax.random.key(2), x)
    error = np.sqrt(np.mean((fitted - y) ** 2))
    assert error < 0.45
    assert np.sqrt(np.mean((trapped - y) ** 2)) > 1.5 * error


@pytest.mark.slow
def test_marginal_distribution():
    """Its sampler has the covariance that its density has, and batches of values work."""
    rng = np.random.default_rng(0)
    features, loc = jnp.asarray(rng.normal(size=(4, 2)), "f"), jnp.asarray(rng.normal(size=(4, 2)), "f")
    noise_scale, prior_scale = jnp.array([0.5, 1.0]), jnp.array([[1.0], [2.0]])
    problem = linear_gaussian.ReadoutProblem.of(features, loc, noise_scale, prior_scale=prior_scale)
    marginal = ReadoutMarginal(problem, loc)
    draws = np.asarray(marginal.sample(jax.random.key(0), (3, 20000)), float)
    assert draws.shape == (3, 20000, 4, 2)
    assert marginal.log_prob(draws[:, :2]).shape == (3, 2)
    draws = draws.reshape(-1, 4, 2)
    for j in range(2):
        covariance = (features * prior_scale[:, 0] ** 2) @ features.T + noise_scale[j] ** 2 * np.eye(4)
        np.testing.assert_allclose(np.cov(draws[:, :, j].T), covariance, atol=0.02 * np.diagonal(covariance).max())
        np.testing.assert_allclose(marginal.variance[:, j], np.diagonal(covariance), rtol=1e-5)
    np.testing.assert_allclose(draws.mean(0), marginal.mean, atol=0.05)
    reference = sum(
        dist.MultivariateNormal(
            loc[:, j], (features * prior_scale[:, 0] ** 2) @ features.T + noise_scale[j] ** 2 * jnp.eye(4)
        ).log_prob(draws[0, :, j])
        for j in range(2)
    )
    np.testing.assert_allclose(marginal.log_prob(draws[0]), reference, rtol=1e-4)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, marginal)
    np.testing.assert_allclose(doubled.loc, 2 * loc)


@parametrize("columns", [(), (2,)], rest="slow")
def test_marginal_of_features_by_blocks_is_that_of_all_rows_and_never_holds_them(columns):
    rng = np.random.default_rng(0)
    x, loc = jnp.asarray(rng.normal(size=(50, 3)), "f"), jnp.asarray(rng.normal(size=(50, *columns)), "f")
    prior_scale = jnp.asarray(rng.uniform(0.5, 2, (7, *(1 for _ in columns))), "f")
    hidden = jnp.asarray(rng.normal(size=(3, 7)), "f")
    blocked = RowFeatures.of(lambda rows: jnp.tanh(rows @ hidden), x, 8)
    of_blocks = ReadoutMarginal(BlockedProblem.of(blocked, loc, 0.3, prior_scale), loc)
    dense = ReadoutMarginal(
        linear_gaussian.ReadoutProblem.of(jnp.tanh(x @ hidden), loc, 0.3, prior_scale=prior_scale), loc
    )
    np.testing.assert_allclose(of_blocks.variance, dense.variance, rtol=1e-5)
    draws = [marginal.sample(jax.random.key(0), (2, 4)) for marginal in (of_blocks, dense)]
    assert draws[0].shape == (2, 4, 50, *columns)
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-5)
    program = str(jax.make_jaxpr(lambda key: (of_blocks.variance, of_blocks.sample(key)))(jax.random.key(0)))
    assert "[8,7]" in program and "[50,7]" not in program and "[50,50]" not in program


def with_argument(x, y=None, factor=1.0):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 5]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
    mean = jnp.where(x[:, 0] > 1, 7.0, factor * (features @ w))
    numpyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


@pytest.mark.fault(
    "readout/_assumptions.py",
    "return nan_unless(*_read(model, values, args, kwargs))",
    "return _read(model, values, args, kwargs)[1]",
)
@pytest.mark.parametrize("wrap", ["collapsed", "plain"])
def test_inputs_at_which_the_mean_is_another_function_are_refused(wrap):
    """Linear at the inputs of the fit, and not at others."""
    x, draws = np.linspace(-1, 1, 6, dtype="f")[:, None], {"hidden": jnp.ones((3, 1, 5))}
    fitted_on = (x, np.sin(x[:, 0]), 1.0)
    if wrap == "collapsed":
        predictive = ReadoutPredictive(collapse_readout(with_argument, **SITES), draws, fitted_on)
    else:
        predictive = ReadoutPredictive(with_argument, draws, fitted_on, readout="w", features="features")
    key, message = jax.random.key(0), "at draw 0, with these arguments: the mean of observed site 'y' must be features"
    assert predictive.is_integrated and predictive(key, x, None, 1.0)["mean"].shape == (3, 6)
    with pytest.raises(ValueError, match=message):
        predictive(key, x, None, 3.0)
    with pytest.raises(ValueError, match=message):
        predictive.log_density(2 * x, np.zeros(6, "f"), 1.0)
    assert jnp.isnan(jax.jit(lambda x: predictive(key, x, None, 3.0)["mean"])(x)).all()


@parametrize("wrap", ["repriorised", "plain"], rest="slow")
def test_a_readout_with_another_likelihood_is_that_of_the_draws(wrap):
    """Of a chain of the repriorised model, which is right whatever else the readout reaches."""

    def model(x, y=None):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("total", dist.Normal(0.0, 0.01), obs=w.sum())
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    x, w = np.eye(2, dtype="f"), jnp.array([[0.5, -0.5], [1.0, -1.0]])
    fitted_on, names = (x, np.ones(2)), {"observed": "y"}
    if wrap == "plain":
        names |= {"readout": "w", "features": "features"}
    else:
        model = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.3)
        with pytest.raises(ValueError, match="one observed site, but the model observes 'total', 'y'.*observed=..."):
            ReadoutPredictive(model, {"w": w}, fitted_on)
    predictive = ReadoutPredictive(model, {"w": w}, fitted_on, **names)
    assert not predictive.is_integrated
    np.testing.assert_array_equal(predictive.readout(jax.random.key(0)), w)


def test_a_plain_model_predicts_as_its_wrapped_form():
    x, y = small_data()
    key, plain = jax.random.key(1), {"readout": "w", "features": "features"}
    one = ReadoutPredictive(collapse_readout(network, **SITES), hidden_draws(), (x, y))(key, x[:4])
    other = ReadoutPredictive(network, hidden_draws(), (x, y), **plain)(key, x[:4])
    jax.tree.map(np.testing.assert_array_equal, one, other)
    with pytest.raises(TypeError, match="name the sites: readout=..., features=..."):
        ReadoutPredictive(network, hidden_draws(), (x, y))


def test_chains_that_have_not_moved_are_told():
    x, y = small_data()
    draws = jax.tree.map(lambda draw: jnp.repeat(draw[:1], 200, axis=0), hidden_draws())
    with pytest.warns(RuntimeWarning, match=r"1 of 1 chains hardly move: distinct draws by chain \[1\], of 200"):
        ReadoutPredictive(collapse_readout(network, **SITES), draws, (x, y))
