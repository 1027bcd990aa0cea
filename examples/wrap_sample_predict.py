"""Wrap, sample, predict: a wide network collapsed, repriorised and unwrapped, by SplitHMC and NUTS."""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise, set_blas_threads
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.mcmc import SplitHMC

set_blas_threads(1)  # the fastest for small matrices on a CPU
x, y, x_new = jnp.linspace(-1, 1, 20), jnp.sin(jnp.linspace(-4, 4, 20)), jnp.linspace(-1.5, 1.5, 60)


def bnn(x, y=None, width=200):  # an ordinary NumPyro model
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * jnp.outer(x, hidden[0]) + hidden[1]) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(features @ readout, 0.1), obs=y)


def sample(kernel, cost, num_samples):  # four chains: their hidden weights, gradients, and seconds
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, num_chains=4, chain_method="vectorized")
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), x, y, extra_fields=(cost,))
    return mcmc.get_samples(True)["hidden"], mcmc.get_extra_fields()[cost].sum(), time.perf_counter() - start


print("Four chains each, for about the same seconds; compiling ...", flush=True)
collapsed = collapse_readout(bnn, readout="readout", features="features", observed="y")
repriorised = repriorise(bnn, readout="readout", features="features", targets="y", noise_scale=0.1)
runs = {
    "collapsed, SplitHMC": sample(SplitHMC(collapsed), "num_grad", num_samples=1000),
    "repriorised, SplitHMC": sample(SplitHMC(repriorised), "num_grad", num_samples=1000),
    "unwrapped, SplitHMC": sample(SplitHMC(bnn), "num_grad", num_samples=8000),
    "unwrapped, NUTS": sample(NUTS(bnn), "num_steps", num_samples=500),
}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for i, (name, (hidden, gradients, seconds)) in enumerate(runs.items()):
    predictive = ReadoutPredictive(collapsed, {"hidden": hidden.reshape(-1, 2, 200)}, (x, y))  # exact readouts
    mean = predictive(jax.random.key(1), x_new)["mean"].reshape(4, -1, 60)
    for j, (what, draws) in enumerate({"mean function": mean, "hidden weights": hidden}.items()):
        ess = projected_ess({what: draws}, jax.random.key(2))["mean"]
        rhat = numpyro.diagnostics.split_gelman_rubin(mean).max()
        print(f"{name:21s} {what:14s} ESS/s {ess / seconds:4.0f}, ESS/gradient {ess / gradients:.4f}, R-hat {rhat:.3f}")
        right.bar_label(right.bar(i + 0.4 * j, ess / seconds, 0.4, color=f"C{j}", label="_" if i else what), fmt="%.0f")
    left.fill_between(x_new, *jnp.percentile(mean, jnp.r_[5.0, 95.0], axis=(0, 1)), alpha=0.3)
left.plot(x, y, "ko")
left.set(title="90 % bands of the mean function: all four coincide", xlabel="input x", ylabel="output y")
right.set_xticks([0.2, 1.2, 2.2, 3.2], [name.replace(", ", "\n") for name in runs])
right.set(title="speed of the four forms", ylabel="effective samples per second", ymargin=0.1)
right.legend(loc="upper right", fontsize="small")
plt.savefig("wrap_sample_predict.png", dpi=150)
print("Figure: wrap_sample_predict.png")
