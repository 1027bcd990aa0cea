"""Networks of linear layers, whose laws are known at every width and depth: what is drawn and told, and what is exact.

Each repetition draws data and a key of its own, and compares `model_evidence` with the exact evidence: by how many of
its standard errors it is off. Of honest errors 95 % are below 1.96. Then chains of every kernel, and their means beside
exact ones. Each run is a row of a table that is written as it is done: run it again, and it goes on.

    python studies/exact_laws.py
"""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS
from scipy import stats

import _chains
import _common
from _linear_networks import NOISE_SCALE, LinearLaw, draw_data, linear_network, scale_and_slopes
from numpyro_wide import ReadoutPredictive, mcmc, model_evidence

# Every form and both methods, from one layer to three.
NETWORKS = (
    ("collapsed", 1, 4, "stepping-stone"),
    ("plain", 1, 4, "bridge"),
    ("repriorised", 2, 16, "bridge"),
    ("plain", 3, 4, "stepping-stone"),
)
KERNELS = {
    "SplitHMC": mcmc.SplitHMC,
    "Langevin": partial(mcmc.UnderdampedLangevin, damping=0.2),
    "pCN": mcmc.PreconditionedCrankNicolson,
    "pCNL": mcmc.PreconditionedCrankNicolsonLangevin,
    "MAMS": mcmc.MicrocanonicalLangevin,
    "MCLMC": partial(mcmc.MicrocanonicalLangevin, adjusted=False),
    "NUTS": NUTS,
}
CHAINS = (
    ("SplitHMC", "collapsed", 3, 16),
    ("Langevin", "repriorised", 1, 16),
    ("pCN", "collapsed", 2, 64),
    ("pCNL", "repriorised", 3, 64),
    ("MAMS", "plain", 2, 16),
    ("MCLMC", "collapsed", 1, 4),
    ("NUTS", "plain", 3, 4),
)


class Cell(NamedTuple):
    """One repetition."""

    form: str
    depth: int
    width: int
    method: str
    seed: int


class Row(NamedTuple):
    """What was found, and what is exact."""

    log_evidence: float
    standard_error: float
    exact: float
    overlap: float
    is_trusted: float


class Chain(NamedTuple):
    """One run of chains."""

    kernel: str
    form: str
    depth: int
    width: int


class Means(NamedTuple):
    """Posterior means with their Monte Carlo errors, and the exact ones: of log Q, its square, a function value."""

    scale: float
    scale_error: float
    scale_exact: float
    square: float
    square_error: float
    square_exact: float
    function: float
    function_error: float
    function_exact: float


def run(cell, options):
    """Return one repetition's row."""
    data = draw_data(cell.seed)
    lengths = {"num_chains": options.num_chains, "num_warmup": options.num_warmup, "num_samples": options.num_samples}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is not to be trusted is counted
        found = model_evidence(
            jax.random.key(cell.seed),
            linear_network(cell.form, cell.depth, cell.width),
            data.x,
            data.y,
            method=cell.method,
            progress_bar=False,
            **lengths,
        )
    exact = LinearLaw(cell.depth, cell.width, data.x, data.y, NOISE_SCALE).log_evidence
    return Row(found.log_evidence, found.standard_error, exact, found.overlap, float(found.is_trusted))


def run_chain(cell, options):
    """Return what chains say of Q and of the function at one new input."""
    data, model = draw_data(3, scale=2.5), linear_network(cell.form, cell.depth, cell.width)
    num_chains, num_samples = 4 * options.num_chains, options.num_samples
    chains = MCMC(
        KERNELS[cell.kernel](model),
        num_warmup=2 * options.num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    chains.run(jax.random.key(0), data.x, data.y)
    draws = chains.get_samples()
    if cell.form != "plain":
        readout = ReadoutPredictive(model, draws, (data.x, data.y)).readout(jax.random.key(1))
        draws = {**draws, "readout": readout}
    scale, slopes = scale_and_slopes(draws, cell.depth)
    law = LinearLaw(cell.depth, cell.width, data.x, data.y, NOISE_SCALE)
    exact = np.log(law.scales)
    pairs = (
        (np.log(scale), law.average(exact)),
        (np.log(scale) ** 2, law.average(exact**2)),
        (slopes @ data.x_new[0].astype(float), law.predict(data.x_new)[0][0]),
    )
    found = []
    for values, truth in pairs:
        values = values.reshape(num_chains, num_samples)
        found += [float(values.mean()), _chains.standard_error(values), float(truth)]
    return Means(*found)


def chain_line(cell, row):
    """Return a line of the table of chains."""
    line = {"kernel": cell.kernel, "form": cell.form, "network": f"{cell.depth} x {cell.width}"}
    for name in ("scale", "square", "function"):
        drawn, error, exact = (getattr(row, field) for field in (name, f"{name}_error", f"{name}_exact"))
        label = {"scale": "log Q", "square": "log Q squared", "function": "function"}[name]
        line |= {label: f"{drawn:.3f} ± {error:.3f}", f"exact {label}": f"{exact:.3f}"}
    return line


def summary(network, rows):
    """Return a line of the table: of the repetitions that are to be trusted, how often the interval holds the truth."""
    form, depth, width, method = network
    trusted = [row for row in rows if row.is_trusted]
    scores = scores_of(trusted)
    return {
        "form": form,
        "network": f"{depth} x {width}",
        "method": method,
        "repetitions": len(rows),
        "trusted": len(trusted),
        "95 % interval holds, %": 100 * np.mean(np.abs(scores) < 1.96),
        "mean score": scores.mean(),
        "sd of score": scores.std(),
        "standard error, median": np.median([row.standard_error for row in trusted]),
    }


def scores_of(rows):
    """Return how many standard errors each is off."""
    return np.array([(row.log_evidence - row.exact) / row.standard_error for row in rows])


def draw(by_network, options):
    """Draw the scores against those of a standard normal."""
    figure, panels = plt.subplots(2, 2, figsize=(6.4, 5), sharex=True, sharey=True, layout="constrained")
    grid = np.linspace(-4, 4, 200)
    for panel, (network, rows) in zip(panels.flat, by_network.items(), strict=False):
        form, depth, width, method = network
        scores = scores_of([row for row in rows if row.is_trusted])
        panel.hist(np.clip(scores, -4, 4), bins=np.linspace(-4, 4, 25), density=True, color="0.75")
        panel.plot(grid, stats.norm.pdf(grid), color="black")
        panel.set_title(f"{form}, {depth} x {width}, {method}", fontsize=9)
    figure.supxlabel("(estimate - exact) / standard error")
    _common.save(figure, options, "exact_laws.png", dpi=140)


def main(options):
    """Run the study."""
    networks = NETWORKS[: options.networks]
    rows = _common.resumed(
        options.output / "exact_laws.csv",
        [Cell(*network, seed) for network in networks for seed in range(options.repetitions)],
        Row,
        lambda cell: run(cell, options),
        unit="repetition",
        name=lambda cell: f"{cell.form} {cell.depth} x {cell.width}, {cell.method}",
    )
    by_network = {network: [row for cell, row in rows.items() if cell[:4] == network] for network in networks}
    _common.print_table([summary(network, found) for network, found in by_network.items()])
    draw(by_network, options)
    chains = _common.resumed(
        options.output / "exact_laws_chains.csv",
        [Chain(*chain) for chain in CHAINS if chain[0] in options.kernels],
        Means,
        lambda cell: run_chain(cell, options),
        unit="kernel",
        name=lambda cell: cell.kernel,
    )
    _common.print_table([chain_line(cell, row) for cell, row in chains.items()])


if __name__ == "__main__":
    main(
        _common.arguments(
            __doc__,
            repetitions=(200, "of each network"),
            networks=(len(NETWORKS), "number of networks, the first of the list"),
            kernels=list(KERNELS),
            num_chains=(4, "at each temperature; of each kernel four times as many"),
            num_warmup=(100, "of each chain; of each kernel twice as many"),
            num_samples=(200, "of each chain"),
        )
    )
