"""The trained guide is the exact posterior, for observations that it has not seen."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL

positive = dist.constraints.positive


def train(model, guide, *args, observed, num_steps=4000, batch_size=64, rate=0.05):
    """A guide trained until the gradient's noise is averaged out."""
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, num_steps))
    trainer = AmortizedForwardKL(model, guide, optimiser, observed=observed, batch_size=batch_size)
    return trainer.run(jax.random.key(0), num_steps, *args, progress_bar=False).params


@pytest.mark.as_compiled
def test_conjugate_gaussian():
    prior_loc, prior_scale = np.array([0.5, -1.0]), np.array([1.5, 0.7])
    design = np.array([[1.0, 0.4], [-0.3, 1.2], [0.8, -0.5]])
    noise_scale = np.array([0.6, 0.9, 0.4])

    def model():
        theta = numpyro.sample("theta", dist.Normal(jnp.array(prior_loc), jnp.array(prior_scale)).to_event(1))
        numpyro.sample("x", dist.Normal(jnp.array(design) @ theta, jnp.array(noise_scale)).to_event(1))

    def guide(observed_values):
        gain, intercept = numpyro.param("gain", jnp.zeros((2, 3))), numpyro.param("intercept", jnp.zeros(2))
        scale_tril = numpyro.param("scale_tril", jnp.eye(2), constraint=dist.constraints.lower_cholesky)
        loc = gain @ observed_values["x"] + intercept
        numpyro.sample("theta", dist.MultivariateNormal(loc, scale_tril=scale_tril))

    params = train(model, guide, observed="x")
    precision = np.diag(prior_scale**-2) + design.T / noise_scale**2 @ design
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(params["scale_tril"] @ params["scale_tril"].T, covariance, atol=0.01)
    for x in np.array([[0.3, -2.0, 1.0], [-4.0, 3.0, -3.0]]):
        mean = covariance @ (prior_loc / prior_scale**2 + design.T @ (x / noise_scale**2))
        draws = Predictive(guide, params=params, num_samples=20_000)(jax.random.key(1), {"x": jnp.array(x)})["theta"]
        # 0.015 for the draws' own error, and an error of the gain that grows with the observation.
        np.testing.assert_allclose(draws.mean(0), mean, atol=0.015 + 0.01 * np.abs(x).max())
        np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.015)


@pytest.mark.slow
def test_gamma_poisson():
    def model(num_counts):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 1.5))
        with numpyro.plate("counts", num_counts):
            numpyro.sample("y", dist.Poisson(rate))

    def guide(observed_values, num_counts):
        start, step, rate = [numpyro.param(name, 1.0, constraint=positive) for name in ("start", "step", "beta")]
        numpyro.sample("rate", dist.Gamma(start + step * observed_values["y"].sum(), rate))

    params = train(model, guide, 5, observed="y")
    for total in (0, 7, 40):
        shape, rate = float(params["start"] + params["step"] * total), float(params["beta"])
        guide_posterior, exact = scipy.stats.gamma(shape, scale=1 / rate), scipy.stats.gamma(3 + total, scale=1 / 6.5)
        assert guide_posterior.mean() == pytest.approx(exact.mean(), rel=0.04)
        assert guide_posterior.std() == pytest.approx(exact.std(), rel=0.04)


@pytest.mark.slow
def test_marginalised_nuisance():
    def rotation():
        theta = numpyro.sample("theta", dist.Uniform(-jnp.pi, jnp.pi))
        z = numpyro.sample("z", dist.Normal(0, 0.5))
        numpyro.deterministic("x", jnp.stack([jnp.cos(theta + z), jnp.sin(theta + z)]))

    shown = set()

    def guide(observed_values):
        shown.update(observed_values)
        offset, concentration = numpyro.param("offset", 0.5), numpyro.param("concentration", 1.0, constraint=positive)
        angle = jnp.arctan2(observed_values["x"][1], observed_values["x"][0])
        numpyro.sample("theta", dist.VonMises(angle + offset, concentration))

    params = train(rotation, guide, observed="x")
    # Of all von Mises distributions, that with the wrapped normal's mean resultant length has the least forward KL.
    length = np.exp(-(0.5**2) / 2)
    exact = scipy.optimize.brentq(lambda k: scipy.special.i1e(k) / scipy.special.i0e(k) - length, 1, 10)
    assert exact == pytest.approx(4.575, abs=0.001)
    assert float(params["concentration"]) == pytest.approx(exact, rel=0.04)
    assert float(params["offset"]) == pytest.approx(0, abs=0.02)
    assert shown == {"x"}


@pytest.mark.slow
def test_discrete_latent():
    def model():
        label = numpyro.sample("label", dist.Bernoulli(0.2))
        numpyro.sample("x", dist.Normal(jnp.where(label == 1, 1.5, -0.5), 1.0))

    def guide(observed_values):
        logits = numpyro.param("slope", 0.0) * observed_values["x"] + numpyro.param("intercept", 0.0)
        numpyro.sample("label", dist.Bernoulli(logits=logits))

    params = train(model, guide, observed="x")
    # log N(x; 1.5, 1) - log N(x; -0.5, 1) = 2 x - 1
    assert float(params["slope"]) == pytest.approx(2.0, abs=0.1)
    assert float(params["intercept"]) == pytest.approx(np.log(0.2 / 0.8) - 1, abs=0.1)


def test_plates_arguments_and_several_observed_sites():
    """Groups around a mean that is marginalised; the mean is observed too, with an error of its own."""

    def model(num_groups, noise_scale):
        mu = numpyro.sample("mu", dist.Normal(0.5, 2.0))
        with numpyro.plate("groups", num_groups):
            theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(theta, noise_scale))
        numpyro.sample("u", dist.Normal(mu, 0.7))

    def guide(observed_values, num_groups, noise_scale):
        own, others, direct, constant = numpyro.param("coefficients", jnp.zeros(4))
        scale = numpyro.param("scale", 1.0, constraint=positive)
        y, u = observed_values["y"], observed_values["u"]
        with numpyro.plate("groups", num_groups):
            numpyro.sample("theta", dist.Normal(own * y + others * (y.sum() - y) + direct * u + constant, scale))

    noise_scale = jnp.array([0.5, 0.5, 0.5])
    params = train(model, guide, 3, noise_scale, observed=["y", "u"])
    # The joint covariance of (y1, y2, y3, u), and theirs with theta1.
    joint = 4 * np.ones((4, 4)) + np.diag([1.25, 1.25, 1.25, 0.49])
    cross = np.array([5.0, 4.0, 4.0, 4.0])
    weights = np.linalg.solve(joint, cross)
    expected = [*weights[[0, 1, 3]], 0.5 * (1 - weights.sum())]
    np.testing.assert_allclose(params["coefficients"], expected, atol=0.015)
    assert float(params["scale"]) == pytest.approx(np.sqrt(5 - cross @ weights), rel=0.02)
