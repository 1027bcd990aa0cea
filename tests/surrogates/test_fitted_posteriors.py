"""Models repriorised by fitted surrogates: exact in density, and the nearer to N(0, I) the better they fit."""

from functools import partial

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_wide import fitted_surrogate, mean_kernel, repriorise, surrogate_targets
from numpyro_wide.surrogates import Surrogate
from studies._data import digits
from tests.marks import parametrize

N = 14
X = np.linspace(-1, 1, N, dtype="f")[:, None]
NOISE = np.random.default_rng(5).normal(size=N)
CURVE = 1.5 * np.sin(3 * X[:, 0]) + 0.3 * NOISE


def student(f):
    return dist.StudentT(3.0, f, 0.3)


# By name: the likelihood, observations, what else the fit is told, and what is predicted from function values.
CASES = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=f), (CURVE > 0).astype(int), {}, jax.nn.sigmoid),
    "binomial": (
        lambda f: dist.Binomial(6, logits=f),
        np.round(6 / (1 + np.exp(-CURVE))).astype(int),
        {"total_count": 6},
        jax.nn.sigmoid,
    ),
    "poisson": (lambda f: dist.Poisson(jnp.exp(f)), np.round(np.exp(CURVE)).astype(int), {}, jnp.exp),
    "negative_binomial": (
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 4.0),
        np.round(np.exp(CURVE)).astype(int),
        {"concentration": 4.0},
        jnp.exp,
    ),
    "categorical": (
        lambda f: dist.Categorical(logits=f),
        np.digitize(CURVE, [-0.7, 0.7]),
        {"num_classes": 3},
        lambda f: jax.nn.softmax(f)[..., :2],
    ),
    "student_t": (student, CURVE + 4 * (np.arange(N) == 5), {"df": 3.0, "scale": 0.3}, lambda f: f),
    "function": (student, CURVE + 4 * (np.arange(N) == 5), {}, lambda f: f),
}


def network(x, observed=None, *, name):
    """Two tanh units of a latent scale, and a prior of the readout that is not N(0, I)."""
    likelihood, _, _, predicted = CASES[name]
    shape = (2, 3) if name == "categorical" else (2,)
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    inputs = jnp.concatenate([2 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", scale * jnp.tanh(inputs @ hidden))
    w = numpyro.sample("w", dist.Normal(0.2, 1.3).expand(shape).to_event(len(shape)))
    numpyro.deterministic("predictions", predicted(features @ w)[::4])
    numpyro.sample("y", likelihood(features @ w).to_event(1), obs=observed)


def surrogate_of(name):
    likelihood, observed, options, _ = CASES[name]
    kernel = mean_kernel(jax.random.key(0), partial(network, name=name), "features", X, readout="w")
    called = likelihood if name == "function" else name
    return fitted_surrogate(observed, called, kernel, **options)


def wrapped_by(name, surrogate):
    model = partial(network, name=name)
    return repriorise(model, readout="w", features="features", targets="observed", surrogate=surrogate)


def density_and_readout(model, observed, values):
    def both(values):
        density, sites = log_density(model, (X, observed), {}, values)
        return density, sites["w"]["value"]

    return [np.asarray(part) for part in jax.jit(both)(values)]


@parametrize("name", CASES, rest="slow")
def test_the_joint_density_is_the_model_s_own(x64, name):
    """That of the plain model at the readout, plus the log-determinant of a dense root of Σ, all in float64."""
    rng, observed = np.random.default_rng(1), CASES[name][1]
    shape = (2, 3) if name == "categorical" else (2,)
    phi = rng.normal(size=shape)
    given = {"hidden": rng.normal(size=(2, 2)), "scale": np.array(0.7)}
    fitted = surrogate_of(name)
    density, readout = density_and_readout(wrapped_by(name, fitted), observed, {**given, "w_base": phi})
    features = np.asarray(0.7 * np.tanh(np.concatenate([2 * X, np.ones_like(X)], 1) @ given["hidden"]))
    expected, _ = density_and_readout(partial(network, name=name), observed, {**given, "w": readout})
    # Of the readout less its prior mean, in units of its prior scale.
    psi, weights = 1.3 * features, np.asarray(fitted.noise_scale).reshape(N, -1)[:, :1] ** -2
    precision = np.eye(2) + psi.T @ (weights * psi)
    targets = np.asarray(fitted.targets).reshape(N, -1) - 0.2 * features.sum(1, keepdims=True)
    centred = ((readout - 0.2) / 1.3).reshape(2, -1) - np.linalg.solve(precision, psi.T @ (weights * targets))
    np.testing.assert_allclose(np.sum(centred * (precision @ centred)), np.sum(phi**2), rtol=1e-8)
    log_det = (3 if name == "categorical" else 1) * (2 * np.log(1.3) - 0.5 * np.linalg.slogdet(precision)[1])
    np.testing.assert_allclose(density, expected + log_det, rtol=1e-10)


def test_other_rows_than_the_fitted_ones_are_refused():
    model, observed = wrapped_by("poisson", surrogate_of("poisson")), CASES["poisson"][1]
    with pytest.raises(ValueError, match=r"fitted to 14 rows, but 'observed' has the shape \(9,\); fit it to these"):
        log_density(model, (X[:9], observed[:9]), {}, {"hidden": jnp.ones((2, 2)), "scale": 1.0, "w_base": jnp.ones(2)})


def test_it_takes_what_surrogate_targets_gives():
    observed = CASES["poisson"][1]
    values = {"hidden": jnp.ones((2, 2)), "scale": jnp.ones(()), "w_base": jnp.ones(2)}
    quick = partial(surrogate_targets, likelihood="poisson")
    found = [
        density_and_readout(wrapped_by("poisson", surrogate), observed, values)
        for surrogate in (quick, quick(observed))
    ]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)


def classifier(x, labels=None, *, width=256):
    """One GELU layer, with the pixels of digits."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    units = jax.nn.gelu((2 / x.shape[1]) ** 0.5 * x @ hidden, approximate=False)
    features = numpyro.deterministic("features", 3 * (2 / width) ** 0.5 * units)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=features @ w).to_event(1), obs=labels)


@pytest.fixture(scope="module")
def energies():
    """U − ‖z‖²/2 at draws of N(0, I), constant where the posterior is N(0, I), of quick and fitted surrogate."""
    data = digits()
    x = np.asarray(data.inputs, "f").reshape(-1, 64)[:128]
    x, labels = (x - x.mean()) / x.std(), np.asarray(data.targets)[:128] % 2
    kernel = mean_kernel(jax.random.key(2), classifier, "features", x)
    fitted = fitted_surrogate(labels, "bernoulli", kernel)

    def model(parts):
        surrogate = Surrogate(*parts)
        return repriorise(classifier, readout="w", features="features", targets="labels", surrogate=surrogate)

    @jax.jit
    def at_draws(parts, keys):
        def energy(key):
            keys = jax.random.split(key)
            z = {"hidden": jax.random.normal(keys[0], (64, 256)), "w_base": jax.random.normal(keys[1], (256,))}
            density, _ = log_density(model(parts), (x, labels), {}, z)
            return -density - 0.5 * (jnp.sum(z["hidden"] ** 2) + jnp.sum(z["w_base"] ** 2))

        return jax.lax.map(energy, keys)

    keys = jax.random.split(jax.random.key(1), 150)
    quick = surrogate_targets(labels, "bernoulli")
    quick = quick._replace(noise_scale=jnp.broadcast_to(quick.noise_scale, quick.targets.shape))
    return [np.asarray(at_draws(tuple(each), keys)) for each in (quick, fitted)]


@pytest.mark.slow
def test_energies_at_the_limit_differ_less_if_it_is_fitted(energies):
    quick, fitted = energies
    # The difference of the means is that of the divergences KL(N(0, I) ‖ posterior).
    assert fitted.mean() < quick.mean() - 8
    assert fitted.std() < 0.75 * quick.std()


@pytest.mark.slow
def test_counts_in_the_hundred_thousands_have_finite_gradients():
    rng = np.random.default_rng(0)
    counts = rng.poisson(np.exp(10 + CURVE))

    def model(counts=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 40]).to_event(2))
        inputs = jnp.concatenate([3 * X, jnp.ones_like(X)], axis=1)
        features = numpyro.deterministic("features", 4 * jnp.tanh(inputs @ hidden) / 40**0.5)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([40]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(10.0 + features @ w)).to_event(1), obs=counts)

    fitted = fitted_surrogate(counts, "poisson", mean_kernel(jax.random.key(0), model, "features"), offset=10.0)
    wrapped = repriorise(model, readout="w", features="features", targets="counts", surrogate=fitted)

    @jax.jit
    def gradients(keys):
        def gradient(key):
            keys = jax.random.split(key)
            z = {"hidden": jax.random.normal(keys[0], (2, 40)), "w_base": jax.random.normal(keys[1], (40,))}
            return jax.value_and_grad(lambda z: log_density(wrapped, (counts,), {}, z)[0])(z)

        return jax.lax.map(gradient, keys)

    found = gradients(jax.random.split(jax.random.key(1), 20))
    assert all(np.isfinite(part).all() for part in jax.tree.leaves(found))


def statistics(model, name, key):
    """Draws (chain, draw, statistic) of predictions at four inputs, and the number of divergences."""
    mcmc = MCMC(
        NUTS(model, max_tree_depth=5, target_accept_prob=0.9),
        num_warmup=120,
        num_samples=160,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(key), X, CASES[name][1])
    predictions = np.asarray(mcmc.get_samples(group_by_chain=True)["predictions"], float)
    return predictions.reshape(*predictions.shape[:2], -1), int(mcmc.get_extra_fields()["diverging"].sum())


@pytest.mark.slow
@parametrize("name", CASES, rest="slow")
def test_plain_and_fitted_chains_agree(name):
    means, errors = [], []
    for model, key in ((partial(network, name=name), 10), (wrapped_by(name, surrogate_of(name)), 20)):
        draws, num_divergent = statistics(model, name, key)
        ess = np.asarray(az.ess({"x": draws}, method="mean")["x"])
        assert ess.min() > 60  # of 640 draws
        assert num_divergent <= 6  # of 640 draws; how many differs with the machine's rounding
        means.append(draws.mean((0, 1)))
        errors.append(draws.std((0, 1)) / np.sqrt(ess))
    # Of four to eight statistics, one in 2,000 runs differs by that much by chance.
    assert np.abs((means[1] - means[0]) / np.hypot(*errors)).max() < 4
