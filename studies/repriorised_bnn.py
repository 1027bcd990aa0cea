"""A Bayesian neural network on handwritten digits, sampled by NUTS plain, repriorised and collapsed.

Prints a table of effective sample sizes per gradient, R-hat, test accuracy and negative log-likelihood, and an ArviZ
summary, and draws two figures: effective sample size by width, and the calibration of the predictions.

    python studies/repriorised_bnn.py
"""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive

import _chains
import _common
from numpyro_wide import ReadoutPredictive, collapse_readout, nn, repriorise
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.plots import plot_ess_by_width

NOISE_SCALE = 0.1
NUM_CHAINS = 2
SCALES = {"w_std": 2**0.5, "b_std": 0.1, "readout_w_std": 2**0.5, "readout_b_std": 0.1}


def three_forms(width):
    """Return the same posterior in three sets of coordinates."""
    model = nn.bnn(nn.FCN(1, width, "gelu", **SCALES), 10, NOISE_SCALE)
    names = {"readout": "readout", "features": "features"}
    return {
        "plain": model,
        "repriorised": repriorise(model, **names, targets="y", noise_scale=NOISE_SCALE),
        "collapsed": collapse_readout(model, **names, observed="y"),
    }


def sample(model, x, y, num_warmup, budget):
    """Run NUTS, warmed up, for as many draws as ``budget`` gradients a chain pay for; with what each chain spent."""
    kernel = NUTS(model, max_tree_depth=8)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=1, num_chains=NUM_CHAINS, chain_method="parallel")
    mcmc.warmup(jax.random.key(0), x, y, collect_warmup=True, extra_fields=("num_steps",))
    gradients_per_draw = np.mean(mcmc.get_extra_fields()["num_steps"][-num_warmup // 4 :])

    # What a draw costs varies: take some more, and keep those that the budget pays for.
    mcmc.num_samples = max(4, int(1.3 * budget / gradients_per_draw))
    mcmc.run(mcmc.post_warmup_state.rng_key, x, y, extra_fields=("num_steps",))
    spent = np.cumsum(mcmc.get_extra_fields(group_by_chain=True)["num_steps"], axis=1).mean(0)
    num_draws = max(4, int(np.sum(spent <= budget)))
    samples = mcmc.get_samples(group_by_chain=True)
    return {name: np.asarray(draws[:, :num_draws]) for name, draws in samples.items()}, int(spent[num_draws - 1])


def predict(model, samples, train, x, labels):
    """Return test accuracy, mean negative log-likelihood of an image's ten targets, and class probabilities (n, 10).

    Averages over 100 evenly spaced draws; for the collapsed model each is a Gaussian over functions.
    """
    flat = {name: draws.reshape(-1, *draws.shape[2:]) for name, draws in samples.items()}
    total = next(iter(flat.values())).shape[0]
    flat = {name: draws[np.linspace(0, total - 1, min(100, total)).astype(int)] for name, draws in flat.items()}
    if "readout" in flat:
        plain = getattr(model, "fn", model)  # predict with the unwrapped model and the draws of the readout
        draws = Predictive(plain, flat, return_sites=["features", "y"])(jax.random.key(1), x)
        mean, variance = draws["features"] @ flat["readout"], NOISE_SCALE**2
    else:
        draws = ReadoutPredictive(model, flat, train)(jax.random.key(1), x)
        mean, variance = draws["mean"], draws["predictive_variance"]

    log_probs = dist.Normal(mean, jnp.sqrt(variance)).log_prob(_common.centred_codes(labels, 10)).sum(-1)
    nll = -float(jnp.mean(jax.nn.logsumexp(log_probs, axis=0) - np.log(len(log_probs))))
    # The probability of a class is how often its target is the largest of the ten predicted ones.
    probs = np.asarray(jax.nn.one_hot(jnp.argmax(draws["y"], -1), 10).mean(0))
    return float(np.mean(np.argmax(np.asarray(mean).mean(0), axis=1) == labels)), nll, probs


def draw_ess(ess, options):
    """Draw effective draws by width."""
    figure, axes = plt.subplots(figsize=(5, 3.5))
    plot_ess_by_width(ess, ax=axes, ylabel="ESS per gradient").set_title("NUTS on digits, hidden weights")
    _common.save(figure, options, "ess_by_width.png")


def draw_calibration(test, probs, options):
    """Draw accuracy against confidence, in bins of confidence with at least ten test images."""
    figure, axes = plt.subplots(figsize=(4, 3.5))
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="calibrated")
    for (form, values), marker in zip(probs.items(), "osD", strict=True):
        confidence, is_right = values.max(1), values.argmax(1) == test.targets
        bins = np.digitize(confidence, np.linspace(0.2, 1.0, 9)[1:-1])
        parts = [bins == i for i in range(8) if (bins == i).sum() >= 10]
        points = [(confidence[part].mean(), is_right[part].mean()) for part in parts]
        axes.plot(*np.transpose(points), marker=marker, markersize=4, label=form)
    axes.set(xlabel="confidence", ylabel="accuracy", title="Test images", xlim=(0.2, 1.02), ylim=(0.2, 1.02))
    axes.legend()
    _common.save(figure, options, "calibration.png")


def main(options):
    """Run the study."""
    train, test = _common.digits(options.num_train, options.num_test)
    data = train.inputs, _common.centred_codes(train.targets, 10)
    ess, probs, rows = {}, {}, []
    for width in sorted({*options.other_widths, options.width}):
        # The figure needs less precision than the table.
        share = 1 if width == options.width else 0.5
        for form, model in three_forms(width).items():
            print(f"\nWidth {width}, {form}", flush=True)
            start = time.perf_counter()
            draws, num_gradients = sample(model, *data, options.num_warmup, int(options.budget * share))
            seconds = time.perf_counter() - start
            hidden = {name: values for name, values in draws.items() if name.startswith("hidden")}
            sizes = projected_ess(hidden, jax.random.key(0))
            found = {name: value / (NUM_CHAINS * num_gradients) for name, value in sizes.items()}
            ess.setdefault(form, {})[width] = found
            if width == options.width:
                accuracy, nll, probs[form] = predict(model, draws, data, test.inputs, test.targets)
                projections = _chains.projected(hidden, jax.random.key(0))
                row = {"model": form, "draws": projections.shape[1], "gradients": num_gradients}
                row |= {
                    "ESS/gradient": found["mean"],
                    "R-hat": _chains.rhat(projections).max(),
                }
                rows.append({**row, "accuracy": accuracy, "NLL": nll, "seconds": seconds})
                print(f"\nArviZ summary, {form}: hidden weights along three random directions")
                print(_chains.summary({f"direction {i}": projections[:, :, i] for i in range(3)}))

    print(f"\nDigits, n = {options.num_train}, width {options.width}, {NUM_CHAINS} chains")
    _common.print_table(rows)
    draw_ess(ess, options)
    draw_calibration(test, probs, options)


if __name__ == "__main__":
    numpyro.set_host_device_count(NUM_CHAINS)
    main(
        _common.arguments(
            __doc__,
            width=(256, "width of the network that is looked at closely"),
            other_widths={"type": int, "nargs": "*", "default": [32, 96], "help": "also in the first figure"},
            num_train=256,
            num_test=1000,
            num_warmup=(100, "iterations of NUTS"),
            budget=(6000, "gradients of each chain after warmup"),
        )
    )
