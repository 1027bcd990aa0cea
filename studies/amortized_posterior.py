"""One guide for every epidemic: amortised inference in a stochastic SIR model, checked, and held against NUTS.

The model is that of an influenza outbreak in a boarding school of 763 boys (British Medical Journal, 4 March 1978,
page 587): boys in bed on each of 14 days. The guide, a mixture of Gaussians computed by a network, is trained on
simulated outbreaks alone; the overdispersion of the counts is a nuisance that it marginalises. Its calibration is
checked on other simulated outbreaks, and on the real one it is compared with NUTS. Prints tables, draws two figures.

    python studies/amortized_posterior.py
"""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen
from numpyro.contrib.module import flax_module
from numpyro.infer import MCMC, NUTS, Predictive

import _common
from numpyro_wide import AmortizedForwardKL, calibration
from numpyro_wide.plots import plot_coverage, plot_rank_ecdf

NUM_BOYS = 763.0
IN_BED = np.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4])
NUM_COMPONENTS = 4
NUM_DRAWS = 99  # of each simulated outbreak, in the calibration


def infected(beta, gamma):
    """Return the numbers of infected boys after 1, ..., 14 days of the SIR equations, one infected at the start."""
    steps_a_day = 4

    def slope(state):
        infections = beta * state[0] * state[1] / NUM_BOYS
        return jnp.stack([-infections, infections - gamma * state[1]])

    def runge_kutta(state, _):
        h = 1 / steps_a_day
        first = slope(state)
        second = slope(state + h / 2 * first)
        third = slope(state + h / 2 * second)
        state = state + h / 6 * (first + 2 * second + 2 * third + slope(state + h * third))
        return state, state[1]

    start = jnp.array([NUM_BOYS - 1, 1.0])
    _, sick = jax.lax.scan(runge_kutta, start, length=len(IN_BED) * steps_a_day)
    return jnp.maximum(sick[steps_a_day - 1 :: steps_a_day], 1e-3)


def outbreak(counts=None):
    """Sample rates of infection and recovery a day, in logarithms, and overdispersed counts of those in bed."""
    log_rates = numpyro.sample("log_rates", dist.Normal(jnp.log(jnp.array([1.5, 0.5])), 0.4).to_event(1))
    overdispersion = numpyro.sample("overdispersion", dist.Exponential(5.0))
    beta, gamma = jnp.exp(log_rates)
    with numpyro.plate("days", len(IN_BED)):
        numpyro.sample("counts", dist.NegativeBinomial2(infected(beta, gamma), 1 / overdispersion), obs=counts)


class Encoder(linen.Module):
    """Weights, means and Cholesky factors of the components, from the logarithms of the counts."""

    @linen.compact
    def __call__(self, counts):
        """Return three arrays: (k,), (k, 2), (k, 2, 2)."""
        hidden = jnp.log1p(counts) - 2.5
        for _ in range(2):
            hidden = linen.gelu(linen.Dense(64)(hidden))
        outputs = linen.Dense(6 * NUM_COMPONENTS)(hidden).reshape(NUM_COMPONENTS, 6)
        scale = 0.4 * jnp.exp(outputs[:, 3:5])
        scale_tril = scale[:, :, None] * jnp.eye(2) + 0.4 * outputs[:, 5, None, None] * jnp.array([[0, 0], [1, 0]])
        return outputs[:, 0], jnp.log(jnp.array([1.5, 0.5])) + 0.4 * outputs[:, 1:3], scale_tril


def guide(observed_values):
    """Sample the rates from a mixture of Gaussians: the overdispersion is left out."""
    encoder = flax_module("encoder", Encoder(), input_shape=(len(IN_BED),))
    logits, loc, scale_tril = encoder(observed_values["counts"])
    components = dist.MultivariateNormal(loc, scale_tril=scale_tril)
    numpyro.sample("log_rates", dist.MixtureSameFamily(dist.Categorical(logits=logits), components))


def quantities(log_rates):
    """Return what an epidemiologist asks for, by name."""
    beta, gamma = np.exp(log_rates.T)
    return {"infection rate (1/day)": beta, "days of illness": 1 / gamma, "reproduction number": beta / gamma}


def calibrate(params, options):
    """Check the guide's ranks and coverage on simulated outbreaks: a table and a figure."""
    sizes = {"num_simulations": options.num_simulations, "num_draws": NUM_DRAWS}
    simulations = calibration.from_guide(jax.random.key(2), outbreak, guide, params, observed="counts", **sizes)
    ranks = calibration.sbc_ranks(simulations)["log_rates"]
    by_name = {"log infection rate": ranks[:, 0], "log recovery rate": ranks[:, 1]}
    (of_density,) = calibration.expected_coverage(simulations, region="hpd").values()
    both = {"highest density": of_density, "TARP": calibration.tarp(jax.random.key(3), simulations)}

    print(f"\nCalibration over {options.num_simulations} simulated outbreaks (p-values of simultaneous tests)")
    rows = []
    for name, values in by_name.items():
        rows.append({"test": f"ranks, {name}", "p": float(calibration.uniformity_p_value(values, NUM_DRAWS))})
    for name, found in both.items():
        row = {"test": f"coverage, {name}", "p": float(found.p_value)}
        rows.append({**row, "coverage at 0.9": float(np.interp(0.9, found.nominal, found.empirical))})
    _common.print_table(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    plot_rank_ecdf(by_name, NUM_DRAWS, ax=left).legend(loc="lower right", fontsize="small")
    plot_coverage(both, ax=right)
    _common.save(figure, options, "epidemic_calibration.png")


def draw(draws, options):
    """Draw the posterior draws of both methods, and the outbreaks that those of the guide predict."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained")
    for (name, log_rates), marker in zip(draws.items(), "ox", strict=True):
        values = quantities(log_rates[:: max(1, len(log_rates) // 500)])
        left.plot(values["reproduction number"], values["days of illness"], marker, markersize=3, alpha=0.5, label=name)
    left.set(xlabel="reproduction number", ylabel="days of illness", title="posterior draws")
    left.legend()
    days = np.arange(1, len(IN_BED) + 1)
    curves = np.asarray(jax.vmap(infected)(*jnp.exp(draws["amortised guide"][:1000]).T))
    low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
    right.fill_between(days, low, high, color="tab:blue", alpha=0.3, label="guide: infected, 90 %")
    right.plot(days, middle, color="tab:blue")
    right.plot(days, IN_BED, "ko", markersize=4, label="boys in bed")
    right.set(xlabel="day", ylabel="boys", title="the outbreak of 1978", ylim=(-10, 390))
    right.legend(loc="upper right")
    _common.save(figure, options, "epidemic_posterior.png")


def main(options):
    """Run the study."""
    start = time.perf_counter()
    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, options.num_steps))
    trainer = AmortizedForwardKL(outbreak, guide, optimiser, observed="counts", batch_size=64)
    # Of all parameters, those that are the best on held-out simulations are kept.
    params, state, _ = trainer.run(jax.random.key(0), options.num_steps, held_out=2000)
    seconds = {"training": time.perf_counter() - start}
    print(f"Held-out loss {state.held_out.best_loss:.3f} nats, {state.num_skipped} steps skipped")
    calibrate(params, options)
    start = time.perf_counter()
    mcmc = MCMC(NUTS(outbreak), num_warmup=options.num_warmup, num_samples=options.num_samples, num_chains=2)
    mcmc.run(jax.random.key(1), jnp.array(IN_BED))
    draws = {"NUTS": np.asarray(mcmc.get_samples()["log_rates"])}
    seconds["NUTS"] = time.perf_counter() - start
    posterior = Predictive(guide, params=params, num_samples=2 * options.num_samples)
    posterior(jax.random.key(4), {"counts": jnp.zeros(len(IN_BED))})  # compiled once, for any outbreak
    start = time.perf_counter()
    draws["amortised guide"] = np.asarray(posterior(jax.random.key(4), {"counts": jnp.array(IN_BED)})["log_rates"])
    seconds["amortised guide"] = time.perf_counter() - start

    print("\nThe outbreak of 1978: posterior mean ± standard deviation")
    rows = []
    for name, log_rates in draws.items():
        rows.append({"method": name} | {q: f"{v.mean():.3f} ± {v.std():.3f}" for q, v in quantities(log_rates).items()})
    _common.print_table(rows)
    print("Seconds: " + ", ".join(f"{name} {taken:.2f}" for name, taken in seconds.items()))
    draw(draws, options)


if __name__ == "__main__":
    numpyro.set_host_device_count(2)
    main(
        _common.arguments(
            __doc__,
            num_steps=(20_000, "of training, 64 simulated outbreaks each"),
            num_simulations=(1000, "simulated outbreaks to check calibration on"),
            num_warmup=(500, "of NUTS"),
            num_samples=(1000, "of NUTS, in each of two chains; as many of the guide"),
        )
    )
