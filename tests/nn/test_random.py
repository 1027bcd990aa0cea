"""Networks in blocks of rows: the same numbers, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import log_density

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise, wide_limit_draws
from numpyro_wide.nn import FCN, bnn, by_row_blocks
from numpyro_wide.nn import _random as _row_blocks
from tests.marks import parametrize

NETWORK = FCN(4, 24, "erf", b_std=0.2)


def gradient(num_rows, block_size):
    """The collapsed model's log density with its gradient, and what it needs: compiled, but not run."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 3)).astype("f")
    y = np.sin(2 * x[:, :2]).astype("f")
    plain = bnn(NETWORK, 2, 0.3, block_size=block_size)
    model = collapse_readout(plain, readout="readout", features="features", observed="y")
    params = NETWORK.init(jax.random.key(0), x[:1])["params"]
    hidden = {f"hidden.{layer}.{name}": value for layer, part in params.items() for name, value in part.items()}
    compiled = jax.jit(jax.value_and_grad(lambda values: log_density(model, (x, y), {}, values)[0]))
    return compiled.lower(hidden).compile(), hidden


@parametrize("block_size", [7, "auto"], rest="slow")
def test_blocks_give_the_same_density_and_gradient(block_size, monkeypatch):
    # About 3 · 24 numbers a layer and row: a dozen blocks of the 50 rows.
    monkeypatch.setattr(_row_blocks, "AUTO_NUMBERS", 1500)
    whole, hidden = gradient(50, None)
    blocked, _ = gradient(50, block_size)
    assert ("while" in blocked.as_text()) and ("while" not in whole.as_text())
    value, slope = whole(hidden)
    blocked_value, blocked_slope = blocked(hidden)
    np.testing.assert_allclose(blocked_value, value, rtol=1e-5)
    slope, blocked_slope = ravel_pytree(slope)[0], ravel_pytree(blocked_slope)[0]
    np.testing.assert_allclose(blocked_slope, slope, rtol=1e-3, atol=2e-5 * float(jnp.abs(slope).max()))


def test_blocks_bound_the_memory():
    whole, blocked = (gradient(8192, block_size)[0].memory_analysis() for block_size in (None, 256))
    assert blocked.temp_size_in_bytes < 0.55 * whole.temp_size_in_bytes


def test_automatic_blocks_are_large_enough_to_be_one_for_small_data():
    assert "while" not in gradient(50, "auto")[0].as_text()


def test_numbers_per_row_are_those_that_the_operations_give():
    def network(x):
        hidden = jnp.tanh(x @ jnp.ones((3, 5)))  # 5 and 5
        return jax.jit(lambda h: h @ jnp.ones((5, 2)))(hidden)  # 2, inside

    assert _row_blocks._numbers_per_row(network, jnp.ones((7, 3))) == 12


@pytest.mark.as_compiled
def test_memory_of_a_gradient_does_not_grow_with_the_rows():
    few, many = (gradient(num_rows, 256)[0].memory_analysis() for num_rows in (2048, 65536))
    # But for copies of the targets and of the means of both runs: features would be twelve times as large as these.
    targets = 65536 * 2 * 4
    assert many.temp_size_in_bytes < few.temp_size_in_bytes + 8 * targets


@pytest.mark.slow
def test_one_pass_gives_the_draws_and_predictions_of_all_rows_at_once():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)).astype("f")
    y = np.sin(x[:, 0]) + 0.2 * rng.normal(size=90).astype("f")
    found = []
    for block_size in (None, 32):  # which does not divide 90
        plain = bnn(FCN(1, 20), None, 0.2, block_size=block_size)
        model = collapse_readout(plain, readout="readout", features="features", observed="y")
        draws = wide_limit_draws(jax.random.key(0), model, 3, x, y)
        predictive = ReadoutPredictive(model, draws, (x, y))
        moments = predictive(jax.random.key(1), x[:70])
        scores = predictive.log_density(x[:70], y[:70]), predictive.joint_log_density(x[:9], y[:9])
        found.append((dict(draws), moments["mean"], moments["predictive_variance"], *scores))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-3, atol=2e-3), *found)


@parametrize("wrap", [False, True], rest="slow")
def test_gradients_of_models_that_hold_the_readout(wrap):
    x = np.random.default_rng(0).normal(size=(5, 2)).astype("f")
    values = {
        "hidden.hidden_0.kernel": np.full((2, 3), 0.3, "f"),
        "readout_base" if wrap else "readout": np.ones(3, "f"),
    }
    found = []
    for block_size in (None, 2):
        model = bnn(FCN(1, 3, "erf"), None, 0.2, block_size=block_size)
        if wrap:
            model = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.2)
        density = lambda values, model=model: log_density(model, (x, x[:, 0]), {}, values)[0]  # noqa: E731
        found.append(jax.jit(jax.grad(density))(values))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-3), *found)


def test_what_blocked_features_cannot_do_is_said():
    def model(x):
        features = by_row_blocks(lambda x: jnp.tanh(x), 2, site="features")(x)
        return features.T

    with pytest.raises(AttributeError, match="'RowFeatures' object has no attribute 'T'"):
        model(np.ones((5, 2), "f"))


@pytest.mark.as_compiled
def test_own_model_says_that_its_features_come_by_blocks():
    def model(block_size, x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 8]).to_event(2))
        features = by_row_blocks(lambda x: jnp.tanh(x @ w), block_size, site="features")(x)
        readout = numpyro.sample("readout", dist.Normal(0, 1).expand([8]).to_event(1))
        numpyro.sample("y", dist.Normal(0.5 + features @ readout, 0.3).to_event(1), obs=y)

    wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
    x = np.random.default_rng(0).normal(size=(23, 2)).astype("f")
    values = {"w": np.ones((2, 8), "f") / 4}
    whole, blocked = (log_density(wrapped, (size, x, x[:, 0]), {}, values)[0] for size in (None, 5))
    np.testing.assert_allclose(blocked, whole, rtol=1e-5)
