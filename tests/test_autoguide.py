"""Dropout and degenerate guides: against dropout by hand, and against principal components."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen
from numpyro.contrib.module import random_flax_module
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_wide.autoguide import AutoDegenerateNormal, AutoDropout
from numpyro_wide.distributions import DegenerateNormal
from numpyro_wide.elbo import TraceQKL

X = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), "f")
Y = jnp.sin(X[:, :2])
PRIOR_SCALE, NOISE = 1.4, 0.3


def network(x, y=None, batch=None):
    prior = dist.Normal(0.0, PRIOR_SCALE)
    w1 = numpyro.sample("w1", prior.expand([3, 5]).to_event(2))
    b1 = numpyro.sample("b1", prior.expand([5]).to_event(1))
    with numpyro.plate("hidden", 5):
        w2 = numpyro.sample("w2", prior.expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as index:
        mean = jnp.tanh(x[index] @ w1 + b1) @ w2
        numpyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=None if y is None else y[index])


@pytest.mark.as_compiled
def test_gradient_is_dropout_with_l2(x64):
    """Rows by masks, squared error, and L2 on kept rows: parameter by parameter (Hron 2018, section 4.1)."""
    x, y, rate = jnp.asarray(X, float), jnp.asarray(Y, float), {"w1": 0.2, "w2": 0.4}
    guide = AutoDropout(network, rate=rate)
    svi = SVI(network, guide, numpyro.optim.Adam(0.01), TraceQKL())
    params = svi.get_params(svi.init(jax.random.key(1), x, y))
    assert set(params) == {"w1_auto_rows", "w2_auto_rows", "b1_auto_loc"}
    key = jax.random.key(5)
    gradient = jax.jit(jax.grad(lambda p: TraceQKL().loss(key, p, network, guide, x, y)))(params)

    # The masks of this very draw: which rows the guide left standing.
    seeded = numpyro.handlers.seed(guide, jax.random.split(key)[1])
    draws = numpyro.handlers.substitute(seeded, params)(x, y)
    masks = {name: jnp.any(draws[name] != 0, -1).astype(float) for name in ("w1", "w2")}
    assert 0 < masks["w1"].sum() + masks["w2"].sum() < 8

    def dropout_training(p):
        hidden = jnp.tanh((x * masks["w1"]) @ p["w1_auto_rows"] + p["b1_auto_loc"])
        residual = y - (hidden * masks["w2"]) @ p["w2_auto_rows"]
        decay = jnp.sum(p["b1_auto_loc"] ** 2)
        decay += sum((1 - rate[n]) * jnp.sum(p[f"{n}_auto_rows"] ** 2) for n in rate)
        return jnp.sum(residual**2) / (2 * NOISE**2) + decay / (2 * PRIOR_SCALE**2)

    expected = jax.grad(dropout_training)(params)
    for name in params:
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-9, err_msg=name)

    # Minibatches: the likelihood averages to the full one, the divergence is not scaled.
    def batched(p, index):
        fixed = numpyro.handlers.substitute(network, data={"data": index})
        return TraceQKL().loss(key, p, fixed, guide, x, y, 3)

    batches = jnp.arange(9).reshape(3, 3)
    each = jax.jit(jax.vmap(jax.grad(batched), (None, 0)))(params, batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.mean(0), b, rtol=1e-9), each, gradient)


@pytest.mark.as_compiled
@pytest.mark.fault("autoguide.py", "BernoulliDropout(rows, rate,", "BernoulliDropout(rows, 1 - rate,")
def test_learned_rate_and_posterior_draws():
    x = jax.random.normal(jax.random.key(0), (60, 4))
    y = x @ jnp.array([[2.0], [-1.0], [1.5], [1.0]])

    def linear(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 1]).to_event(2))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal((x @ w)[:, 0], 0.2), obs=None if y is None else y[:, 0])

    guide = AutoDropout(linear, rate=0.5, learn_rate=True)
    svi = SVI(linear, guide, numpyro.optim.Adam(0.02), TraceQKL(num_particles=8))
    fit = svi.run(jax.random.key(0), 500, x, y, progress_bar=False)
    # Every row is needed, so dropping costs and the rate falls.
    assert 0 < fit.params["w_auto_rate"] < 0.1
    draws = guide.sample_posterior(jax.random.key(1), fit.params, sample_shape=(500,))["w"]
    assert draws.shape == (500, 4, 1)
    np.testing.assert_allclose(jnp.mean(draws == 0), fit.params["w_auto_rate"], atol=0.03)
    with pytest.raises(NotImplementedError, match="sample_posterior"):
        guide.median(fit.params)


@pytest.mark.as_compiled
def test_dropout_of_a_flax_module():
    def model(x, y=None):
        net = random_flax_module("net", linen.Dense(2), prior=dist.Normal(0, 1), input_shape=(1, 3))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x), NOISE).to_event(1), obs=y)

    guide = AutoDropout(model, rate=0.1)
    svi = SVI(model, guide, numpyro.optim.Adam(0.02), TraceQKL())
    fit = svi.run(jax.random.key(0), 100, X, Y, progress_bar=False)
    assert "net/kernel_auto_rows" in fit.params and "net/bias_auto_loc" in fit.params
    assert fit.losses[-10:].mean() < fit.losses[:10].mean()


@pytest.mark.as_compiled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.0}, r"in \(0, 1\), got 1.0"),
        ({"rate": {"w1": -0.1}}, r"in \(0, 1\)"),
        ({"rate": 0.5, "temperature": 0.0}, "temperature"),
        ({"rate": 0.5, "sites": ["w3"]}, "suitable are 'w1', 'w2', other latent sites are.*'b1'"),
        ({"rate": 0.5, "sites": ["b1"]}, "to_event"),
    ],
)
def test_mistakes_with_dropout_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        numpyro.handlers.seed(AutoDropout(network, **arguments), 0)(X, Y)


@pytest.mark.as_compiled
@pytest.mark.fault("elbo/_trace_qkl.py", "log_density(guide_site) - log_density(model_site)", "log_density(guide_site)")
def test_trace_qkl_is_the_elbo_of_a_proper_guide():
    def guide(x, y=None):
        numpyro.sample("w1", dist.Normal(jnp.full((3, 5), 0.2), 0.3).to_event(2))
        # No analytic KL for this one.
        numpyro.sample("b1", dist.StudentT(5.0, jnp.zeros(5), 0.4).to_event(1))
        with numpyro.plate("hidden", 5):
            numpyro.sample("w2", dist.Normal(jnp.full(2, -0.4), 0.2).to_event(1))

    for options in ({}, {"num_particles": 3, "vectorize_particles": False, "sum_sites": False}):
        args = jax.random.key(2), {}, network, guide, X, Y
        ours, expected = (elbo(**options).loss(*args) for elbo in (TraceQKL, TraceMeanField_ELBO))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


@pytest.mark.slow
def test_trace_elbo_has_the_value_of_trace_qkl_but_not_the_slope_of_a_learned_rate():
    """It takes log q at a draw of the rows, whose derivative in the rate is zero on average, not the entropy's."""
    rate, num_rows = 0.2, 3

    def model():
        numpyro.sample("w", dist.Normal(0, 1).expand([num_rows, 2]).to_event(2))

    guide = AutoDropout(model, rate=rate, learn_rate=True)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceQKL())
    params = svi.get_params(svi.init(jax.random.key(0)))
    params["w_auto_rows"] = jnp.full((num_rows, 2), 0.1)  # so small that the prior hardly feels the rate

    def value_and_slope(loss):
        of_params = lambda p: loss(num_particles=4000).loss(jax.random.key(1), p, model, guide)  # noqa: E731
        value, gradient = jax.value_and_grad(of_params)(params)
        return np.array([value, gradient["w_auto_rate"]])

    difference = value_and_slope(Trace_ELBO) - value_and_slope(TraceQKL)
    expected = [0, num_rows * np.log((1 - rate) / rate)]
    # Standard errors: 0.015 of log q, 0.07 of its derivative.
    assert np.all(np.abs(difference - expected) < [0.07, 0.3])


def test_trace_qkl_carries_mutable_state():
    def counting(y):
        state = numpyro.primitives.mutable("calls", {"count": jnp.array(0.0)})
        state["count"] += 1
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0, 1)), 1.0), obs=y)

    svi = SVI(counting, AutoDelta(counting), numpyro.optim.Adam(0.01), TraceQKL())
    state = svi.init(jax.random.key(1), 1.0)
    start = state.mutable_state["calls"]["count"]
    state, _ = svi.update(state, 1.0)
    assert state.mutable_state["calls"]["count"] == start + 1
    svi.loss = TraceQKL(num_particles=2)
    with pytest.warns(UserWarning, match="more than one particle"):
        svi.update(state, 1.0)


def covariance():
    root = np.random.default_rng(11).normal(size=(6, 6))
    vectors = np.linalg.qr(root)[0]
    return vectors, np.array([4.0, 2.5, 1.2, 0.7, 0.4, 0.2])


def angles(basis, vectors):
    """Principal angles between the guide's plane and a pair of eigenvectors."""
    cosines = np.linalg.svd(np.linalg.qr(basis)[0].T @ vectors, compute_uv=False)
    return np.arccos(np.clip(cosines, -1, 1))


@pytest.mark.slow
def test_proposition_6_principal_components_through_svi(x64):
    """Against N(0, Σ) the optimal plane is that of the leading eigenvectors, whatever the random start."""
    vectors, variances = covariance()
    sigma = (vectors * variances) @ vectors.T

    def model():
        numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(6), covariance_matrix=sigma))

    def guide():
        columns = numpyro.param("columns", lambda key: jax.random.normal(key, (6, 2)))
        scale = numpyro.param("scale", jnp.ones(2), constraint=dist.constraints.softplus_positive)
        numpyro.sample("w", DegenerateNormal(jnp.zeros(6), jnp.linalg.qr(columns)[0], scale))

    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), TraceQKL())

    @jax.jit
    @jax.vmap
    def fit(key):
        state, losses = jax.lax.scan(lambda s, _: svi.update(s), svi.init(key), length=1500)
        return svi.get_params(state), losses[-1]

    starts = 12
    params, losses = fit(jax.random.split(jax.random.key(0), starts))
    elsewhere = 0
    for columns, scale in zip(params["columns"], params["scale"], strict=True):
        basis = np.linalg.qr(columns)[0]
        near = min(itertools.combinations(range(6), 2), key=lambda pair: angles(basis, vectors[:, list(pair)]).max())
        assert angles(basis, vectors[:, list(near)]).max() < 1e-2
        if near != (0, 1):
            elsewhere += 1
            continue
        fitted = (basis * np.square(scale)) @ basis.T
        np.testing.assert_allclose(np.sort(np.linalg.eigvalsh(fitted))[-2:], variances[[1, 0]], rtol=0.02)
        for k in range(2):
            axis = np.linalg.eigh(fitted)[1][:, -1 - k]
            assert np.arccos(min(1.0, abs(axis @ vectors[:, k]))) < 1e-2
    print(f"\nProp. 6: {elsewhere} of {starts} random starts ended in another stationary plane")
    # The value at the optimum: every discarded direction pays ½ log 2π λ.
    np.testing.assert_allclose(losses.min(), 0.5 * np.log(2 * np.pi * variances[2:]).sum(), rtol=1e-4)
    assert elsewhere <= starts // 3


@pytest.mark.slow
def test_auto_degenerate_normal_finds_the_plane(x64):
    vectors, variances = covariance()
    mean, sigma = np.array([1.0, -2.0, 0.5, 0.0, 3.0, 1.0]), (vectors * variances) @ vectors.T

    def model():
        # Two sites, so that the guide has to join them; the second given the first.
        first = numpyro.sample("u", dist.MultivariateNormal(mean[:2], covariance_matrix=sigma[:2, :2]))
        gain = sigma[2:, :2] @ np.linalg.inv(sigma[:2, :2])
        numpyro.sample(
            "v",
            dist.MultivariateNormal(
                mean[2:] + gain @ (first - mean[:2]), covariance_matrix=sigma[2:, 2:] - gain @ sigma[:2, 2:]
            ),
        )

    guide = AutoDegenerateNormal(model, rank=2)
    schedule = optax.cosine_decay_schedule(0.05, 2000)
    svi = SVI(model, guide, optax.adam(schedule), TraceQKL(num_particles=32))
    fit = svi.run(jax.random.key(2), 2000, progress_bar=False)
    posterior = guide.get_posterior(fit.params)
    np.testing.assert_allclose(posterior.basis.T @ posterior.basis, np.eye(2), atol=1e-12)
    assert angles(posterior.basis, vectors[:, :2]).max() < 2e-2
    fitted = (posterior.basis * posterior.scale**2) @ posterior.basis.T
    np.testing.assert_allclose(np.linalg.eigvalsh(fitted)[-2:], variances[[1, 0]], rtol=0.03)
    np.testing.assert_allclose(guide.median(fit.params)["v"], mean[2:], atol=0.03)
    draws = guide.sample_posterior(jax.random.key(0), fit.params, sample_shape=(2000,))
    joined = jnp.concatenate([draws["u"], draws["v"]], -1)
    assert bool(jnp.all(posterior.support(joined)))
    quantiles = guide.quantiles(fit.params, [0.25, 0.5, 0.75])["v"]
    np.testing.assert_allclose(jnp.quantile(draws["v"], jnp.array([0.25, 0.5, 0.75]), axis=0), quantiles, atol=0.15)


def test_mistakes_with_degenerate_guides_are_named():
    with pytest.raises(ValueError, match="at least 1"):
        AutoDegenerateNormal(network, rank=0)
    with pytest.raises(ValueError, match="init_scale"):
        AutoDegenerateNormal(network, rank=1, init_scale=0.0)
    with pytest.raises(ValueError, match="at most the number of weights, 30"):
        numpyro.handlers.seed(AutoDegenerateNormal(network, rank=31), 0)(X, Y)
