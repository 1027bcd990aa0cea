"""Corrections of a finite width: evidence and predictive mean of networks against the theory of order 1/width.

One erf layer on the winning paces of the Olympic marathon, its readout integrated out. Chains give the log evidence of
every width and its predictive mean; the leading corrections to the infinitely wide network's come from draws of single
units. Each width is a row of a table that is written as it is done: run it again, and it goes on.

    python studies/finite_width.py
"""

from functools import partial
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.infer import MCMC

import _chains
import _common
from _width_correction import width_correction
from numpyro_wide import ReadoutPredictive, collapse_readout, datasets, model_evidence
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

SCALES = {"w_std": 3.0, "b_std": 2.0}  # as in studies/marathon.py
NOISE_SCALE = 0.4
NUM_CHAINS = 8
NUM_UNITS = 200_000
GRID = np.linspace(-2.0, 2.0, 21)[:, None]  # from 1885 to 2025, about


class Cell(NamedTuple):
    """A network."""

    width: int


class Row(NamedTuple):
    """Findings of the chains; ``share`` is that of the theory's shift of the mean, which by theory is 1/width."""

    log_evidence: float
    error: float
    share: float
    share_error: float


def run(cell, data, mean, shift, options):
    """Return the log evidence of a width, and its predictive mean less the limit's, as a multiple of the theory's."""
    network = partial(_common.erf_network, **SCALES, width=cell.width, readout_std=1.0, noise_scale=NOISE_SCALE)
    model = collapse_readout(network, readout="readout", features="features", observed="y")
    lengths = {"num_chains": NUM_CHAINS, "num_warmup": options.num_warmup, "num_samples": options.num_samples}
    evidence = model_evidence(jax.random.key(0), model, *data, **lengths, progress_bar=False)
    mcmc = MCMC(SplitHMC(model, persistence=0.0), **lengths, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(1), *data)
    predictive = ReadoutPredictive(model, mcmc.get_samples(), data, batch_size=100)
    differences = np.asarray(predictive(jax.random.key(2), GRID)["mean"]) - mean
    shares = (differences @ shift / (shift @ shift)).reshape(NUM_CHAINS, -1)
    error = _chains.standard_error(shares)
    return Row(evidence.log_evidence, evidence.standard_error, float(shares.mean()), error)


def units_at(x):
    """Draw independent units at inputs (n, 1), with the kernel that is their mean, (n, n)."""
    weights = np.random.default_rng(0).normal(size=(2, NUM_UNITS))
    units = np.asarray(jax.lax.erf(SCALES["w_std"] * x * weights[0] + SCALES["b_std"] * weights[1]))
    return units, np.asarray(fcn_kernel(1, "erf", **SCALES)(x)[0])


def draw(panel, widths, values, errors, theory, title):
    """Draw what is seen, times the width, which tends to what the theory says."""
    values, errors = np.array(widths) * values, np.array(widths) * errors
    panel.errorbar(widths, values, yerr=2 * errors, fmt="o", markersize=4, label="chains, ± 2 standard errors")
    panel.axhline(theory[0], color="black", linestyle="--", label="theory of order 1/width")
    panel.axhspan(theory[0] - 2 * theory[1], theory[0] + 2 * theory[1], color="0.85")
    panel.set(title=title, xlabel="width", xscale="log", ylim=(0, None))
    _common.number_ticks(panel, widths)


def draw_both(theory, table, options):
    """Draw evidence and predictive mean beside the theory."""
    widths = [row["width"] for row in table]
    figure, (above, below) = plt.subplots(2, 1, figsize=(6, 6.4), layout="constrained")  # legible at half of it
    gains, errors, shares, share_errors = (
        np.array([row[name] for row in table])
        for name in ("evidence less limit", "±", "share of the mean's shift", "± ")
    )
    of_evidence = float(theory.log_evidence), float(theory.log_evidence_error)
    draw(above, widths, gains, errors, of_evidence, "width × (log evidence less the limit's), nats")
    draw(below, widths, shares, share_errors, (1.0, 0.0), "width × (shift of the predictive mean / theory's shift)")
    below.legend(loc="lower right")
    _common.save(figure, options, "finite_width.png")


def main(options):
    """Run the study."""
    numpyro.enable_x64()
    data = tuple(np.asarray(part, np.float64) for part in _common.standardised(datasets.marathon()))
    x, y = data
    num_train = len(x)
    units, kernel = units_at(np.concatenate([x, GRID]))
    blocks = kernel[:num_train, :num_train], kernel[num_train:, :num_train], kernel[num_train:, num_train:]
    limit = float(gp_log_evidence(blocks[0], y, NOISE_SCALE))
    mean = np.asarray(gp_posterior(*blocks, y, NOISE_SCALE)[0])
    theory = width_correction(
        units[:num_train], blocks[0], y, NOISE_SCALE, units_new=units[num_train:], kernel_cross=blocks[1]
    )
    shift = np.asarray(theory.mean)
    print(f"Log evidence of the infinitely wide network: {limit:.3f}")
    print(
        f"Correction times width: evidence {theory.log_evidence:.2f} ± {theory.log_evidence_error:.2f} nats, predictive"
    )
    print(f"mean {_common.rms(shift):.3f} ± {_common.rms(theory.mean_error):.3f} (root mean square)", flush=True)
    rows = _common.resumed(
        options.output / "finite_width.csv",
        [Cell(width) for width in options.widths],
        Row,
        lambda cell: run(cell, data, mean, shift, options),
        unit="width",
        name=lambda cell: f"width {cell.width}",
    )
    table = [
        {
            "width": cell.width,
            "evidence less limit": row.log_evidence - limit,
            "±": row.error,
            "theory": float(theory.log_evidence) / cell.width,
            "share of the mean's shift": row.share,
            "± ": row.share_error,
            "1/width": 1 / cell.width,
        }
        for cell, row in sorted(rows.items())
    ]
    _common.print_table(table)
    draw_both(theory, table, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[16, 32, 64, 128, 256, 512, 1024],
            num_warmup=(200, "of each of the eight chains"),
            num_samples=(1000, "of each of the eight chains"),
        )
    )
