"""Draws and predictions compile their programs at the first call for some shapes, and not again."""

import dataclasses
import functools
import itertools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.sparse import csr_array
from scipy.stats import multivariate_normal
from sklearn.preprocessing import StandardScaler

from numpyro_wide import ReadoutPredictive, collapse_readout, guide_draws, repriorise, wide_limit_draws
from tests.compilations import compilations
from tests.marks import parametrize
from tests.models import network, small_data

SITES = {"readout": "w", "features": "features"}
X, Y = small_data(12)


def hidden_draws(num_draws=5, seed=0):
    return {
        "hidden": jax.random.normal(jax.random.key(seed), (num_draws, 2, 20)),
        "sigma": jnp.linspace(0.2, 0.4, num_draws),
    }


def test_the_counter_counts():
    with compilations() as compiled:
        jax.jit(lambda x: jnp.cos(x) * 3.25)(jnp.ones(7))
    assert compiled


@pytest.mark.slow
def test_predictions_and_readouts():
    model = collapse_readout(network, observed="y", **SITES)
    predictive = ReadoutPredictive(model, hidden_draws(), (X, Y))
    keys, others = jax.random.split(jax.random.key(0)), jax.random.split(jax.random.key(1))
    first = predictive(keys[0], X[:4]), predictive.readout(keys[1])
    shifted, draws = X[:4] + np.float32(0.1), hidden_draws(seed=1)
    jax.block_until_ready(first)
    with compilations() as compiled:
        second = predictive(others[0], shifted), predictive.readout(others[1])
        # Other draws and data of the same shapes, as in a loop of active learning, are no other program.
        later = ReadoutPredictive(model, draws, (X, -Y))(others[0], shifted)
        jax.block_until_ready((second, later))
    assert compiled == []
    assert not np.allclose(first[0]["mean"], second[0]["mean"])
    assert not np.allclose(second[0]["mean"], later["mean"])
    with compilations() as compiled:
        predictive(keys[0], X[:3])
    assert compiled


@pytest.mark.slow
def test_wide_limit_and_guide():
    model = repriorise(network, targets="y", noise_scale="sigma", **SITES)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    params = svi.run(jax.random.key(0), 2, X, Y, progress_bar=False).params
    keys = jax.random.split(jax.random.key(1), 4)

    def both(one, other, y):
        return wide_limit_draws(one, model, 3, X, y), guide_draws(other, model, guide, params, 3, X, y)

    first = both(keys[0], keys[1], Y)
    moved = Y + np.float32(1.0)
    jax.block_until_ready(first)
    with compilations() as compiled:
        second = both(keys[2], keys[3], moved)
        jax.block_until_ready(second)
    assert compiled == []
    for before, after in zip(first, second, strict=True):
        assert not np.allclose(before["w"], after["w"])


def test_data_are_looked_at_in_every_call():
    model = repriorise(network, targets="y", noise_scale="sigma", **SITES)
    wide_limit_draws(jax.random.key(0), model, 3, X, Y)
    with pytest.raises(ValueError, match="targets must not contain NaN, but 12 of its entries do"):
        wide_limit_draws(jax.random.key(0), model, 3, X, np.full_like(Y, np.nan))


def test_options_of_the_model_are_part_of_the_program():
    def model(x, y=None, shift=0.0, is_shifted=False):
        network(x, None if y is None else y - shift * is_shifted, noise_scale=0.3)

    wrapped = collapse_readout(model, observed="y", **SITES)
    draws = {"hidden": hidden_draws()["hidden"]}
    means = [
        ReadoutPredictive(wrapped, draws, (X, Y), {"shift": shift, "is_shifted": is_shifted})(jax.random.key(0), X)
        for shift, is_shifted in [(1.0, False), (1.0, True), (2.0, True)]
    ]
    gaps = [float(jnp.abs(a["mean"] - b["mean"]).max()) for a, b in itertools.pairwise(means)]
    assert min(gaps) > 0.1


class Hidden:
    """Its repr does not show its number."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return "Hidden"


@dataclasses.dataclass(frozen=True)
class Equal:
    """It is equal to others whatever their numbers."""

    number: float = dataclasses.field(compare=False)


# Things that hold a number, and how a model reads it.
THINGS = {
    "object": (Hidden, lambda thing: thing.number),
    "equal object": (Equal, lambda thing: thing.number),
    "scaler": (lambda number: StandardScaler().fit([[number - 1], [number + 1]]), lambda thing: thing.mean_[0]),
    "sparse table": (lambda number: csr_array([[number, 0.0]]), lambda thing: thing.sum()),
    "partial": (lambda number: functools.partial(np.mean, np.full(1001, number)), lambda thing: thing()),
    "number": (float, lambda thing: thing),
}


@pytest.mark.fault("_compile.py", "else _ByIdentity(value)\n\n\ndef", "else value\n\n\ndef")
@parametrize("kind", THINGS, rest="slow")
def test_things_among_the_arguments_are_known_by_themselves(kind):
    """Against regression on one feature in closed form: inputs times the number that a thing holds."""
    make, read = THINGS[kind]

    def model(x, y=None, thing=None):
        numpyro.sample("other", dist.Normal(0, 1))
        features = numpyro.deterministic("features", jnp.asarray(read(thing), x.dtype) * x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)

    x, y, wrapped = X[:, :1], Y[:, 0], collapse_readout(model, observed="y", **SITES)
    for fitted in (2.0, 3.0):
        predictive = ReadoutPredictive(wrapped, {"other": np.ones(2)}, (x, y, make(fitted)))
        slope = fitted * (x[:, 0] @ y) / (fitted**2 * (x[:, 0] @ x[:, 0]) + 0.25)
        for new in (1.0, 5.0):
            mean = predictive.moments(x, thing=make(new))["mean"]
            np.testing.assert_allclose(mean, np.tile(new * slope * x[:, 0], (2, 1)), rtol=1e-5)


def test_features_from_functions_in_python():
    """Two models of the same text, by their dense evidence; and the first one once more."""

    def model_of(fn):
        def model(x, y=None):
            numpyro.sample("other", dist.Normal(0, 1))
            values = jax.pure_callback(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            features = numpyro.deterministic("features", values)
            w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
            numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)

        return collapse_readout(model, observed="y", **SITES)

    for fn in (np.sin, np.cos, np.sin):
        found = ReadoutPredictive(model_of(fn), {"other": np.ones(2)}, (X, Y[:, 0])).log_evidence()
        covariance = fn(X) @ fn(X).T + 0.25 * np.eye(len(X))
        np.testing.assert_allclose(found, np.full(2, multivariate_normal(cov=covariance).logpdf(Y[:, 0])), rtol=1e-5)


@pytest.mark.slow
def test_the_batch_size_does_not_matter():
    model = collapse_readout(network, observed="y", **SITES)
    found = [
        ReadoutPredictive(model, hidden_draws(), (X, Y), batch_size=size)(jax.random.key(0), X[:4])
        for size in (None, 2, np.int64(5))
    ]
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found[0], other)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, but got 2.5"):
        ReadoutPredictive(model, hidden_draws(), (X, Y), batch_size=2.5)


def test_nothing_to_predict_and_nothing_to_predict_with():
    model = collapse_readout(network, observed="y", **SITES)
    predictive = ReadoutPredictive(model, hidden_draws(), (X, Y))
    with pytest.raises(AssertionError, match="no rows to predict for, and a plate of the model may need one"):
        predictive(jax.random.key(0), X[:0])
    with pytest.raises(ValueError, match="at least one draw, of the same length, but the lengths are {'hidden': 0"):
        ReadoutPredictive(model, hidden_draws(0), (X, Y))
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key, such as jax.random.key\(0\), but is an int"):
        predictive(0, X)
    with pytest.raises(TypeError, match="rng_key must be a PRNG key"):
        predictive.readout(0)
    for keys in (jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.PRNGKey(0), 3)):
        with pytest.raises(ValueError, match=r"rng_key must be one PRNG key, but is an array of them, of shape \(3,\)"):
            predictive(keys, X)
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key.*the order is wide_limit_draws\(rng_key, model"):
        wide_limit_draws(0, model, 3, X, Y)
    assert predictive(jax.random.PRNGKey(0), X[:2])["mean"].shape == (5, 2, 1)


# What a model is at a call -----------------------------------------------------------------------------------------

FACTOR = 1.0


def scaled_network(x, y=None):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 4]).to_event(2))
    features = numpyro.deterministic("features", FACTOR * jnp.tanh(x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)


def test_a_predictive_answers_for_the_model_as_it_was_and_a_new_one_for_that_of_now(monkeypatch):
    """As a jitted function does: at inputs of a shape that it has computed at."""
    model, key = collapse_readout(scaled_network, observed="y", **SITES), jax.random.key(0)
    draws, data = {"hidden": jnp.ones((3, 1, 4))}, (X[:, :1], Y[:, 0])
    old = ReadoutPredictive(model, draws, data)
    before = old(key, X[:4, :1])["mean"]
    limit = wide_limit_draws(key, model, 5, *data)["w"]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    np.testing.assert_array_equal(old(key, X[:4, :1])["mean"], before)
    new = ReadoutPredictive(model, draws, data)(key, X[:4, :1])["mean"]
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    assert not np.allclose(new, before)
    np.testing.assert_array_equal(ReadoutPredictive(model, draws, data)(key, X[:4, :1])["mean"], before)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert not np.allclose(wide_limit_draws(key, model, 5, *data)["w"], limit)


@pytest.mark.fault("readout/_predictive.py", "leaf.copy() if type(leaf) is np.ndarray else leaf", "leaf")
def test_arrays_are_copied():
    x, y, draws = X[:, :1].copy(), Y[:, 0].copy(), {"hidden": np.ones((2, 1, 4), "f")}
    predictive = ReadoutPredictive(collapse_readout(scaled_network, observed="y", **SITES), draws, (x, y))
    before = predictive(jax.random.key(0), X[:, :1])["mean"]
    x *= 5
    y *= 5
    draws["hidden"] *= 5
    np.testing.assert_array_equal(predictive(jax.random.key(0), X[:, :1])["mean"], before)


def test_a_predictive_survives_pickling():
    data = (X[:, :1], Y[:, 0])
    predictive = ReadoutPredictive(
        collapse_readout(scaled_network, observed="y", **SITES), {"hidden": jnp.ones((2, 1, 4))}, data
    )
    before = predictive(jax.random.key(0), X[:3, :1])["mean"]
    again = pickle.loads(pickle.dumps(predictive))
    np.testing.assert_array_equal(again(jax.random.key(0), X[:3, :1])["mean"], before)


@pytest.mark.slow
def test_first_predictions_from_several_threads():
    """NumPyro's stack of handlers is one for all threads."""
    key, found = jax.random.key(0), {}
    model = collapse_readout(scaled_network, observed="y", **SITES)
    made = [ReadoutPredictive(model, {"hidden": jnp.ones((n, 1, 4))}, (X[:, :1], Y[:, 0])) for n in (2, 3, 4, 5)]

    def predict(index):
        found[index] = made[index](key, X[:, :1])["mean"]

    threads = [threading.Thread(target=predict, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, predictive in enumerate(made):
        np.testing.assert_array_equal(found[index], predictive(key, X[:, :1])["mean"])
