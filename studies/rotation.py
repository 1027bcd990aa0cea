"""Amortised inference of a rotation angle: networks of growing width against their linearised twins.

The study of McNamara 2025, Section 5. An angle is rotated by a perturbation that is a nuisance; a von Mises guide in
natural parameters, computed by a scaled ReLU network, is trained on simulations. Prints a table of negative
log-likelihoods, of the gap between network and twin, and of the drift of the tangent kernel, and draws two figures.

    python studies/rotation.py
    python studies/rotation.py --checkpoints rotation_runs    # interrupted, the same command skips finished trainings
"""

import pickle
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from scipy.special import logsumexp

import _common
import _tangent_training
from _scaled_relu import ScaledReLU, inverse_time_schedule
from _von_mises import VonMises
from numpyro_wide import AmortizedForwardKL

PERTURBATION_SCALE = 0.5
SHIFT = 1e-4  # of the natural parameters, which start at zero


def rotation() -> None:
    """Sample an angle theta, rotated further by z, seen as a point on the circle."""
    theta = numpyro.sample("theta", dist.Uniform(0, 2 * jnp.pi))
    z = numpyro.sample("z", dist.Normal(0, PERTURBATION_SCALE))
    numpyro.deterministic("x", jnp.stack([jnp.cos(theta + z), jnp.sin(theta + z)]))


def trainer_of(network, params0, options):
    """Make a guide for theta alone, z being marginalised, with its training."""

    def guide(observed_values):
        weights = numpyro.param("weights", params0)
        numpyro.sample("theta", VonMises(network(weights, observed_values["x"]) + SHIFT))

    optimiser = optax.adam(inverse_time_schedule(options.learning_rate))
    return AmortizedForwardKL(rotation, guide, optimiser, observed="x", batch_size=options.batch_size)


def circle(count):
    """Return points on the circle, (count, 2)."""
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def exact_log_prob(theta, x):
    """Return the exact posterior's log density, the perturbation integrated out on a fine grid of the circle."""
    grid = np.linspace(0, 2 * np.pi, 2000, endpoint=False)

    def log_unnormalised(difference):
        turns = difference[..., None] + 2 * np.pi * np.arange(-4, 5)
        return logsumexp(-0.5 * (turns / PERTURBATION_SCALE) ** 2, axis=-1)

    angle = np.arctan2(x[:, 1], x[:, 0])
    log_constant = logsumexp(log_unnormalised(angle[:, None] - grid), axis=1) + np.log(2 * np.pi / len(grid))
    return log_unnormalised(angle - theta) - log_constant


def expected_nll(network, weights):
    """Return the guide's expected NLL, by quadrature over all x, theta integrated out in closed form."""
    x = circle(2000)
    eta = np.asarray(network(weights, jnp.asarray(x, jnp.float32)), np.float64) + SHIFT
    # E[(cos theta, sin theta) | x] = exp(-sigma^2 / 2) x
    mean = np.exp(-(PERTURBATION_SCALE**2) / 2) * x
    log_prob_at_zero = np.asarray(VonMises(jnp.asarray(eta, jnp.float32)).log_prob(0.0), np.float64)
    return float(np.mean(eta[:, 0] - np.sum(eta * mean, axis=1) - log_prob_at_zero))


def train(name, network, params0, options):
    """Train on fresh simulations, with a look at the held-out ones every hundredth of the way."""
    path = options.checkpoints and options.checkpoints / f"{name}.pickle"
    if path and path.exists():
        return pickle.loads(path.read_bytes())
    trainer = trainer_of(network, params0, options)
    start = time.perf_counter()
    result = trainer.run(
        jax.random.key(options.seed),  # the same for all: they are trained, and judged, on the same simulations
        options.num_steps,
        held_out=options.num_held_out,
        evaluate_every=max(1, options.num_steps // 100),
    )
    weights, seen = trainer.get_params(result.state)["weights"], result.state.held_out
    found = {"steps": np.asarray(seen.steps), "held out": np.asarray(seen.losses), "weights": weights}
    found |= {"nll": expected_nll(network, weights), "seconds": time.perf_counter() - start}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found


def draw_training(both, exact, options):
    """Draw the held-out negative log-likelihood while training, as in the paper's Figure 1."""
    figure, axes = plt.subplots(1, len(both), figsize=(2.6 * len(both) + 0.6, 3.0), sharey=True, squeeze=False)
    for axis, (width, trainings) in zip(axes[0], both.items(), strict=True):
        for (label, training), style in zip(trainings.items(), ("-", "--"), strict=True):
            axis.plot(training["steps"] / 1000, training["held out"], style, label=label)
        axis.axhline(exact, color="tab:red", linewidth=1, label="exact posterior")
        axis.set(title=f"width {width}", xlabel="gradient steps (thousands)")
    final = max(training["held out"][-1] for trainings in both.values() for training in trainings.values())
    axes[0, 0].set(ylabel="held-out NLL (nats)", ylim=(exact - 0.01, max(exact + 0.12, final + 0.02)))
    axes[0, -1].legend()
    _common.save(figure, options, "rotation_nll.png")


def draw_widths(by_name, options):
    """Draw the drift of the tangent kernel, and the mean gap between network and twin, against the width."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    labels = {"drift": "NTK drift, sup norm", "mean gap": "mean NLL gap to the twin (nats)"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        sizes, values = by_name["width"], by_name[name]
        axis.loglog(sizes, values, "o-", label="measured")
        axis.loglog(sizes, values[0] * np.sqrt(sizes[0] / sizes), ":", color="0.5", label="1/√width")
        _common.number_ticks(axis, sizes)
        axis.set(xlabel="width", ylabel=label)
        axis.legend()
    _common.save(figure, options, "rotation_widths.png")


def main(options):
    """Run the study."""
    both, rows = {}, []
    for width in sorted(options.widths):
        encoder = ScaledReLU(width, 2)
        params0 = encoder.init(jax.random.key(width), jnp.ones(2))
        linearised = encoder.linearize(params0)
        print(f"\nWidth {width}: network, then linearised twin", flush=True)
        network = train(f"network_{width}", encoder.apply, params0, options)
        twin = train(f"twin_{width}", linearised, params0, options)
        both[width] = {"network": network, "linearised twin": twin}
        grid = jnp.asarray(circle(32), jnp.float32)
        difference = encoder.apply(network["weights"], grid) - linearised(twin["weights"], grid)
        drift = float(_tangent_training.drift_monitor(encoder.apply, params0, grid)(network["weights"]).sup_norm)
        row = {"width": width, "network": network["nll"], "twin": twin["nll"]}
        row |= {"final gap": abs(network["nll"] - twin["nll"])}
        row |= {"mean gap": float(np.mean(np.abs(network["held out"] - twin["held out"])))}
        row |= {"distance": float(jnp.sqrt(jnp.mean(jnp.sum(difference**2, axis=1)))), "drift": drift}
        row |= {"drift × √width": drift * width**0.5, "seconds": network["seconds"], "of the twin": twin["seconds"]}
        rows.append(row)

    print(
        f"\nExpected NLL (exact 0.7258, best von Mises 0.7277), {options.num_steps} steps of {options.batch_size} later"
    )
    _common.print_table(rows)
    print("final gap and mean gap (over the training): of the NLL; distance: of the natural parameters after training")
    by_name = {name: np.array([row[name] for row in rows]) for name in ("width", "drift", "mean gap", "distance")}
    if len(rows) > 1:
        logs = {name: np.log(values) for name, values in by_name.items()}
        powers = {name: np.polyfit(logs["width"], logs[name], 1)[0] for name in ("drift", "mean gap", "distance")}
        print("Powers of the width: " + ", ".join(f"{name} {power:.2f}" for name, power in powers.items()))

    # Those that all trainings of one seed are judged on.
    encoder = ScaledReLU(1, 2)
    trainer = trainer_of(encoder.apply, encoder.init(jax.random.key(0), jnp.ones(2)), options)
    held_out = trainer.held_out_simulations(trainer.init(jax.random.key(options.seed)), options.num_held_out)
    exact = -float(np.mean(exact_log_prob(np.asarray(held_out["theta"]), np.asarray(held_out["x"]))))
    print(f"Exact posterior on the {options.num_held_out} held-out simulations: {exact:.4f}")
    draw_training(both, exact, options)
    draw_widths(by_name, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[64, 256, 1024, 4096],
            num_steps=200_000,
            batch_size=(16, "simulations in each step"),
            learning_rate=(1e-4, "at the start; it falls as 1/(1/rate + t/10)"),
            num_held_out=(1000, "simulations for the curves"),
            seed=(0, "of the simulations"),
            checkpoints={"type": Path, "help": "folder to save finished trainings in, and to take them from"},
        )
    )
