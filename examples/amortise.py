"""Amortise: one guide, trained on simulations alone, answers for every data set, and its calibration is tested."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen
from numpyro.contrib.module import flax_module
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL, natural, set_blas_threads
from numpyro_wide.calibration import from_guide, sbc_ranks, uniformity_p_value
from numpyro_wide.plots import plot_rank_ecdf

PRIOR = natural.parameters(dist.Normal(0.0, 1.0))  # what the network's output is added to


def model():
    """Sample four noisy measurements of mu; how noisy they are is not known either, and is a nuisance."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.2))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.Normal(mu, scale))


def guide(observed):
    """Sample mu alone, a Gaussian in natural parameters that a wide network computes from the measurements."""
    layers = linen.Dense(256), linen.relu, linen.Dense(2, kernel_init=linen.initializers.zeros)
    network = flax_module("network", linen.Sequential(layers), input_shape=(4,))
    first, second = network(observed["y"])
    eta = jnp.stack([first, -jax.nn.softplus(second - 1.0)])  # the second is to be negative
    numpyro.sample("mu", natural.Normal(eta, shift=PRIOR))


set_blas_threads(1)
trainer = AmortizedForwardKL(
    model, guide, optax.adam(optax.cosine_decay_schedule(1e-2, 10_000)), observed="y", batch_size=64
)
params = trainer.run(jax.random.key(0), num_steps=10_000, held_out=1000).params

ask = Predictive(guide, params=params, num_samples=1000)
print("\nmeasurements             mu given them")
for y in ([0.9, 1.4, 0.6, 1.1], [-1.0, -1.1, -0.9, -1.0], [2.0, -2.0, 1.0, -1.0]):
    draws = ask(jax.random.key(1), {"y": jnp.array(y)})["mu"]
    print(f"{y!s:23s}  {draws.mean():5.2f} ± {draws.std():.2f}")

sizes = {"num_simulations": 500, "num_draws": 99}
ranks = sbc_ranks(from_guide(jax.random.key(2), model, guide, params, observed="y", **sizes))["mu"]
print(f"Ranks of the true mu among draws are uniform: p = {float(uniformity_p_value(ranks, 99)):.2f}")
plot_rank_ecdf(ranks, 99).figure.savefig("amortise.png", dpi=150)
print("Figure: amortise.png")
