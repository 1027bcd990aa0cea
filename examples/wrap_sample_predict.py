"""Why wrap? One network at three widths: collapsed by SplitHMC, and unwrapped by SplitHMC and NUTS."""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
import pandas
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


def sample(kernel, width, num_samples, count):  # two chains: hidden weights, gradients; seconds to sample, to compile
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, **options)

    def warm_up(key):
        mcmc.warmup(key, x, y, width=width)
        return mcmc.post_warmup_state

    def go_on(state):
        mcmc.post_warmup_state = state
        mcmc.run(jax.random.key(1), x, y, width=width, extra_fields=(count,))
        return mcmc.get_samples(group_by_chain=True)["hidden"], mcmc.get_extra_fields()[count].sum()

    program, first = timed(lambda: jax.jit(warm_up).lower(key).compile())
    state = program(key)
    program, second = timed(lambda: jax.jit(go_on).lower(state).compile())
    (hidden, gradients), seconds = timed(program, state)
    return hidden, int(gradients), seconds, first + second


collapsed = collapse_readout(bnn, readout="readout", features="features", observed="y")
runs = {  # kernel, model, number of samples of a chain, and the name of what counts gradients
    "SplitHMC, collapsed": (SplitHMC, collapsed, 1000, "num_grad"),
    "SplitHMC, unwrapped": (SplitHMC, bnn, 2000, "num_grad"),
    "NUTS, unwrapped": (NUTS, bnn, 300, "num_steps"),
}
rows = []
panels = ["predictions"] * 2, ["function", "weights"]
figure, axes = plt.subplot_mosaic(panels, figsize=(6.4, 6.4), layout="constrained")
for width in (50, 200, 800):
    for name, (kernel, model, num_samples, count) in runs.items():
        hidden, gradients, seconds, compilation = sample(kernel(model), width, num_samples, count)
        predictive = ReadoutPredictive(collapsed, {"hidden": hidden.reshape(-1, 2, width)}, (x, y), {"width": width})
        found = predictive(key, x_new, width=width)  # the readout integrated out
        mean = found["mean"].reshape(2, -1, 60)
        numbers = {}
        for of, draws in {"function": mean, "weights": hidden}.items():
            ess = float(projected_ess({"": draws}, jax.random.key(2))["mean"])
            numbers |= {f"{of} / s": ess / seconds, f"{of} / 1000 gradients": 1000 * ess / gradients}
        numbers |= {"R-hat": numpyro.diagnostics.split_gelman_rubin(mean).max(), "compilation, s": compilation}
        rows.append({"width": width, "run": name, **numbers})
        print(width, name, *(f"{what}: {number:.3g};" for what, number in numbers.items()), flush=True)
        if width == 800 and name == "SplitHMC, collapsed":
            plot_prediction(x_new, found, data=(x, y), ax=axes["predictions"])
(table := pandas.DataFrame(rows)).to_csv("wrap_sample_predict.csv", index=False, float_format="%.4g")
for of, title in {"function": "mean function", "weights": "hidden weights"}.items():
    for name, points in table.groupby("run", sort=False):
        axes[of].loglog(points["width"], points[f"{of} / s"], "o-", label=name)
    axes[of].set(title=title, xlabel="width", ylim=(10, 10_000), ylabel="effective samples per core second")
    axes[of].set_xticks([50, 200, 800], ["50", "200", "800"], minor=False)
    axes[of].minorticks_off()
figure.legend(*axes["weights"].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
axes["predictions"].set(title="predictions of 800 units", xlabel="input x", ylabel="output y", ylim=(-2.2, 2))
axes["predictions"].legend(loc="lower left", frameon=False, ncols=2)
plt.savefig("wrap_sample_predict.png", dpi=150)
print("Figure: wrap_sample_predict.png")
