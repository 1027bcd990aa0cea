"""Guides for data of any size, nuisances left out: groups of a two-level model, a time series, a line with outliers.

Each guide is trained on fresh simulations of a few sizes, and asked for others as well. Effects of groups, noise by
step and outliers are simulated and never inferred. Ten data sets of 3 to 30 groups, the eight schools of Rubin (1981)
among them, are held against NUTS on the model with the effects integrated out, and importance weights are told; so is
the line, by NUTS on a mixture; the series against its posterior on a grid. Prints a table, and draws a figure.

    python studies/any_size.py
"""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, Predictive

import _common
from numpyro_wide import AmortizedForwardKL, amortized, calibration
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.nn import ResidualEncoder

EIGHT_SCHOOLS = {
    "y": jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
    "se": jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
}
TRAINED_GROUPS, ASKED_GROUPS = (3, 6, 13, 30), (3, 4, 6, 10, 13, 17, 21, 25, 30)
TRAINED_LENGTHS, ASKED_LENGTHS = (5, 20, 100), (6, 12, 25, 50, 100)
NUM_POINTS, OUTLIER_SCALE, NOISE_SCALE = 12, 3.0, 0.3


def top_level():
    """Sample mean and scale of the effects, as is usual for the eight schools."""
    return numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))


def schools(num_groups):
    """Sample effects of groups, and their estimates with standard errors that are known."""
    mu, tau = top_level()
    with numpyro.plate("groups", num_groups):
        se = numpyro.sample("se", dist.LogNormal(np.log(12), 0.3))
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(effect, se))


def marginal_schools(num_groups):
    """Sample the same with the effects integrated out."""
    mu, tau = top_level()
    with numpyro.plate("groups", num_groups):
        se = numpyro.sample("se", dist.LogNormal(np.log(12), 0.3))
        numpyro.sample("y", dist.Normal(mu, jnp.hypot(tau, se)))


def padded_schools(y, se, is_there):
    """Sample the same for NUTS, compiled once: some of the groups are not there."""
    mu, tau = top_level()
    with numpyro.plate("groups", len(y)):
        numpyro.sample("y", dist.Normal(mu, jnp.hypot(tau, se)).mask(is_there), obs=y)


def series(length):
    """Sample a stationary autoregression, as the pairs of neighbours in time."""
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    noise = numpyro.sample("noise", dist.Normal(0, 1).expand([length]).to_event(1))

    def step(state, noise):
        state = phi * state + scale * noise
        return state, state

    start = scale * noise[0] / jnp.sqrt(1 - phi**2)
    _, later = jax.lax.scan(step, start, noise[1:])
    states = jnp.concatenate([start[None], later])
    numpyro.deterministic("pairs", jnp.stack([states[:-1], states[1:]], axis=1))


def line():
    """Sample intercept and slope, which also NUTS's model has."""
    return numpyro.sample("intercept", dist.Normal(0, 1)), numpyro.sample("slope", dist.Normal(0, 1))


def with_outliers(num_points):
    """Sample points around a line, an unknown share of them outliers."""
    intercept, slope = line()
    share = numpyro.sample("share", dist.Beta(2, 6))
    with numpyro.plate("points", num_points):
        x = numpyro.sample("x", dist.Uniform(-2, 2))
        is_outlier = numpyro.sample("is_outlier", dist.Bernoulli(share))
        scale = jnp.where(is_outlier == 1, OUTLIER_SCALE, NOISE_SCALE)
        numpyro.sample("y", dist.Normal(intercept + slope * x, scale))


def mixture_of_outliers(x, y):
    """Sample the same by a mixture, for NUTS."""
    intercept, slope = line()
    share = numpyro.sample("share", dist.Beta(2, 6))
    components = dist.Normal((intercept + slope * x)[:, None], jnp.array([NOISE_SCALE, OUTLIER_SCALE]))
    weights = dist.Categorical(jnp.stack([1 - share, share]))
    numpyro.sample("y", dist.MixtureSameFamily(weights, components).to_event(1), obs=y)


def trained(model, observed, sites, sizes, options):
    """Train a guide of rows on fresh simulations of some sizes in turn; return it, and its parameters."""
    encoder, start = ResidualEncoder(32, depth=2), time.process_time()
    guide = AutoAmortized(model, observed=observed, sites=sites, family="mixture", pool="rows", encoder=encoder)
    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, options.num_steps))
    trainer = AmortizedForwardKL(model, guide, optimiser, observed=observed, batch_size=64)
    state, num_steps = None, max(1, options.num_steps // (20 * len(sizes)))
    for _ in range(20):
        for size in sizes:
            run = trainer.run(jax.random.key(0), num_steps, size, init_state=state, progress_bar=False)
            state = run.state
    print(f"{model.__name__}: {time.process_time() - start:.0f} processor seconds, {run.losses.mean():.3f} nats")
    return guide, run.params


def sampler(model, options):
    """Return NUTS that draws as many as are asked for, of four times as many, compiled once."""
    kernel, counts = NUTS(model, target_accept_prob=0.95), {"num_warmup": 500, "num_samples": options.num_draws}
    more = {"num_chains": 4, "chain_method": "vectorized", "thinning": 4, "progress_bar": False}
    return MCMC(kernel, **counts, **more, jit_model_args=True)


def vectors(draws):
    """Return the top level of the groups as it is scored, the scale by its logarithm."""
    return np.stack([draws["mu"], np.log(draws["tau"])], axis=1)


def run_schools(options, ax):
    """Train on groups, and compare with NUTS on ten data sets."""
    guide, params = trained(schools, ("y", "se"), ("mu", "tau"), TRAINED_GROUPS, options)
    data_sets = [EIGHT_SCHOOLS]
    for seed, size in enumerate(ASKED_GROUPS):
        draws = Predictive(schools, num_samples=1)(jax.random.key(100 + seed), size)
        data_sets.append({name: draws[name][0] for name in ("y", "se")})
    rows, intervals, exact = [], [], sampler(padded_schools, options)
    for seed, data in enumerate(data_sets):
        size, key = len(data["y"]), jax.random.key(seed)
        pad = lambda values, fill, size=size: jnp.pad(values, (0, 30 - size), constant_values=fill)  # noqa: E731
        exact.run(key, pad(data["y"], 0.0), pad(data["se"], 1.0), jnp.arange(30) < size)
        weighted = amortized.importance_sample(key, options.num_draws, marginal_schools, guide, params, data, size)
        sets = weighted.samples, exact.get_samples()
        c2st = calibration.c2st(key, *map(vectors, sets), progress_bar=False)
        share = weighted.effective_sample_size / options.num_draws
        name = "the eight schools" if seed == 0 else "simulated groups"
        rows.append({"data": name, "size": size, "C2ST": c2st, "effective": share, "pareto_k": weighted.pareto_k})
        intervals.append([np.quantile(draws["tau"], [0.1, 0.5, 0.9]) for draws in sets])
    sizes = [row["size"] + (0.25 if row["data"] == "the eight schools" else 0) for row in rows]
    plot_intervals(ax, sizes, intervals, "NUTS", 0.25)
    ax.set(xlabel="groups", ylabel="scale of the effects", yscale="log", title="Two levels")
    return rows


def plot_intervals(ax, sizes, intervals, exact_label, shift):
    """Plot medians and intervals of the guide and of the exact posterior beside each other."""
    for place, (label, colour) in enumerate((("guide", "C0"), (exact_label, "0.4"))):
        low, middle, high = np.transpose([both[place] for both in intervals])
        x = np.asarray(sizes, float) + (2 * place - 1) * shift
        ax.errorbar(x, middle, [middle - low, high - middle], fmt="o", markersize=3, color=colour, label=label)
    ax.legend(fontsize="small", loc="lower right")


def exact_series(pairs, num_draws):
    """Draw from the posterior of a series on a grid of coefficient and log scale."""
    phi, log_scale = np.linspace(-1, 1, 802)[1:-1], np.linspace(-2.5, 2.5, 800)
    first, last = np.float64(pairs[:, 0]), np.float64(pairs[:, 1])
    square = np.sum((last - phi[:, None] * first) ** 2, axis=1) + first[0] ** 2 * (1 - phi**2)
    log_density = 0.5 * np.log1p(-(phi**2))[:, None] - square[:, None] / (2 * np.exp(2 * log_scale))
    log_density = log_density - (len(pairs) + 1) * log_scale - 0.5 * (log_scale / 0.5) ** 2
    weights = np.exp(log_density - log_density.max()).ravel()
    rng = np.random.default_rng(0)
    cells = np.unravel_index(rng.choice(len(weights), num_draws, p=weights / weights.sum()), log_density.shape)
    grids = (phi, log_scale)
    return np.stack(
        [
            grid[cell] + (grid[1] - grid[0]) * rng.uniform(-0.5, 0.5, num_draws)
            for grid, cell in zip(grids, cells, strict=True)
        ],
        axis=1,
    )


def run_series(options, ax):
    """Train on series, and compare with exact posteriors as one series grows."""
    guide, params = trained(series, "pairs", ("phi", "scale"), TRAINED_LENGTHS, options)
    fixed = {"phi": jnp.array(0.7), "scale": jnp.array(1.0)}
    model = numpyro.handlers.condition(series, data=fixed)
    pairs = Predictive(model, num_samples=1)(jax.random.key(1), max(ASKED_LENGTHS))["pairs"][0]
    rows, intervals = [], []
    for length in ASKED_LENGTHS:
        data, key = {"pairs": pairs[: length - 1]}, jax.random.key(length)
        draws = Predictive(guide, params=params, num_samples=options.num_draws)(key, data, length)
        sets = np.stack([draws["phi"], np.log(draws["scale"])], axis=1), exact_series(data["pairs"], options.num_draws)
        rows.append({"data": "a series", "size": length, "C2ST": calibration.c2st(key, *sets, progress_bar=False)})
        intervals.append([np.quantile(values[:, 0], [0.1, 0.5, 0.9]) for values in sets])
    plot_intervals(ax, ASKED_LENGTHS, intervals, "exact", 1.0)
    ax.axhline(0.7, color="0.7", linewidth=1, zorder=0)
    ax.set(xlabel="length of the series so far", ylabel="autoregressive coefficient", title="A time series")
    return rows


def run_line(options, ax):
    """Train on points with outliers, and compare with NUTS."""
    guide, params = trained(with_outliers, ("x", "y"), ("intercept", "slope"), (NUM_POINTS,), options)
    fixed = {"intercept": jnp.array(0.5), "slope": jnp.array(1.0)}
    model = numpyro.handlers.condition(with_outliers, data=fixed)
    draws = Predictive(model, num_samples=1)(jax.random.key(3), NUM_POINTS)
    data, key = {name: draws[name][0] for name in ("x", "y")}, jax.random.key(4)
    exact = sampler(mixture_of_outliers, options)
    exact.run(key, data["x"], data["y"])
    ask = Predictive(guide, params=params, num_samples=options.num_draws)
    sets = ask(key, data, NUM_POINTS), exact.get_samples()
    x = np.linspace(-2, 2, 50)
    for label, colour, style, found in zip(("guide", "NUTS"), ("C0", "0.4"), ("-", "--"), sets, strict=True):
        lines = np.asarray(found["intercept"])[:, None] + np.asarray(found["slope"])[:, None] * x
        for edge, name in zip(np.quantile(lines, [0.1, 0.9], axis=0), (label, None), strict=True):
            ax.plot(x, edge, style, color=colour, label=name)
    ax.plot(x, np.polyval(np.polyfit(data["x"], data["y"], 1), x), ":", color="C1", label="least squares")
    ax.plot(data["x"], data["y"], "k.")
    ax.set(xlabel="x", ylabel="y", title="Outliers left out")
    ax.legend(fontsize="small")
    scored = [np.stack([found["intercept"], found["slope"]], axis=1) for found in sets]
    return [{"data": "a line", "size": NUM_POINTS, "C2ST": calibration.c2st(key, *scored, progress_bar=False)}]


def main():
    """Train three guides, and show how they do."""
    options = _common.arguments(
        __doc__,
        num_steps=(6000, "steps of each training"),
        num_draws=(1000, "draws of each posterior, a multiple of four"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    rows = [*run_line(options, axes[2]), *run_series(options, axes[1]), *run_schools(options, axes[0])]
    table = [
        {name: value if isinstance(value, str) else round(value, 3) for name, value in row.items()} for row in rows
    ]
    _common.write_table(table, options.output / "any_size.csv")
    _common.save(figure, options, "any_size.png", dpi=120)


if __name__ == "__main__":
    main()
