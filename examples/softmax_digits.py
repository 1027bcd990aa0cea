"""Handwritten digits under a softmax likelihood: a Gaussian surrogate repriorises the readout of a classifier.

Samples the same Bayesian neural network as it is and repriorised, by the paper's sampler and by SplitHMC; prints
effective sample sizes per gradient, test accuracy and negative log-likelihood, and draws effective sample size by width
(after Figure 11 of Hron et al. 2022). Weights are not stored: only their random projections and the test probabilities.

    python examples/softmax_digits.py
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from sklearn.datasets import load_digits

import numpyro_wide
from numpyro_wide import repriorise, surrogate_targets
from numpyro_wide.diagnostics import effective_sample_size, random_projections, reduced, rhat_squared, site_function
from numpyro_wide.mcmc import SplitHMC, UnderdampedLangevin
from numpyro_wide.plots import plot_ess_by_width
from numpyro_wide.surrogate import class_contrasts

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NUM_CLASSES = 10
NUM_CHAINS = 2
# About the prior standard deviation of a logit: with 1, the prior would hardly let a label be certain.
LOGIT_SCALE = 3.0
METHODS = ("Langevin, plain", "Langevin, repriorised", "SplitHMC, plain", "SplitHMC, repriorised")
WEIGHTS = ("hidden_weights", "hidden_bias", "readout")


def classifier(x, labels=None, *, width):
    """One GELU layer in NTK parametrisation, every weight N(0, 1); its logits sum to 0."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.nn.gelu(np.sqrt(2 / x.shape[1]) * x @ weights + 0.1 * bias, approximate=False)
    bias_column = jnp.full((x.shape[0], 1), 0.1)
    scaled = [LOGIT_SCALE * np.sqrt(2 / width) * hidden, bias_column]
    features = numpyro.deterministic("features", jnp.concatenate(scaled, axis=1))
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width + 1, NUM_CLASSES - 1]).to_event(2))
    logits = numpyro.deterministic("logits", features @ readout @ class_contrasts(NUM_CLASSES).T)
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


class Digits(NamedTuple):
    """Standardised pixels (n, 64) and labels (n,)."""

    x: np.ndarray
    labels: np.ndarray


def load_data(num_train: int, num_test: int) -> tuple[Digits, Digits]:
    """A random split, standardised by the training part."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: num_train + num_test]
    pixels, labels = pixels[order], labels[order]
    pixels = ((pixels - pixels[:num_train].mean()) / pixels[:num_train].std()).astype(np.float32)
    return Digits(pixels[:num_train], labels[:num_train]), Digits(pixels[num_train:], labels[num_train:])


class Method(NamedTuple):
    """A kernel, the sites that are not stored, and how many iterations to run for one of SplitHMC's."""

    kernel: MCMCKernel
    drop: tuple[str, ...]
    factor: int


def method(name: str, width: int) -> Method:
    """One of ``METHODS``."""
    model = partial(classifier, width=width)
    drop = (*WEIGHTS, "logits", "features")
    if name.endswith("repriorised"):
        surrogate = partial(surrogate_targets, likelihood="categorical", num_classes=NUM_CLASSES, contrasts=True)
        model = repriorise(model, readout="readout", features="features", targets="labels", surrogate=surrogate)
        drop = (*WEIGHTS, "logits", "readout_base")
    if name.startswith("Langevin"):
        return Method(UnderdampedLangevin(model), drop, 10)
    return Method(SplitHMC(model), drop, 1)  # an iteration costs about ten gradients


class Run(NamedTuple):
    """Projections of the weights and test probabilities by chain, and gradients of all chains after warmup."""

    projections: np.ndarray
    probs: np.ndarray
    num_gradients: int

    def ess(self) -> np.ndarray:
        """Effective sample size of each projection for one gradient, (100,)."""
        return effective_sample_size(self.projections, num_grad=self.num_gradients)

    def quality(self, labels: np.ndarray) -> tuple[float, float]:
        """Accuracy and mean negative log-likelihood of the test labels."""
        probs = self.probs.mean((0, 1))
        return float(np.mean(probs.argmax(1) == labels)), float(-np.mean(np.log(probs[np.arange(len(labels)), labels])))


def sample(method: Method, width: int, train: Digits, test: Digits, num_warmup: int, num_samples: int) -> Run:
    """Two chains, of which projections and test probabilities are stored."""
    logits = site_function(partial(classifier, width=width), "logits", test.x)
    functions: dict[str, Callable] = {
        "projections": random_projections(jax.random.key(0), WEIGHTS),
        "probs": lambda draw: jax.nn.softmax(logits(draw)),
    }
    kernel = reduced(method.kernel, drop=method.drop, functions=functions)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=NUM_CHAINS)
    mcmc.run(jax.random.key(1), train.x, train.labels, extra_fields=("num_grad",))
    draws = {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}
    return Run(draws["projections"], draws["probs"], int(mcmc.get_extra_fields()["num_grad"].sum()))


def plot(ess: dict[str, dict[int, np.ndarray]], path: Path) -> None:
    """Effective sample size by width."""
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    plot_ess_by_width(ess, ax=ax)
    ax.set_title("Digits under softmax: projections of the weights")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--num-test", type=int, default=200)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="; ".join(METHODS)
    )
    parser.add_argument("--num-warmup", type=int, default=200, help="of SplitHMC; Langevin takes ten times as many")
    parser.add_argument("--num-samples", type=int, default=400, help="of SplitHMC; Langevin takes ten times as many")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figure")
    return parser.parse_args()


def main() -> None:
    """Sample, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    data = load_data(options.num_train, options.num_test)
    ess: dict[str, dict[int, np.ndarray]] = {}
    rows = []
    for width in options.widths:
        for name in options.methods:
            print(f"\nWidth {width}, {name}", flush=True)
            start = time.perf_counter()
            chosen = method(name, width)
            iterations = chosen.factor * options.num_warmup, chosen.factor * options.num_samples
            run = sample(chosen, width, *data, *iterations)
            ess.setdefault(name, {})[width] = run.ess()
            rows.append((width, name, run, time.perf_counter() - start))

    print(f"\nDigits, n = {options.num_train}, softmax; ESS per gradient over 100 projections of the weights")
    print("width  method                  draws  gradients    mean     min  worst R-hat²  accuracy    NLL  seconds")
    for width, name, run, seconds in rows:
        accuracy, nll = run.quality(data[1].labels)
        num_draws = run.projections.shape[0] * run.projections.shape[1]
        print(
            f"{width:5d}  {name:22s}  {num_draws:5d}  {run.num_gradients:9d}  {run.ess().mean():.4f}  "
            f"{run.ess().min():.4f}  {rhat_squared(run.projections).max():12.2f}  {accuracy:8.3f}  {nll:5.3f}  "
            f"{seconds:7.1f}"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    plot(ess, options.output / "softmax_digits.png")
    print(f"\nFigure in {options.output}: softmax_digits.png")


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    main()
