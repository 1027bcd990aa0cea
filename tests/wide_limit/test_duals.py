"""The angle of a point, against NumPy's in extended precision, and its derivatives against a formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.wide_limit._duals import angle_of
from tests.marks import parametrize


@pytest.mark.fault("wide_limit/_duals.py", "is_steep = low > _EIGHTH * high", "is_steep = low > 2 * _EIGHTH * high")
@parametrize("dtype", [np.float32, np.float64], rest="slow")
def test_angles_are_numpy_s_to_rounding(x64, dtype):
    """All round, near the axes, and at sizes far apart."""
    rng = np.random.default_rng(0)
    near = np.geomspace(1e-30, 1, 1000)
    angles = np.concatenate([rng.uniform(-np.pi, np.pi, 100_000), near, np.pi - near, np.pi / 2 - near])
    sizes = 10 ** rng.uniform(-5, 5, len(angles))
    y, x = ((sizes * part(angles)).astype(dtype) for part in (np.sin, np.cos))
    found = jax.jit(angle_of)(y, x)
    assert found.dtype == dtype
    expected = np.arctan2(y.astype(np.longdouble), x.astype(np.longdouble))
    assert np.max(np.abs(np.asarray(found) / expected - 1)) < 3 * np.finfo(dtype).eps


@pytest.mark.as_compiled
def test_the_axes_and_the_origin():
    x = jnp.array([0.0, 1.0, -1.0, 0.0, 0.0, np.inf])
    y = jnp.array([0.0, 0.0, 0.0, 2.0, -2.0, 1.0])
    np.testing.assert_array_equal(angle_of(y, x), np.float32([0, 0, np.pi, np.pi / 2, -np.pi / 2, 0]))


def test_derivatives(x64):
    """The second one as well, and zero at the origin."""
    y, x = jnp.array([0.3, -2.0]), jnp.array([-1.1, 0.2])
    by_y, by_x = (jax.vmap(jax.grad(angle_of, argnum))(y, x) for argnum in (0, 1))
    np.testing.assert_allclose((by_y, by_x), (x / (x**2 + y**2), -y / (x**2 + y**2)), rtol=1e-12)
    second = jax.vmap(jax.grad(jax.grad(angle_of)))(y, x)
    np.testing.assert_allclose(second, -2 * x * y / (x**2 + y**2) ** 2, rtol=1e-12)
    assert jax.grad(angle_of)(0.0, 0.0) == 0
