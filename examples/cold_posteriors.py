"""Tempering the KL of a Bayesian neural network on handwritten digits: what it does to the predictions.

A ReLU layer whose output is divided by its width is fitted by mean-field variational inference with eta = tau p/N, for
tau from 1e-4 to 1e2 (Huix et al. 2022, Figures 1 and 8). Prints accuracy, negative log-likelihood, calibration error,
confidence and predictive entropies on digits and on patches of photographs, and the spread of predictions against the
width on the paper's cubic regression (Figure 4), with and without tempering.

    python examples/cold_posteriors.py
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_sample
from sklearn.datasets import load_digits, load_sample_images

import numpyro_wide
from numpyro_wide import TemperedTraceMeanFieldELBO
from numpyro_wide.diagnostics import (
    accuracy,
    confidence,
    expected_calibration_error,
    negative_log_likelihood,
    predictive_entropy,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PRIOR_SCALE = 0.2**0.5  # every weight N(0, 1/5), as in the paper
TAUS = 10.0 ** np.arange(-4, 2.5, 0.5)
SHOWN_TAUS = (1e-4, 1e-2, 1.0)  # whose entropies are drawn
CUBIC_NOISE = 0.001**0.5


class Images(NamedTuple):
    """Pixels (n, 64) from 0 to 1 with a column of ones, and labels (n,)."""

    x: np.ndarray
    labels: np.ndarray


def with_bias(x: np.ndarray) -> np.ndarray:
    """Append a column of ones."""
    return np.concatenate([x, np.ones_like(x[:, :1])], axis=1).astype(np.float32)


def load_images(num_train: int) -> tuple[Images, Images, np.ndarray]:
    """A random split of the digits, and as many patches of scikit-learn's two photographs as test images."""
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    digits = Images(with_bias(pixels[order] / 16), labels[order])
    # Every second pixel in grey, in windows of the digits' size, of which those with the most contrast are no sky.
    photographs = [image[::2, ::2].mean(-1) / 255 for image in load_sample_images().images]
    windows = [np.lib.stride_tricks.sliding_window_view(image, (8, 8))[::8, ::8] for image in photographs]
    patches = np.concatenate([window.reshape(-1, 64) for window in windows])
    patches = patches[np.argsort(-patches.std(1))[: len(labels) - num_train]]
    train, test = (Images(*[part[i] for part in digits]) for i in (slice(num_train), slice(num_train, None)))
    return train, test, with_bias(patches)


def network(x, y=None, *, width, outputs):
    """One ReLU layer, its output divided by the width; classes for several outputs, a regression for one."""
    prior = dist.Normal(0, PRIOR_SCALE)
    hidden = numpyro.sample("hidden", prior.expand([x.shape[1], width]).to_event(2))
    readout = numpyro.sample("readout", prior.expand([width, outputs]).to_event(2))
    function = numpyro.deterministic("function", jax.nn.relu(x @ hidden) @ readout / width)
    with numpyro.plate("rows", x.shape[0]):
        is_class = outputs > 1
        likelihood = dist.Categorical(logits=function) if is_class else dist.Normal(function[:, 0], CUBIC_NOISE)
        numpyro.sample("y", likelihood, obs=y)


def fitter(model: Callable, num_steps: int, num_particles: int, num_draws: int) -> Callable:
    """A compiled function from eta and data to draws of the weights, (num_draws, ...) by site."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.1 * PRIOR_SCALE)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))

    @jax.jit
    def draws(eta: jax.Array, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        svi = SVI(model, guide, optimiser, TemperedTraceMeanFieldELBO(eta=eta, num_particles=num_particles))
        state = svi.init(jax.random.key(0), x, y)
        state, _ = jax.lax.scan(lambda s, _: svi.update(s, x, y), state, length=num_steps)
        return guide.sample_posterior(jax.random.key(1), svi.get_params(state), sample_shape=(num_draws,))

    return draws


def functions(draws: dict[str, jax.Array], x: np.ndarray, width: int) -> jax.Array:
    """The network's outputs (num_draws, n, outputs)."""
    return jax.lax.map(lambda draw: jax.nn.relu(x @ draw["hidden"]) @ draw["readout"] / width, draws)


class Quality(NamedTuple):
    """Measures of averaged class probabilities, and entropies (n,) on digits and on patches."""

    accuracy: float
    nll: float
    ece: float
    confidence: float
    entropies: tuple[np.ndarray, np.ndarray]


def assess(draws: dict[str, jax.Array], width: int, test: Images, patches: np.ndarray) -> Quality:
    """Look at a fitted guide on test images and patches."""
    probs, outside = (jax.nn.softmax(functions(draws, x, width)).mean(0) for x in (test.x, patches))
    measures = (
        measure(probs, test.labels) for measure in (accuracy, negative_log_likelihood, expected_calibration_error)
    )
    entropies = tuple(np.asarray(predictive_entropy(p)) for p in (probs, outside))
    return Quality(*map(float, measures), float(confidence(probs).mean()), entropies)


def cubic_spread(widths: list[int], num_steps: int, num_draws: int) -> dict[str, dict[int, float]]:
    """Standard deviation of the predictions on y = x³, averaged over the inputs, by loss and width."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 100)
    y = (x**3 + CUBIC_NOISE * rng.normal(size=100)).astype(np.float32)
    inputs = with_bias(x[:, None])
    spread: dict[str, dict[int, float]] = {"eta = p/N": {}, "eta = 1": {}, "prior": {}}
    for width in widths:
        model = partial(network, width=width, outputs=1)
        draws = fitter(model, num_steps, 4, num_draws)
        for name, eta in (("eta = p/N", len(x) / width), ("eta = 1", 1.0)):
            spread[name][width] = float(functions(draws(eta, inputs, y), inputs, width).std(0).mean())
        shapes = {"hidden": (2, width), "readout": (width, 1)}
        keys = dict(zip(shapes, jax.random.split(jax.random.key(2)), strict=True))
        prior = {
            name: PRIOR_SCALE * jax.random.normal(keys[name], (num_draws, *shape)) for name, shape in shapes.items()
        }
        spread["prior"][width] = float(functions(prior, inputs, width).std(0).mean())
    return spread


def plot(qualities: dict[float, Quality], spread: dict, no_cooling: float, path: Path) -> None:
    """Measures against the temperature above; entropies and the spread against the width below."""
    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    taus = list(qualities)
    labels = ("accuracy", "negative log-likelihood, nats", "expected calibration error", "mean confidence")
    for panel, name, label in zip(axes[0], Quality._fields, labels, strict=False):
        panel.semilogx(taus, [getattr(quality, name) for quality in qualities.values()], marker="o", markersize=4)
        panel.axvline(no_cooling, color="tab:red", linestyle="--", label="η = 1")
        panel.set(xlabel="temperature τ", ylabel=label)
    axes[0, 0].legend()
    bins = np.linspace(0, np.log(10), 24)
    for panel, tau in zip(axes[1], SHOWN_TAUS, strict=False):
        nearest = min(taus, key=lambda t: abs(np.log(t / tau)))
        for entropy, label in zip(qualities[nearest].entropies, ("digits", "photographs"), strict=True):
            panel.hist(entropy, bins, density=True, alpha=0.6, label=label)
        panel.set(xlabel="predictive entropy, nats", ylabel="density", title=f"τ = {nearest:.3g}")
    axes[1, 0].legend()
    for (name, by_width), marker in zip(spread.items(), "os^", strict=True):
        axes[1, 3].loglog(list(by_width), list(by_width.values()), marker=marker, markersize=4, label=name)
    axes[1, 3].set(xlabel="width N", ylabel="predictive sd", title="cubic regression")
    axes[1, 3].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=200, help="of the network on digits")
    parser.add_argument("--num-train", type=int, default=1000, help="digits to train on; the others are for testing")
    parser.add_argument("--num-taus", type=int, default=len(TAUS), help="how many temperatures, from 1e-4 to 1e2")
    parser.add_argument("--cubic-widths", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10000])
    parser.add_argument(
        "--num-steps", type=int, default=2000, help="Adam steps of each fit, from 0.03 down by a cosine"
    )
    parser.add_argument("--num-draws", type=int, default=50, help="networks that are averaged over")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Fit, assess, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    train, test, patches = load_images(options.num_train)
    model = partial(network, width=options.width, outputs=10)
    draws = fitter(model, options.num_steps, 1, options.num_draws)
    no_cooling = options.width / len(train.x)
    print(f"Digits, p = {len(train.x)}, width N = {options.width}; eta = tau p/N is 1 at tau = {no_cooling:.3g}")
    print("    tau  accuracy    NLL    ECE  confidence  entropy on digits  on photographs")
    qualities = {}
    for tau in TAUS[np.linspace(0, len(TAUS) - 1, options.num_taus).astype(int)]:
        quality = assess(draws(tau / no_cooling, *train), options.width, test, patches)
        qualities[float(tau)] = quality
        inside, outside = (float(entropy.mean()) for entropy in quality.entropies)
        print(
            f"{tau:7.2g}  {quality.accuracy:8.3f}  {quality.nll:5.3f}  {quality.ece:5.3f}  {quality.confidence:10.3f}  "
            f"{inside:17.3f}  {outside:14.3f}",
            flush=True,
        )

    spread = cubic_spread(options.cubic_widths, options.num_steps, options.num_draws)
    print(
        "\nCubic regression: standard deviation of the predictions, averaged over the inputs\n"
        "width  eta = p/N  eta = 1   prior"
    )
    for width in options.cubic_widths:
        print(f"{width:5d}  " + "  ".join(f"{spread[name][width]:{len(name)}.4f}" for name in spread))
    options.output.mkdir(parents=True, exist_ok=True)
    plot(qualities, spread, no_cooling, options.output / "cold_posteriors.png")
    print(f"\nFigure in {options.output}: cold_posteriors.png")


if __name__ == "__main__":
    main()
