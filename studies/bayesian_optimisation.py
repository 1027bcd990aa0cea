"""Bayesian optimisation by a wide network with its readout integrated out, by a Gaussian process, and at random.

Two standard functions, Branin in two dimensions and Hartmann in three, are minimised by twenty evaluations after a few
random ones, the same for all. Prints and draws how far the best evaluation is from the minimum.

    python studies/bayesian_optimisation.py
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.stats import norm
from scipy.stats.qmc import Sobol
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from tqdm.auto import tqdm

import _common
from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.readout import site_function

NOISE, ABSENT = 0.03, 1e3  # of standardised values; a row of noise 1000 says nothing, and is there for the shapes alone


class Problem(NamedTuple):
    """A function of points (m, d) in the unit cube, and its minimum."""

    function: Callable[[np.ndarray], np.ndarray]
    dimension: int
    minimum: float


def branin(x):
    """Evaluate a function with three minima of the same depth in the plane."""
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    return (b - 5.1 / (4 * np.pi**2) * a**2 + 5 / np.pi * a - 6) ** 2 + 10 * (1 - 1 / (8 * np.pi)) * np.cos(a) + 10


def hartmann(x):
    """Evaluate a function with four wells in three dimensions."""
    steepness = np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]])
    centres = np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]]) * 1e-4
    depths = np.array([1.0, 1.2, 3.0, 3.2])
    return -np.exp(-np.sum(steepness * (x[:, None] - centres) ** 2, -1)) @ depths


PROBLEMS = {"Branin": Problem(branin, 2, 0.397887), "Hartmann": Problem(hartmann, 3, -3.86278)}


def network(x, noise, y=None, *, width):
    """Sample a layer of tanh units whose slopes in each direction are latent; ``noise`` is by row."""
    slopes = numpyro.sample("slopes", dist.LogNormal(1, 0.5).expand([x.shape[1]]).to_event(1))
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
    features = numpyro.deterministic("features", 1.5 * jnp.tanh((2 * x - 1) * slopes @ weights + 2 * bias) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ readout, noise), obs=y)


def improvement(best, mean, sd):
    """Return the expected improvement on ``best`` (Jones, Schonlau and Welch 1998), averaged over draws if any."""
    z = (best - mean) / sd
    return np.mean(np.reshape(sd * (z * norm.cdf(z) + norm.pdf(z)), (-1, mean.shape[-1])), 0)


class Network:
    """Draws of the hidden weights at every round, by programs that are compiled at the first round alone."""

    def __init__(self, width, num_rows, options):
        self.plain, self.num_rows = partial(network, width=width), num_rows
        self.model = collapse_readout(self.plain, readout="readout", features="features", observed="y")
        self.lengths = {"num_warmup": options.num_warmup, "num_samples": options.num_samples}
        self.sample = jax.jit(self._sample)
        self.function = jax.jit(lambda draw, *inputs: site_function(self.plain, "y", *inputs)(draw))

    def _sample(self, key, *data):
        """Start, warm up and sample: under ``jit`` a single program, for any data of the same shape."""
        kernel = SplitHMC(self.model, persistence=0.0)  # few draws are stored
        mcmc = MCMC(kernel, **self.lengths, num_chains=2, chain_method="vectorized", progress_bar=False)
        mcmc.run(key, *data)
        return mcmc.get_samples()

    def fit(self, key, x, y):
        """Pad the rows to the number that there will be in the end, and sample."""
        present = np.arange(self.num_rows) < len(x)
        padded, targets = np.zeros((self.num_rows, x.shape[1]), np.float32), np.zeros(self.num_rows, np.float32)
        padded[present], targets[present] = x, y
        data = padded, np.where(present, NOISE, ABSENT).astype(np.float32), targets
        return ReadoutPredictive(self.model, self.sample(key, *data), data)

    def expected_improvement(self, key, x, y, candidates):
        """Return the expected improvement, in closed form given the hidden weights, and averaged over them."""
        noise = np.full(len(candidates), NOISE, np.float32)
        found = self.fit(key, x, y)(key, candidates, noise)
        mean, variance = np.asarray(found["mean"], np.float64), np.asarray(found["variance"], np.float64)
        return improvement(y.min(), mean, np.sqrt(variance) + 1e-9)

    def thompson(self, key, x, y, candidates):
        """Return minus one draw of the function."""
        predictive = self.fit(key, x, y)
        readouts = predictive.readout(key)
        draw = {name: draws[-1] for name, draws in {**predictive.draws, "readout": readouts}.items()}
        return -np.asarray(self.function(draw, candidates, np.full(len(candidates), NOISE, np.float32)))


def gaussian_process(key, x, y, candidates):
    """Return the expected improvement under scikit-learn's Gaussian process, Matérn 5/2, its scales fitted anew."""
    kernel = ConstantKernel(1.0) * Matern(np.full(x.shape[1], 0.5), (0.05, 20), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=NOISE**2, n_restarts_optimizer=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scale on its bound
        mean, sd = process.fit(x, y).predict(candidates, return_std=True)
    return improvement(y.min(), mean, sd + 1e-9)


def at_random(key, x, y, candidates):
    """Give no candidate a preference: they are in random order."""
    return np.zeros(len(candidates))


def optimise(problem, acquire, seed, options):
    """Return the best value so far after the start and after every round, and the seconds of every round."""
    num_start = 2 * problem.dimension + 1
    rng = np.random.default_rng(seed)
    x = rng.random((num_start, problem.dimension))
    values, seconds = problem.function(x), []
    for round_ in range(options.rounds):
        began = time.perf_counter()
        spread = Sobol(problem.dimension, seed=rng).random(512)
        near = x[values.argmin()] + 0.05 * rng.normal(size=(128, problem.dimension))
        candidates = rng.permutation(np.concatenate([spread, np.clip(near, 0, 1)])).astype(np.float32)
        if acquire is at_random:
            candidates = rng.random(candidates.shape)
        y = (values - values.mean()) / values.std()
        key = jax.random.fold_in(jax.random.key(seed), round_)
        chosen = candidates[[np.argmax(acquire(key, x, y, candidates))]]
        x, values = np.concatenate([x, chosen]), np.concatenate([values, problem.function(chosen)])
        seconds.append(time.perf_counter() - began)
    return np.minimum.accumulate(values)[num_start - 1 :], seconds


def draw(regrets, options):
    """Draw the distance from the minimum against the evaluations, a panel for each function."""
    figure, axes = plt.subplots(1, len(PROBLEMS), figsize=(10, 3.8), layout="constrained")
    for panel, (name, by_method) in zip(axes, regrets.items(), strict=True):
        for method, regret in by_method.items():
            low, median, high = np.quantile(regret, [0.25, 0.5, 0.75], axis=0)
            (line,) = panel.semilogy(median, label=method)
            panel.fill_between(np.arange(len(median)), low, high, color=line.get_color(), alpha=0.15)
        panel.set(title=name, xlabel="evaluations after the start", ylabel="best value less the minimum")
        _common.number_ticks(panel, range(0, options.rounds + 1, 5))
    axes[0].legend(fontsize=8)
    _common.save(figure, options, "bayesian_optimisation.png")


def main(options):
    """Run the study."""
    regrets: dict[str, dict[str, np.ndarray]] = {}
    rows = []
    for name, problem in PROBLEMS.items():
        surrogate = Network(options.width, 2 * problem.dimension + 1 + options.rounds, options)
        methods = {
            "network, expected improvement": surrogate.expected_improvement,
            "network, Thompson": surrogate.thompson,
            "Gaussian process, expected improvement": gaussian_process,
            "random": at_random,
        }
        regrets[name] = {}
        for method, acquire in methods.items():
            starts = tqdm(range(options.seeds), desc=f"{name}, {method}", unit="start")
            runs = [optimise(problem, acquire, seed, options) for seed in starts]
            regret = regrets[name][method] = np.stack([best for best, _ in runs]) - problem.minimum
            seconds = np.array([seconds for _, seconds in runs])
            low, median, high = np.quantile(regret[:, -1], [0.25, 0.5, 0.75])
            row = {"function": name, "method": method, "median": median, "lower quartile": low, "upper quartile": high}
            rows.append({**row, "first round, s": seconds[0, 0], "later ones, s": np.median(seconds[:, 1:])})

    print(f"\nBest value of {options.rounds} rounds less the minimum, over {options.seeds} starts")
    _common.print_table(rows)
    draw(regrets, options)


if __name__ == "__main__":
    samples = (100, "draws of each of two chains, at every round")
    main(_common.arguments(__doc__, width=100, rounds=20, seeds=(10, "starts"), num_warmup=100, num_samples=samples))
