"""Winning paces of the Olympic marathon: as its network widens, a Bayesian posterior becomes a Gaussian process.

Networks of growing width are sampled by NUTS as they are, by NUTS repriorised, and without a Markov chain by pushing
draws from N(0, I) through the repriorisation. Prints how far each predictive mean and standard deviation is from the
NNGP posterior, and draws them all (after Figure 3 of Hron et al. 2022).

    python studies/marathon.py
"""

from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.infer import MCMC, NUTS, Predictive

import _chains
import _common
import _data
from _common import Posterior
from numpyro_wide import datasets, repriorise, wide_limit_draws
from numpyro_wide.wide_limit import fcn_kernel

# In units of standardised years and paces. The hidden units erf(3 w x + 2 b) bend within about a third of the data's
# spread, at places all over it and somewhat beyond; their sum has a prior standard deviation of 0.8 to 0.95, near that
# of the paces. Given these, the evidence (gp_log_evidence) is largest for a noise of 0.4 to 0.5: it has to explain 1904
# (St Louis: heat, dust and 32 starters), without which it would be half of that.
W_STD, B_STD, READOUT_STD, NOISE_SCALE = 3.0, 2.0, 1.0, 0.4
NUM_CHAINS = 2
METHODS = ("NUTS, plain", "NUTS, repriorised", "wide limit, no chain")
GAMES = datasets.marathon()
X, Y = _common.standardised(GAMES)
YEARS, PACES = (_data.Standardiser.fit(part) for part in GAMES)
GRID = np.arange(1890, 2031, 2)


def predict(model, draws):
    """Return functions on the grid (chain, draw, m), from the model that is *not* wrapped and draws of its weights."""
    predictive = Predictive(model, draws, batch_ndims=2, return_sites=["function"])
    return np.asarray(predictive(jax.random.key(2), YEARS(GRID[:, None]))["function"], np.float64)


def run_nuts(model, plain, options, budget=np.inf):
    """Run NUTS for ``num_samples`` draws a chain, of which those count that ``budget`` gradients pay for."""
    mcmc = MCMC(NUTS(model), num_warmup=options.num_warmup, num_samples=options.num_samples, num_chains=NUM_CHAINS)
    mcmc.run(jax.random.key(0), X, Y, extra_fields=("num_steps",))
    cost = np.cumsum(mcmc.get_extra_fields(group_by_chain=True)["num_steps"].sum(0))
    num_paid = min(max(4, int(np.sum(cost <= budget))), len(cost))  # ArviZ's ESS takes four draws at least
    draws = {name: draw[:, :num_paid] for name, draw in mcmc.get_samples(group_by_chain=True).items()}
    return predict(plain, draws), int(cost[num_paid - 1])


def draw(nngp, runs, options):
    """Draw means in the first row, standard deviations in the second, a column for each method."""
    figure, axes = plt.subplots(2, len(METHODS), figsize=(12, 6), sharex=True, sharey="row", height_ratios=[3, 2])
    low, mean, high = (PACES.inverse(nngp.mean + times * nngp.sd) for times in (-2, 0, 2))
    for (top, bottom), (method, by_width) in zip(axes.T, runs.items(), strict=True):
        top.fill_between(GRID, low, high, color="0.88", label="NNGP, mean ± 2 sd")
        for (width, run), colour in zip(by_width.items(), _common.shades(len(by_width)), strict=True):
            top.plot(GRID, PACES.inverse(run.mean), color=colour, label=f"width {width}")
            bottom.plot(GRID, PACES.scale * run.sd, color=colour)
        top.plot(GRID, mean, color="black", linestyle="--", label="NNGP, mean")
        bottom.plot(GRID, PACES.scale * nngp.sd, color="black", linestyle="--")
        top.plot(GAMES.inputs[:, 0], GAMES.targets, "o", color="tab:red", markersize=3, label="winners")
        top.set_title(method)
        bottom.set_xlabel("year")
    axes[0, 0].set_ylabel("predictive mean, min/km")
    axes[1, 0].set(ylabel="predictive sd, min/km", ylim=(0, None))
    axes[0, -1].legend(fontsize=8)
    figure.suptitle("Olympic marathon, men: posterior over functions by width")
    figure.tight_layout()
    _common.save(figure, options, "marathon.png")


def main(options):
    """Run the study."""
    kernel = fcn_kernel(1, "erf", w_std=W_STD, b_std=B_STD, readout_w_std=READOUT_STD)
    nngp = _common.nngp_posterior(kernel, X, Y, YEARS(GRID[:, None]), NOISE_SCALE)
    scales = {"w_std": W_STD, "b_std": B_STD, "readout_std": READOUT_STD, "noise_scale": NOISE_SCALE}
    runs: dict[str, dict[int, Posterior]] = {method: {} for method in METHODS}
    rows = []
    for width in options.widths:
        plain = partial(_common.erf_network, width=width, **scales)
        model = repriorise(plain, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE)
        print(f"\nWidth {width}: NUTS repriorised, then plain", flush=True)
        chain, budget = run_nuts(model, plain, options)
        # The others get what the repriorised chains cost: as many gradients, or as many maps.
        draws = wide_limit_draws(jax.random.key(1), model, budget, X, Y)
        limit = predict(plain, {name: draw[None] for name, draw in draws.items()})
        found = (run_nuts(plain, plain, options, budget), (chain, budget), (limit, budget))
        for method, (functions, cost) in zip(METHODS, found, strict=True):
            posterior = runs[method][width] = Posterior(functions.mean((0, 1)), functions.std((0, 1)))
            ess = None if functions is limit else np.mean(_chains.bulk_ess(functions[:, :, ::5])) / cost
            row = {"width": width, "method": method, "draws": functions[..., 0].size, "cost": cost, "ESS/gradient": ess}
            mean, sd = (60 * PACES.scale * distance for distance in posterior.distance(nngp))
            rows.append({**row, "mean": mean, "sd": sd})

    print("\nDistance (RMSE) of predictive mean and sd to the NNGP posterior, years 1890 to 2030, in seconds per km")
    print("Cost: gradients of NUTS after warmup, maps of the wide limit. ESS: of the function's values")
    _common.print_table(rows)
    draw(nngp, runs, options)


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    samples = (500, "draws of each repriorised chain; sets the budget of the others")
    main(_common.arguments(__doc__, widths=[4, 16, 64, 256], num_warmup=200, num_samples=samples))
