"""Wrap, sample, predict: a wide network collapsed, repriorised and unwrapped, sampled for the same seconds."""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout, readout, repriorise, set_blas_threads
from numpyro_wide.diagnostics import project, projected_ess
from numpyro_wide.mcmc import SplitHMC

set_blas_threads(1)  # the fastest for small matrices on a CPU
x, y, x_new = jnp.linspace(-1, 1, 20), jnp.sin(jnp.linspace(-4, 4, 20)), jnp.linspace(-1.5, 1.5, 60)


def bnn(x, y=None, width=200):  # an ordinary NumPyro model
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * jnp.outer(x, hidden[0]) + hidden[1]) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)


def sample(kernel, cost, num_samples, seconds=0.0):  # four chains, drawn on until the seconds are over
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, num_chains=4, chain_method="vectorized")
    parts, start = [], time.perf_counter()
    while not parts or time.perf_counter() - start < seconds:
        mcmc.run(jax.random.key(len(parts)), x, y, extra_fields=(cost,))
        mcmc.post_warmup_state = mcmc.last_state  # where the next run goes on
        parts.append({"cost": mcmc.get_extra_fields(True)[cost], **mcmc.get_samples(True)})
    return jax.tree.map(lambda *draws: jnp.concatenate(draws, axis=1), *parts), time.perf_counter() - start


print("Four chains each, of three forms of one network; compiling ...", flush=True)
collapsed = collapse_readout(bnn, readout="readout", features="features", observed="y")
repriorised = repriorise(bnn, readout="readout", features="features", targets="y", noise_scale=0.1)
runs = {"collapsed, SplitHMC": sample(SplitHMC(collapsed), "num_grad", num_samples=1000)}
first, seconds = runs["collapsed, SplitHMC"]
predictive = ReadoutPredictive(collapsed, {"hidden": first["hidden"].reshape(-1, 2, 200)}, (x, y))
first["readout"] = predictive.readout(jax.random.key(1)).reshape(4, -1, 200)  # drawn exactly, given all the rest
for name, model in {"repriorised, SplitHMC": repriorised, "SplitHMC": bnn}.items():
    runs[name] = sample(SplitHMC(model), "num_grad", num_samples=400, seconds=seconds)
runs["NUTS"] = sample(NUTS(bnn), "num_steps", num_samples=100, seconds=seconds)
_, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.5), layout="constrained")
for name, (draws, spent) in runs.items():
    function = jax.vmap(jax.vmap(readout.site_function(bnn, "y", x_new)))(draws)
    of_weights = project({"hidden": draws["hidden"]}, jax.random.key(2))
    ess = projected_ess({"hidden": draws["hidden"]}, jax.random.key(2))["mean"]
    rhat = numpyro.diagnostics.split_gelman_rubin(jnp.concatenate([of_weights, function], axis=2)).max()
    print(f"{name:21s} ESS a second {ess / spent:4.0f}, a gradient {ess / draws['cost'].sum():.4f}; R-hat {rhat:.3f}")
    left.fill_between(x_new, *jnp.percentile(function, jnp.r_[5.0, 95.0], axis=(0, 1)), alpha=0.3)
    right.bar_label(right.bar(name.replace(", ", ",\n"), ess / spent, alpha=0.6), fmt="%.0f")
left.plot(x, y, "ko")
left.set(xlabel="x", ylabel="the middle 90 % of the functions")
right.set_ylabel("effective samples of the weights a second")
plt.savefig("wrap_sample_predict.png", dpi=150)
print("Figure: wrap_sample_predict.png")
