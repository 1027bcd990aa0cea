"""The collapse of a mean-field guide as its network widens: predictions, and the parameters of the guide.

One hidden layer of erf, tanh or ReLU units on two points, every weight with a Gaussian prior, fitted by mean-field
variational inference (after Figures 3 and 6 of Coker et al. 2021; the theorem is for erf). Prints how far the
predictive mean gets, and how many nats each hidden weight moves away from its prior; draws the predictions, and the
means and standard deviations of the guide's Gaussians. The priors over functions are not what changes: they are drawn
by width, with the places where draws of them cross zero upwards (Figure 4).

    python studies/collapse.py
"""

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean
from tqdm.auto import tqdm

import _common
from numpyro_wide import nn
from numpyro_wide.readout import site_function
from numpyro_wide.wide_limit import fcn_kernel

PRIOR_SCALE, NOISE_SCALE = 2**0.5, 0.1  # as in studies/wide_mean_field.py
ACTIVATIONS = ("erf", "tanh", "relu")
DATA = (np.array([[-1.0], [1.0]], np.float32), np.array([-1.0, 1.0], np.float32))
SCALES = {"w_std": PRIOR_SCALE, "b_std": PRIOR_SCALE, "readout_w_std": PRIOR_SCALE}
GRID = np.linspace(-3, 3, 121, dtype=np.float32)[:, None]


def fit(activation, width, options):
    """Fit a guide: the predictive mean on the grid (m,), and locations and scales of its Gaussians, all in one."""
    model = nn.bnn(nn.FCN(1, width, activation, **SCALES), num_outputs=None, noise=NOISE_SCALE)
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, options.num_steps))
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO(num_particles=4))
    params = svi.run(jax.random.key(0), options.num_steps, *DATA, progress_bar=False).params
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(options.num_draws,))
    functions = jax.lax.map(site_function(model, "y", GRID), draws, batch_size=50)
    gaussians = [
        np.concatenate([np.ravel(value) for name, value in params.items() if name.endswith(end)])
        for end in ("_auto_loc", "_auto_scale")
    ]
    return np.asarray(functions.mean(0)), *gaussians


def limit_kernel():
    """Return the covariance (m, m) of the infinitely wide erf network on the grid."""
    return np.asarray(fcn_kernel(1, "erf", **SCALES)(GRID)[0])


def prior_functions(width, num_draws):
    """Draw from the prior over functions of erf networks on the grid (num_draws, m); of its limit without a width."""
    key = jax.random.key(2)
    if width is None:
        kernel = limit_kernel()
        return np.asarray(jax.random.multivariate_normal(key, np.zeros(len(GRID)), kernel, (num_draws,), method="svd"))
    model = nn.bnn(nn.FCN(1, width, "erf", **SCALES), num_outputs=None, noise=NOISE_SCALE)

    def draw(key):
        sites = handlers.trace(handlers.seed(model, key)).get_trace(GRID)
        return sites["features"]["value"] @ sites["readout"]["value"]

    return np.asarray(jax.lax.map(draw, jax.random.split(key, num_draws), batch_size=50))


def upcrossings(functions):
    """Tell where draws of functions (draws, m) cross zero upwards, up to the grid (draws, m - 1)."""
    return (functions[:, :-1] < 0) & (functions[:, 1:] >= 0)


def expected_upcrossings(kernel):
    """Return the expected upcrossings of a Gaussian process with this covariance on a grid."""
    sd = np.sqrt(np.diag(kernel))
    return float(np.arccos(np.diag(kernel, 1) / (sd[1:] * sd[:-1])).sum() / (2 * np.pi))


def draw(found, options):
    """Draw predictions above, a panel for each activation, and parameters of the guide below."""
    figure, axes = plt.subplots(2, len(ACTIVATIONS), figsize=(12, 6.5), layout="constrained")
    colours = dict(zip(options.widths, _common.shades(len(options.widths)), strict=True))
    for panel, below, activation in zip(*axes, ACTIVATIONS, strict=True):
        for width, colour in colours.items():
            mean, locs, scales = found[activation, width]
            panel.plot(GRID[:, 0], mean, color=colour, label=f"width {width}")
            below.plot(locs[:3000], scales[:3000], ".", markersize=2, color=colour)
        panel.plot(*DATA, "o", color="tab:red")
        panel.set(title=activation, xlabel="input")
        below.plot([0], [1], "+", color="black", markersize=12)
        below.set(xlabel="mean of a weight")
    axes[0, 0].set_ylabel("predictive mean")
    axes[1, 0].set_ylabel("its standard deviation (+ is the prior)")
    axes[0, 0].legend()
    _common.save(figure, options, "collapse.png", dpi=110)


def compare_priors(options):
    """Compare priors over functions: predictive bands and zero crossings, a column for each width, the limit's last."""
    priors = {f"width {width}": prior_functions(width, options.num_draws) for width in options.widths}
    priors["NNGP"] = prior_functions(None, options.num_draws)
    print("\nPriors over functions of erf networks, inputs from -3 to 3")
    rows = []
    for name, functions in priors.items():
        counts = upcrossings(functions).sum(1)
        error = counts.std() / np.sqrt(options.num_draws)
        rows.append(
            {"prior": name, "sd at 0": functions[:, len(GRID) // 2].std(), "upcrossings": counts.mean(), "error": error}
        )
    _common.print_table(rows)
    print(f"Expected of the NNGP: {expected_upcrossings(limit_kernel()):.3f}")
    shape = {"figsize": (2.4 * len(priors), 4.4), "sharey": "row", "layout": "constrained"}
    figure, axes = plt.subplots(2, len(priors), **shape)
    for panel, below, (name, functions) in zip(*axes, priors.items(), strict=True):
        mean, sd = functions.mean(0), functions.std(0)
        for times in (2, 1):
            panel.fill_between(
                GRID[:, 0], mean - times * sd, mean + times * sd, color="tab:blue", alpha=0.2, linewidth=0
            )
        panel.plot(GRID[:, 0], functions[:5].T, color="0.4", linewidth=0.6)
        panel.plot(GRID[:, 0], mean, color="tab:blue")
        panel.set_title(name)
        below.bar(np.arange(-2.875, 3, 0.25), upcrossings(functions).mean(0).reshape(24, 5).sum(1), 0.25)
        below.set_xlabel("input")
    axes[0, 0].set_ylabel("draws, mean ± 1 and 2 sd")
    axes[1, 0].set_ylabel("upcrossings of zero a draw")
    _common.save(figure, options, "prior_by_width.png", dpi=100)


def main(options):
    """Run the study."""
    cells = [(activation, width) for activation in ACTIVATIONS for width in options.widths]
    found, rows = {}, []
    for activation, width in (progress := tqdm(cells, unit="fit")):
        progress.set_description(f"{activation}, width {width}")
        mean, locs, scales = found[activation, width] = fit(activation, width, options)
        nats = 0.5 * (locs**2 + scales**2 - 1) - np.log(scales)
        at_data = np.interp(DATA[0][:, 0], GRID[:, 0], mean)
        row = {"activation": activation, "width": width, "mean at the points": f"{at_data[0]:.2f}, {at_data[1]:.2f}"}
        rows.append({**row, "nats in all": nats.sum(), "nats a weight": nats.mean()})
    print("\nTwo points, (-1, -1) and (1, 1): the predictive mean, and the divergence of the guide from the prior")
    _common.print_table(rows)
    draw(found, options)
    compare_priors(options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[10, 100, 1000, 10000],
            num_steps=(3000, "Adam steps of each fit, from 0.03 down by a cosine"),
            num_draws=(1000, "draws for the predictive mean"),
        )
    )
