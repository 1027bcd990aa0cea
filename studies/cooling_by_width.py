"""Temperature and width: what wider networks lose without tempering, and how it moves a guide's Gaussians.

The network of studies/cold_posteriors.py on handwritten digits, fitted with eta = 1 and with eta = tau p/N, for
growing widths N (Huix et al. 2022, Figure 3), and at one width for several tau (Figure 7). Prints accuracy and
negative log-likelihood on test digits, and draws them beside histograms of the guide's means and standard deviations.

    python studies/cooling_by_width.py
"""

from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
from tqdm.auto import tqdm

import _common
from _tempered import PRIOR_SCALE, digits, fitter, functions, network
from numpyro_wide import diagnostics

COLUMNS = ("accuracy", "negative log-likelihood")
CHANCE = (0.1, np.log(10))


def assess(fitted, width, test):
    """Return accuracy and negative log-likelihood of averaged class probabilities."""
    probs = jax.nn.softmax(functions(fitted.draws, test.inputs, width)).mean(0)
    scores = diagnostics.classification_scores(test.targets, probs)
    return dict(zip(COLUMNS, (scores["accuracy"], scores["negative_log_likelihood"]), strict=True))


def gaussians(fitted):
    """Return means and standard deviations of the guide's Gaussians, all sites in one."""
    return tuple(
        np.concatenate([np.ravel(value) for name, value in fitted.params.items() if name.endswith(end)])
        for end in ("_auto_loc", "_auto_scale")
    )


def draw(found, guides, options):
    """Draw measures by width above; below means, standard deviations, and the latter against the former."""
    figure = plt.figure(figsize=(11, 6.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    for panel, column, chance in zip(top.subplots(1, 2), COLUMNS, CHANCE, strict=True):
        for label, by_width in found.items():
            panel.semilogx(options.widths, [row[column] for row in by_width.values()], "o-", markersize=4, label=label)
        panel.axhline(chance, color="0.5", linestyle="--", label="chance")
        panel.set(xlabel="width N", ylabel=column)
        panel.legend(fontsize=8)
    means, sds, both = bottom.subplots(1, 3)
    colours = _common.shades(len(guides))
    for (tau, (locs, scales)), colour in zip(guides.items(), colours, strict=True):
        label = f"τ = {tau:g}"
        means.hist(locs, 60, density=True, histtype="step", color=colour, label=label)
        sds.hist(scales, 60, density=True, histtype="step", color=colour, label=label)
        both.plot(locs, scales, ".", markersize=1.5, color=colour, rasterized=True)
    means.set(xlabel="mean of a weight", ylabel="density", yscale="log")
    sds.set(xlabel="its standard deviation", ylabel="density", yscale="log")
    both.set(xlabel="mean of a weight", ylabel="its standard deviation")
    both.plot([0], [PRIOR_SCALE], "+", color="tab:red", markersize=12, label="prior")
    sds.axvline(PRIOR_SCALE, color="tab:red", linestyle="--", label="prior")
    for panel in (means, sds, both):
        panel.legend(fontsize=8)
    _common.save(figure, options, "cooling_by_width.png", dpi=100)


def main(options):
    """Run the study."""
    train, test = digits(options.num_train)
    labels = ("η = 1", f"η = τp/N, τ = {options.tau:g}")
    found = {label: {} for label in labels}
    for width in tqdm(options.widths, desc="widths", unit="width"):
        fit = fitter(partial(network, width=width, outputs=10), options.num_steps, 1, options.num_draws)
        for label, eta in zip(labels, (1.0, options.tau * options.num_train / width), strict=True):
            found[label][width] = assess(fit(eta, *train), width, test)
    print(f"\nDigits, p = {options.num_train}")
    _common.print_table(
        [{"width N": width, "eta": label} | found[label][width] for width in options.widths for label in labels]
    )

    fit = fitter(partial(network, width=options.width, outputs=10), options.num_steps, 1, options.num_draws)
    guides = {
        tau: gaussians(fit(tau * options.num_train / options.width, *train)) for tau in tqdm(options.taus, unit="fit")
    }
    print(f"\nWidth {options.width}: the guide's Gaussians; the prior's have mean 0 and sd {PRIOR_SCALE:.3f}")
    _common.print_table(
        [
            {"tau": tau, "RMS of means": _common.rms(locs), "median sd": np.median(scales), "least sd": scales.min()}
            for tau, (locs, scales) in guides.items()
        ]
    )
    draw(found, guides, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[10, 30, 100, 300, 1000],
            num_train=(1000, "digits to train on; the others are for testing"),
            tau=(1e-3, "temperature by the width"),
            taus=([1e-4, 1e-3, 1e-2, 1e-1], "temperatures of the histograms"),
            width=(200, "of the histograms"),
            num_steps=(2000, "Adam steps of each fit, from 0.03 down by a cosine"),
            num_draws=(50, "networks that are averaged over"),
        )
    )
