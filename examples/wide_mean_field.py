"""Mean-field variational inference in wide networks: it ignores the data, but not with the readout integrated out.

One hidden erf layer of growing width on two points, a noisy sine and the winning paces of the Olympic marathon (the
kinds of data, the network and the priors of Coker et al. 2021). Mean-field Gaussian guides, all started at the prior,
are fitted to the network as it is, with the KL of its hidden layer tempered (Huix et al. 2022), and with its readout
integrated out. Prints how far each predictive distribution is from the NNGP posterior, the limit of the exact one, with
its ELBO, and draws them all.

    python examples/wide_mean_field.py
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.ticker
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_wide
from numpyro_wide import ReadoutPredictive, TemperedTraceMeanFieldELBO, collapse_readout, datasets
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Coker et al. 2021, section 4.1: prior variance 2 of every weight and bias, noise variance 0.01.
PRIOR_SCALE, NOISE_SCALE = 2**0.5, 0.1
DATA = {"points": "two points", "sine": "noisy sine", "marathon": "Olympic marathon"}
METHODS = ("standard mean field", "tempered mean field", "readout integrated out")
HIDDEN = ("hidden_weights", "hidden_bias")
GRID = np.linspace(-4, 4, 161, dtype=np.float32)[:, None]


class Data(NamedTuple):
    """Inputs (n, 1) and targets (n,), both with variances of about one."""

    name: str
    x: np.ndarray
    y: np.ndarray


def load_data() -> list[Data]:
    """Two points; a sine of unit variance with the likelihood's noise; the marathon, standardised."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-(3**0.5), 3**0.5, 20)
    y = 2**0.5 * np.sin(1.5 * np.pi * x / 3**0.5) + NOISE_SCALE * rng.normal(size=20)
    race = datasets.marathon()
    years, paces = ((v - v.mean()) / v.std() for v in (race.inputs[:, 0], race.targets))
    points = np.array([-1.0, 1.0])
    pairs = zip(DATA.values(), [(points, points), (x, y), (years, paces)], strict=True)
    return [Data(name, x.astype(np.float32)[:, None], y.astype(np.float32)) for name, (x, y) in pairs]


def network(x, y=None, *, width):
    """One erf layer in NTK parametrisation: every weight N(0, 1)."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.lax.erf(PRIOR_SCALE * (x @ weights + bias))
    features = numpyro.deterministic("features", PRIOR_SCALE / np.sqrt(width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    function = numpyro.deterministic("function", features @ readout)
    with numpyro.plate("points", x.shape[0]):
        numpyro.sample("y", dist.Normal(function, NOISE_SCALE), obs=y)


class Posterior(NamedTuple):
    """Mean and standard deviation (m,) of the function on the grid, and a bound on the log evidence or itself."""

    mean: np.ndarray
    sd: np.ndarray
    log_evidence: float

    def distance(self, other: "Posterior") -> tuple[float, float]:
        """Root mean squares of the differences of means and of standard deviations."""
        return tuple(float(np.sqrt(np.mean((mine - its) ** 2))) for mine, its in zip(self[:2], other[:2], strict=True))


def nngp_posterior(data: Data) -> Posterior:
    """The posterior of an infinitely wide network, in closed form."""
    kernel = fcn_kernel(1, "erf", w_std=PRIOR_SCALE, b_std=PRIOR_SCALE, readout_w_std=PRIOR_SCALE)
    train = kernel(data.x)[0]
    mean, covariance = gp_posterior(train, kernel(GRID, data.x)[0], kernel(GRID)[0], data.y, NOISE_SCALE)
    log_evidence = float(gp_log_evidence(train, data.y, NOISE_SCALE))
    return Posterior(np.asarray(mean), np.sqrt(np.diag(covariance)), log_evidence)


class Options(NamedTuple):
    """How to fit and to look."""

    num_steps: int
    num_particles: int
    num_draws: int


def model_and_loss(
    method: str, width: int, num_points: int, num_particles: int
) -> tuple[Callable, TraceMeanField_ELBO]:
    """What a column of the figure is made with."""
    model = partial(network, width=width)
    if method == "standard mean field":
        return model, TraceMeanField_ELBO(num_particles=num_particles)
    if method == "tempered mean field":
        # With an output scaled by 1/√width, the KL of the hidden layer alone is tempered (Huix 2022, appendix D).
        eta = dict.fromkeys(HIDDEN, num_points / width)
        return model, TemperedTraceMeanFieldELBO(eta=eta, num_particles=num_particles)
    collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
    return collapsed, TraceMeanField_ELBO(num_particles=num_particles)


def fit(method: str, width: int, data: Data, options: Options) -> Posterior:
    """Fit a mean-field guide from the prior, N(0, I), on; its ELBO is the ordinary one, also after a tempered fit."""
    model, loss = model_and_loss(method, width, len(data.x), options.num_particles)
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, options.num_steps))
    svi = SVI(model, guide, optimiser, loss)
    params = svi.run(jax.random.key(0), options.num_steps, data.x, data.y, progress_bar=False).params

    elbo = TraceMeanField_ELBO(num_particles=options.num_draws, vectorize_particles=False)
    bound = -float(jax.jit(elbo.loss, static_argnums=(2, 3))(jax.random.key(1), params, model, guide, data.x, data.y))
    draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(options.num_draws,))
    if method == "readout integrated out":
        predictions = ReadoutPredictive(model, draws, (data.x, data.y), batch_size=20)(jax.random.key(3), GRID)
        mean, variance = predictions["mean"], predictions["variance"].mean(0)
    else:
        predictive = Predictive(model, draws, return_sites=["function"])
        mean, variance = predictive(jax.random.key(3), GRID)["function"], 0.0
    mean = np.asarray(mean, np.float64)
    return Posterior(mean.mean(0), np.sqrt(variance + mean.var(0)), bound)


Fits = dict[str, dict[str, dict[int, Posterior]]]  # by data set, method and width


def plot(data_sets: list[Data], limits: dict[str, Posterior], fits: Fits, path: Path) -> None:
    """A row for each data set: a column for each method, the limit, and the distances to it."""
    figure, axes = plt.subplots(len(data_sets), 5, figsize=(15, 8), layout="constrained", squeeze=False)
    for row, data in zip(axes, data_sets, strict=True):
        limit, by_method = limits[data.name], fits[data.name]
        for panel, method in zip(row, [*METHODS, "NNGP"], strict=False):
            draw_panel(panel, data, limit, by_method.get(method))
        row[0].set_ylabel(f"{data.name}\ntarget")
        draw_distances(row[4], limit, by_method)
    titles = ["standard mean field", "hidden KL tempered", "mean field, readout\nintegrated out", "NNGP posterior"]
    for panel, title in zip(axes[0], [*titles, "distance of predictive\nmeans to the NNGP's"], strict=True):
        panel.set_title(title)
    for panel in axes[-1, :4]:
        panel.set_xlabel("input")
    axes[-1, 4].set_xlabel("width")
    axes[len(data_sets) // 2, 4].legend(fontsize=7, loc="lower left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_panel(panel: plt.Axes, data: Data, limit: Posterior, by_width: dict[int, Posterior] | None) -> None:
    """Predictive means by width and the band of the widest network; without fits, the limit's."""
    x = GRID[:, 0]
    widest = limit if by_width is None else by_width[max(by_width)]
    panel.fill_between(
        x, widest.mean - 2 * widest.sd, widest.mean + 2 * widest.sd, color="0.85", label="mean ± 2 sd, widest or NNGP"
    )
    colours = matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, len(by_width or ())))
    for (width, posterior), colour in zip((by_width or {}).items(), colours, strict=True):
        panel.plot(x, posterior.mean, color=colour, label=f"width {width}")
    panel.plot(x, limit.mean, color="black", linestyle="--", linewidth=1, label="NNGP")
    panel.plot(data.x[:, 0], data.y, "o", color="tab:red", markersize=3, label="data")
    reach = 1.15 * max(np.abs(limit.mean).max() + 2 * limit.sd.max(), np.abs(data.y).max())
    panel.set(xlim=(x[0], x[-1]), ylim=(-reach, reach))


def draw_distances(panel: plt.Axes, limit: Posterior, by_method: dict[str, dict[int, Posterior]]) -> None:
    """RMSE of the predictive mean to the limit's, by width."""
    for (method, by_width), marker in zip(by_method.items(), "os^", strict=True):
        distances = [posterior.distance(limit)[0] for posterior in by_width.values()]
        panel.loglog(list(by_width), distances, marker=marker, markersize=4, label=method)
    widths = list(next(iter(by_method.values())))
    panel.set_xticks(widths, [str(width) for width in widths])
    panel.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    panel.set_ylabel("RMSE")
    panel.yaxis.set_label_position("right")
    panel.yaxis.tick_right()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 125, 500, 2000, 8000])
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA), help="data sets, by default all")
    parser.add_argument(
        "--num-steps", type=int, default=4000, help="Adam steps of each fit, from 0.03 down by a cosine"
    )
    parser.add_argument("--num-particles", type=int, default=4, help="draws of the guide in each step")
    parser.add_argument("--num-draws", type=int, default=1000, help="draws for predictions and for the ELBO")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Fit, compare, draw."""
    arguments = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    options = Options(arguments.num_steps, arguments.num_particles, arguments.num_draws)
    data_sets = [data for data in load_data() if data.name in {DATA[key] for key in arguments.data}]
    limits = {data.name: nngp_posterior(data) for data in data_sets}
    fits: Fits = {}
    print("RMSE of predictive mean and sd to the NNGP posterior, inputs from -4 to 4")
    for data in data_sets:
        limit = limits[data.name]
        size = float(np.sqrt(np.mean(limit.mean**2)))
        print(f"\n{data.name}, {len(data.x)} points: log evidence of the NNGP {limit.log_evidence:.2f}, RMS {size:.2f}")
        print("width  method                    mean      sd      ELBO  seconds")
        for method in METHODS:
            for width in sorted(arguments.widths):
                start = time.perf_counter()
                posterior = fit(method, width, data, options)
                fits.setdefault(data.name, {}).setdefault(method, {})[width] = posterior
                mean, sd = posterior.distance(limit)
                seconds = time.perf_counter() - start
                line = (
                    f"{width:5d}  {method:22s}  {mean:6.4f}  {sd:6.4f}  {posterior.log_evidence:8.2f}  {seconds:7.1f}"
                )
                print(line, flush=True)

    arguments.output.mkdir(parents=True, exist_ok=True)
    plot(data_sets, limits, fits, arguments.output / "wide_mean_field.png")
    print(f"\nFigure in {arguments.output}: wide_mean_field.png")


if __name__ == "__main__":
    main()
