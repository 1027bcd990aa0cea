"""Functions of many draws, a batch at a time, against ``jax.lax.map``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide._blocks import map_draws


def function(draw):
    return {"hidden": jnp.tanh(draw["weights"]) @ draw["weights"].T, "label": draw["label"] + 1}


@pytest.mark.fault("_blocks.py", "flat[repeated - size :]", "flat[-size:]")
@pytest.mark.parametrize(("num_draws", "batch_size"), [(1, 1), (7, 1), (7, 3), (7, 5), (2003, 262), (7, 7), (7, 50)])
def test_every_draw_is_mapped_once_and_in_order(num_draws, batch_size):
    weights = jax.random.normal(jax.random.key(0), (num_draws, 2, 3))
    draws = {"weights": weights, "label": jnp.arange(num_draws)}
    found = jax.jit(lambda draws: map_draws(function, draws, batch_size))(draws)
    expected = jax.lax.map(function, draws)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, expected)


def test_gradients_are_those_of_each_draw():
    values = jnp.arange(5.0)
    found = jax.grad(lambda values: jnp.sum(map_draws(jnp.sin, values, 2)))(values)
    np.testing.assert_allclose(found, jnp.cos(values), rtol=1e-6)
