"""Mean-field variational inference in wide networks: it ignores the data, but not with the readout integrated out.

One hidden erf layer of growing width on two points, a noisy sine and the winning paces of the Olympic marathon (the
kinds of data, the network and the priors of Coker et al. 2021). Mean-field Gaussian guides, all started at the prior,
are fitted to the network as it is, with the KL of its hidden layer tempered (Huix et al. 2022), and with its readout
integrated out. Prints how far each predictive distribution is from the NNGP posterior, the limit of the exact one, and
its ELBO beside the log evidence of the network, which it bounds; and draws them all.

    python studies/wide_mean_field.py
"""

import time
from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean
from tqdm.auto import tqdm

import _common
from _common import Posterior
from numpyro_wide import ReadoutPredictive, TemperedTraceMeanFieldELBO, collapse_readout, datasets, model_evidence
from numpyro_wide.wide_limit import fcn_kernel

# Coker et al. 2021, section 4.1: prior variance 2 of every weight and bias, noise variance 0.01.
PRIOR_SCALE, NOISE_SCALE = 2**0.5, 0.1
NUM_CHAINS = 4  # of the evidence
DATA = {"points": "two points", "sine": "noisy sine", "marathon": "Olympic marathon"}
METHODS = ("standard mean field", "tempered mean field", "readout integrated out")
TITLES = ("standard mean field", "hidden KL tempered", "mean field, readout\nintegrated out", "NNGP posterior")
GRID = np.linspace(-4, 4, 161, dtype=np.float32)[:, None]
SCALES = {"w_std": PRIOR_SCALE, "b_std": PRIOR_SCALE}
network = partial(_common.erf_network, **SCALES, readout_std=PRIOR_SCALE, noise_scale=NOISE_SCALE)


def load_data(name):
    """Return inputs (n, 1) and targets (n,), of variances of about one; the sine has the likelihood's noise."""
    if name == "marathon":
        return _common.standardised(datasets.marathon())
    x = y = np.array([-1.0, 1.0])
    if name == "sine":
        rng = np.random.default_rng(1)
        x = rng.uniform(-(3**0.5), 3**0.5, 20)
        y = 2**0.5 * np.sin(1.5 * np.pi * x / 3**0.5) + NOISE_SCALE * rng.normal(size=20)
    return x.astype(np.float32)[:, None], y.astype(np.float32)


def collapsed(width):
    """Make the network with its readout integrated out."""
    return collapse_readout(partial(network, width=width), readout="readout", features="features", observed="y")


def fit(method, width, data, options) -> Posterior:
    """Fit a mean-field guide from the prior, N(0, I), on; its ELBO is the ordinary one, also after a tempered fit."""
    model, loss = partial(network, width=width), TraceMeanField_ELBO(num_particles=options.num_particles)
    if method == "tempered mean field":
        # With an output scaled by 1/√width, the KL of the hidden layer alone is tempered (Huix 2022, appendix D).
        eta = dict.fromkeys(("hidden_weights", "hidden_bias"), len(data[1]) / width)
        loss = TemperedTraceMeanFieldELBO(eta=eta, num_particles=options.num_particles)
    elif method == "readout integrated out":
        model = collapsed(width)
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, options.num_steps)), loss)
    params = svi.run(jax.random.key(0), options.num_steps, *data, progress_bar=False).params

    elbo = TraceMeanField_ELBO(num_particles=options.num_draws, vectorize_particles=False)
    bound = -float(jax.jit(elbo.loss, static_argnums=(2, 3))(jax.random.key(1), params, model, guide, *data))
    draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(options.num_draws,))
    if method == "readout integrated out":
        predictions = ReadoutPredictive(model, draws, data, batch_size=20)(jax.random.key(3), GRID)
        mean, variance = predictions["mean"], predictions["variance"].mean(0)
    else:
        predictive = Predictive(model, draws, return_sites=["function"])
        mean, variance = predictive(jax.random.key(3), GRID)["function"], 0.0
    mean = np.asarray(mean, np.float64)
    return Posterior(mean.mean(0), np.sqrt(variance + mean.var(0)), bound)


def draw_panel(panel, data, limit, by_width):
    """Draw predictive means by width and the band of the widest network; without fits, the limit's."""
    x = GRID[:, 0]
    widest = by_width[max(by_width)] if by_width else limit
    band = widest.mean - 2 * widest.sd, widest.mean + 2 * widest.sd
    panel.fill_between(x, *band, color="0.85", label="mean ± 2 sd, widest or NNGP")
    for (width, posterior), colour in zip(by_width.items(), _common.shades(len(by_width)), strict=True):
        panel.plot(x, posterior.mean, color=colour, label=f"width {width}")
    panel.plot(x, limit.mean, color="black", linestyle="--", linewidth=1, label="NNGP")
    panel.plot(data[0][:, 0], data[1], "o", color="tab:red", markersize=3, label="data")
    reach = 1.15 * max(np.abs(limit.mean).max() + 2 * limit.sd.max(), np.abs(data[1]).max())
    panel.set(xlim=(x[0], x[-1]), ylim=(-reach, reach))


def draw(limits, fits, options):
    """Draw a row for each data set: a column for each method, the limit, and the distances to it."""
    figure, axes = plt.subplots(len(limits), 5, figsize=(15, 8), layout="constrained", squeeze=False)
    for (*row, last), (name, limit) in zip(axes, limits.items(), strict=True):
        for panel, method in zip(row, [*METHODS, "NNGP"], strict=True):
            draw_panel(panel, load_data(name), limit, fits[name].get(method, {}))
        row[0].set_ylabel(f"{DATA[name]}\ntarget")
        distances = {
            method: {w: p.distance(limit)[0] for w, p in found.items()} for method, found in fits[name].items()
        }
        _common.plot_lines(last, distances)
        _common.number_ticks(last, sorted(options.widths))
        last.set_ylabel("RMSE")
        last.yaxis.set_label_position("right")
        last.yaxis.tick_right()
    for panel, title in zip(axes[0], [*TITLES, "distance of predictive\nmeans to the NNGP's"], strict=True):
        panel.set_title(title)
    for panel, label in zip(axes[-1], ["input"] * 4 + ["width"], strict=True):
        panel.set_xlabel(label)
    axes[len(limits) // 2, 4].legend(fontsize=7, loc="lower left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    _common.save(figure, options, "wide_mean_field.png", dpi=100)


def main(options):
    """Run the study."""
    kernel = fcn_kernel(1, "erf", **SCALES, readout_w_std=PRIOR_SCALE)
    names = [name for name in DATA if name in options.data]
    limits = {name: _common.nngp_posterior(kernel, *load_data(name), GRID, NOISE_SCALE) for name in names}
    fits = {name: {method: {} for method in METHODS} for name in names}
    print("RMSE of predictive mean and sd to the NNGP posterior, inputs from -4 to 4", flush=True)
    for name, limit in limits.items():
        rows, data = [], load_data(name)
        sizes = {"num_chains": NUM_CHAINS, "num_samples": options.num_samples, "progress_bar": False}
        evidences = {
            width: model_evidence(jax.random.key(4), collapsed(width), *data, **sizes) for width in options.widths
        }
        cells = [(method, width) for method in METHODS for width in sorted(options.widths)]
        for method, width in (progress := tqdm(cells, unit="fit")):
            progress.set_description(f"{DATA[name]}, {method}, width {width}")
            start = time.perf_counter()
            posterior = fits[name][method][width] = fit(method, width, data, options)
            mean, sd = posterior.distance(limit)
            row = {"width": width, "method": method, "mean": mean, "sd": sd, "ELBO": posterior.log_evidence}
            row |= {"log evidence": evidences[width].log_evidence, "±": evidences[width].standard_error}
            rows.append({**row, "seconds": time.perf_counter() - start})
        size = f"log evidence of the NNGP {limit.log_evidence:.2f}, RMS {_common.rms(limit.mean):.2f}"
        print(f"\n{DATA[name]}, {len(data[1])} points: {size}")
        _common.print_table(rows)
    draw(limits, fits, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[32, 125, 500, 2000, 8000],
            data={"nargs": "+", "default": list(DATA), "choices": list(DATA), "help": "data sets, by default all"},
            num_steps=(4000, "Adam steps of each fit, from 0.03 down by a cosine"),
            num_particles=(4, "draws of the guide in each step"),
            num_draws=(1000, "draws for predictions and for the ELBO"),
            num_samples=(200, "draws of each of four chains, at each temperature, for the evidence"),
        )
    )
