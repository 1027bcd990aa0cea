"""Variational inference with guides that have no density: dropout on the diabetes data, and principal components.

Fits a line through a two-dimensional Gaussian by quasi-KL, which finds the first principal component (Hron et al.
2018, Proposition 6 and Figure 5), and a neural network on the diabetes data with Bernoulli dropout as its guide, for
fixed rates and a learned one. Prints what the fits give, beside a point estimate, and draws both.

    python studies/dropout_qkl.py
"""

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_sample
from tqdm.auto import tqdm

import _common
import _data
from numpyro_wide import TraceQKL, quasi_kl
from numpyro_wide.autoguide import AutoDegenerateNormal, AutoDropout
from numpyro_wide.distributions import DegenerateNormal

COVARIANCE = np.array([[2.0, 1.1], [1.1, 1.0]])
TARGET = dist.MultivariateNormal(np.zeros(2), covariance_matrix=COVARIANCE)
ANGLES = np.linspace(0, 180, 181)  # of lines through the origin, in degrees
WIDTH, NOISE_SCALE = 50, 0.7  # noise in standard deviations of the target: a linear fit explains half of its variance
RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def direction(degrees):
    """Return unit vectors (..., 2)."""
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], -1)


def gaussian():
    """Sample the distribution to be approximated."""
    numpyro.sample("w", TARGET)


def lowest_quasi_kl(degrees):
    """Return the quasi-KL of the best guide on each line: -log of the mass that the Gaussian's density has there."""
    basis = direction(degrees)
    variance = 1 / np.einsum("ai,ij,aj->a", basis, np.linalg.inv(COVARIANCE), basis)
    return np.asarray(quasi_kl(DegenerateNormal(jnp.zeros(2), basis[:, :, None], np.sqrt(variance)[:, None]), TARGET))


def fit_line(start, num_steps):
    """Fit a degenerate Gaussian by SVI from a random start: angle in degrees, standard deviation, quasi-KL."""
    guide = AutoDegenerateNormal(gaussian, rank=1, init_scale=1.0)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
    svi = SVI(gaussian, guide, optimiser, TraceQKL(num_particles=8))
    posterior = guide.get_posterior(svi.run(jax.random.key(start), num_steps, progress_bar=False).params)
    x, y = np.asarray(posterior.basis[:, 0])
    angle, sd = float(np.degrees(np.arctan2(y, x)) % 180), float(posterior.scale[0])
    return {"start": start, "angle": angle, "sd": sd, "quasi-KL": float(quasi_kl(posterior, TARGET))}


def network(x, y=None):
    """Sample a tanh layer; a row of the readout holds what one hidden unit sends on."""
    hidden = numpyro.sample("hidden", dist.Normal(0, x.shape[1] ** -0.5).expand([x.shape[1], WIDTH]).to_event(2))
    readout = numpyro.sample("readout", dist.Normal(0, WIDTH**-0.5).expand([WIDTH, 1]).to_event(2))
    function = numpyro.deterministic("function", (jnp.tanh(x @ hidden) @ readout)[:, 0])
    with numpyro.plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(function, NOISE_SCALE), obs=y)


def fit(guide, train, test, num_steps):
    """Fit a guide to the network; its dropout rate and objective, and how draws from it predict the test data."""
    loss = Trace_ELBO() if isinstance(guide, AutoDelta) else TraceQKL(num_particles=4)
    svi = SVI(network, guide, optax.adam(optax.cosine_decay_schedule(0.01, num_steps)), loss)
    result = svi.run(jax.random.key(0), num_steps, *train, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, *train, sample_shape=(500,))
    predictive = Predictive(network, draws, return_sites=["function"])
    function = predictive(jax.random.key(2), test[0])["function"]
    log_probs = dist.Normal(function, NOISE_SCALE).log_prob(test[1])
    nll = -float(jnp.mean(jax.nn.logsumexp(log_probs, axis=0) - np.log(len(log_probs))))
    rate = float(result.params.get("readout_auto_rate", getattr(guide, "rate", 0.0)))
    found = {"rate": rate, "objective": float(result.losses[-num_steps // 10 :].mean())}
    return {**found, "test RMSE": _common.rms(function.mean(0) - test[1]), "test NLL": nll}


def draw_lines(panel, lines):
    """Draw the Gaussian's contours, lines coloured by their quasi-KL, and the best fit."""
    x, y = np.meshgrid(np.linspace(-4, 4, 101), np.linspace(-4, 4, 101))
    points = np.stack([x, y], -1)
    squared = np.einsum("...i,ij,...j->...", points, np.linalg.inv(COVARIANCE), points)
    panel.contour(x, y, np.exp(-squared / 2), levels=np.exp(-0.5 * np.array([9, 4, 1])), colors="0.5", linewidths=1)
    angles = np.arange(0, 180, 15)
    values = lowest_quasi_kl(angles)
    colour = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(values.min(), values.max()), "viridis")
    for angle, value in zip(angles, values, strict=True):
        panel.plot(*(6 * np.outer([-1, 1], direction(angle))).T, color=colour.to_rgba(value), linewidth=1)
    best = min(lines, key=lambda line: line["quasi-KL"])
    ends = 2 * best["sd"] * np.outer([-1, 1], direction(best["angle"]))
    panel.plot(*ends.T, color="tab:orange", linewidth=4, solid_capstyle="butt", label="fit, ± 2 sd")
    panel.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", xlabel="$w_1$", ylabel="$w_2$", title="Gaussian and lines")
    panel.legend(loc="upper left", fontsize=8)
    panel.figure.colorbar(colour, ax=panel, label="lowest quasi-KL on the line, nats", shrink=0.8)


def draw(component, lines, fits, options):
    """Draw the lines, their quasi-KL against the angle, and dropout against its rate."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=[1.2, 1, 1])
    draw_lines(axes[0], lines)
    axes[1].plot(ANGLES, lowest_quasi_kl(ANGLES), label="best guide on the line")
    axes[1].axvline(component, color="0.5", linestyle="--", label="first principal component")
    found = [line["angle"] for line in lines], [line["quasi-KL"] for line in lines]
    axes[1].plot(*found, "o", color="tab:orange", label=f"fits, {len(lines)} random starts")
    axes[1].set(xlabel="angle of the line, degrees", ylabel="quasi-KL, nats", title="principal components by SVI")

    fixed = [result for name, result in fits.items() if name.startswith("dropout, rate")]
    axes[2].plot([f["rate"] for f in fixed], [f["objective"] for f in fixed], "o-", label="fixed rate")
    learned = fits["dropout, learned rate"]
    axes[2].plot(learned["rate"], learned["objective"], "*", color="tab:orange", markersize=12, label="learned rate")
    axes[2].set(xlabel="dropout rate of hidden units", ylabel="fitted objective, nats", title="dropout on diabetes")
    for panel in axes[1:]:
        panel.legend(fontsize=8)
    _common.save(figure, options, "dropout_qkl.png", dpi=130)


def main(options):
    """Run the study."""
    variances, vectors = np.linalg.eigh(COVARIANCE)
    component = float(np.degrees(np.arctan2(*vectors[::-1, 1])) % 180)
    lowest = lowest_quasi_kl(np.array([component]))[0]
    print(
        f"Principal component: angle {component:.2f}, sd {variances[1] ** 0.5:.3f}, quasi-KL {lowest:.4f}", flush=True
    )
    num_steps = max(options.num_steps // 4, 1)
    lines = [fit_line(start, num_steps) for start in tqdm(range(options.num_starts), desc="lines", unit="fit")]
    _common.print_table(lines)

    print(f"\nDiabetes, {options.num_train} patients for training, {WIDTH} hidden units\n", flush=True)
    # A point estimate, dropout of hidden units at fixed rates, and at a learned rate.
    guides = {"point estimate": AutoDelta(network, init_loc_fn=init_to_sample)}
    for rate in RATES[: options.num_rates]:
        guides[f"dropout, rate {rate}"] = AutoDropout(network, rate=rate, sites=["readout"])
    guides["dropout, learned rate"] = AutoDropout(network, rate=0.2, sites=["readout"], learn_rate=True)
    n = options.num_train
    x, y = _common.standardised(_data.split(_data.diabetes(), 442, 0, seed=0)[0], n)
    x = _common.with_ones(x)
    data = (x[:n], y[:n]), (x[n:], y[n:]), options.num_steps
    fits = {name: fit(guide, *data) for name, guide in tqdm(guides.items(), desc="guides", unit="fit")}
    print("Objectives of dropout and of a point estimate do not compare: they differ in the measure of their support.")
    _common.print_table([{"guide": name} | result for name, result in fits.items()])
    draw(component, lines, fits, options)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            num_starts=(8, "random starts of the line"),
            num_train=(300, "patients to train on; the others are for testing"),
            num_rates=(len(RATES), f"how many of the rates {RATES}"),
            num_steps=(4000, "Adam steps of each fit, its rate lowered by a cosine"),
        )
    )
