"""Slices of a log posterior, as their study draws them: great circles, and densities in a model's coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

from numpyro_wide import repriorise
from numpyro_wide.linear_gaussian import readout_map
from studies._slices import posterior_slice
from tests.models import network, small_data


def slerp(a, b, t):
    """Spherical linear interpolation of directions as Shoemake 1985 writes it, norms linearly."""
    one, two = np.linalg.norm(a), np.linalg.norm(b)
    angle = np.arccos(a @ b / one / two)
    direction = (np.sin((1 - t) * angle) * a / one + np.sin(t * angle) * b / two) / np.sin(angle)
    return ((1 - t) * one + t * two) * direction


def test_a_slice_is_spherical_interpolation():
    """The log density of a linear function of the weights gives the weights away."""
    points = np.random.default_rng(1).normal(size=(3, 12)).astype("f") * np.array([[1], [2], [0.5]], "f")
    weights = np.random.default_rng(2).normal(size=12).astype("f")

    def model():
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (12,)))
        numpyro.factor("linear", w @ weights)

    found = posterior_slice(model, [{"w": point} for point in points], resolution=7, margin=0.0)
    # The first edge lies along the first axis, where the second coordinate is 0.
    first, second = found.points[:2]
    assert (first == 0).all() and second[1] == pytest.approx(0, abs=1e-12)
    row = np.flatnonzero(np.isclose(found.angles[1], 0))
    assert row.size == 1
    for angle, value in zip(found.angles[0], found.log_density[row[0]], strict=True):
        expected = slerp(points[0].astype(float), points[1].astype(float), angle / second[0]) @ weights
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "repriorised"])
def test_a_slice_has_the_density_of_the_model_s_own_coordinates(form):
    """That of θ, or of φ: that of θ times |det ∂θ/∂φ|; a bounded site as NumPyro's samplers see it."""
    x, y = small_data(8)
    points, expected = [], []
    for i, key in enumerate(jax.random.split(jax.random.key(0), 3)):
        one, two = jax.random.split(key)
        point = {
            "hidden": jax.random.normal(one, (2, 20)),
            "w": jax.random.normal(two, (21, 1)),
            "sigma": 0.5 + 0.1 * i,
        }
        joint, sites = log_density(network, (x, y), {}, point)
        log_det = 0.0
        if form == "repriorised":
            log_det = readout_map(sites["features"]["value"], y, jnp.zeros((21, 1)), point["sigma"], prior_scale=1.2)[1]
        points.append(point)
        expected.append(joint + log_det + np.log(point["sigma"]))
    model = network
    if form == "repriorised":
        model = repriorise(network, readout="w", features="features", targets="y", noise_scale="sigma")
    found = posterior_slice(model, points, x, y, resolution=2, batch_size=2)
    np.testing.assert_allclose(found.at_points, expected, rtol=1e-3)


def test_points_that_span_no_slice_are_refused():
    def model():
        numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))

    points = [{"w": jnp.array(point)} for point in ([1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0])]
    with pytest.raises(ValueError, match="lie on one great circle"):
        posterior_slice(model, points)
