"""Huix 2022, Theorems 3 and 4: at η = τ p/N the best tempered ELBO tends to a limit, by the inverse of the width."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_sample

from numpyro_wide.elbo import TemperedTraceMeanFieldELBO

X = np.linspace(-1.5, 1.5, 6, dtype=np.float32)
Y = np.sin(2 * X)


def network(x, y, *, width):
    """One layer with outputs scaled by 1/N (their equation 3)."""
    inner = numpyro.sample("inner", dist.Normal(0, 1).expand([2, width]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0, 1).expand([width]).to_event(1))
    mean = jax.lax.erf(x[:, None] * inner[:1] + inner[1:]) @ outer / width
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def best_elbo(width, tau, num_steps=1000):
    """The ELBO over p, at the end of a fit."""
    model = lambda x, y: network(x, y, width=width)  # noqa: E731
    guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=1.0)
    tempered = {"tau": tau, "num_neurons": width}
    schedule = optax.cosine_decay_schedule(0.05, num_steps)
    svi = SVI(model, guide, optax.adam(schedule), TemperedTraceMeanFieldELBO(num_particles=8, **tempered))
    params = svi.run(jax.random.key(0), num_steps, X, Y, progress_bar=False).params
    loss = TemperedTraceMeanFieldELBO(num_particles=20_000, **tempered).loss
    return -float(jax.jit(lambda key: loss(key, params, model, guide, X, Y))(jax.random.key(1))) / len(X)


def best_of_the_limit(tau, num_neurons=40, num_steps=3000):
    """The largest value of their limiting functional, over equal mixtures of as many neurons' laws.

    Means of neurons in closed form, E erf of a Gaussian included; nothing of this package, and no draws.
    """

    def functional(params):
        loc, log_scale = params
        scale = jnp.exp(log_scale)  # (3, num_neurons): slope, offset, outer
        spread = jnp.sqrt(1 + 2 * (scale[0] * X[:, None]) ** 2 + 2 * scale[1] ** 2)
        means = jnp.mean(loc[2] * jax.lax.erf((loc[0] * X[:, None] + loc[1]) / spread), axis=1)
        divergence = jnp.sum(0.5 * (scale**2 + loc**2 - 1) - log_scale, axis=0).mean()
        return jnp.mean(-0.5 * (Y - means) ** 2 - 0.5 * np.log(2 * np.pi)) - tau * divergence

    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    start = (jax.random.normal(jax.random.key(2), (3, num_neurons)), jnp.zeros((3, num_neurons)))

    def step(carry, _):
        params, state = carry
        updates, state = optimiser.update(jax.grad(lambda params: -functional(params))(params), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda: jax.lax.scan(step, (start, optimiser.init(start)), None, length=num_steps))()
    return float(functional(params))


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.02, 0.1])
def test_the_best_tempered_elbo_tends_to_its_limit_like_one_over_the_width(tau):
    limit = best_of_the_limit(tau)
    gaps = {width: limit - best_elbo(width, tau) for width in (64, 256)}
    assert limit > -0.5 * np.log(2 * np.pi) - 0.5 * np.mean(Y**2) + 0.01  # the guide has left its prior
    assert 0 < gaps[256] < 2e-3 and 3 < gaps[64] / gaps[256] < 5.5
