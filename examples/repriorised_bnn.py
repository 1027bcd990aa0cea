"""A Bayesian neural network on handwritten digits, sampled by NUTS plain, repriorised and collapsed.

Prints a table of effective sample sizes per gradient, R-hat, test accuracy and negative log-likelihood, and an ArviZ
summary, and draws two figures: effective sample size by width, and the calibration of the predictions.

    python examples/repriorised_bnn.py
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.ticker
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive
from sklearn.datasets import load_digits

import numpyro_wide
from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise
from numpyro_wide.diagnostics import project, projected_ess

matplotlib.use("Agg")
import matplotlib.pyplot as plt

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces its next generation
    import arviz as az

NOISE_SCALE = 0.1
HIDDEN = ("hidden_weights", "hidden_bias")
NUM_CHAINS = 2


def bnn(x, y=None, *, width):
    """One GELU layer in NTK parametrisation: every weight N(0, 1), weight variance 2, bias variance 0.01."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.nn.gelu(np.sqrt(2 / x.shape[1]) * x @ weights + 0.1 * bias, approximate=False)
    bias_column = jnp.full((x.shape[0], 1), 0.1)
    features = numpyro.deterministic("features", jnp.concatenate([np.sqrt(2 / width) * hidden, bias_column], axis=1))
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width + 1, 10]).to_event(2))
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("label", dist.Normal(features @ readout, NOISE_SCALE).to_event(1), obs=y)


def three_forms(width: int) -> dict[str, Callable]:
    """The same posterior in three sets of coordinates."""
    model = partial(bnn, width=width)
    return {
        "plain": model,
        "repriorised": repriorise(model, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE),
        "collapsed": collapse_readout(model, readout="readout", features="features", observed="label"),
    }


class Digits(NamedTuple):
    """Standardised pixels (n, 64), one-hot labels minus 0.1 (n, 10), labels (n,)."""

    x: np.ndarray
    y: np.ndarray
    labels: np.ndarray


def load_data(num_train: int, num_test: int) -> tuple[Digits, Digits]:
    """A random split, standardised by the training part."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: num_train + num_test]
    pixels, labels = pixels[order], labels[order]
    pixels = (pixels - pixels[:num_train].mean()) / pixels[:num_train].std()
    targets = np.eye(10)[labels] - 0.1
    data = Digits(pixels.astype(np.float32), targets.astype(np.float32), labels)
    return Digits(*[part[:num_train] for part in data]), Digits(*[part[num_train:] for part in data])


class Run(NamedTuple):
    """Draws by chain, and the gradients that each chain spent on them after warmup."""

    samples: dict[str, np.ndarray]
    num_gradients: int

    def projections(self) -> np.ndarray:
        """The hidden weights along 100 random unit directions, (chain, draw, 100)."""
        return np.asarray(project({name: self.samples[name] for name in HIDDEN}, jax.random.key(0)))

    def ess_per_gradient(self) -> float:
        """Mean effective sample size of the projections for each gradient."""
        ess = projected_ess({name: self.samples[name] for name in HIDDEN}, jax.random.key(0))
        return ess["mean"] / (NUM_CHAINS * self.num_gradients)


def sample(model: Callable, data: Digits, num_warmup: int, budget: int) -> Run:
    """NUTS with ``num_warmup`` iterations of warmup, then as many draws as ``budget`` gradients a chain pay for."""
    kernel = NUTS(model, max_tree_depth=8)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=1, num_chains=NUM_CHAINS, chain_method="parallel")
    cost = ("num_steps",)
    mcmc.warmup(jax.random.key(0), data.x, data.y, collect_warmup=True, extra_fields=cost)
    gradients_per_draw = np.mean(mcmc.get_extra_fields()["num_steps"][-num_warmup // 4 :])

    # What a draw costs varies: take some more, and keep those that the budget pays for.
    mcmc.num_samples = max(4, int(1.3 * budget / gradients_per_draw))
    mcmc.run(mcmc.post_warmup_state.rng_key, data.x, data.y, extra_fields=cost)
    spent = np.cumsum(mcmc.get_extra_fields(group_by_chain=True)["num_steps"], axis=1).mean(0)
    num_draws = max(4, int(np.sum(spent <= budget)))
    samples = mcmc.get_samples(group_by_chain=True)
    return Run({k: np.asarray(v[:, :num_draws]) for k, v in samples.items()}, int(spent[num_draws - 1]))


class Predictions(NamedTuple):
    """Test accuracy, mean negative log-likelihood of an image's ten targets, and class probabilities (n, 10)."""

    accuracy: float
    nll: float
    probs: np.ndarray


def predict(model: Callable, run: Run, train: Digits, test: Digits, num_draws: int = 100) -> Predictions:
    """Averages over evenly spaced draws; for the collapsed model each is a Gaussian over functions."""
    flat = {name: draws.reshape(-1, *draws.shape[2:]) for name, draws in run.samples.items()}
    total = len(next(iter(flat.values())))
    flat = {name: draws[np.linspace(0, total - 1, min(num_draws, total)).astype(int)] for name, draws in flat.items()}
    if "readout" in flat:
        plain = getattr(model, "fn", model)  # predict with the unwrapped model and the draws of the readout
        return_sites = ["features", "label"]
        draws = Predictive(plain, flat, return_sites=return_sites)(jax.random.key(1), test.x)
        mean, variance = draws["features"] @ flat["readout"], 0.0
    else:
        draws = ReadoutPredictive(model, flat, (train.x, train.y))(jax.random.key(1), test.x)
        mean, variance = draws["mean"], draws["variance"]

    log_probs = dist.Normal(mean, jnp.sqrt(variance + NOISE_SCALE**2)).log_prob(test.y).sum(-1)
    nll = -float(jnp.mean(jax.nn.logsumexp(log_probs, axis=0) - np.log(len(log_probs))))
    # The probability of a class is how often its target is the largest of the ten predicted ones.
    probs = np.asarray(jax.nn.one_hot(jnp.argmax(draws["label"], -1), 10).mean(0))
    accuracy = float(np.mean(np.argmax(np.asarray(mean).mean(0), axis=1) == test.labels))
    return Predictions(accuracy, nll, probs)


def plot_ess(ess: dict[str, dict[int, float]], path: Path) -> None:
    """Effective sample size per gradient against width, one line for each form."""
    figure, axes = plt.subplots(figsize=(5, 3.5))
    for (form, by_width), marker in zip(ess.items(), "osD", strict=True):
        axes.loglog(list(by_width), list(by_width.values()), marker=marker, label=form)
    widths = list(next(iter(ess.values())))
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set(xlabel="width", ylabel="ESS per gradient", title="NUTS on digits, hidden weights")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_calibration(predictions: dict[str, Predictions], labels: np.ndarray, path: Path) -> None:
    """Accuracy against confidence, in bins of confidence with at least ten test images."""
    figure, axes = plt.subplots(figsize=(4, 3.5))
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="calibrated")
    for (form, prediction), marker in zip(predictions.items(), "osD", strict=True):
        confidence, is_right = prediction.probs.max(1), prediction.probs.argmax(1) == labels
        bins = np.digitize(confidence, np.linspace(0.2, 1.0, 9)[1:-1])
        parts = [bins == i for i in range(8) if (bins == i).sum() >= 10]
        points = [(confidence[part].mean(), is_right[part].mean()) for part in parts]
        axes.plot(*np.transpose(points), marker=marker, markersize=4, label=form)
    axes.set(xlabel="confidence", ylabel="accuracy", title="Test images", xlim=(0.2, 1.02), ylim=(0.2, 1.02))
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def summarise(form: str, run: Run) -> None:
    """ArviZ's summary of a few projections."""
    print(f"\nArviZ summary, {form}: hidden weights along three random directions")
    print(az.summary({f"direction {i}": run.projections()[:, :, i] for i in range(3)}))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="width of the network that is looked at closely")
    parser.add_argument("--other-widths", type=int, nargs="*", default=[32, 96], help="also in the first figure")
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--num-test", type=int, default=1000)
    parser.add_argument("--num-warmup", type=int, default=100, help="iterations of NUTS")
    parser.add_argument("--budget", type=int, default=6000, help="gradients of each chain after warmup")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figures")
    return parser.parse_args()


def main() -> None:
    """Sample, compare, draw."""
    options = parse_arguments()
    numpyro_wide.set_blas_threads(1)
    train, test = load_data(options.num_train, options.num_test)
    ess: dict[str, dict[int, float]] = {}
    predictions = {}
    rows = []
    for width in sorted({*options.other_widths, options.width}):
        # The figure needs less precision than the table.
        share = 1 if width == options.width else 0.5
        for form, model in three_forms(width).items():
            print(f"\nWidth {width}, {form}", flush=True)
            start = time.perf_counter()
            run = sample(model, train, options.num_warmup, int(options.budget * share))
            seconds = time.perf_counter() - start
            ess.setdefault(form, {})[width] = run.ess_per_gradient()
            if width == options.width:
                predictions[form] = predict(model, run, train, test)
                rhat = float(np.max(az.rhat({"x": run.projections()})["x"]))
                rows.append((form, run, ess[form][width], rhat, predictions[form], seconds))
                summarise(form, run)

    print(f"\nDigits, n = {options.num_train}, width {options.width}, {NUM_CHAINS} chains")
    print("model        draws  gradients  ESS/gradient  worst R-hat  accuracy   NLL  seconds")
    for form, run, per_gradient, rhat, prediction, seconds in rows:
        num_draws = next(iter(run.samples.values())).shape[1]
        print(
            f"{form:11s}  {num_draws:5d}  {run.num_gradients:9d}  {per_gradient:12.5f}  {rhat:11.2f}  "
            f"{prediction.accuracy:8.3f}  {prediction.nll:4.1f}  {seconds:7.1f}"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    plot_ess(ess, options.output / "ess_by_width.png")
    plot_calibration(predictions, test.labels, options.output / "calibration.png")
    print(f"\nFigures in {options.output}: ess_by_width.png, calibration.png")


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    main()
