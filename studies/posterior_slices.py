"""Slices of a log posterior, repriorised and not: through three trained networks, and a regression in the plane.

A network with one GELU layer is trained thrice by gradient descent, and its log posterior drawn on the slice through
the three, in the weights and after repriorisation: for several widths at 128 images, and several numbers of images at
width 128 (Hron et al. 2022, Figure 5). Prints how far the log posterior falls between them. The other figure maps the
posterior of a linear regression with two weights to N(0, I) (Figure 2).

    python studies/posterior_slices.py --cifar10 path/to/cifar-10-batches-py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.interpolate import RegularGridInterpolator
from tqdm.auto import tqdm

import _common
import _data
from _slices import plot_posterior_slice, posterior_slice
from numpyro_wide import repriorise
from numpyro_wide.nn import FCN, bnn
from numpyro_wide.readout import site_function

NOISE_SCALE = 0.1
ROWS = ("plain", "repriorised")
POINT, TARGET = np.array([[0.9, 0.5]]), np.array([2.0])  # the regression of the paper, and its noise variance
POINT_NOISE = 0.1**0.5
LIMITS = {"plain": (-2.2, 2.8), "repriorised": (-2.5, 2.5)}


def forms(model, noise_scale):
    """Return a model as it stands, and repriorised."""
    mapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=noise_scale)
    return dict(zip(ROWS, (model, mapped), strict=True))


def trained(model, num_steps, x, y):
    """Train weights (3, ...) by site from draws of the prior, by gradient descent with momentum on squared errors."""
    optimiser = optax.sgd(0.5 / len(x), momentum=0.9)
    function = site_function(model, "y", x)
    loss = jax.grad(lambda weights: 0.5 * jnp.sum((function(weights) - y) ** 2))

    def descend(carry, _):
        weights, state = carry
        step, state = optimiser.update(loss(weights), state)
        return (optax.apply_updates(weights, step), state), None

    @jax.jit
    def train(key):
        sites = handlers.trace(handlers.seed(model, key)).get_trace(x, y)
        start = {name: site["value"] for name, site in sites.items() if site["type"] == "sample" and name != "y"}
        return jax.lax.scan(descend, (start, optimiser.init(start)), length=num_steps)[0][0]

    return [train(key) for key in jax.random.split(jax.random.key(0), 3)]


def slices(num_train, width, inputs, codes, options):
    """Return the slice through the same three settings of the weights in both forms."""
    data = tuple(part[:num_train] for part in (inputs, codes))
    network = FCN(1, width, "gelu", w_std=2**0.5, b_std=0.1, readout_w_std=1.0)
    models = forms(bnn(network, codes.shape[1], NOISE_SCALE), NOISE_SCALE)
    points = trained(models["plain"], options.num_steps, *data)
    cut = {"resolution": options.resolution, "batch_size": 8}
    return {form: posterior_slice(model, points, *data, **cut) for form, model in models.items()}


def fall(slice_):
    """Return the nats from the lower of two of the three to the lowest point between, mean of the pairs."""
    across, up = slice_.angles
    surface = RegularGridInterpolator((up, across), slice_.log_density, method="cubic")
    pairs = [(0, 1), (0, 2), (1, 2)]
    lines = [np.linspace(slice_.points[i], slice_.points[j], 101)[:, ::-1] for i, j in pairs]
    return np.mean([min(slice_.at_points[[*p]]) - surface(line).min() for p, line in zip(pairs, lines, strict=True)])


def regression(x, y=None):
    """Sample a line through the origin, its weights N(0, I)."""
    features = numpyro.deterministic("features", x)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, POINT_NOISE).to_event(1), obs=y)


def densities(model, site, ends):
    """Return prior and posterior density of a site with two coordinates on a grid, over their highest values."""
    axis = np.linspace(*ends, 121)
    points = np.stack(np.meshgrid(axis, axis), -1)
    values = jax.vmap(lambda point: log_density(model, (POINT, TARGET), {}, {site: point})[0])(points.reshape(-1, 2))
    posterior = np.asarray(values).reshape(points.shape[:2])
    return axis, np.exp(-0.5 * (points**2).sum(-1)), np.exp(posterior - posterior.max())


def draw_slices(cells, found, options):
    """Draw a column for each cell, weights above, coordinates of the map below; what lies deep is left out."""
    shape = {"figsize": (2.6 * len(cells), 5.6), "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(2, len(cells), **shape)
    for column, ((n, width), cut) in zip(axes.T, found.items(), strict=True):
        for panel, form in zip(column, ROWS, strict=True):
            depth = min(3 * fall(cut["plain"]), np.ptp(cut[form].log_density))
            plot_posterior_slice(cut[form], depth=depth, ax=panel)
            panel.set_title(f"width {width}, n = {n}\n{form}, {depth:,.0f} nats", fontsize=10)
    figure.supxlabel("angle towards the second network, radians")
    figure.supylabel("angle at right angles to it, radians")
    _common.save(figure, options, "posterior_slices.png", dpi=90)


def draw_regression(options):
    """Draw the linear regression, its posterior over its prior, in both forms."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    models = forms(regression, POINT_NOISE)
    for panel, form, site, letter in zip(axes, ROWS, ("readout", "readout_base"), ("θ", "φ"), strict=True):
        axis, prior, posterior = densities(models[form], site, LIMITS[form])
        levels = np.exp(-0.5 * np.array([2.0, 1.0]) ** 2)
        panel.contourf(axis, axis, posterior, [*levels, 1.001], colors=["#c6dbef", "#6baed6"])
        panel.contour(axis, axis, prior, levels, colors="black", linestyles="--", linewidths=1)
        panel.set(aspect="equal", xlabel=f"${letter}_1$", ylabel=f"${letter}_2$", title=form)
    axes[0].plot([], color="black", linestyle="--", linewidth=1, label="prior, 1 and 2 sd")
    axes[0].fill([], [], color="#6baed6", label="posterior")
    axes[0].legend(loc="lower left", fontsize=8)
    _common.save(figure, options, "linear_regression.png", dpi=90)


def main(options):
    """Run the study."""
    images = _data.digits() if options.cifar10 is None else _data.cifar10(options.cifar10)[0]
    images = _data.split(images, max(options.num_train), 0, seed=0)[0]
    pixels = images.inputs.reshape(len(images.targets), -1)
    inputs = _data.Standardiser.fit(pixels, by_column=False)(pixels)
    codes = _common.centred_codes(images.targets, 10)
    cells = [(options.num_train[0], width) for width in options.widths]
    cells += [(n, options.widths[:2][-1]) for n in options.num_train[1:]]
    found = {cell: slices(*cell, inputs, codes, options) for cell in tqdm(cells, unit="slice")}
    print("\nHow far the log posterior falls between two of the three, nats, mean of three pairs")
    _common.print_table(
        [{"images": n, "width": width} | {form: fall(cut[form]) for form in ROWS} for (n, width), cut in found.items()]
    )
    draw_slices(cells, found, options)
    draw_regression(options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=([32, 128, 512, 2048], "at the number of images that comes first"),
            num_train=([128, 512, 1536], "at the second of the widths, or the only one"),
            resolution=(31, "grid points along each axis"),
            num_steps=(1000, "of gradient descent from a draw of the prior"),
            cifar10={"type": Path, "help": "folder with the CIFAR-10 batches; digits without it"},
        )
    )
