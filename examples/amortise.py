"""Amortise: one guide, trained on simulations alone, answers for every data set, and its calibration is tested."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL, set_blas_threads
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.calibration import from_guide, sbc_ranks, uniformity_p_value
from numpyro_wide.plots import plot_rank_ecdf


def model():
    """Sample four noisy measurements of mu; how noisy they are is not known either."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.2))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.Normal(mu, scale))


set_blas_threads(1)
guide = AutoAmortized(model, observed="y")
trainer = AmortizedForwardKL(
    model, guide, optax.adam(optax.cosine_decay_schedule(1e-3, 5000)), observed="y", batch_size=64
)
params = trainer.run(jax.random.key(0), num_steps=5000, held_out=1000).params

ask = Predictive(guide, params=params, num_samples=1000)
print("\nmeasurements             mu given them  scale given them")
for y in ([0.9, 1.4, 0.6, 1.1], [-1.0, -1.1, -0.9, -1.0], [2.0, -2.0, 1.0, -1.0]):
    draws = ask(jax.random.key(1), {"y": jnp.array(y)})
    mu, scale = draws["mu"], draws["scale"]
    print(f"{y!s:23s}  {mu.mean():5.2f} ± {mu.std():.2f}   {scale.mean():5.2f} ± {scale.std():.2f}")

sizes = {"num_simulations": 500, "num_draws": 99}
ranks = sbc_ranks(from_guide(jax.random.key(2), model, guide, params, observed="y", **sizes))
for name, values in ranks.items():
    print(f"Ranks of the true {name} among draws are uniform: p = {float(uniformity_p_value(values, 99)):.2f}")
plot_rank_ecdf(ranks, 99).figure.savefig("amortise.png", dpi=150)
print("Figure: amortise.png")
