"""Tempering the KL of a Bayesian neural network on handwritten digits: what it does to the predictions.

A ReLU layer whose output is divided by its width is fitted by mean-field variational inference with eta = tau p/N, for
tau from 1e-4 to 1e2 (Huix et al. 2022, Figures 1 and 8). Prints accuracy, negative log-likelihood, calibration error,
confidence and predictive entropies on digits and on patches of photographs, and the spread of predictions against the
width on the paper's cubic regression (Figure 4), with and without tempering.

    python studies/cold_posteriors.py
"""

from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import entr
from sklearn.datasets import load_sample_images
from tqdm.auto import tqdm

import _common
from _tempered import CUBIC_NOISE, PRIOR_SCALE, digits, fitter, functions, network
from numpyro_wide import diagnostics

TAUS = 10.0 ** np.arange(-4, 2.5, 0.5)
MEASURES = ("accuracy", "negative_log_likelihood", "expected_calibration_error")
SPREADS = ("eta = p/N", "eta = 1", "prior")


def load_images(num_train):
    """Return digits, and as many patches of photographs as there are test images."""
    train, test = digits(num_train)
    # Every second pixel in grey, in windows of the digits' size, of which those with the most contrast are no sky.
    photographs = [image[::2, ::2].mean(-1) / 255 for image in load_sample_images().images]
    windows = [np.lib.stride_tricks.sliding_window_view(image, (8, 8))[::8, ::8] for image in photographs]
    patches = np.concatenate([window.reshape(-1, 64) for window in windows])
    return train, test, _common.with_ones(patches[np.argsort(-patches.std(1))[: len(test.targets)]])


def assess(draws, width, test, patches):
    """Return measures of averaged class probabilities on test images, and entropies (n,) on them and on patches."""
    probs, outside = (jax.nn.softmax(functions(draws, x, width)).mean(0) for x in (test.inputs, patches))
    scores = diagnostics.classification_scores(test.targets, probs)
    measures = {name.replace("_", " "): scores[name] for name in MEASURES}
    entropies = [entr(np.asarray(p)).sum(-1) for p in (probs, outside)]
    return measures | {"mean confidence": float(probs.max(-1).mean())}, entropies


def cubic_spread(width, num_steps, num_draws):
    """Return the sd of predictions on y = x³, averaged over inputs, for eta = p/N, eta = 1, and the prior."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 100)
    y = (x**3 + CUBIC_NOISE * rng.normal(size=100)).astype(np.float32)
    inputs = _common.with_ones(x[:, None])
    fit = fitter(partial(network, width=width, outputs=1), num_steps, 4, num_draws)
    keys = jax.random.split(jax.random.key(2))
    shapes = zip(("hidden", "readout"), keys, ((2, width), (width, 1)), strict=True)
    prior = {name: PRIOR_SCALE * jax.random.normal(key, (num_draws, *shape)) for name, key, shape in shapes}
    found = (fit(len(x) / width, inputs, y).draws, fit(1.0, inputs, y).draws, prior)
    return {n: float(functions(draws, inputs, width).std(0).mean()) for n, draws in zip(SPREADS, found, strict=True)}


def draw(no_cooling, qualities, spread, options):
    """Draw measures against the temperature above, entropies and the spread against the width below."""
    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    taus = list(qualities)
    for panel, label in zip(axes[0], qualities[taus[0]][0], strict=True):
        panel.semilogx(taus, [measures[label] for measures, _ in qualities.values()], marker="o", markersize=4)
        panel.axvline(no_cooling, color="tab:red", linestyle="--", label="η = 1")
        panel.set(xlabel="temperature τ", ylabel=label)
    bins = np.linspace(0, np.log(10), 24)
    for panel, tau in zip(axes[1], (1e-4, 1e-2, 1.0), strict=False):
        nearest = min(taus, key=lambda t: abs(np.log(t / tau)))
        for entropy, label in zip(qualities[nearest][1], ("digits", "photographs"), strict=True):
            panel.hist(entropy, bins, density=True, alpha=0.6, label=label)
        panel.set(xlabel="predictive entropy, nats", ylabel="density", title=f"τ = {nearest:.3g}")
    _common.plot_lines(axes[1, 3], {name: {width: found[name] for width, found in spread.items()} for name in SPREADS})
    axes[1, 3].set(xlabel="width N", ylabel="predictive sd", title="cubic regression")
    for panel in (axes[0, 0], axes[1, 0], axes[1, 3]):
        panel.legend(fontsize=8)
    _common.save(figure, options, "cold_posteriors.png", dpi=130)


def main(options):
    """Run the study."""
    train, test, patches = load_images(options.num_train)
    fit = fitter(partial(network, width=options.width, outputs=10), options.num_steps, 1, options.num_draws)
    no_cooling = options.width / options.num_train
    taus = TAUS[np.linspace(0, len(TAUS) - 1, options.num_taus).astype(int)]
    print(f"Digits, p = {options.num_train}, width N = {options.width}; eta = tau p/N is 1 at tau = {no_cooling:.3g}")
    qualities = {}
    for tau in tqdm(taus, desc="temperatures", unit="fit"):
        qualities[float(tau)] = assess(fit(tau / no_cooling, *train).draws, options.width, test, patches)
    entropies = ("entropy on digits", "on photographs")
    rows = []
    for tau, (measures, both) in qualities.items():
        means = {name: float(entropy.mean()) for name, entropy in zip(entropies, both, strict=True)}
        rows.append({"tau": tau, **measures, **means})
    _common.print_table(rows)

    print("\nCubic regression: standard deviation of the predictions, averaged over the inputs", flush=True)
    widths = tqdm(options.cubic_widths, desc="widths", unit="width")
    spread = {width: cubic_spread(width, options.num_steps, options.num_draws) for width in widths}
    _common.print_table([{"width": width} | found for width, found in spread.items()])
    draw(no_cooling, qualities, spread, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            width=200,
            num_train=(1000, "digits to train on; the others are for testing"),
            num_taus=(len(TAUS), "how many temperatures, from 1e-4 to 1e2"),
            cubic_widths=[10, 30, 100, 300, 1000, 3000, 10000],
            num_steps=(2000, "Adam steps of each fit, from 0.03 down by a cosine"),
            num_draws=(50, "networks that are averaged over"),
        )
    )
