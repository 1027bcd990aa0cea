"""Handwritten digits under a softmax likelihood: a Gaussian surrogate repriorises the readout of a classifier.

Samples the same Bayesian neural network as it is, and repriorised by the quick surrogate and by the fitted one, by the
paper's sampler and by SplitHMC; prints effective sample sizes per gradient, test accuracy and negative log-likelihood,
and draws effective sample size by width (after Figure 11 of Hron et al. 2022). Weights are not stored: only random
projections of them and of the test logits, and the test probabilities.

    python studies/softmax_digits.py
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import _common
from numpyro_wide import diagnostics, fitted_surrogate, mean_kernel, repriorise, surrogate_targets
from numpyro_wide.mcmc import SplitHMC, UnderdampedLangevin
from numpyro_wide.plots import plot_ess_by_width
from numpyro_wide.readout import site_function
from numpyro_wide.runs import reduced
from numpyro_wide.surrogates import class_contrasts

NUM_CLASSES = 10
NUM_CHAINS = 2
# About the prior standard deviation of a logit: with 1, the prior would hardly let a label be certain.
LOGIT_SCALE = 3.0
SAMPLERS = ("Langevin", "SplitHMC")
METHODS = [f"{sampler}, {form}" for sampler in SAMPLERS for form in ("plain", "quick", "fitted")]
PROJECTED = ("weights", "test logits")
WEIGHTS = ("hidden_weights", "hidden_bias", "readout")


def classifier(x, labels=None, *, width):
    """Sample a GELU layer in NTK parametrisation, every weight N(0, 1); its logits sum to 0."""
    weights = numpyro.sample("hidden_weights", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    bias = numpyro.sample("hidden_bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.nn.gelu(np.sqrt(2 / x.shape[1]) * x @ weights + 0.1 * bias, approximate=False)
    scaled = [LOGIT_SCALE * np.sqrt(2 / width) * hidden, jnp.full((x.shape[0], 1), 0.1)]
    features = numpyro.deterministic("features", jnp.concatenate(scaled, axis=1))
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width + 1, NUM_CLASSES - 1]).to_event(2))
    logits = numpyro.deterministic("logits", features @ readout @ class_contrasts(NUM_CLASSES).T)
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


def surrogate_of(form, model, train):
    """Make a Gaussian surrogate: the quick one, a function of the labels, or the one fitted at the wide limit."""
    several = {"num_classes": NUM_CLASSES, "contrasts": True}
    if form == "quick":
        return partial(surrogate_targets, likelihood="categorical", **several)
    kernel = mean_kernel(jax.random.key(2), model, "features", train.inputs)
    return fitted_surrogate(train.targets, "categorical", kernel, **several)


def sample(name, width, train, x_test, options):
    """Run two chains: projections of weights and test logits, mean test probabilities, and the gradients of all."""
    sampler, form = name.split(", ")
    plain = model = partial(classifier, width=width)
    drop = (*WEIGHTS, "logits", "features")
    if form != "plain":
        surrogate = surrogate_of(form, plain, train)
        model = repriorise(plain, readout="readout", features="features", targets="labels", surrogate=surrogate)
        drop = (*WEIGHTS, "logits", "readout_base")
    # An iteration of SplitHMC costs about ten gradients.
    is_langevin = sampler == "Langevin"
    kernel, factor = (UnderdampedLangevin(model), 10) if is_langevin else (SplitHMC(model, persistence=0.0), 1)
    logits = site_function(plain, "logits", x_test)
    of_logits = diagnostics.random_projections(jax.random.key(3), ["logits"])
    functions = {
        "weights": diagnostics.random_projections(jax.random.key(0), WEIGHTS),
        "test logits": lambda draw: of_logits({"logits": logits(draw)}),
        "probs": lambda draw: jax.nn.softmax(logits(draw)),
    }
    sizes = {"num_warmup": factor * options.num_warmup, "num_samples": factor * options.num_samples}
    mcmc = MCMC(reduced(kernel, drop=drop, functions=functions), **sizes, num_chains=NUM_CHAINS)
    mcmc.run(jax.random.key(1), *train, extra_fields=("num_grad",))
    draws = mcmc.get_samples(group_by_chain=True)
    num_grad = int(mcmc.get_extra_fields()["num_grad"].sum())
    return {of: np.asarray(draws[of]) for of in PROJECTED}, draws["probs"].mean((0, 1)), num_grad


def draw(ess, options):
    """Draw effective draws by width, a row for each sampler."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharey=True, layout="constrained")
    for sampler, panels in zip(SAMPLERS, axes, strict=True):
        for panel, (of, by_name) in zip(panels, ess.items(), strict=True):
            lines = {name: found for name, found in by_name.items() if name.startswith(sampler)}
            if lines:
                plot_ess_by_width(lines, ax=panel).set_title(f"projections of the {of}")
    _common.save(figure, options, "softmax_digits.png", dpi=100)


def main(options):
    """Run the study."""
    train, test = _common.digits(options.num_train, options.num_test)
    ess, rows = {of: {} for of in PROJECTED}, []
    for width in options.widths:
        for name in options.methods:
            print(f"\nWidth {width}, {name}", flush=True)
            start = time.perf_counter()
            projections, probs, cost = sample(name, width, train, test.inputs, options)
            row = {"width": width, "method": name, "draws": projections["weights"][..., 0].size, "gradients": cost}
            for of, draws in projections.items():
                found = diagnostics.effective_sample_size(draws, num_grad=cost)
                row |= {of: found.mean(), f"{of}, worst": found.min()}
                # The figure's bands go down to the worst projection: a line for each form, and no crowd.
                ess[of].setdefault(name, {})[width] = {"mean": found.mean(), "min": found.min(), "max": found.mean()}
                row |= {f"{of}, R-hat²": diagnostics.rhat_squared(draws).max()}
            scores = diagnostics.classification_scores(test.targets, probs)
            row |= {"accuracy": scores["accuracy"], "NLL": scores["negative_log_likelihood"]}
            rows.append({**row, "seconds": time.perf_counter() - start})

    print(f"\nDigits, n = {options.num_train}, softmax; ESS per gradient, means over 100 projections")
    _common.print_table(rows)
    draw(ess, options)


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    main(
        _common.arguments(
            __doc__,
            widths=[16, 64, 256],
            num_train=256,
            num_test=200,
            methods={
                "nargs": "+",
                "choices": METHODS,
                "default": METHODS,
                "metavar": "METHOD",
                "help": "; ".join(METHODS),
            },
            num_warmup=(200, "of SplitHMC; Langevin takes ten times as many"),
            num_samples=(300, "of SplitHMC; Langevin takes ten times as many"),
        )
    )
