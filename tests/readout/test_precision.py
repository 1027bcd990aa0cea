"""Predictions are computed in float64 from draws of any precision, and returned in the caller's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from numpyro.infer import Predictive
from scipy.stats import norm

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise
from numpyro_wide.nn import FCN, bnn, by_row_blocks
from tests.conftest import enable_x64
from tests.marks import parametrize

SITES = {"readout": "w", "features": "features"}
RNG = np.random.default_rng(0)
X, X_NEW = (RNG.normal(size=(n, 2)).astype("f") for n in (200, 7))
Y, Y_NEW = np.sin(X[:, 0]), np.sin(X_NEW[:, 0])
HIDDEN = RNG.normal(size=(3, 2, 30)).astype("f")
KEY = jax.random.key(0)
NOISE = 1e-3  # lost in float32: less than rounding of the squared norm of 200 rows


def network(x, y=None, noise=NOISE):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 30]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([30]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)


def make(model=network, **options):
    return ReadoutPredictive(collapse_readout(model, observed="y", **SITES), {"hidden": HIDDEN}, (X, Y), **options)


def dense(hidden, noise=NOISE, scales=1.0):
    """Mean and variance of the function at the new inputs, by NumPy."""
    old, new = (np.tanh((scales * x) @ hidden.astype(float)) for x in (X.astype(float), X_NEW.astype(float)))
    precision = old.T @ old / noise**2 + np.eye(30)
    mean = new @ np.linalg.solve(precision, old.T @ Y.astype(float)) / noise**2
    return mean, np.sum(new * np.linalg.solve(precision, new.T).T, axis=1)


@pytest.mark.fault("readout/_predictive.py", "with double_precision():\n                    return", "return")
@parametrize("is_mapped", [False, True], rest="slow")
def test_a_noise_that_float32_loses(is_mapped, tmp_path):
    predictive = make()
    if is_mapped:
        np.save(tmp_path / "hidden.npy", HIDDEN)
        draws = {"hidden": np.load(tmp_path / "hidden.npy", mmap_mode="r")}
        predictive = ReadoutPredictive(predictive.model, draws, (X, Y))
    found, means, variances = predictive.moments(X_NEW), *zip(*map(dense, HIDDEN), strict=True)
    assert {values.dtype for values in found.values()} == {jnp.dtype("float32")}
    np.testing.assert_allclose(found["mean"], means, rtol=1e-4)
    np.testing.assert_allclose(found["variance"], variances, rtol=1e-4)
    scale = np.sqrt(np.array(variances) + NOISE**2)
    density = np.log(np.mean(norm(means, scale).pdf(Y_NEW.astype(float)), axis=0))
    np.testing.assert_allclose(predictive.log_density(X_NEW, Y_NEW), density, rtol=1e-4)
    assert np.isfinite(predictive.summary(X_NEW).mean).all()


def test_under_a_transformation_the_caller_s_precision_stays():
    predictive = make()
    lost = jax.jit(predictive.moments)(X_NEW)["mean"]
    assert lost.dtype == jnp.float32 and jnp.isnan(lost).all()
    large = ReadoutPredictive(predictive.model, {"hidden": HIDDEN}, (X, Y, 0.1))
    found = jax.jit(lambda x: large.moments(x, None, 0.1))(X_NEW)
    expected = large.moments(X_NEW, None, 0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), found, expected)
    with enable_x64(True):
        assert jax.jit(predictive.moments)(X_NEW)["mean"].dtype == predictive.moments(X_NEW)["mean"].dtype == "float64"


def test_results_go_on_with_arrays_of_the_caller():
    """Warnings of truncated types are errors here."""
    predictive = make()
    samples = {"hidden": jnp.asarray(HIDDEN), "w": predictive.readout(KEY)}
    found = Predictive(network, samples)(KEY, X_NEW)["y"]
    np.testing.assert_allclose(found + jnp.zeros(7), predictive(KEY, X_NEW)["y"], atol=0.1)


def test_labels_keep_the_caller_s_integers():
    def classes(x, y=None):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Categorical(logits=features @ w), obs=y)

    model = repriorise(classes, targets="y", surrogate=lambda y: (jnp.zeros((len(y), 3)), 1.0), **SITES)
    w = RNG.normal(size=(4, 2, 3)).astype("f")
    found = ReadoutPredictive(model, {"w": w}, (X, np.arange(200) % 3))(KEY, X_NEW)
    assert {name: str(values.dtype) for name, values in found.items()} == {"probs": "float32", "y": "int32"}
    logits = np.exp(X_NEW.astype(float) @ w)
    np.testing.assert_allclose(found["probs"], logits / logits.sum(axis=-1, keepdims=True), rtol=3e-7)


@pytest.mark.as_compiled
def test_a_model_that_fixes_float32():
    """What it rounds stays so; where its types no longer agree in float64, it is predicted from in float32, told."""
    scales = np.array([0.5, 1.5])  # which JAX remembers in float32

    def rounds(x, y=None):
        network(jnp.asarray(x, "float32"), y)

    def fixes(x, y=None):
        network(jax.lax.scan(lambda total, row: (total + row, row), jnp.zeros(2, "float32"), x)[1], y, noise=0.1)

    def remembers(x, y=None):
        network(x * scales, y, noise=0.1)

    np.testing.assert_allclose(make(rounds).moments(X_NEW)["mean"], make().moments(X_NEW)["mean"], rtol=1e-4)
    chain = jax.jit(remembers)
    with seed(rng_seed=0):
        chain.lower(X, Y)  # as the chain's program did
    for model, factor in ((fixes, 1.0), (remembers, scales)):
        with pytest.warns(RuntimeWarning, match=r"computed in float32: .* jnp\.asarray of them"):
            predictive = make(model)
        found = predictive.moments(X_NEW)["mean"]
        exact = [dense(hidden, 0.1, factor)[0] for hidden in HIDDEN]
        np.testing.assert_allclose(found, exact, rtol=2e-2, atol=1e-3)


@pytest.mark.as_compiled
def test_priors_by_numpy_arrays_are_predicted_from_in_float64():
    network = FCN(depth=1, width=30, activation="tanh")
    scales = {"input_scale": dist.LogNormal(np.zeros(2), 1.0), "w_std": dist.Uniform(np.zeros(1), np.ones(1))}
    names = {"readout": "readout", "features": "features", "observed": "y"}
    model = collapse_readout(bnn(network, num_outputs=None, noise=NOISE, scales=scales), **names)

    def latent(key):
        sites = trace(seed(model, key)).get_trace(X, Y)
        return {n: site["value"][None] for n, site in sites.items() if site["type"] == "sample" and n != "y"}

    hidden = jax.jit(latent)(KEY)  # a program of the priors in float32, as the chain's is
    found = ReadoutPredictive(model, hidden, (X, Y)).moments(X_NEW)["mean"]  # a warning is an error here
    assert np.isfinite(found).all()


@pytest.mark.as_compiled
def test_kept_sums_over_rows_serve_both_precisions():
    def model(x, y=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 30]).to_event(2))
        features = by_row_blocks(lambda rows: jnp.tanh(rows @ hidden), 50, site="features")(x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([30]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)

    predictive = make(model)
    found = predictive.moments(X_NEW)["mean"]
    np.testing.assert_allclose(found, [dense(hidden, 0.1)[0] for hidden in HIDDEN], rtol=1e-4)
    np.testing.assert_allclose(jax.jit(predictive.moments)(X_NEW)["mean"], found, rtol=1e-2, atol=1e-4)
