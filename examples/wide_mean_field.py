"""Mean-field variational inference in a wide network ignores the data; with the readout integrated out it does not."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

from numpyro_wide import ReadoutPredictive, collapse_readout, nn, set_blas_threads
from numpyro_wide.readout import site_function
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

x, x_new = jnp.linspace(-1.5, 1.5, 20)[:, None], jnp.linspace(-3, 3, 100)[:, None]
y = jnp.sin(3 * x[:, 0])


def fit(model, num_steps=2000):
    """Fit a Gaussian for every weight, from the prior on: draws of the weights, and the bound on the log evidence."""
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceMeanField_ELBO(num_particles=4))
    result = svi.run(jax.random.key(0), num_steps, x, y)
    draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(300,))
    return draws, -float(result.losses[-num_steps // 10 :].mean())


set_blas_threads(1)
network = nn.FCN(depth=1, width=1000, activation="erf", w_std=2**0.5, b_std=2**0.5, readout_w_std=2**0.5)
model = nn.bnn(network, num_outputs=None, noise=0.1)
collapsed = collapse_readout(model, readout="readout", features="features", observed="y")

draws, bound = fit(model)
functions = jax.vmap(site_function(model, "y", x_new))(draws)
rows = {"as usual": (functions.mean(0), functions.std(0), bound)}

draws, bound = fit(collapsed)
predictions = ReadoutPredictive(collapsed, draws, (x, y))(jax.random.key(2), x_new)
sd = jnp.sqrt(predictions["variance"].mean(0) + predictions["mean"].var(0))
rows["readout integrated out"] = predictions["mean"].mean(0), sd, bound

kernel = fcn_kernel(network.depth, network.activation, **network.scales())
mean, covariance = gp_posterior(kernel(x)[0], kernel(x_new, x)[0], kernel(x_new)[0], y, 0.1)
rows["infinitely wide, exact"] = mean, jnp.sqrt(jnp.diag(covariance)), float(gp_log_evidence(kernel(x)[0], y, 0.1))

print(f"\n{'':24s}  log evidence, or its bound  distance of the mean to the exact one")
figure, panels = plt.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
for panel, (name, (mean, sd, bound)) in zip(panels, rows.items(), strict=True):
    print(f"{name:24s}  {bound:26.1f}  {jnp.sqrt(jnp.mean((mean - rows['infinitely wide, exact'][0]) ** 2)):38.3f}")
    panel.fill_between(x_new[:, 0], mean - 2 * sd, mean + 2 * sd, alpha=0.25, label="mean ± 2 sd")
    panel.plot(x_new[:, 0], mean)
    panel.plot(x[:, 0], y, "k.", label="data")
    panel.set(title=name, xlabel="x")
panels[0].legend(loc="upper left")
figure.savefig("wide_mean_field.png", dpi=150)
print("Figure: wide_mean_field.png")
