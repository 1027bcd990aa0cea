"""Amortised inference of a rotation angle: networks of growing width against their linearised twins.

The study of McNamara 2025, Section 5. An angle is rotated by a perturbation that is a nuisance; a von Mises guide in
natural parameters, computed by a scaled ReLU network, is trained on simulations. Prints a table of negative
log-likelihoods, of the gap between network and twin, and of the drift of the tangent kernel, and draws two figures.

    python examples/rotation.py
    python examples/rotation.py --checkpoints rotation_runs    # can be interrupted, and resumed by the same command
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from scipy.special import logsumexp

import numpyro_wide
from numpyro_wide import AmortizedForwardKL, natural, nn
from numpyro_wide.wide_limit import drift_monitor

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker

PERTURBATION_SCALE = 0.5
SHIFT = 1e-4  # of the natural parameters, which start at zero


def rotation() -> None:
    """An angle theta, rotated further by z, seen as a point on the circle."""
    theta = numpyro.sample("theta", dist.Uniform(0, 2 * jnp.pi))
    z = numpyro.sample("z", dist.Normal(0, PERTURBATION_SCALE))
    numpyro.deterministic("x", jnp.stack([jnp.cos(theta + z), jnp.sin(theta + z)]))


def guide_of(network: Callable, params0: Any) -> Callable:
    """A guide for theta alone: z is marginalised."""

    def guide(observed_values: dict) -> None:
        weights = numpyro.param("weights", params0)
        numpyro.sample("theta", natural.VonMises(network(weights, observed_values["x"]), shift=SHIFT))

    return guide


def exact_log_prob(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The exact posterior's log density, the perturbation integrated out on a fine grid of the circle."""
    grid = np.linspace(0, 2 * np.pi, 2000, endpoint=False)

    def log_unnormalised(difference: np.ndarray) -> np.ndarray:
        turns = difference[..., None] + 2 * np.pi * np.arange(-4, 5)
        return logsumexp(-0.5 * (turns / PERTURBATION_SCALE) ** 2, axis=-1)

    angle = np.arctan2(x[:, 1], x[:, 0])
    log_constant = logsumexp(log_unnormalised(angle[:, None] - grid), axis=1) + np.log(2 * np.pi / len(grid))
    return log_unnormalised(angle - theta) - log_constant


def expected_nll(network: Callable, weights: Any) -> float:
    """The guide's expected negative log-likelihood, by quadrature over all x, theta integrated out in closed form."""
    angle = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    eta = np.asarray(network(weights, jnp.asarray(x, jnp.float32)), np.float64) + SHIFT
    # E[(cos theta, sin theta) | x] = exp(-sigma^2 / 2) x
    mean = np.exp(-(PERTURBATION_SCALE**2) / 2) * x
    log_prob_at_zero = np.asarray(natural.VonMises(jnp.asarray(eta, jnp.float32)).log_prob(0.0), np.float64)
    return float(np.mean(eta[:, 0] - np.sum(eta * mean, axis=1) - log_prob_at_zero))


class Training(NamedTuple):
    """What one network or twin came to."""

    steps: np.ndarray
    held_out_nll: np.ndarray
    nll: float
    weights: Any
    seconds: float


def train(name: str, network: Callable, params0: Any, options: argparse.Namespace) -> Training:
    """Train on fresh simulations, with a look at the held-out ones every hundredth of the way."""
    optimiser = optax.adam(nn.inverse_time_schedule(options.learning_rate))
    trainer = AmortizedForwardKL(
        rotation, guide_of(network, params0), optimiser, observed="x", batch_size=options.batch_size
    )
    start = time.perf_counter()
    result = trainer.run(
        jax.random.key(options.seed),  # the same for all: they are trained, and judged, on the same simulations
        options.num_steps,
        held_out=options.num_held_out,
        evaluate_every=max(1, options.num_steps // 100),
        checkpoint=options.checkpoints and options.checkpoints / f"{name}.npz",
    )
    seconds = time.perf_counter() - start
    weights, seen = trainer.get_params(result.state)["weights"], result.state.held_out
    return Training(np.asarray(seen.steps), np.asarray(seen.losses), expected_nll(network, weights), weights, seconds)


class Width(NamedTuple):
    """The network of one width against its twin, and how far the network's tangent kernel drifted."""

    network: Training
    twin: Training
    distance: float
    """Root mean square, over the circle, of the difference of their natural parameters after training."""
    drift: float

    @property
    def final_gap(self) -> float:
        """Difference of the expected negative log-likelihoods after training, in absolute value."""
        return abs(self.network.nll - self.twin.nll)

    @property
    def mean_gap(self) -> float:
        """Difference of the held-out negative log-likelihoods in absolute value, averaged over the training."""
        return float(np.mean(np.abs(self.network.held_out_nll - self.twin.held_out_nll)))


def study(width: int, options: argparse.Namespace) -> Width:
    """Train the network of one width and its twin."""
    encoder = nn.ScaledReLU(width, 2)
    params0 = encoder.init(jax.random.key(width), jnp.ones(2))
    linearised = nn.linearised_twin(encoder, params0)
    print(f"\nWidth {width}: network, then linearised twin", flush=True)
    network = train(f"network_{width}", encoder.apply, params0, options)
    twin = train(f"twin_{width}", linearised, params0, options)
    angle = jnp.linspace(0, 2 * jnp.pi, 32, endpoint=False)
    grid = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    difference = encoder.apply(network.weights, grid) - linearised(twin.weights, grid)
    drift = drift_monitor(encoder.apply, params0, grid)(network.weights)
    return Width(network, twin, float(jnp.sqrt(jnp.mean(jnp.sum(difference**2, axis=1)))), float(drift.sup_norm))


def slope(widths: dict[int, Width], name: str) -> float:
    """The power of the width as which a quantity falls."""
    values = [getattr(width, name) for width in widths.values()]
    return float(np.polyfit(np.log(list(widths)), np.log(values), 1)[0]) if len(widths) > 1 else float("nan")


def plot_curves(widths: dict[int, Width], exact: float, path: Path) -> None:
    """Held-out negative log-likelihood while training, as in the paper's Figure 1."""
    figure, axes = plt.subplots(1, len(widths), figsize=(2.6 * len(widths) + 0.6, 3.0), sharey=True, squeeze=False)
    for axis, (width, both) in zip(axes[0], widths.items(), strict=True):
        for training, label, style in [(both.network, "network", "-"), (both.twin, "linearised twin", "--")]:
            axis.plot(training.steps / 1000, training.held_out_nll, style, label=label)
        axis.axhline(exact, color="tab:red", linewidth=1, label="exact posterior")
        axis.set(title=f"width {width}", xlabel="gradient steps (thousands)")
    final = max(t.held_out_nll[-1] for both in widths.values() for t in (both.network, both.twin))
    axes[0, 0].set(ylabel="held-out NLL (nats)", ylim=(exact - 0.01, max(exact + 0.12, final + 0.02)))
    axes[0, -1].legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_widths(widths: dict[int, Width], path: Path) -> None:
    """Drift of the tangent kernel, and gap between network and twin averaged over the training, against width."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    sizes = np.array(list(widths))
    panels = [("NTK drift, sup norm", [w.drift for w in widths.values()])]
    panels += [("mean NLL gap to the twin (nats)", [w.mean_gap for w in widths.values()])]
    for axis, (label, values) in zip(axes, panels, strict=True):
        axis.loglog(sizes, values, "o-", label="measured")
        axis.loglog(sizes, values[0] * np.sqrt(sizes[0] / sizes), ":", color="0.5", label="1/√width")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set(xlabel="width", ylabel=label)
        axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--num-steps", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=16, help="simulations in each step")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="at the start; it falls as 1/(1/rate + t/10)")
    parser.add_argument("--num-held-out", type=int, default=1000, help="simulations for the curves")
    parser.add_argument("--seed", type=int, default=0, help="of the simulations")
    parser.add_argument(
        "--checkpoints", type=Path, default=None, help="folder to save runs in, and to resume them from"
    )
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figures")
    return parser.parse_args()


def main() -> None:
    """Train, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    widths = {width: study(width, options) for width in sorted(options.widths)}

    print(
        f"\nExpected NLL after {options.num_steps} steps of {options.batch_size} (exact 0.7258, best von Mises 0.7277)"
    )
    print("width  network    twin  final gap  mean gap  distance  NTK drift  drift × √width  seconds (network, twin)")
    for width, both in widths.items():
        print(
            f"{width:5d}  {both.network.nll:7.4f}  {both.twin.nll:6.4f}  {both.final_gap:9.5f}  {both.mean_gap:8.5f}  "
            f"{both.distance:8.4f}  {both.drift:9.4f}  {both.drift * width**0.5:14.2f}  "
            f"{both.network.seconds:7.1f}, {both.twin.seconds:.1f}"
        )
    print("final gap and mean gap (over the training): of the NLL; distance: of the natural parameters after training")
    powers = {name: slope(widths, name) for name in ("drift", "mean_gap", "distance")}
    print("Powers of the width: " + ", ".join(f"{name.replace('_', ' ')} {p:.2f}" for name, p in powers.items()))

    held_out = held_out_simulations(options)
    exact = -float(np.mean(exact_log_prob(np.asarray(held_out["theta"]), np.asarray(held_out["x"]))))
    print(f"Exact posterior on the {options.num_held_out} held-out simulations: {exact:.4f}")
    options.output.mkdir(parents=True, exist_ok=True)
    plot_curves(widths, exact, options.output / "rotation_nll.png")
    plot_widths(widths, options.output / "rotation_widths.png")
    print(f"\nFigures in {options.output}: rotation_nll.png, rotation_widths.png")


def held_out_simulations(options: argparse.Namespace) -> dict[str, jax.Array]:
    """Those that all trainings of one seed are judged on."""
    encoder = nn.ScaledReLU(1, 2)
    guide = guide_of(encoder.apply, encoder.init(jax.random.key(0), jnp.ones(2)))
    trainer = AmortizedForwardKL(rotation, guide, optax.sgd(0.0), observed="x", batch_size=options.batch_size)
    return trainer.held_out_simulations(trainer.init(jax.random.key(options.seed)), options.num_held_out)


if __name__ == "__main__":
    main()
