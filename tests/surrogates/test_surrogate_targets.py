"""Readouts repriorised by surrogates of other likelihoods: exact, and better conditioned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy

from numpyro_wide import ReprioriseReadout, repriorise, surrogate_targets
from numpyro_wide.surrogates import class_contrasts
from tests.marks import parametrize
from tests.readout.test_repriorise import disagreement

LIKELIHOODS = {
    "categorical": (lambda f: dist.Categorical(logits=f), np.array([2, 0, 1, 1, 2]), {"num_classes": 3}),
    "bernoulli": (lambda f: dist.Bernoulli(logits=f), np.array([1, 0, 0, 1, 1]), {}),
    "poisson": (lambda f: dist.Poisson(jnp.exp(f)), np.array([0, 3, 1, 20, 7]), {}),
}


@parametrize("name", LIKELIHOODS, rest="slow")
def test_the_first_two_derivatives_are_those_of_the_likelihood(name):
    """At f = 0, or for counts at f = log(y + 1/2); of softmax, for changes of the logits that sum to 0."""
    likelihood, y, options = LIKELIHOODS[name]
    targets, noise_scale = surrogate_targets(y, name, **options)
    # NumPyro's Bernoulli has a kink in its formula at 0 exactly.
    f = jnp.log(y + 0.5) if name == "poisson" else jnp.full(targets.shape, 1e-4)
    change = np.random.default_rng(0).normal(size=targets.shape)
    change = jnp.asarray(change - change.mean(-1, keepdims=True) if name == "categorical" else change)

    @partial(jax.jit, static_argnums=0)
    def derivatives(log_likelihood):
        along = lambda t: log_likelihood(f + t * change).sum()  # noqa: E731
        return jax.grad(along)(0.0), jax.grad(jax.grad(along))(0.0)

    expected = derivatives(lambda f: likelihood(f).log_prob(y))
    found = derivatives(dist.Normal(targets, noise_scale).log_prob)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_contrasts_are_the_same_targets_in_an_orthonormal_basis():
    basis = np.asarray(class_contrasts(4))
    np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(basis.sum(0), 0, atol=1e-6)
    full, scale = surrogate_targets([3, 0, 1], "categorical", num_classes=4)
    found, same_scale = surrogate_targets([3, 0, 1], "categorical", num_classes=4, contrasts=True)
    np.testing.assert_allclose(found @ basis.T, full, atol=1e-5)
    assert scale == same_scale == 2


@parametrize("name", LIKELIHOODS, rest="slow")
def test_a_linear_model_becomes_nearly_spherical(name):
    """The curvature of −log p at the mode of φ is near the identity; that of the plain model is not."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(200, 6)) * np.array([0.1, 0.2, 0.5, 0.5, 1, 1])
    likelihood, _, options = LIKELIHOODS[name]
    shape, to_logits = (6,), lambda f: f
    if name == "categorical":
        shape, to_logits, options = (6, 2), lambda f: f @ class_contrasts(3).T, {**options, "contrasts": True}
    y = np.asarray(likelihood(to_logits(features @ (0.7 * rng.normal(size=shape)))).sample(jax.random.key(0)))

    def model(y=None):
        psi = numpyro.deterministic("features", jnp.asarray(features, "f"))
        w = numpyro.sample("w", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        numpyro.sample("y", likelihood(to_logits(psi @ w)).to_event(1), obs=y)

    surrogate = partial(surrogate_targets, likelihood=name, **options)
    wrapped = repriorise(model, readout="w", features="features", targets="y", surrogate=surrogate)

    def condition_number(model, site):
        def energy(flat):
            return potential_energy(model, (y,), {}, {site: flat.reshape(shape)})

        @jax.jit
        def curvature_at_the_mode():
            newton = lambda _, w: w - jnp.linalg.solve(jax.hessian(energy)(w), jax.grad(energy)(w))  # noqa: E731
            mode = jax.lax.fori_loop(0, 8, newton, jnp.zeros(np.prod(shape)))
            return jax.hessian(energy)(mode), jax.grad(energy)(mode)

        hessian, gradient = curvature_at_the_mode()
        assert jnp.linalg.norm(gradient) < 0.05
        return np.linalg.cond(hessian)

    plain, found = condition_number(model, "w"), condition_number(wrapped, "w_base")
    assert plain > 10
    assert found < 2.5 and found < plain / 8


def network(x, labels=None):
    """Softmax of a small network whose features have a latent scale, which the log-determinant depends on."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 4]).to_event(2))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.15))
    inputs = jnp.concatenate([2 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", scale * jnp.tanh(inputs @ hidden))
    w = numpyro.sample("w", dist.Normal(0.3, 1.2).expand([4, 3]).to_event(2))
    logits = numpyro.deterministic("logits", features @ w)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


X = np.linspace(-1, 1, 24, dtype="f")[:, None]
LABELS = np.digitize(X[:, 0] + 0.4 * np.random.default_rng(0).normal(size=24), [-0.4, 0.5])
REPRIORISED = repriorise(
    network,
    readout="w",
    features="features",
    targets="labels",
    surrogate=partial(surrogate_targets, likelihood="categorical", num_classes=3),
)


def statistics(model, key):
    """Draws (chain, draw, statistic): the log scale, and two contrasts of the logits at four inputs.

    Four chains: one in ten sits for hundreds of draws where hidden units have another sign, which only others show.
    """
    mcmc = MCMC(NUTS(model, max_tree_depth=6), num_warmup=200, num_samples=400, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(key), X, LABELS)
    draws = mcmc.get_samples(group_by_chain=True)
    logits = draws["logits"][:, :, ::7]
    contrasts = (logits[..., 1:] - logits[..., :1]).reshape(*logits.shape[:2], -1)
    return np.concatenate([np.log(draws["scale"])[..., None], contrasts], axis=-1, dtype=float)


@pytest.fixture(scope="module")
def reference():
    return statistics(network, key=10)


@pytest.mark.slow
def test_the_softmax_posterior_is_the_plain_one(reference):
    # Eighteen statistics: a difference of 4.5 standard errors happens by chance once in 8,000 runs.
    assert disagreement(statistics(REPRIORISED, key=20), reference) < 4.5


def test_the_reparametriser_and_the_handler_take_the_same_surrogate():
    def inside(x, labels):
        targets, noise_scale = surrogate_targets(labels, "categorical", num_classes=3)
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 4]).to_event(2))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.15))
        features = scale * jnp.tanh(jnp.concatenate([2 * x, jnp.ones_like(x)], axis=1) @ hidden)
        with reparam(config={"w": ReprioriseReadout(features, targets, noise_scale)}):
            w = numpyro.sample("w", dist.Normal(0.3, 1.2).expand([4, 3]).to_event(2))
        numpyro.sample("label", dist.Categorical(logits=features @ w).to_event(1), obs=labels)

    values = {"hidden": jnp.ones((2, 4)), "scale": 0.3, "w_base": jnp.arange(12.0).reshape(4, 3)}
    energies = [
        jax.jit(lambda y, m=model: potential_energy(m, (X, y), {}, values))(LABELS) for model in (inside, REPRIORISED)
    ]
    np.testing.assert_allclose(energies[0], energies[1], rtol=1e-5)


def test_a_noise_scale_of_one_s_own_keeps_the_gradient():
    targets, noise_scale = surrogate_targets(np.array([1, 0]), "bernoulli", noise_scale=3.0)
    np.testing.assert_allclose(targets, [4.5, -4.5])
    assert noise_scale == 3
    of_counts = surrogate_targets(np.array([4]), "poisson", noise_scale=0.2)
    np.testing.assert_allclose(of_counts.noise_scale, 0.2)
    np.testing.assert_allclose((of_counts.targets - np.log(4.5)) / 0.2**2, 4 - 4.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1], "gamma"), {}, "likelihood must be one of 'bernoulli', 'categorical', 'poisson', but got 'gamma'"),
        (([1], "categorical"), {}, "num_classes belongs to a categorical likelihood, but is None for 'categorical'"),
        (([1], "poisson"), {"num_classes": 3}, "num_classes belongs to a categorical likelihood, but is 3"),
        (([0, 3], "categorical"), {"num_classes": 3}, "must be whole numbers from 0 to 2, but they range from 0 to 3"),
        (([0, 2], "bernoulli"), {}, "must be whole numbers from 0 to 1"),
        (([-1, 2], "poisson"), {}, "must be whole numbers from 0 to inf, but they range from -1 to 2"),
        (([0.5], "poisson"), {}, "or are not whole"),
        (([[0], [1]], "categorical"), {"num_classes": 3}, r"labels must .* \(2, 1\); take labels\[:, 0\]\."),
        (([0, 1], "bernoulli"), {"contrasts": True}, "contrasts belong to a categorical likelihood"),
        (([0, 1], "bernoulli"), {"noise_scale": -1.0}, "noise_scale must be positive"),
        (([0, 1], "bernoulli"), {"noise_scale": np.ones(3)}, r"broadcast against shape \(2,\), but got \(3,\)"),
        (([0, 1], "bernoulli"), {"noise_scale": np.ones((2, 1))}, r"shape \(2,\), but got \(2, 1\)"),
        (([0, np.nan], "bernoulli"), {}, "observations must not contain NaN"),
        ((np.eye(3), "categorical"), {"num_classes": 3}, r"labels must have shape \(n,\), but got \(3, 3\); .*argmax"),
    ],
)
def test_observations_that_cannot_be_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        surrogate_targets(*arguments, **options)


def test_contrasts_of_one_class_are_refused():
    with pytest.raises(ValueError, match="num_classes must be a whole number of at least 2"):
        class_contrasts(1)


def test_a_noise_scale_and_a_surrogate_exclude_each_other():
    names = {"readout": "w", "features": "features", "targets": "labels"}
    with pytest.raises(TypeError, match="noise_scale must be .* but got None; .* a surrogate"):
        repriorise(network, **names)
    with pytest.raises(ValueError, match="a surrogate brings its own noise scale; drop noise_scale"):
        repriorise(network, **names, noise_scale=0.1, surrogate=surrogate_targets)
    with pytest.raises(TypeError, match="surrogate must be a function of the observations, .* but got a str"):
        repriorise(network, **names, surrogate="categorical")
