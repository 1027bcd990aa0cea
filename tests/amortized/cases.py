"""A conjugate Gaussian model that several tests share, and its exact posterior."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

PRIOR_LOC, PRIOR_SCALE, NOISE_SCALE = 0.7, 1.3, 0.5
# Exact: the slope and intercept of the posterior mean, and the posterior's standard deviation.
SLOPE = PRIOR_SCALE**2 / (PRIOR_SCALE**2 + NOISE_SCALE**2)
INTERCEPT = (1 - SLOPE) * PRIOR_LOC
SCALE = np.sqrt(1 - SLOPE) * PRIOR_SCALE
# The smallest expected loss: the entropy of the posterior.
ENTROPY = 0.5 * np.log(2 * np.pi * np.e) + np.log(SCALE)


def normal_model():
    theta = numpyro.sample("theta", dist.Normal(PRIOR_LOC, PRIOR_SCALE))
    numpyro.sample("x", dist.Normal(theta, NOISE_SCALE))


def linear_guide(observed_values):
    slope, intercept = numpyro.param("slope", 0.2), numpyro.param("intercept", -0.3)
    scale = numpyro.param("scale", 1.5, constraint=dist.constraints.positive)
    numpyro.sample("theta", dist.Normal(slope * observed_values["x"] + intercept, scale))


def failing_model():
    """The same, but one simulation in ten gives NaN."""
    theta = numpyro.sample("theta", dist.Normal(PRIOR_LOC, PRIOR_SCALE))
    fails = numpyro.sample("fails", dist.Bernoulli(0.1))
    numpyro.sample("x", dist.Normal(jnp.where(fails == 1, jnp.nan, theta), NOISE_SCALE))
