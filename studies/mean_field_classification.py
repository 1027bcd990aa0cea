"""Mean-field variational inference of wide classifiers: it ignores the data, but not in repriorised coordinates.

One hidden erf layer of growing width under a Bernoulli likelihood, on labels along a line and on two moons. Mean-field
Gaussian guides, all started at N(0, I), are fitted to the network as it is, and repriorised by the quick and by the
fitted surrogate. Prints how far each prediction is from two posteriors of the infinitely wide network: its variational
Gaussian one, which the fitted surrogate implies in closed form, and the exact one, by importance sampling from the
former; with the ELBO of each, and draws them all. The counterpart of wide_mean_field.py for classes.

    python studies/mean_field_classification.py
"""

import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_value
from scipy.special import expit, log_expit, logsumexp
from sklearn.datasets import make_moons
from tqdm.auto import tqdm

import _common
from numpyro_wide import fitted_surrogate, repriorise, surrogate_targets
from numpyro_wide.linear_gaussian import readout_map
from numpyro_wide.readout import site_function
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

# The readout's scale makes the prior standard deviation of a logit about 3, so that labels can be certain.
SCALES, READOUT_SCALE = {"w_std": 2**0.5, "b_std": 2**0.5}, 4.0
DATA = {"line": "a line", "moons": "two moons"}
METHODS = ("standard mean field", "quick stand-in", "fitted stand-in")
LIMITS = ("variational", "exact")
NODES, SHARES = np.polynomial.hermite_e.hermegauss(40)


class Data(NamedTuple):
    """Inputs (n, 1 or 2), labels (n,), and the inputs (m, 1 or 2) of predictions."""

    x: np.ndarray
    labels: np.ndarray
    grid: np.ndarray


class Posterior(NamedTuple):
    """Mean and standard deviation of the logit, the probability of label 1, (m,), and a bound on the log evidence."""

    mean: np.ndarray
    sd: np.ndarray
    probs: np.ndarray
    log_evidence: float

    def distance(self, other):
        """Return root mean squares of the differences of means, standard deviations and probabilities."""
        return {part: _common.rms(getattr(self, part) - getattr(other, part)) for part in ("mean", "sd", "probs")}


def load_data(name):
    """Draw labels by chance on a line, likelier 1 in two stretches of it, or the two moons."""
    if name == "moons":
        x, labels = make_moons(100, noise=0.2, random_state=0)
        side = np.linspace(-2.5, 2.5, 31)
        grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
        return Data((x - x.mean(0)) / x.std(0), labels, grid)
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(-(3**0.5), 3**0.5, 60))
    labels = rng.uniform(size=60) < expit(6 * np.sin(1.5 * np.pi * x / 3**0.5))
    return Data(x[:, None], labels.astype(int), np.linspace(-4, 4, 161)[:, None])


def network(x, labels=None, *, width):
    """Sample an erf layer in NTK parametrisation, every weight N(0, 1)."""
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.lax.erf(SCALES["w_std"] / np.sqrt(x.shape[1]) * x @ weights + SCALES["b_std"] * bias)
    features = numpyro.deterministic("features", READOUT_SCALE / np.sqrt(width) * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("label", dist.Bernoulli(logits=features @ readout), obs=labels)


def probabilities(mean, variance):
    """Return the probability of label 1, where the logit is Gaussian."""
    return expit(mean[..., None] + np.sqrt(variance)[..., None] * NODES) @ (SHARES / SHARES.sum())


def limits(data, num_draws):
    """Return the posteriors of the infinite width: the best Gaussian, the exact one, and the effective draws."""
    numpyro.enable_x64()
    kernel = fcn_kernel(1, "erf", **SCALES, readout_w_std=READOUT_SCALE)
    points = np.concatenate([data.x, data.grid])
    train, n = kernel(data.x)[0], len(data.x)
    targets, noise = fitted_surrogate(data.labels, "bernoulli", train)
    found = gp_posterior(train, kernel(points, data.x)[0], kernel(points)[0], targets, noise)
    mean, covariance = map(np.asarray, found)
    evidence = float(gp_log_evidence(train, targets, noise))
    numpyro.enable_x64(False)

    values, vectors = np.linalg.eigh(covariance)
    normals = np.random.default_rng(0).normal(size=(num_draws // 2, len(values)))
    draws = mean + np.concatenate([normals, -normals]) @ (vectors * np.sqrt(np.maximum(values, 0))).T
    # The likelihood over that of the surrogate, at the rows of the data.
    f, targets, noise = draws[:, :n], np.asarray(targets), np.asarray(noise)
    of_surrogate = -0.5 * ((targets - f) / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi)
    log_weights = (log_expit(np.where(data.labels, f, -f)) - of_surrogate).sum(1)
    weights = np.exp(log_weights - logsumexp(log_weights))

    mean, variance, f = mean[n:], np.diag(covariance)[n:], draws[:, n:]
    gaussian = Posterior(mean, np.sqrt(variance), probabilities(mean, variance), evidence + log_weights.mean())
    exact_mean = weights @ f
    exact_sd = np.sqrt(weights @ (f - exact_mean) ** 2)
    log_evidence = evidence + logsumexp(log_weights) - np.log(num_draws)
    exact = Posterior(exact_mean, exact_sd, weights @ expit(f), log_evidence)
    return dict(zip(LIMITS, (gaussian, exact), strict=True)), 1 / np.sum(weights**2)


def fit(method, width, data, options):
    """Fit a mean-field guide from N(0, I) on, and predict."""
    plain = model = partial(network, width=width)
    readout, surrogate = "readout", None
    if method != "standard mean field":
        kernel = fcn_kernel(1, "erf", **SCALES, readout_w_std=READOUT_SCALE)(data.x)[0]
        is_quick = method == "quick stand-in"
        quick = surrogate_targets(data.labels, "bernoulli")
        surrogate = quick if is_quick else fitted_surrogate(data.labels, "bernoulli", kernel)
        model = repriorise(plain, readout="readout", features="features", targets="labels", surrogate=surrogate)
        readout = "readout_base"
    shapes = {"weights": (data.x.shape[1], width), "bias": (width,), readout: (width,)}
    start = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=start), init_scale=1.0)
    loss = TraceMeanField_ELBO(num_particles=options.num_particles)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, options.num_steps)), loss)
    observed = (data.x, data.labels)
    params = svi.run(jax.random.key(0), options.num_steps, *observed, progress_bar=False).params

    elbo = TraceMeanField_ELBO(num_particles=options.num_draws, vectorize_particles=False)
    bound = -float(jax.jit(elbo.loss, static_argnums=(2, 3))(jax.random.key(1), params, model, guide, *observed))
    draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(options.num_draws,))
    of_readout = params[f"{readout}_auto_loc"], params[f"{readout}_auto_scale"]
    return predict(plain, {name: draws[name] for name in ("weights", "bias")}, *of_readout, surrogate, data, bound)


def predict(model, hidden, loc, scale, surrogate, data, bound):
    """Average over draws of the hidden weights; given each the logit is affine in the readout's site, and Gaussian."""
    options = {} if surrogate is None else surrogate._asdict()

    @jax.jit
    def moments(draw):
        features, elsewhere = (site_function(model, "features", x)(draw) for x in (data.x, data.grid))

        def function(base):
            readout = readout_map(features, phi=base, **options)[0] if options else base
            return elsewhere @ readout

        mean, transpose = jax.vjp(function, loc)
        (rows,) = jax.vmap(transpose)(jnp.eye(len(data.grid)))
        return mean, rows**2 @ scale**2

    mean, variance = (np.asarray(part, float) for part in jax.lax.map(moments, hidden))
    sd = np.sqrt(variance.mean(0) + mean.var(0))
    return Posterior(mean.mean(0), sd, probabilities(mean, variance).mean(0), bound)


def draw_line(panel, data, exact, by_width):
    """Draw mean logits by width, and the band of the widest; without fits, the limit's."""
    x = data.grid[:, 0]
    widest = by_width[max(by_width)] if by_width else exact
    panel.fill_between(x, widest.mean - 2 * widest.sd, widest.mean + 2 * widest.sd, color="0.85")
    for posterior, colour in zip(by_width.values(), _common.shades(len(by_width)), strict=True):
        panel.plot(x, posterior.mean, color=colour)
    panel.plot(x, exact.mean, color="black", linestyle="--", linewidth=1)
    for sign in (-2, 2):
        panel.plot(x, exact.mean + sign * exact.sd, color="black", linestyle=":", linewidth=0.8)
    reach = 1.1 * np.max(np.abs(exact.mean) + 2 * exact.sd)
    panel.scatter(data.x[:, 0], np.where(data.labels, 0.93, -0.93) * reach, s=8, c=data.labels, cmap="coolwarm")
    panel.set(xlim=(x[0], x[-1]), ylim=(-reach, reach), xlabel="input")


def draw_plane(panel, data, exact, by_width):
    """Draw the probability by the widest, where it is a half by width, and where the limit's is 0.1, 0.5 and 0.9."""
    size = round(len(data.grid) ** 0.5)
    first, second = (side.reshape(size, size) for side in data.grid.T)
    widest = by_width[max(by_width)] if by_width else exact
    panel.contourf(first, second, widest.probs.reshape(size, size), np.linspace(0, 1, 11), cmap="coolwarm", alpha=0.5)
    for posterior, colour in zip(by_width.values(), _common.shades(len(by_width)), strict=True):
        panel.contour(first, second, posterior.probs.reshape(size, size), [0.5], colors=[colour])
    lines = {"colors": "black", "linestyles": [":", "--", ":"], "linewidths": 0.8}
    panel.contour(first, second, exact.probs.reshape(size, size), [0.1, 0.5, 0.9], **lines)
    panel.scatter(*data.x.T, s=8, c=data.labels, cmap="coolwarm")


def draw(problems, posteriors, fits, widths):
    """Draw a row for each problem: a column for each method, the limit, and distances to it."""
    figure, axes = plt.subplots(len(problems), 5, figsize=(15, 3 * len(problems) + 0.8), layout="constrained")
    for (*row, last), (name, data) in zip(np.atleast_2d(axes), problems.items(), strict=True):
        exact, draw_panel = posteriors[name]["exact"], draw_line if data.x.shape[1] == 1 else draw_plane
        for panel, method in zip(row, [*METHODS, "limit"], strict=True):
            draw_panel(panel, data, exact, fits[name].get(method, {}))
            panel.set_title({"limit": "exact posterior of\nthe wide limit"}.get(method, f"mean field,\n{method}"))
        row[0].set_title(METHODS[0])
        row[0].set_ylabel(f"{DATA[name]}\n" + ("logit" if draw_panel is draw_line else "probability"))
        lines = {
            f"{method}, to the {limit}": {w: p.distance(posteriors[name][limit])["mean"] for w, p in found.items()}
            for method, found in fits[name].items()
            for limit in (LIMITS if method == "fitted stand-in" else LIMITS[1:])
        }
        _common.plot_lines(last, lines)
        floor = posteriors[name]["variational"].distance(exact)["mean"]
        last.axhline(floor, color="black", linestyle=":", label="variational to exact")
        _common.number_ticks(last, widths)
        last.set(xlabel="width", title="distance of mean logits\nto the limits' (RMS)")
        last.yaxis.tick_right()
    last.legend(fontsize=6)
    lines = [plt.Line2D([], [], color=colour) for colour in _common.shades(len(widths))]
    dashed = plt.Line2D([], [], color="black", linestyle="--")
    names = [*(f"width {width}" for width in widths), "exact posterior of the wide limit"]
    figure.legend([*lines, dashed], names, loc="outside lower center", ncols=len(names))
    return figure


def main(options):
    """Run the study."""
    widths = sorted(options.widths)
    problems = {name: load_data(name) for name in DATA if name in options.data}
    posteriors, fits = {}, {name: {method: {} for method in METHODS} for name in problems}
    for name, data in problems.items():
        posteriors[name], num_effective = limits(data, options.num_exact)
        gaussian, exact = (posteriors[name][limit] for limit in LIMITS)
        print(f"\n{DATA[name]}, {len(data.labels)} labels; {num_effective:.0f} effective of {options.num_exact} draws")
        print(f"log evidence {exact.log_evidence:.3f}, of the variational posterior {gaussian.log_evidence:.3f}")
        distance = {part: round(value, 4) for part, value in gaussian.distance(exact).items()}
        print(
            f"RMS of mean logits {_common.rms(exact.mean):.2f}, from the variational to the exact {distance}",
            flush=True,
        )
        rows = []
        for method, width in tqdm([(method, width) for method in METHODS for width in widths], unit="fit"):
            start = time.perf_counter()
            found = fits[name][method][width] = fit(method, width, data, options)
            row = {"width": width, "method": method, "ELBO": found.log_evidence}
            for limit, posterior in posteriors[name].items():
                row |= {f"{part}, {limit}": value for part, value in found.distance(posterior).items()}
            rows.append({**row, "seconds": time.perf_counter() - start})
        _common.print_table(rows)
    _common.save(draw(problems, posteriors, fits, widths), options, "mean_field_classification.png", dpi=90)


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            widths=[32, 125, 500, 2000],
            data={"nargs": "+", "default": list(DATA), "choices": list(DATA), "help": "data sets, by default all"},
            num_steps=(4000, "Adam steps of each fit, from 0.03 down by a cosine"),
            num_particles=(4, "draws of the guide in each step"),
            num_draws=(400, "draws for predictions and for the ELBO"),
            num_exact=(20_000, "weighted draws for the exact limit"),
        )
    )
