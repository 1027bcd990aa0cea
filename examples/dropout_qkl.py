"""Variational inference with guides that have no density: dropout on the diabetes data, and principal components.

Fits a line through a two-dimensional Gaussian by quasi-KL, which finds the first principal component (Hron et al.
2018, Proposition 6 and Figure 5), and a neural network on the diabetes data with Bernoulli dropout as its guide, for
fixed rates and a learned one. Prints what the fits give, beside a point estimate, and draws both.

    python examples/dropout_qkl.py
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuide
from numpyro.infer.initialization import init_to_sample
from sklearn.datasets import load_diabetes

import numpyro_wide
from numpyro_wide import TraceQKL, quasi_kl
from numpyro_wide.autoguide import AutoDegenerateNormal, AutoDropout
from numpyro_wide.distributions import DegenerateNormal

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COVARIANCE = np.array([[2.0, 1.1], [1.1, 1.0]])
ANGLES = np.linspace(0, 180, 181)  # of lines through the origin, in degrees
WIDTH, NOISE_SCALE = 50, 0.7  # noise in standard deviations of the target: a linear fit explains half of its variance
RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def direction(degrees: np.ndarray) -> np.ndarray:
    """Unit vectors (..., 2)."""
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], -1)


def gaussian():
    """The distribution to be approximated."""
    numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=COVARIANCE))


def lowest_quasi_kl(degrees: np.ndarray) -> np.ndarray:
    """Quasi-KL of the best guide on each line, which is -log of the mass that the Gaussian's density has there."""
    basis = direction(degrees)
    variance = 1 / np.einsum("ai,ij,aj->a", basis, np.linalg.inv(COVARIANCE), basis)
    guide = DegenerateNormal(jnp.zeros(2), basis[:, :, None], np.sqrt(variance)[:, None])
    return np.asarray(quasi_kl(guide, dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=COVARIANCE)))


class Line(NamedTuple):
    """A fitted degenerate Gaussian: angle in degrees from 0 to 180, standard deviation along the line, quasi-KL."""

    angle: float
    sd: float
    quasi_kl: float


def fit_lines(num_starts: int, num_steps: int) -> list[Line]:
    """Through SVI, from random starts."""
    target = dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=COVARIANCE)
    lines = []
    for start in range(num_starts):
        guide = AutoDegenerateNormal(gaussian, rank=1, init_scale=1.0)
        optimiser = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
        svi = SVI(gaussian, guide, optimiser, TraceQKL(num_particles=8))
        posterior = guide.get_posterior(svi.run(jax.random.key(start), num_steps, progress_bar=False).params)
        x, y = np.asarray(posterior.basis[:, 0])
        divergence = float(quasi_kl(posterior, target))
        lines.append(Line(float(np.degrees(np.arctan2(y, x)) % 180), float(posterior.scale[0]), divergence))
    return lines


class Diabetes(NamedTuple):
    """Standardised inputs with a column of ones (n, 11) and targets (n,)."""

    x: np.ndarray
    y: np.ndarray


def load_data(num_train: int) -> tuple[Diabetes, Diabetes]:
    """A random split, standardised by the training part."""
    order = np.random.default_rng(0).permutation(442)
    x, y = (part[order] for part in load_diabetes(return_X_y=True))
    x, y = ((part - part[:num_train].mean(0)) / part[:num_train].std(0) for part in (x, y))
    data = Diabetes(np.concatenate([x, np.ones((442, 1))], 1).astype(np.float32), y.astype(np.float32))
    return Diabetes(*[part[:num_train] for part in data]), Diabetes(*[part[num_train:] for part in data])


def network(x, y=None):
    """One tanh layer; a row of the readout holds what one hidden unit sends on."""
    hidden = numpyro.sample("hidden", dist.Normal(0, x.shape[1] ** -0.5).expand([x.shape[1], WIDTH]).to_event(2))
    readout = numpyro.sample("readout", dist.Normal(0, WIDTH**-0.5).expand([WIDTH, 1]).to_event(2))
    function = numpyro.deterministic("function", (jnp.tanh(x @ hidden) @ readout)[:, 0])
    with numpyro.plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(function, NOISE_SCALE), obs=y)


class Fit(NamedTuple):
    """A guide's dropout rate, objective, and on test data the RMSE and mean negative log-likelihood."""

    rate: float
    objective: float
    rmse: float
    nll: float


def fit(guide: AutoGuide, loss: Trace_ELBO | TraceQKL, train: Diabetes, test: Diabetes, num_steps: int) -> Fit:
    """Fit a guide to the network and predict with draws from it."""
    svi = SVI(network, guide, optax.adam(optax.cosine_decay_schedule(0.01, num_steps)), loss)
    result = svi.run(jax.random.key(0), num_steps, *train, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, *train, sample_shape=(500,))
    predictive = Predictive(network, draws, return_sites=["function"])
    function = predictive(jax.random.key(2), test.x)["function"]
    rmse = float(jnp.sqrt(jnp.mean((function.mean(0) - test.y) ** 2)))
    log_probs = dist.Normal(function, NOISE_SCALE).log_prob(test.y)
    nll = -float(jnp.mean(jax.nn.logsumexp(log_probs, axis=0) - np.log(len(log_probs))))
    rate = float(result.params.get("readout_auto_rate", getattr(guide, "rate", 0.0)))
    return Fit(rate, float(result.losses[-num_steps // 10 :].mean()), rmse, nll)


def fit_diabetes(num_train: int, num_steps: int, num_rates: int) -> dict[str, Fit]:
    """A point estimate, dropout of hidden units at fixed rates, and at a learned rate."""
    train, test = load_data(num_train)
    point = AutoDelta(network, init_loc_fn=init_to_sample)
    fits = {"point estimate": fit(point, Trace_ELBO(), train, test, num_steps)}
    for rate in RATES[:num_rates]:
        guide = AutoDropout(network, rate=rate, sites=["readout"])
        fits[f"dropout, rate {rate}"] = fit(guide, TraceQKL(num_particles=4), train, test, num_steps)
    guide = AutoDropout(network, rate=0.2, sites=["readout"], learn_rate=True)
    fits["dropout, learned rate"] = fit(guide, TraceQKL(num_particles=4), train, test, num_steps)
    return fits


def draw_lines(panel: plt.Axes, lines: list[Line]) -> None:
    """The Gaussian's contours, lines coloured by their quasi-KL, and the best fit."""
    x, y = np.meshgrid(np.linspace(-4, 4, 101), np.linspace(-4, 4, 101))
    points = np.stack([x, y], -1)
    squared = np.einsum("...i,ij,...j->...", points, np.linalg.inv(COVARIANCE), points)
    panel.contour(x, y, np.exp(-squared / 2), levels=np.exp(-0.5 * np.array([9, 4, 1])), colors="0.5", linewidths=1)
    angles = np.arange(0, 180, 15)
    values = lowest_quasi_kl(angles)
    colour = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(values.min(), values.max()), "viridis")
    for angle, value in zip(angles, values, strict=True):
        ends = 6 * np.outer([-1, 1], direction(angle))
        panel.plot(*ends.T, color=colour.to_rgba(value), linewidth=1)
    best = min(lines, key=lambda line: line.quasi_kl)
    ends = 2 * best.sd * np.outer([-1, 1], direction(best.angle))
    panel.plot(*ends.T, color="tab:orange", linewidth=4, solid_capstyle="butt", label="fit, ± 2 sd")
    panel.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", xlabel="$w_1$", ylabel="$w_2$", title="Gaussian and lines")
    panel.legend(loc="upper left", fontsize=8)
    panel.figure.colorbar(colour, ax=panel, label="lowest quasi-KL on the line, nats", shrink=0.8)


def plot(lines: list[Line], component: float, fits: dict[str, Fit], path: Path) -> None:
    """Lines, their quasi-KL against the angle, and dropout against its rate."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=[1.2, 1, 1])
    draw_lines(axes[0], lines)
    axes[1].plot(ANGLES, lowest_quasi_kl(ANGLES), label="best guide on the line")
    axes[1].axvline(component, color="0.5", linestyle="--", label="first principal component")
    found = [line.angle for line in lines], [line.quasi_kl for line in lines]
    axes[1].plot(*found, "o", color="tab:orange", label=f"fits, {len(lines)} random starts")
    axes[1].set(xlabel="angle of the line, degrees", ylabel="quasi-KL, nats", title="principal components by SVI")
    axes[1].legend(fontsize=8)

    fixed = [result for name, result in fits.items() if name.startswith("dropout, rate")]
    axes[2].plot([result.rate for result in fixed], [result.objective for result in fixed], "o-", label="fixed rate")
    learned = fits["dropout, learned rate"]
    axes[2].plot(learned.rate, learned.objective, "*", color="tab:orange", markersize=12, label="learned rate")
    axes[2].set(xlabel="dropout rate of hidden units", ylabel="fitted objective, nats", title="dropout on diabetes")
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-starts", type=int, default=8, help="random starts of the line")
    parser.add_argument("--num-train", type=int, default=300, help="patients to train on; the others are for testing")
    parser.add_argument("--num-rates", type=int, default=len(RATES), help=f"how many of the rates {RATES}")
    parser.add_argument(
        "--num-steps", type=int, default=4000, help="Adam steps of each fit, its rate lowered by a cosine"
    )
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Fit, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    variances, vectors = np.linalg.eigh(COVARIANCE)
    component = float(np.degrees(np.arctan2(*vectors[::-1, 1])) % 180)
    print(f"First principal component: angle {component:.2f} degrees, sd {variances[1] ** 0.5:.3f}, ", end="")
    print(f"quasi-KL {lowest_quasi_kl(np.array([component]))[0]:.4f}\nstart   angle     sd  quasi-KL")
    lines = fit_lines(options.num_starts, max(options.num_steps // 4, 1))
    for start, line in enumerate(lines):
        print(f"{start:5d}  {line.angle:6.2f}  {line.sd:5.3f}  {line.quasi_kl:8.4f}")

    print(f"\nDiabetes, {options.num_train} patients for training, {WIDTH} hidden units\n", flush=True)
    fits = fit_diabetes(options.num_train, options.num_steps, options.num_rates)
    print(
        "Objectives of dropout and of a point estimate are not comparable: they differ in the measure of their support."
    )
    print("guide                   rate  objective  test RMSE  test NLL")
    for name, result in fits.items():
        print(f"{name:21s}  {result.rate:5.3f}  {result.objective:9.1f}  {result.rmse:9.4f}  {result.nll:8.4f}")
    options.output.mkdir(parents=True, exist_ok=True)
    plot(lines, component, fits, options.output / "dropout_qkl.png")
    print(f"\nFigure in {options.output}: dropout_qkl.png")


if __name__ == "__main__":
    main()
