"""Winning paces of the Olympic marathon: as its network widens, a Bayesian posterior becomes a Gaussian process.

Networks of growing width are sampled by NUTS as they are, by NUTS repriorised, and without a Markov chain by pushing
draws from N(0, I) through the repriorisation. Prints how far each predictive mean and standard deviation is from the
NNGP posterior, and draws them all (after Figure 3 of Hron et al. 2022).

    python examples/marathon.py
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive

import numpyro_wide
from numpyro_wide import datasets, repriorise, wide_limit_draws
from numpyro_wide.wide_limit import fcn_kernel, gp_posterior

matplotlib.use("Agg")
import matplotlib.pyplot as plt

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces its next generation
    import arviz as az

# In units of standardised years and paces. The hidden units erf(3 w x + 2 b) bend within about a third of the data's
# spread, at places all over it and somewhat beyond; their sum has a prior standard deviation of 0.8 to 0.95, near that
# of the paces. Given these, the evidence (gp_log_evidence) is largest for a noise of 0.4 to 0.5: it has to explain 1904
# (St Louis: heat, dust and 32 starters), without which it would be half of that.
W_STD, B_STD, READOUT_STD, NOISE_SCALE = 3.0, 2.0, 1.0, 0.4
NUM_CHAINS = 2
METHODS = ("NUTS, plain", "NUTS, repriorised", "wide limit, no chain")


class Marathon(NamedTuple):
    """Years (n,) and paces in min/km (n,) of the Games, and the years to predict (m,)."""

    years: np.ndarray
    paces: np.ndarray
    grid: np.ndarray

    def scaled(self, years: np.ndarray) -> np.ndarray:
        """Years as a network's inputs, (n, 1)."""
        return ((years - self.years.mean()) / self.years.std()).astype(np.float32)[:, None]

    def targets(self) -> np.ndarray:
        """Standardised paces, (n,)."""
        return ((self.paces - self.paces.mean()) / self.paces.std()).astype(np.float32)


def load_data() -> Marathon:
    """The table that comes with the package, and a grid of years."""
    games = datasets.marathon()
    return Marathon(games.inputs[:, 0], games.targets, np.arange(1890, 2031, 2))


def network(x, y=None, *, width):
    """One erf layer in NTK parametrisation: every weight N(0, 1)."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.lax.erf(W_STD * x @ weights + B_STD * bias)
    features = numpyro.deterministic("features", READOUT_STD / np.sqrt(width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    function = numpyro.deterministic("function", features @ readout)
    with numpyro.plate("games", x.shape[0]):
        numpyro.sample("pace", dist.Normal(function, NOISE_SCALE), obs=y)


class Posterior(NamedTuple):
    """Mean and standard deviation (m,) of the pace without noise, in min/km."""

    mean: np.ndarray
    sd: np.ndarray

    def distance(self, other: "Posterior") -> tuple[float, float]:
        """Root mean squares of the differences, in seconds per km."""
        return tuple(60 * float(np.sqrt(np.mean((mine - its) ** 2))) for mine, its in zip(self, other, strict=True))


def nngp_posterior(data: Marathon) -> Posterior:
    """The posterior of an infinitely wide network, in closed form."""
    kernel = fcn_kernel(1, "erf", w_std=W_STD, b_std=B_STD, readout_w_std=READOUT_STD)
    x, x_test = data.scaled(data.years), data.scaled(data.grid)
    kernels = kernel(x)[0], kernel(x_test, x)[0], kernel(x_test)[0]
    mean, covariance = gp_posterior(*kernels, data.targets(), NOISE_SCALE)
    mean, variance = np.asarray(mean), np.diag(covariance)
    return Posterior(data.paces.mean() + data.paces.std() * mean, data.paces.std() * np.sqrt(variance))


class Run(NamedTuple):
    """Functions on the grid by chain (chain, draw, m), and how many gradients, or maps, all chains spent on them."""

    functions: np.ndarray
    cost: int

    def posterior(self) -> Posterior:
        """Averages over all draws."""
        return Posterior(self.functions.mean((0, 1)), self.functions.std((0, 1)))

    def ess_per_gradient(self) -> float:
        """Effective sample size of the function's values for each gradient, on average over the grid."""
        ess = np.mean(az.ess({"function": self.functions[:, :, ::5]})["function"].values)
        return float(ess) / self.cost


def predict(model: Callable, draws: dict, data: Marathon) -> np.ndarray:
    """Functions on the grid (chain, draw, m), from the model that is *not* wrapped and draws of its weights."""
    predictive = Predictive(model, draws, batch_ndims=2, return_sites=["function"])
    functions = predictive(jax.random.key(2), data.scaled(data.grid))["function"]
    return data.paces.mean() + data.paces.std() * np.asarray(functions, np.float64)


def run_nuts(model: Callable, data: Marathon, num_warmup: int, num_samples: int, budget: float = np.inf) -> Run:
    """NUTS for ``num_samples`` draws a chain, of which those count that ``budget`` gradients of all chains pay for."""
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, num_chains=NUM_CHAINS)
    mcmc.run(jax.random.key(0), data.scaled(data.years), data.targets(), extra_fields=("num_steps",))
    cost = np.cumsum(mcmc.get_extra_fields(group_by_chain=True)["num_steps"].sum(0))
    num_paid = min(max(4, int(np.sum(cost <= budget))), num_samples)  # ArviZ's ESS takes four draws at least
    draws = {name: draw[:, :num_paid] for name, draw in mcmc.get_samples(group_by_chain=True).items()}
    plain = getattr(model, "fn", model)  # predict with the unwrapped model and the draws of the readout
    return Run(predict(plain, draws, data), int(cost[num_paid - 1]))


def run_wide_limit(model: Callable, data: Marathon, num_draws: int) -> Run:
    """Independent draws, one evaluation of the map each."""
    inputs = data.scaled(data.years), data.targets()
    draws = wide_limit_draws(jax.random.key(1), model, num_draws, *inputs)
    return Run(predict(model.fn, {name: draw[None] for name, draw in draws.items()}, data), num_draws)


def plot(runs: dict[str, dict[int, Run]], nngp: Posterior, data: Marathon, path: Path) -> None:
    """Means in the first row, standard deviations in the second; a column for each method."""
    figure, axes = plt.subplots(2, len(METHODS), figsize=(12, 6), sharex=True, sharey="row", height_ratios=[3, 2])
    for (top, bottom), (method, by_width) in zip(axes.T, runs.items(), strict=True):
        band = nngp.mean - 2 * nngp.sd, nngp.mean + 2 * nngp.sd
        top.fill_between(data.grid, *band, color="0.88", label="NNGP, mean ± 2 sd")
        colours = matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, len(by_width)))
        for (width, run), colour in zip(by_width.items(), colours, strict=True):
            mean, sd = run.posterior()
            top.plot(data.grid, mean, color=colour, label=f"width {width}")
            bottom.plot(data.grid, sd, color=colour)
        top.plot(data.grid, nngp.mean, color="black", linestyle="--", label="NNGP, mean")
        bottom.plot(data.grid, nngp.sd, color="black", linestyle="--")
        top.plot(data.years, data.paces, "o", color="tab:red", markersize=3, label="winners")
        top.set_title(method)
        bottom.set_xlabel("year")
    axes[0, 0].set_ylabel("predictive mean, min/km")
    axes[1, 0].set_ylabel("predictive sd, min/km")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, -1].legend(fontsize=8)
    figure.suptitle("Olympic marathon, men: posterior over functions by width")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(runs: dict[str, dict[int, Run]], nngp: Posterior) -> None:
    """How far each run is from the limit."""
    print("\nDistance (RMSE) of predictive mean and sd to the NNGP posterior, years 1890 to 2030, in seconds per km")
    print("Cost: gradients of NUTS after warmup, maps of the wide limit. ESS: of the function's values")
    print("width  method                draws   cost  ESS/gradient  mean    sd")
    for width in runs[METHODS[0]]:
        for method in METHODS:
            run = runs[method][width]
            ess = "" if method == METHODS[2] else f"{run.ess_per_gradient():.4f}"
            mean, sd = run.posterior().distance(nngp)
            num_draws = run.functions.shape[0] * run.functions.shape[1]
            print(f"{width:5d}  {method:20s}  {num_draws:5d}  {run.cost:5d}  {ess:>12s}  {mean:4.2f}  {sd:4.2f}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--num-warmup", type=int, default=200, help="iterations of NUTS")
    parser.add_argument(
        "--num-samples", type=int, default=500, help="draws of each repriorised chain; sets the budget of the others"
    )
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Sample, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    data = load_data()
    nngp = nngp_posterior(data)
    runs: dict[str, dict[int, Run]] = {method: {} for method in METHODS}
    start = time.perf_counter()
    for width in options.widths:
        plain = partial(network, width=width)
        repriorised = repriorise(plain, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE)
        print(f"\nWidth {width}: NUTS repriorised, then plain", flush=True)
        chain = run_nuts(repriorised, data, options.num_warmup, options.num_samples)
        runs["NUTS, repriorised"][width] = chain
        # The others get what the repriorised chains cost: as many gradients, or as many maps.
        runs["NUTS, plain"][width] = run_nuts(plain, data, options.num_warmup, options.num_samples, chain.cost)
        runs["wide limit, no chain"][width] = run_wide_limit(repriorised, data, chain.cost)

    print_table(runs, nngp)
    options.output.mkdir(parents=True, exist_ok=True)
    plot(runs, nngp, data, options.output / "marathon.png")
    print(f"\n{time.perf_counter() - start:.0f} s. Figure in {options.output}: marathon.png")


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    main()
