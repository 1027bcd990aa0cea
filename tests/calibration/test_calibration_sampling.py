"""Draws from guides, for data simulated from a model with plates and a nuisance."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_wide.calibration import expected_coverage, from_guide, sbc_ranks, tarp, uniformity_p_value
from tests.marks import parametrize

X = np.array([0.5, -1.0, 2.0], np.float32)


def model(x):
    slope = numpyro.sample("slope", dist.Normal(1.0, 2.0))
    nuisance = numpyro.sample("nuisance", dist.Normal(0.0, 0.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x + nuisance, 0.7))


def posterior_of_slope(x, y):
    """Mean and scale given y, the nuisance integrated out, in closed form."""
    noise = 0.49 * np.eye(len(x)) + 0.25
    weights = np.linalg.solve(noise, x)
    variance = 1 / (0.25 + weights @ x)
    return variance * (0.25 + y @ weights), variance**0.5


def guide(observed, x):
    inflation = numpyro.param("inflation", 1.0)
    mean, scale = posterior_of_slope(x, observed["y"])
    numpyro.sample("slope", dist.Normal(mean, inflation * scale))


@pytest.fixture(scope="module")
def exact():
    """Draws of the exact posterior."""
    params = {"inflation": jnp.array(1.0)}
    return from_guide(jax.random.key(0), model, guide, params, X, observed="y", num_simulations=400, batch_size=64)


def test_the_exact_guide_is_calibrated(exact):
    assert exact.truth.keys() == {"slope"}  # the nuisance is marginalised
    assert exact.draws["slope"].shape == (400, 99)
    mean, scale = posterior_of_slope(X, exact.observed["y"])
    np.testing.assert_allclose(np.mean((exact.truth["slope"] - mean) / scale), 0, atol=4 / 400**0.5)
    assert uniformity_p_value(sbc_ranks(exact)["slope"], 99) > 0.01
    assert expected_coverage(exact, region="hpd")["joint"].p_value > 0.01
    assert tarp(jax.random.key(1), exact, {"slope": mean}).p_value > 0.01
    expected = dist.Normal(mean[:, None], scale).log_prob(exact.draws["slope"])
    np.testing.assert_allclose(exact.log_density_draws, expected, rtol=1e-4, atol=1e-4)


def test_the_parameters_of_a_guide_count(exact):
    wide = from_guide(jax.random.key(0), model, guide, {"inflation": jnp.array(2.0)}, X, observed="y", batch_size=500)
    assert wide.num_simulations == 500
    mean, scale = posterior_of_slope(X, wide.observed["y"])
    expected = dist.Normal(mean, 2 * scale).log_prob(wide.truth["slope"])
    np.testing.assert_allclose(wide.log_density_truth, expected, rtol=1e-4, atol=1e-4)
    assert expected_coverage(wide, region="hpd")["joint"].p_value < 0.002
    assert uniformity_p_value(sbc_ranks(wide)["slope"], 99) < 0.002


def test_refuses_unknown_sites():
    sites = "the sample or deterministic site 'z', which the model does not have; .* are 'slope', 'nuisance', 'y'"
    with pytest.raises(ValueError, match=rf"observed names {sites}"):
        from_guide(jax.random.key(0), model, guide, {}, X, observed="z")
    other = lambda observed, x: numpyro.sample("w", dist.Normal())  # noqa: E731
    with pytest.raises(ValueError, match=r"latent site 'w', which the model does not have.*'slope', 'nuisance'"):
        from_guide(jax.random.key(0), model, other, {}, X, observed="y", num_simulations=2)


def test_a_guide_without_its_parameters_is_refused():
    with pytest.raises(ValueError, match=r"params must be a dictionary .*'inflation', but got none.*get_params"):
        from_guide(jax.random.key(0), model, guide, {}, X, observed="y", num_simulations=2)


def test_models_that_do_not_simulate_are_refused():
    """As the trainer refuses them: with a factor, a given value or a scale, draws are not from the joint law."""

    def with_factor(x):
        model(x)
        numpyro.factor("penalty", 1.0)

    def subsampled(x):
        slope = numpyro.sample("slope", dist.Normal(1.0, 2.0))
        with numpyro.plate("rows", 6, subsample_size=3):
            numpyro.sample("y", dist.Normal(slope, 0.7))

    def attempt(model):
        from_guide(jax.random.key(0), model, guide, {"inflation": 1.0}, X, observed="y")

    with pytest.raises(ValueError, match=r"must simulate every site, but 'penalty'"):
        attempt(with_factor)
    with pytest.raises(ValueError, match=r"plate 'rows' takes 3 of 6 rows"):
        attempt(subsampled)


def test_a_guide_may_see_a_function_of_the_latents():
    def implicit():
        numpyro.deterministic("y", 2 * numpyro.sample("slope", dist.Normal()))

    def near(observed):
        numpyro.sample("slope", dist.Normal(observed["y"] / 2, 0.1))

    found = from_guide(jax.random.key(0), implicit, near, {}, observed="y", num_simulations=50, num_draws=19)
    np.testing.assert_allclose(found.draws["slope"].mean(1), found.observed["y"] / 2, atol=5 * 0.1 / 19**0.5)
    np.testing.assert_allclose(found.truth["slope"], found.observed["y"] / 2, rtol=1e-6)


def test_the_key_comes_first():
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key.*order is from_guide\(rng_key, model, guide"):
        from_guide(model, guide, {}, X, observed="y")


@parametrize("name", ["num_simulations", "num_draws", "batch_size"], rest="slow")
def test_numbers_of_draws_are_whole(name):
    for value in (0, 2.5, True):
        with pytest.raises(ValueError, match=rf"{name} must be a whole number of at least 1, but got {value}"):
            from_guide(jax.random.key(0), model, guide, {}, X, observed="y", **{name: value})
