"""Wrap, sample, predict: a wide network, collapsed by SplitHMC, as it is by SplitHMC and NUTS, for the same seconds."""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout, readout, set_blas_threads
from numpyro_wide.diagnostics import project, projected_ess
from numpyro_wide.mcmc import SplitHMC

set_blas_threads(1)  # the fastest for small matrices on a CPU
x, y, x_new = jnp.linspace(-1, 1, 20), jnp.sin(jnp.linspace(-4, 4, 20)), jnp.linspace(-1.5, 1.5, 60)


def bnn(x, y=None, width=200):  # an ordinary NumPyro model
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * jnp.outer(x, hidden[0]) + hidden[1]) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(features @ readout, 0.1), obs=y)


def sample(kernel, cost, num_samples, seconds=0.0):  # four chains, drawn on until the seconds are over
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, num_chains=4, chain_method="vectorized")
    parts, start = [], time.perf_counter()
    while not parts or time.perf_counter() - start < seconds:
        mcmc.run(jax.random.key(len(parts)), x, y, extra_fields=(cost,))
        mcmc.post_warmup_state = mcmc.last_state  # where the next run goes on
        parts.append({"gradients": mcmc.get_extra_fields(True)[cost], **mcmc.get_samples(True)})
    return jax.tree.map(lambda *draws: jnp.concatenate(draws, axis=1), *parts), time.perf_counter() - start


print("Four chains each: collapsed by SplitHMC, as it is by SplitHMC, and by NUTS; compiling ...", flush=True)
model = collapse_readout(bnn, readout="readout", features="features", observed="y")
ours = sample(SplitHMC(model), "num_grad", num_samples=1000)
predictive = ReadoutPredictive(model, {"hidden": ours[0]["hidden"].reshape(-1, 2, 200)}, (x, y))
ours[0]["readout"] = predictive.readout(jax.random.key(1)).reshape(4, -1, 200)  # drawn exactly, given all the rest
plain = sample(SplitHMC(bnn), "num_grad", num_samples=400, seconds=ours[1])
nuts = sample(NUTS(bnn), "num_steps", num_samples=100, seconds=ours[1])
print("\n                     ESS/second  ESS/1000 gradients  worst R-hat of weights and predictions  seconds")
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), width_ratios=[3, 2], layout="constrained")
for name, (draws, spent) in {"collapsed, SplitHMC": ours, "SplitHMC": plain, "NUTS": nuts}.items():
    function = jax.vmap(jax.vmap(readout.site_function(bnn, "y", x_new)))(draws)
    of_weights = project({"hidden": draws["hidden"]}, jax.random.key(2))
    ess = projected_ess({"hidden": draws["hidden"]}, jax.random.key(2))["mean"]
    rhat = split_gelman_rubin(jnp.concatenate([of_weights, function], axis=2)).max()
    print(f"{name:19s}  {ess / spent:10.1f}  {1000 * ess / draws['gradients'].sum():18.1f}  {rhat:38.3f}  {spent:7.1f}")
    left.fill_between(x_new, *jnp.percentile(function, jnp.r_[5.0, 95.0], axis=(0, 1)), alpha=0.3, label=name)
    right.bar_label(right.bar(name.replace(", ", ",\n"), ess / spent, alpha=0.6), fmt="%.0f", label_type="center")
left.plot(x, y, "ko")
left.legend(title="90 % of the functions", loc="lower left", fontsize="small")
right.set_title("effective draws of the weights a second", fontsize="medium")
plt.savefig("wrap_sample_predict.png", dpi=150)
print("Figure: wrap_sample_predict.png")
