"""Effective sample size per gradient of classifiers repriorised by the quick surrogate, and by the fitted one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from sklearn.datasets import load_digits

from numpyro_wide import fitted_surrogate, mean_kernel, repriorise, surrogate_targets
from numpyro_wide.diagnostics import effective_sample_size, random_projections
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.readout import site_function
from numpyro_wide.runs import reduced
from numpyro_wide.surrogates import class_contrasts

NUM_ROWS, NUM_HELD_OUT, WIDTH = 256, 100, 512
NUM_WARMUP, NUM_SAMPLES = 200, 400
LOGIT_SCALE = 3.0  # as in studies/softmax_digits.py


def network(x: np.ndarray, labels: np.ndarray | None = None, *, num_classes: int) -> None:
    """Sample a GELU layer in NTK parametrisation; one logit, or the contrasts of several."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([x.shape[1], WIDTH]).to_event(2))
    units = jax.nn.gelu((2 / x.shape[1]) ** 0.5 * x @ hidden, approximate=False)
    features = numpyro.deterministic("features", LOGIT_SCALE * (2 / WIDTH) ** 0.5 * units)
    shape = (WIDTH, num_classes - 1)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand(shape).to_event(2))
    values = numpyro.deterministic("values", features @ readout)
    if num_classes == 2:
        likelihood: Any = dist.Bernoulli(logits=values).to_event(2)
    else:
        likelihood = dist.Categorical(logits=values @ class_contrasts(num_classes).T).to_event(1)
    numpyro.sample("label", likelihood, obs=labels)


def digits(num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pixels and labels of some digits, drawn at random, and pixels of others; two classes are odd and even."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = ((pixels - pixels.mean()) / pixels.std()).astype("f")
    order = np.random.default_rng(seed).permutation(len(inputs))
    rows, held_out = order[:NUM_ROWS], order[NUM_ROWS : NUM_ROWS + NUM_HELD_OUT]
    return inputs[rows], labels[rows, None] % 2 if num_classes == 2 else labels[rows], inputs[held_out]


def per_gradient(model: Callable, surrogate: Any, data: tuple) -> dict[str, float]:
    """Measure bulk ESS, ArviZ's and the paper's, of 100 projections of hidden weights and of held-out values."""
    x, labels, x_new = data
    wrapped = repriorise(model, readout="readout", features="features", targets="labels", surrogate=surrogate)
    values = site_function(model, "values", x_new)
    of_values = random_projections(jax.random.key(2), ["values"])
    functions = {
        "hidden weights": random_projections(jax.random.key(1), ["hidden"]),
        "function": lambda draw: of_values({"values": values(draw)}),
    }
    kernel = reduced(SplitHMC(wrapped), drop=("hidden", "readout", "readout_base", "values"), functions=functions)
    mcmc = MCMC(kernel, num_warmup=NUM_WARMUP, num_samples=NUM_SAMPLES, progress_bar=False)
    mcmc.run(jax.random.key(0), x, labels, extra_fields=("num_grad", "accept_prob"))
    fields, found = mcmc.get_extra_fields(), {}
    num_grad = int(jnp.sum(fields["num_grad"]))
    for name, draws in mcmc.get_samples(group_by_chain=True).items():
        bulk = np.array([float(arviz.ess(np.asarray(draws[..., i]))) for i in range(draws.shape[-1])])
        found[name] = 1e3 * bulk.mean() / num_grad
        found[f"{name}, worst"] = 1e3 * bulk.min() / num_grad
        found[f"{name}, paper's"] = 1e3 * float(np.mean(effective_sample_size(draws, num_grad=num_grad)))
    return {**found, "gradients a draw": num_grad / NUM_SAMPLES, "acceptance": float(jnp.mean(fields["accept_prob"]))}


def tables(seeds: tuple[int, ...] = (0,)) -> None:
    """Make the tables of two classes and of ten."""
    print(f"\n## ESS per 1000 gradients, digits, n = {NUM_ROWS}, one hidden layer of {WIDTH}, SplitHMC\n")
    print("Means over 100 projections, of the hidden weights and of the function at held-out digits.\n")
    columns = ("gradients a draw", "acceptance", "hidden weights", "function", "function, worst", "function, paper's")
    gains = "function, over quick | paper's, over quick"
    print(f"| classes | subset | surrogate | {' | '.join(columns)} | {gains} |")
    print("|---" * (len(columns) + 5) + "|")
    for num_classes in (2, 10):
        model = partial(network, num_classes=num_classes)
        several = {"num_classes": 10, "contrasts": True} if num_classes > 2 else {}
        likelihood = "categorical" if several else "bernoulli"
        for seed in seeds:
            data = digits(num_classes, seed)
            kernel = mean_kernel(jax.random.key(3), model, "features", data[0])
            quick: dict[str, float] = {}
            for name, surrogate in (
                ("quick", partial(surrogate_targets, likelihood=likelihood, **several)),
                ("fitted", fitted_surrogate(data[1], likelihood, kernel, **several)),
            ):
                found = per_gradient(model, surrogate, data)
                quick = quick or found
                gains = [found[column] / quick[column] for column in ("function", "function, paper's")]
                numbers = [found[column] for column in columns] + gains
                row = " | ".join(f"{number:.2f}" if number < 10 else f"{number:.0f}" for number in numbers)
                print(f"| {num_classes} | {seed} | {name} | {row} |", flush=True)
