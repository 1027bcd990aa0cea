"""The gradient estimate is unbiased."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_wide import AmortizedForwardKL
from tests.amortized.cases import NOISE_SCALE, PRIOR_LOC, PRIOR_SCALE, linear_guide, normal_model


def expected_loss(unconstrained):
    """The expectation of -log N(theta; slope x + intercept, scale), in closed form."""
    slope, intercept, scale = unconstrained["slope"], unconstrained["intercept"], jnp.exp(unconstrained["scale"])
    mean = (1 - slope) * PRIOR_LOC - intercept
    variance = (1 - slope) ** 2 * PRIOR_SCALE**2 + slope**2 * NOISE_SCALE**2
    return 0.5 * jnp.log(2 * jnp.pi) + jnp.log(scale) + (mean**2 + variance) / (2 * scale**2)


def test_gradient_averages_to_that_of_the_exact_objective():
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(1.0), observed="x", batch_size=4)
    state = trainer.init(jax.random.key(0))
    start = trainer.optim.get_params(state.optim_state)

    def one_gradient(key):
        new, loss = trainer.update(state._replace(rng_key=key))
        return loss, jax.tree.map(jnp.subtract, start, trainer.optim.get_params(new.optim_state))

    losses, gradients = jax.jit(jax.vmap(one_gradient))(jax.random.split(jax.random.key(1), 50_000))
    exact, exact_gradient = jax.value_and_grad(expected_loss)(start)
    for estimates, value in [(losses, exact), *((gradients[name], exact_gradient[name]) for name in start)]:
        standard_error = np.std(estimates) / np.sqrt(len(estimates))
        assert standard_error < 0.03 * abs(value)
        np.testing.assert_allclose(np.mean(estimates), value, atol=4 * standard_error)
