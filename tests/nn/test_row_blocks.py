"""Networks in blocks of rows: the same numbers, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import log_density

from numpyro_wide import collapse_readout
from numpyro_wide.nn import FCN, _row_blocks, bnn

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


@pytest.mark.parametrize("block_size", [7, "auto"])
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
