"""Moments of whole runs against closed forms, with tolerances from the effective sample size."""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC
from scipy.special import polygamma
from scipy.stats import norm

from tests.marks import parametrize
from tests.mcmc.cases import ADJUSTED, KERNELS, chain, check

NUM_CHAINS = 32


def potential(z):
    """log Gamma(3); N(1 + 0.8 a, 0.5²) given it; and a mixture 0.3 N(−1.2, 0.6²) + 0.7 N(1.5, 0.6²)."""
    a, b, c = z["a"], z["b"][0], z["c"]
    left = jnp.log(0.3) - 0.5 * ((c + 1.2) / 0.6) ** 2
    right = jnp.log(0.7) - 0.5 * ((c - 1.5) / 0.6) ** 2
    return jnp.exp(a) - 3 * a + 0.5 * ((b - 1 - 0.8 * a) / 0.5) ** 2 - jnp.logaddexp(left, right)


def functions_and_means(z):
    mean, variance, third = (float(polygamma(order, 3)) for order in range(3))
    a, b, c = z["a"] - mean, z["b"][..., 0] - (1 + 0.8 * mean), z["c"]
    left, right = norm(-1.2, 0.6), norm(1.5, 0.6)
    moments = [0.3 * left.moment(k) + 0.7 * right.moment(k) for k in (1, 2, 3)]
    return {
        "mean of a": (a, 0.0),
        "mean of b": (b, 0.0),
        "variance of a": (a**2, variance),
        "variance of b": (b**2, 0.25 + 0.64 * variance),
        "covariance of a and b": (a * b, 0.8 * variance),
        "third moment of a": (a**3, third),
        "mean of c": (c, moments[0]),
        "second moment of c": (c**2, moments[1]),
        "third moment of c": (c**3, moments[2]),
        "mass of c on the right": (1.0 * (c > 0), 0.3 * left.sf(0) + 0.7 * right.sf(0)),
        "product of a and c": (a * c, 0.0),
    }


@pytest.mark.as_compiled
@parametrize("name", ADJUSTED, rest="slow")
def test_adjusted_kernels_reach_the_moments(name):
    grid = jnp.linspace(0.0, 1.0, NUM_CHAINS)
    first = {"a": grid, "b": 3 * grid[:, None], "c": 4 * grid[::-1] - 2}
    mcmc = MCMC(
        ADJUSTED[name](potential_fn=potential),
        num_warmup=300,
        num_samples=1500,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(3), init_params=first)
    for label, (draws, truth) in functions_and_means(mcmc.get_samples(group_by_chain=True)).items():
        check(draws, truth, label)


@pytest.mark.fault(
    "mcmc/crank_nicolson.py", "reference_energy_difference(point, end)", "end.potential_energy - point.potential_energy"
)
@parametrize("name", ["pcn", "split"], rest="slow")
def test_everything_is_accepted_on_the_reference(name):
    kernel = ADJUSTED[name](potential_fn=lambda z: 0.5 * jnp.sum(z["x"] ** 2), adapt_step_size=False, step_size=0.4)
    state = kernel.init(jax.random.key(0), 0, {"x": 1.5 * jnp.ones(2000)})
    _, errors = chain(kernel, state, 50, keep=lambda s: (s.energy_error, s.accept_prob, s.z["x"][:3]))
    np.testing.assert_allclose(errors[0], 0.0, atol=5e-3)
    assert jnp.all(errors[1] > 0.995)
    assert jnp.all(jnp.diff(errors[2], axis=0) != 0)


@pytest.mark.as_compiled
def test_warmup_finds_independent_draws_on_the_reference():
    kernel = KERNELS["split"](potential_fn=lambda z: 0.5 * jnp.sum(z**2))
    mcmc = MCMC(kernel, num_warmup=300, num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.ones(20), extra_fields=("num_grad", "step_size"))
    fields = mcmc.get_extra_fields()
    assert jnp.all(fields["num_grad"] == 1)
    np.testing.assert_allclose(fields["step_size"], 2.0, rtol=1e-5)
    assert float(arviz.ess(np.asarray(mcmc.get_samples()[None, :, 0]), method="mean")) > 1500


@pytest.mark.as_compiled
def test_bias_of_the_unadjusted_sampler_falls_as_the_square_of_the_step():
    """On N(0, I) the stationary variance of leapfrog steps with a partial refresh is 1 / (1 − ε²/4)."""
    num_chains, steps = 1000, np.array([0.5, 0.7, 1.0])
    kernel = KERNELS["unadjusted"](potential_fn=lambda z: 0.5 * jnp.sum(z**2), damping=0.5, adapt_step_size=False)
    draws = jax.random.normal(jax.random.key(1), (len(steps), num_chains, 100))
    z = draws / np.sqrt(1 - steps[:, None, None] ** 2 / 4)
    state = kernel.init(jax.random.split(jax.random.key(0), 3 * num_chains), 0, z.reshape(-1, 100))
    state = state._replace(step_size=jnp.repeat(jnp.array(steps, jnp.float32), num_chains))
    _, (first, spread, accept_prob) = chain(
        kernel, state, 40, keep=lambda s: (s.z[:, 0], jnp.mean(s.z**2, axis=1), s.accept_prob)
    )
    assert jnp.all(jnp.diff(first, axis=0) != 0)  # takes every step ...
    assert 0.3 < jnp.mean(accept_prob[:, -num_chains:]) < 0.9  # ... which a correction would not
    biases = jnp.mean(spread[20:].reshape(20, 3, -1), axis=(0, 2)) - 1
    # 1000 chains in 100 dimensions, and 20 steps that are far from independent: an error of about 0.003.
    np.testing.assert_allclose(biases, 1 / (1 - steps**2 / 4) - 1, atol=0.011)
    assert 1.9 < np.log2(biases[2] / biases[0]) < 2.6
