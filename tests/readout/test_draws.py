"""Draws from the wide limit where noise or scales are latent, against the infinitely wide network by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.handlers import reparam
from numpyro.infer import MCMC, Predictive

from numpyro_wide import ReprioriseReadout, collapse_readout, repriorise, surrogate_targets, wide_limit_draws
from numpyro_wide.diagnostics import effective_sample_size
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, bnn
from numpyro_wide.wide_limit import fcn_kernel
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X = np.linspace(-1.5, 1.5, 25, dtype="f")[:, None]
Y = (np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=25)).astype("f")
SCALES = {"w_std": 1.5, "b_std": 0.7, "readout_w_std": 1.2}


def wrapped(width, noise, scales=None):
    plain = bnn(FCN(1, width, "erf", **SCALES), None, noise, scales=scales)
    options = {"readout": "readout", "features": "features", "targets": "y"}
    return plain, repriorise(plain, **options, noise_scale="noise" if isinstance(noise, dist.Distribution) else noise)


def posterior_of_log(grid, log_density):
    """Mean and standard deviation of a logarithm, from its density on a grid."""
    weights = np.exp(log_density - np.max(log_density))
    weights /= weights.sum()
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


def wrapped_as(wrap, model, noise):
    """A model of w, features and y in one of both wrapped forms."""
    names = {"readout": "w", "features": "features"}
    if wrap == "collapsed":
        return collapse_readout(model, observed="y", **names)
    return repriorise(model, targets="y", noise_scale=noise, **names)


def log_evidence(noise_scale, **scales):
    kernel, _ = fcn_kernel(1, "erf", **{**SCALES, **scales})(X)
    covariance = np.asarray(kernel, float) + noise_scale**2 * np.eye(len(X))
    return scipy.stats.multivariate_normal(np.zeros(len(X)), covariance).logpdf(Y)


@pytest.mark.as_compiled
def test_the_noise_is_learnt_at_the_limit():
    model = wrapped(500, dist.LogNormal(0.0, 1.0))[1]
    draws = wide_limit_draws(jax.random.key(0), model, 400, X, Y)
    found = np.log(np.asarray(draws["noise"], float))
    grid = np.linspace(-4, 2, 400)
    mean, sd = posterior_of_log(grid, [log_evidence(np.exp(z)) - z**2 / 2 for z in grid])
    # Of 4,000 draws of the prior some 1,000 carry the weights, and 400 are chosen: six standard errors; the network of
    # 500 units adds a gap of some hundredths of a nat.
    assert abs(found.mean() - mean) < 6 * sd / 280**0.5
    assert abs(np.log(found.std() / sd)) < 0.15
    assert draws.pareto_shape < 0.5
    # The prior's mean is 0, which is what was kept before, and 10 of these standard deviations away.
    assert abs(mean) > 3 * sd


@pytest.mark.slow
def test_a_latent_scale_is_learnt_when_asked_for():
    model = wrapped(500, 0.3, {"w_std": dist.LogNormal(0.5, 1.0)})[1]
    grid = np.linspace(-3, 4, 300)
    mean, sd = posterior_of_log(grid, [log_evidence(0.3, w_std=np.exp(z)) - (z - 0.5) ** 2 / 2 for z in grid])
    found = np.log(wide_limit_draws(jax.random.key(1), model, 400, X, Y, weighted=True)["w_std"])
    assert abs(found.mean() - mean) < 6 * sd / 200**0.5 < 2 / 3 * abs(mean - 0.5)  # whose prior is about 0.5
    unweighted = wide_limit_draws(jax.random.key(1), model, 400, X, Y)
    assert unweighted.pareto_shape is None
    np.testing.assert_allclose(np.log(unweighted["w_std"]).std(), 1.0, atol=0.1)


@pytest.mark.slow
def test_noise_and_scale_are_those_of_a_chain_at_width_1000():
    x, y = X[::2], Y[::2]
    plain, model = wrapped(1000, dist.LogNormal(0.0, 1.0), {"w_std": dist.LogNormal(0.5, 0.5)})
    draws = wide_limit_draws(jax.random.key(2), model, 1000, x, y)
    collapsed = collapse_readout(plain, readout="readout", features="features", observed="y")
    mcmc = MCMC(SplitHMC(collapsed), num_warmup=200, num_samples=400, num_chains=2, chain_method="vectorized")
    mcmc.run(jax.random.key(3), x, y)
    for name in ("noise_base", "w_std_base"):
        chain = np.asarray(mcmc.get_samples(group_by_chain=True)[name], float)
        found = np.asarray(draws[name], float)
        # Of 10,000 proposals at least 300 carry the weights; the chain's error is that of its effective draws.
        error = chain.std() * np.sqrt(1 / effective_sample_size(chain) + 1 / 300)
        assert abs(chain.mean() - found.mean()) < 4 * error < 0.6 * chain.std()
        assert abs(np.log(chain.std() / found.std())) < 0.3


@pytest.mark.slow
def test_weighted_draws_predict():
    plain, model = wrapped(100, dist.LogNormal(-1.0, 0.5))
    draws = wide_limit_draws(jax.random.key(0), model, 50, X, Y)
    predictions = Predictive(plain, draws)(jax.random.key(1), X[:3])
    assert predictions["y"].shape == (50, 3)
    # Chosen more than once, hidden weights come with readouts of their own.
    assert len(np.unique(draws["readout"][:, 0])) == 50
    assert jax.tree.map(jnp.shape, draws)["noise"] == (50,)


def test_a_prior_far_from_the_posterior_is_told_of():
    model = wrapped(30, dist.LogNormal(3.0, 0.5))[1]
    with pytest.warns(RuntimeWarning, match="Pareto shape"):
        assert wide_limit_draws(jax.random.key(0), model, 20, X, Y).pareto_shape > 0.7


@pytest.mark.slow
def test_under_jit_draws_are_weighted_on_request():
    model = wrapped(100, dist.LogNormal(0.0, 1.0))[1]

    def mean_noise(y):
        return jnp.log(wide_limit_draws(jax.random.key(0), model, 200, X, y, weighted=True)["noise"]).mean()

    untraced = wide_limit_draws(jax.random.key(0), model, 200, X, Y)["noise"]
    np.testing.assert_allclose(jax.jit(mean_noise)(Y), jnp.log(untraced).mean(), atol=1e-3)


@pytest.mark.as_compiled
def test_a_likelihood_that_is_not_gaussian_has_its_own_weights():
    """Counts: the target of the weights is the joint density, whatever the stand-in."""
    counts = np.array([0, 1, 3, 6])

    def model(x, y=None):
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(features @ w + offset)).to_event(1), obs=y)

    x = np.array([[-1.0], [0.0], [0.5], [1.0]], "f")
    stand_in = repriorise(
        model, readout="w", features="features", targets="y", surrogate=lambda y: surrogate_targets(y, "poisson")
    )
    draws = wide_limit_draws(jax.random.key(0), stand_in, 1500, x, counts, weighted=True)
    grid = np.linspace(-4, 4, 161)
    rates = np.exp(x[:, 0] * grid[:, None, None] + grid[None, :, None])
    joint = scipy.stats.poisson(rates).logpmf(counts).sum(-1) - (grid[:, None] ** 2 + grid[None, :] ** 2) / 2
    weights = np.exp(joint - joint.max())
    expected = (weights.sum(0) / weights.sum()) @ grid
    np.testing.assert_allclose(draws["offset"].mean(), expected, atol=0.06)


@pytest.mark.as_compiled
@pytest.mark.fault(
    "readout/_draws.py", "= bool(updates) if weighted is None else weighted", "= 'likelihood' in updates"
)
@pytest.mark.filterwarnings("ignore:the Pareto shape")
@parametrize("wrap", ["collapsed", "repriorised"], rest="slow")
def test_another_likelihood_of_hidden_weights_has_its_part(wrap):
    """Against the weighted average of many draws of the prior, whose weights are dense evidences in float64."""
    x, y, seen, noise = np.linspace(-1, 1, 6)[:, None], np.zeros(6), 0.8, 0.5

    def model(x, y=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 20]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 20**0.5)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([20]).to_event(1))
        scale = numpyro.sample("scale", dist.Normal(0.0, 1.0))  # after the readout
        numpyro.sample("also", dist.Normal(scale, 0.5), obs=seen)
        numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)

    wrapped = wrapped_as(wrap, model, noise)
    draws = wide_limit_draws(jax.random.key(0), wrapped, 2000, x.astype("f"), y.astype("f"))
    mean, sd = seen * 4 / 5, 5**-0.5  # the prior's precision is 1, the observation's 4
    num_effective = 1000  # of 20,000 proposals, of which 2,000 are chosen
    assert abs(draws["scale"].mean() - mean) < 5 * sd / num_effective**0.5
    np.testing.assert_allclose(draws["scale"].std(), sd, rtol=5 / (2 * num_effective) ** 0.5)
    assert draws.pareto_shape is not None
    with pytest.raises(ValueError, match="the site 'also' observes other latent sites"):
        wide_limit_draws(jax.random.key(0), wrapped, 20, x.astype("f"), y.astype("f"), weighted=False)


@pytest.mark.as_compiled
@pytest.mark.filterwarnings("ignore:the Pareto shape")
def test_a_soft_constraint_on_the_readout_holds():
    """A sum that is nearly zero, as an observed value: against dense conditioning in float64."""
    x, y, noise = np.linspace(-1, 1, 4)[:, None], np.array([0.5, 0.0, -0.2, 0.4]), 0.3
    features = np.concatenate([x, x**2, np.ones_like(x)], axis=1)

    def model(x, y=None):
        numpyro.sample("hidden", dist.Normal(0.0, 1.0))
        features = numpyro.deterministic("features", jnp.concatenate([x, x**2, jnp.ones_like(x)], axis=1))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("sum", dist.Normal(0.0, 0.01), obs=w.sum())
        numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)

    wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=noise)
    draws = wide_limit_draws(jax.random.key(0), wrapped, 2000, x.astype("f"), y.astype("f"))["w"]
    assert abs(draws.sum(axis=1)).max() < 0.06 and 0.007 < draws.sum(axis=1).std() < 0.013
    precision = np.eye(3) + features.T @ features / noise**2 + np.ones((3, 3)) / 0.01**2
    np.testing.assert_allclose(draws.mean(0), np.linalg.solve(precision, features.T @ y) / noise**2, atol=0.05)


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_draws.py", "is_joint = weighted and any(updates.values())", "is_joint = False")
@pytest.mark.filterwarnings("ignore:the Pareto shape")
@parametrize("regulariser", [None, 1.0], rest="slow")
def test_what_observes_the_readout_beside_its_likelihood_has_its_part(regulariser):
    """Against dense conditioning in float64, and the weighted averages over the hidden weights."""
    x, y, total, noise = np.linspace(-1, 1, 4)[:, None], np.array([0.5, 0.0, -0.2, 0.4]), 1.5, 0.3
    features = np.concatenate([x, x**2, np.ones_like(x)], axis=1)

    def model(x, y=None):
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
        features = numpyro.deterministic("features", jnp.concatenate([x, x**2, jnp.ones_like(x)], axis=1))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("total", dist.Normal(w.sum() + offset, 0.3), obs=total)
        numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)

    options = {"readout": "w", "features": "features", "targets": "y", "noise_scale": noise}
    wrapped = repriorise(model, **options, regulariser=regulariser)
    draws = wide_limit_draws(jax.random.key(0), wrapped, 3000, x.astype("f"), y.astype("f"))
    # Of w and the offset, both N(0, I) a priori.
    design = np.concatenate([np.c_[features, np.zeros(4)], np.ones((1, 4))])
    covariance = np.linalg.inv(np.eye(4) + design.T @ design / 0.3**2)
    mean = covariance @ design.T @ np.append(y, total) / 0.3**2
    found = np.c_[draws["w"], draws["offset"]]
    np.testing.assert_allclose(found.mean(0), mean, atol=5 * 0.5 / 1000**0.5)  # deviations are at most 0.5
    np.testing.assert_allclose(np.cov(found.T), covariance, atol=0.04)
    with pytest.raises(ValueError, match="the site 'total', 'y' observes .* the readout beside its likelihood"):
        wide_limit_draws(jax.random.key(0), wrapped, 20, x.astype("f"), y.astype("f"), weighted=False)


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_draws.py", "has_term = any(", "has_term = False and any(")
@pytest.mark.filterwarnings("ignore:the Pareto shape")
@pytest.mark.parametrize("wrap", ["collapsed", "repriorised"])
def test_an_output_bias_is_learnt(wrap):
    """Against dense conditioning in float64."""
    x, y, noise = np.linspace(-1, 1, 4)[:, None], np.array([1.5, 1.0, 0.8, 1.4]), 0.3

    def model(x, y=None):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(features @ w + bias, noise).to_event(1), obs=y)

    wrapped = wrapped_as(wrap, model, noise)
    draws = wide_limit_draws(jax.random.key(0), wrapped, 3000, x.astype("f"), y.astype("f"))
    design = np.concatenate([x, 2 * np.ones_like(x)], axis=1)  # of the bias over its deviation
    covariance = np.linalg.inv(np.eye(2) + design.T @ design / noise**2)
    found = np.c_[draws["w"], draws["bias"] / 2]
    np.testing.assert_allclose(found.mean(0), covariance @ design.T @ y / noise**2, atol=5 * 0.2 / 1000**0.5)
    np.testing.assert_allclose(np.cov(found.T), covariance, atol=0.01)


@pytest.mark.slow
def test_two_readouts_are_drawn_independently():
    def model(x, y):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.2))
        for name in "ab":
            with reparam(config={name: ReprioriseReadout(x, y, noise)}):
                w = numpyro.sample(name, dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.sample(f"y_{name}", dist.Normal(x @ w, noise).to_event(1), obs=y)

    x = np.array([[1.0, 0.5], [-0.5, 1.0], [0.3, 0.2]], "f")
    draws = wide_limit_draws(jax.random.key(0), model, 400, x, np.ones(3, "f"))
    correlation = np.corrcoef(draws["a_base"][:, 0], draws["b_base"][:, 0])[0, 1]
    assert abs(correlation) < 4 / 400**0.5
