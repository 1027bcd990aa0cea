"""One predictive for every wrapped model, and for draws of a chain, a guide or the limit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_wide import ReadoutPredictive, collapse_readout, guide_draws, repriorise, wide_limit, wide_limit_draws
from numpyro_wide.diagnostics import effective_sample_size
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.readout import _draws
from tests.marks import parametrize
from tests.models import network, small_data

SITES = {"readout": "w", "features": "features"}
COLLAPSED = collapse_readout(network, observed="y", **SITES)
REPRIORISED = repriorise(network, targets="y", noise_scale="sigma", **SITES)
X, Y = small_data(12)
X_NEW = np.linspace(-1.3, 1.3, 5, dtype="f")[:, None]
KEY = jax.random.key(0)


def hidden_draws(num_draws=6):
    draws = Predictive(network, num_samples=num_draws, return_sites=["hidden", "sigma"])
    return dict(draws(jax.random.key(3), X))


@pytest.mark.fault("readout/_predictions.py", "variance + noise_scale**2", "variance")
@pytest.mark.slow
def test_the_same_hidden_weights_give_the_same_numbers_whatever_was_wrapped_and_fitted():
    """Draws of a collapsed chain, of a repriorised one (readout and base), of a plain one."""
    hidden = hidden_draws()
    readout = {"w": jax.random.normal(KEY, (6, 21, 1))}
    bases = {"w_base": jax.random.normal(KEY, (6, 21, 1))}
    cases = [(COLLAPSED, {}), (COLLAPSED, readout), (REPRIORISED, readout), (REPRIORISED, bases), (REPRIORISED, {})]
    found = [ReadoutPredictive(model, {**hidden, **more}, (X, Y)) for model, more in cases]
    assert all(predictive.is_integrated for predictive in found)
    y_new = np.ones_like(X_NEW)
    first, densities, joint = found[0](KEY, X_NEW), found[0].log_density(X_NEW, y_new), found[0].joint_log_density
    for other in found[1:]:
        predictions = other(KEY, X_NEW)
        assert predictions.keys() == first.keys()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), first, predictions)
        np.testing.assert_allclose(other.log_density(X_NEW, y_new), densities, rtol=1e-5)
        np.testing.assert_allclose(other.joint_log_density(X_NEW, y_new), joint(X_NEW, y_new), rtol=1e-5)
        np.testing.assert_allclose(other.readout(KEY), found[0].readout(KEY), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        first["predictive_variance"], first["variance"] + hidden["sigma"][:, None, None] ** 2, rtol=1e-6
    )


def fixed_noise(x, y=None):
    network(x, y, width=40, noise_scale=0.3)


def run(model, num_samples=400, seed=0):
    mcmc = MCMC(SplitHMC(model), num_warmup=200, num_samples=num_samples, num_chains=2, chain_method="vectorized")
    mcmc.run(jax.random.key(seed), X, Y)
    return mcmc


def standard_errors(values):
    """Of the mean over draws (chain x draw, m), by ArviZ's effective sample size."""
    by_chain = np.asarray(values).reshape(2, -1, values.shape[-1])
    ess = np.array([effective_sample_size(by_chain[..., i]) for i in range(values.shape[-1])], float)
    return values.std(axis=0) / np.sqrt(np.maximum(ess, 4))


@pytest.mark.slow
def test_four_ways_to_one_posterior():
    """Collapsed chain, repriorised chain, plain chain with NumPyro's Predictive, each through its own machinery."""
    collapsed = collapse_readout(fixed_noise, observed="y", **SITES)
    repriorised = repriorise(fixed_noise, targets="y", noise_scale=0.3, **SITES)
    means, errors = [], []
    for model in (collapsed, repriorised):
        found = ReadoutPredictive(model, run(model).get_samples(), (X, Y))(KEY, X_NEW)
        means.append(np.asarray(found["mean"][..., 0]))
    plain = run(fixed_noise, 2000).get_samples()
    features = Predictive(fixed_noise, plain, return_sites=["features"])(KEY, X_NEW)["features"]
    means.append(np.einsum("snd,sdk->sn", features, plain["w"]))
    errors = [standard_errors(mean) for mean in means]
    for i in range(3):
        for j in range(i):
            z = (means[i].mean(0) - means[j].mean(0)) / np.hypot(errors[i], errors[j])
            assert np.abs(z).max() < 4.5, (i, j, z)


@pytest.mark.slow
def test_the_limit_is_that_of_the_gaussian_process():
    """Draws of the limit of a wide network, predicted from, against the process with its kernel in closed form."""
    from numpyro_wide import nn

    scales = {"w_std": 1.5, "b_std": 0.3}
    network = nn.FCN(1, 2000, "erf", **scales)
    model = nn.bnn(network, num_outputs=None, noise=0.3)
    names = {"readout": "readout", "features": "features"}
    x, y, x_new = X, Y[:, 0], X_NEW
    kernel = wide_limit.fcn_kernel(1, "erf", **network.scales())
    mean, covariance = wide_limit.gp_posterior(kernel(x)[0], kernel(x_new, x)[0], kernel(x_new)[0], y, 0.3)
    for wrapped in (
        collapse_readout(model, observed="y", **names),
        repriorise(model, targets="y", noise_scale=0.3, **names),
    ):
        draws = wide_limit_draws(KEY, wrapped, 20, x, y)
        assert draws["readout"].shape == (20, 2000)
        found = ReadoutPredictive(wrapped, draws, (x, y))(KEY, x_new)
        np.testing.assert_allclose(found["mean"].mean(0), mean, atol=0.03)
        np.testing.assert_allclose(found["variance"].mean(0), np.diag(covariance), atol=0.02)


@pytest.mark.slow
def test_guides_of_both_forms():
    for model in (COLLAPSED, REPRIORISED):
        guide = AutoNormal(model)
        params = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO()).run(KEY, 3, X, Y, progress_bar=False).params
        draws = guide_draws(KEY, model, guide, params, 5, X, Y)
        assert draws["w"].shape == (5, 21, 1)
        found = ReadoutPredictive(model, draws, (X, Y))(KEY, X_NEW)
        latents = guide.sample_posterior(KEY, params, sample_shape=(5,))
        other = ReadoutPredictive(model, latents, (X, Y))(KEY, X_NEW)
        assert found["mean"].shape == other["mean"].shape == (5, 5, 1)


def classes(x, labels=None, likelihood="categorical"):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 8]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([8, 3]).to_event(2))
    logits = features @ w
    with numpyro.plate("rows", x.shape[0]):
        if likelihood == "categorical":
            numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)
        elif likelihood == "bernoulli":
            numpyro.sample("label", dist.Bernoulli(logits=logits[:, 0]), obs=labels)
        else:
            numpyro.sample("label", dist.Poisson(jnp.exp(logits[:, 0])), obs=labels)


def surrogate(labels):
    return jnp.zeros((len(labels), 3)), 1.0


def weights_of(num_draws):
    rng = np.random.default_rng(5)
    return {"hidden": rng.normal(size=(num_draws, 1, 8)), "w": rng.normal(size=(num_draws, 8, 3))}


@pytest.mark.fault(
    "readout/_predictions.py",
    "by_observation.sum(axis=tuple(range(1, by_observation.ndim)))",
    "by_observation.reshape(by_observation.shape[0], -1)[:, 0] * 0.5",
)
@parametrize("likelihood", ["categorical", "bernoulli", "poisson"], rest="slow")
def test_likelihoods_that_are_not_gaussian_are_predicted_through_the_weights(likelihood):
    """Against logits by NumPy at every draw of the weights."""
    labels, labels_new = np.array([0, 2, 1, 1] * 3) % (3 if likelihood != "bernoulli" else 2), np.array([1, 0, 1, 0, 1])
    wrapped = repriorise(classes, readout="w", features="features", targets="labels", surrogate=surrogate)
    draws = weights_of(7)
    predictive = ReadoutPredictive(wrapped, draws, (X, labels), {"likelihood": likelihood})
    assert not predictive.is_integrated
    found = predictive(KEY, X_NEW, likelihood=likelihood)
    logits = np.einsum("sni,sik->snk", np.tanh(X_NEW @ draws["hidden"]), draws["w"])
    if likelihood == "categorical":
        assert found.keys() == {"probs", "label"}
        log_probs = logits - logsumexp(logits, axis=-1, keepdims=True)
        np.testing.assert_allclose(found["probs"], np.exp(log_probs), rtol=2e-4, atol=1e-5)
        terms = np.take_along_axis(log_probs, labels_new[None, :, None], axis=2)[..., 0]
    elif likelihood == "bernoulli":
        assert found.keys() == {"probs", "mean", "predictive_variance", "label"}
        p = 1 / (1 + np.exp(-logits[..., 0]))
        np.testing.assert_allclose(found["probs"], p, rtol=2e-4)
        np.testing.assert_allclose(found["predictive_variance"], p * (1 - p), rtol=2e-4)
        terms = np.where(labels_new, np.log(p), np.log1p(-p))
    else:
        assert found.keys() == {"mean", "predictive_variance", "label"}
        np.testing.assert_allclose(found["mean"], np.exp(logits[..., 0]), rtol=2e-4)
        terms = labels_new * logits[..., 0] - np.exp(logits[..., 0])  # 0! = 1! = 1
    densities = predictive.log_density(X_NEW, labels_new, likelihood=likelihood)
    np.testing.assert_allclose(densities, logsumexp(terms, axis=0) - np.log(7), rtol=2e-4, atol=2e-5)
    joint = predictive.joint_log_density(X_NEW, labels_new, likelihood=likelihood)
    np.testing.assert_allclose(joint, logsumexp(terms.sum(1)) - np.log(7), rtol=2e-4)
    assert predictive.readout(KEY).shape == (7, 8, 3)
    with pytest.raises(ValueError, match="'label' is observed with these arguments, and predictions make no use"):
        predictive(KEY, X_NEW, labels_new, likelihood=likelihood)
    with pytest.raises(ValueError, match="'label' is not observed with these arguments"):
        predictive.log_density(X_NEW, likelihood=likelihood)


@pytest.mark.slow
def test_a_guide_s_base_draws_are_mapped_to_weights_for_classes():
    wrapped = repriorise(classes, readout="w", features="features", targets="labels", surrogate=surrogate)
    labels, draws = np.array([0, 2, 1, 1] * 3), weights_of(4)
    bases = {"hidden": draws["hidden"], "w_base": draws["w"]}
    predictive = ReadoutPredictive(wrapped, bases, (X, labels))
    draws_of_chain = jax.tree.map(lambda values: jnp.asarray(values, "f"), bases)
    mapped = _draws.weights_of(wrapped, KEY, draws_of_chain, (X, labels), {})
    np.testing.assert_allclose(predictive.readout(KEY), mapped["w"], rtol=1e-4, atol=1e-5)
    other = ReadoutPredictive(wrapped, {"hidden": draws["hidden"], "w": mapped["w"]}, (X, labels))
    np.testing.assert_allclose(predictive(KEY, X_NEW)["probs"], other(KEY, X_NEW)["probs"], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="draws must hold every latent site, but 'w' is missing; they hold 'hidden'"):
        ReadoutPredictive(wrapped, {"hidden": draws["hidden"]}, (X, labels))


def test_a_normal_likelihood_that_is_not_linear_goes_through_the_weights():
    def model(x, y=None):
        features = numpyro.deterministic("features", jnp.tanh(x))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.exp(features @ w), 0.2).to_event(1), obs=y)

    wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.2)
    w = np.array([[0.5], [-1.0]])
    predictive = ReadoutPredictive(wrapped, {"w": w}, (X, Y[:, 0]))
    found = predictive(KEY, X_NEW)
    assert not predictive.is_integrated and found.keys() == {"mean", "predictive_variance", "noise_scale", "y"}
    np.testing.assert_allclose(found["mean"], np.exp(np.tanh(X_NEW) @ w.T).T, rtol=1e-5)
    np.testing.assert_allclose(found["predictive_variance"], 0.04, rtol=1e-5)


@pytest.mark.fault("readout/_predictive.py", "np.sqrt(total_variance)", "np.sqrt(variance.mean(axis=0))")
def test_summary_of_a_mixture():
    predictive = ReadoutPredictive(COLLAPSED, hidden_draws(), (X, Y))
    found = {name: np.asarray(values, float)[..., 0] for name, values in predictive(KEY, X_NEW).items()}
    summary = predictive.summary(X_NEW, quantiles=(0.1, 0.9))
    np.testing.assert_allclose(summary.mean[:, 0], found["mean"].mean(0), rtol=1e-6)
    variance = found["predictive_variance"].mean(0) + found["mean"].var(0)
    np.testing.assert_allclose(summary.standard_deviation[:, 0], np.sqrt(variance), rtol=1e-6)
    for level in (0.1, 0.9):
        below = norm.cdf(summary.quantiles[level][:, 0], found["mean"], np.sqrt(found["predictive_variance"])).mean(0)
        np.testing.assert_allclose(below, level, atol=1e-9)
    lines = str(summary).splitlines()
    assert len(lines) == 1 + len(X_NEW) and lines[0].split() == ["row", "mean[0]", "sd[0]", "10%[0]", "90%[0]"]
    assert lines[1].split()[1] == f"{summary.mean[0, 0]:.4g}" and summary._repr_html_().count("<tr") == 6
    many = str(predictive.summary(np.linspace(-1, 1, 50)[:, None])).splitlines()
    assert many[11].startswith("..") and "49" in [line.split()[0] for line in many if line]
    with pytest.raises(ValueError, match=r"quantiles must lie between 0 and 1, but got \(5, 95\)"):
        predictive.summary(X_NEW, quantiles=(5, 95))
    for levels in (0.5, np.float32(0.5), jnp.array([0.25, 0.5])):
        assert 0.5 in predictive.summary(X_NEW, quantiles=levels).quantiles
    for levels in (None, [], "median", object()):
        with pytest.raises(TypeError, match="quantiles must be numbers, such as"):
            predictive.summary(X_NEW, quantiles=levels)


def test_summaries_of_classes_and_counts():
    wrapped = repriorise(classes, readout="w", features="features", targets="labels", surrogate=surrogate)
    labels, draws = np.array([0, 1, 1, 1] * 3), weights_of(400)
    by_likelihood = {}
    for likelihood in ("categorical", "bernoulli", "poisson"):
        predictive = ReadoutPredictive(wrapped, draws, (X, labels), {"likelihood": likelihood})
        summary = by_likelihood[likelihood] = predictive.summary(X_NEW, likelihood=likelihood)
        found = predictive(KEY, X_NEW, likelihood=likelihood)
        if "probs" in found:
            np.testing.assert_allclose(summary.probs, found["probs"].mean(0), rtol=1e-5)
    assert list(by_likelihood["categorical"].to_frame()) == ["p[0]", "p[1]", "p[2]"]
    assert list(by_likelihood["bernoulli"].to_frame()) == ["p"]
    counts = by_likelihood["poisson"]
    assert np.all(counts.quantiles[0.05] <= counts.quantiles[0.5]) and np.all(counts.quantiles[0.95] % 1 == 0)


@pytest.mark.slow
def test_models_that_observe_several_sites_are_not_predicted_through_weights():
    def model(x, y=None):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        for name in ("a", "b"):
            numpyro.sample(name, dist.Poisson(jnp.exp(features @ w)).to_event(1), obs=y)

    wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=1.0)
    with pytest.raises(ValueError, match="predictions are of one observed site, but the model observes 'a', 'b'"):
        ReadoutPredictive(wrapped, {"w": np.ones((2, 1))}, (X, np.ones(12)))
