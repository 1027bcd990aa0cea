"""Why wrap? One network at three widths: collapsed by SplitHMC, and unwrapped by SplitHMC and NUTS."""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, SplitHMC, collapse_readout, set_blas_threads
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.plots import plot_prediction

set_blas_threads(1)  # the fastest for small matrices on a CPU
x, x_new, key = jnp.linspace(-1, 1, 20), jnp.linspace(-1.5, 1.5, 60), jax.random.key(0)
y = jnp.sin(4 * x) + 0.1 * jax.random.normal(key, x.shape)


def bnn(x, y=None, width=200):  # an ordinary NumPyro model
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * jnp.outer(x, hidden[0]) + hidden[1]) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(features @ readout, 0.1), obs=y)


def timed(task, *args):
    start = time.process_time()
    return jax.block_until_ready(task(*args)), time.process_time() - start


def sample(kernel, width, num_samples):  # two chains: hidden weights; core seconds to sample, to compile
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, **options)

    def warm_up(key):
        mcmc.warmup(key, x, y, width=width)
        return mcmc.post_warmup_state

    def go_on(state):
        mcmc.post_warmup_state = state
        mcmc.run(jax.random.key(1), x, y, width=width)
        return mcmc.get_samples(group_by_chain=True)["hidden"]

    program, first = timed(lambda: jax.jit(warm_up).lower(key).compile())
    state = program(key)
    program, second = timed(lambda: jax.jit(go_on).lower(state).compile())
    hidden, seconds = timed(program, state)
    return hidden, seconds, first + second


collapsed = collapse_readout(bnn, readout="readout", features="features", observed="y")
runs = {  # kernel, model, number of samples of a chain
    "collapsed, SplitHMC": (SplitHMC, collapsed, 1000),
    "unwrapped, SplitHMC": (SplitHMC, bnn, 2000),
    "unwrapped, NUTS": (NUTS, bnn, 300),
}
lines = {name: [] for name in runs}
figure, (left, *panels) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for width in (50, 200, 800):
    for name, (kernel, model, num_samples) in runs.items():
        hidden, seconds, compilation = sample(kernel(model), width, num_samples)
        predictive = ReadoutPredictive(collapsed, {"hidden": hidden.reshape(-1, 2, width)}, (x, y), {"width": width})
        found = predictive(key, x_new, width=width)  # the readout integrated out
        mean = found["mean"].reshape(2, -1, 60)
        ess = [projected_ess({"": draws}, jax.random.key(2))["mean"] / seconds for draws in (mean, hidden)]
        lines[name].append((width, *ess))
        rhat = numpyro.diagnostics.split_gelman_rubin(mean).max()
        print(f"{width:4d} {name:20s} ESS per core second: function {ess[0]:5.0f}, weights {ess[1]:5.0f};", end=" ")
        print(f"R-hat {rhat:.3f}; sampling {seconds:.1f} s, compilation {compilation:.0f} s", flush=True)
        if width == 800 and name.startswith("collapsed"):
            plot_prediction(x_new, found, data=(x, y), ax=left)
for name, points in lines.items():
    for panel, column in zip(panels, (1, 2), strict=True):
        panel.loglog([point[0] for point in points], [point[column] for point in points], "o-", label=name)
for panel, what in zip(panels, ("mean function", "hidden weights"), strict=True):
    panel.set(title=f"sampling speed: {what}", xlabel="width", ylim=(10, 10_000))
    panel.set_xticks([50, 200, 800], ["50", "200", "800"], minor=False)
    panel.minorticks_off()
panels[0].set(ylabel="effective samples per core second")
panels[1].legend(fontsize="small")
left.set(title="predictions of 800 units", xlabel="input x", ylabel="output y", ylim=(-3, 2))
left.legend(loc="lower left", fontsize="small", frameon=False)
plt.savefig("wrap_sample_predict.png", dpi=110)
print("Figure: wrap_sample_predict.png")
