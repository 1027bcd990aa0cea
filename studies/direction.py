"""One direction among six inputs: a network of a few units learns it, Gaussian processes cannot.

The target is a sine of one linear combination of six standard normal inputs. Beside a Gaussian process with a length
for each column (which is told the noise), the infinitely wide network whose activation, scales and noise the evidence
chooses, and boosted trees, networks of several widths are collapsed and sampled by adjusted microcanonical Langevin,
noise and readout's scale latent. Prints summary's verdict on each, and the error of the mean at 1000 new rows.

    python studies/direction.py
"""

from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import MCMC
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

import _chains
import _common
from numpyro_wide import ReadoutPredictive, nn, wide_limit
from numpyro_wide.diagnostics import summary
from numpyro_wide.mcmc import MicrocanonicalLangevin

NUM_INPUTS, NUM_TEST, NOISE = 6, 1000, 0.1
SCALES = {"w_std": 2.0, "b_std": 1.0, "readout_w_std": dist.HalfNormal(2.0)}
PROCESS, LIMIT, TREES = "Gaussian process", "infinitely wide", "boosted trees"


class Data(NamedTuple):
    """Rows, and the place of each new row on the direction, with the function there."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    place: np.ndarray
    truth: np.ndarray


def data(num_train):
    """Draw a direction, and rows."""
    rng = np.random.default_rng(0)
    direction = rng.normal(size=NUM_INPUTS)
    direction /= np.linalg.norm(direction)
    x, x_new = (rng.normal(size=(rows, NUM_INPUTS)).astype(np.float32) for rows in (num_train, NUM_TEST))
    y = np.sin(2.5 * x @ direction) + NOISE * rng.normal(size=num_train)
    return Data(x, y.astype(np.float32), x_new, x_new @ direction, np.sin(2.5 * x_new @ direction))


def network(width, rows, options):
    """Sample a network; the mean at the new rows, and summary's numbers."""
    noise = dist.HalfNormal(0.5)
    model = _chains.collapsed(nn.bnn(nn.FCN(1, width, "tanh"), None, noise, scales=SCALES))
    lengths = {"num_warmup": options.num_warmup, "num_samples": options.num_samples, "num_chains": options.num_chains}
    mcmc = MCMC(MicrocanonicalLangevin(model), chain_method="vectorized", progress_bar=False, **lengths)
    mcmc.run(jax.random.key(0), rows.x, rows.y)
    verdict = summary(mcmc, model, rows.x, rows.y)
    moments = ReadoutPredictive(model, mcmc.get_samples(), (rows.x, rows.y)).moments(rows.x_new)
    return np.asarray(moments["mean"].mean(axis=0), float), verdict


def draw(means, rows, options):
    """Draw predictions along the direction, over the truth."""
    figure, axes = plt.subplots(1, len(means), figsize=(2.6 * len(means), 2.8), sharey=True, layout="constrained")
    order = np.argsort(rows.place)
    for axis, (name, mean) in zip(axes, means.items(), strict=True):
        axis.plot(rows.place, mean, ".", markersize=2)
        axis.plot(rows.place[order], rows.truth[order], color="black", linewidth=1)
        error = _common.rms(mean - rows.truth)
        axis.set(title=f"{name}: RMSE {error:.2f}", xlabel="place on the direction", ylim=(-1.8, 1.8))
    axes[0].set_ylabel("mean, and truth (line)")
    _common.save(figure, options, "direction.png")


def main(options):
    """Run the study."""
    rows = data(options.num_train)
    kernel = ConstantKernel() * RBF(np.ones(NUM_INPUTS))
    process = GaussianProcessRegressor(kernel, alpha=NOISE**2, n_restarts_optimizer=2, random_state=0)
    limit = wide_limit.fit(rows.x, rows.y, activation=["erf", "relu"], input_scale=(False, True))
    trees = HistGradientBoostingRegressor(random_state=0).fit(rows.x, rows.y)
    means = {
        PROCESS: process.fit(rows.x, rows.y).predict(rows.x_new),
        LIMIT: limit.predict(rows.x_new)[0],
        TREES: trees.predict(rows.x_new),
    }
    verdicts = {}
    for width in options.widths:
        name = f"{width} units"
        means[name], told = network(width, rows, options)
        print(told, flush=True)
        verdicts[name] = told.verdict
    table = [
        {"model": name, "RMSE": _common.rms(mean - rows.truth), "verdict": verdicts.get(name)}
        for name, mean in means.items()
    ]
    _common.write_table(table, options.output / "direction.csv")
    shown = (PROCESS, LIMIT, f"{options.widths[-1]} units")
    draw({name: means[name] for name in shown}, rows, options)


if __name__ == "__main__":
    samples = {"num_warmup": 500, "num_samples": 2500, "num_chains": 2}
    main(_common.arguments(__doc__, num_train=100, widths=[16], **samples))
