"""Chains of a finite network, as a schedule has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_wide import _arviz
from numpyro_wide._traces import abstract_sites, latent_sites
from numpyro_wide.diagnostics._pooling import pooling
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._plan import PIECES, Schedule
from numpyro_wide.estimators._posteriors import DrawnPosterior, Moments, Network, collapsed, parts_of, run_network
from numpyro_wide.estimators._scoring import chain_weights, of_regression
from numpyro_wide.linear_gaussian._problem import log_evidence
from numpyro_wide.machine import precision
from numpyro_wide.mcmc.microcanonical import MicrocanonicalLangevin
from numpyro_wide.runs._optimum import init_to_optimum

BIAS_TOLERANCE = 0.15  # root mean square over directions
MOST_CHECKED = 200  # rows of the comparison of chains
_STARTS_APART = 0.1  # of those near one optimum, in prior deviations
LARGEST_RHAT = 1.01  # of function, scales and noise of a posterior (Vehtari et al. 2021)
_MOST_TIMES = 10  # as many steps, that are worth a number
_FIELDS = {"extra_fields": ("accept_prob", "num_grad")}


class Run(NamedTuple):
    """Draws of a finite network, by chains or without."""

    posterior: Any
    mcmc: MCMC | None = None
    num_steps: int = 1  # of each chain
    schedule: Any = None  # as it was run


def run_chains(
    network: Network,
    known: tuple,  # as of a posterior
    scored: tuple[np.ndarray, np.ndarray],  # x and y of compared predictions
    num_chains: int,
    schedule: Schedule,
    *,
    optima: Sequence[dict[str, np.ndarray]] = (),  # weights by site to start near; without, Adam finds starts
    clock: Clock,
    key: Array,
    report: Report,
) -> Run:
    """Run microcanonical chains until settled or as long as planned; the end of the budget ends them before."""
    with precision(schedule.precision == "float64"):
        args = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), known)
        target = FlatTarget(network, args, latent_shapes(network, args))
        target = target._replace(used=target.without())  # an array, as where a site is left out: the same program
        hold = "scales" if network.is_latent else None  # at their medians, by Adam
        start_key, run_key = jax.random.split(key)
        if optima:
            start = starts_near(optima, start_key, target.shapes, num_chains)
        else:
            clock.begin("Adam, for starts of the chains")
            options: dict[str, Any] = {"num_chains": num_chains, "num_steps": schedule.num_adam, "hold": hold}
            start = init_to_optimum(start_key, collapsed(network), *args, progress_bar=False, **options)
            start = start if num_chains > 1 else {name: values[None] for name, values in start.items()}
        vectors, num_steps = target.vectors(start), 0
        lengths = schedule.num_warmup, schedule.num_kept // PIECES
        starts_constant = network.by_row and schedule.num_constant > 0
        if starts_constant:
            # Noise that varies from the start takes for noise what is not learnt yet, and some of it never is.
            clock.begin("chains with constant noise")
            held = target.without("noise.readout")
            first = warm_up(target._replace(used=held), run_key, vectors, *lengths, schedule.adjusted)
            pieces = run_pieces(first, schedule.num_constant, schedule.constant_pieces, clock)
            schedule = replace(schedule, constant_pieces=len(pieces))
            num_steps = schedule.num_warmup + len(pieces) * (schedule.num_constant // PIECES)
            vectors = held[None] * jnp.reshape(first.last_state.z, vectors.shape)
        clock.begin("warmup of the chains")
        mcmc = warm_up(target, run_key, vectors, *lengths, schedule.adjusted)
        num_steps, num_warmup, pieces = num_steps + schedule.num_warmup, num_steps + schedule.num_warmup, []
        for length in schedule.looks:
            clock.begin(f"samples of the chains, {length} steps")
            before = len(pieces)
            pieces += run_pieces(mcmc, length, min(PIECES, schedule.num_pieces - before), clock)
            num_steps += (len(pieces) - before) * (length // PIECES)
            join(mcmc, pieces[-PIECES:])
            draws = mcmc.get_samples()
            posterior, is_settled, lines = judge(network, draws, known, scored, num_chains, schedule.adjusted)
            if is_settled or len(pieces) == schedule.num_pieces:
                break
            if len(pieces) < before + PIECES or clock.is_over:
                report.add(
                    "Plan", f"the chains were ended by the budget, after {num_steps} of {schedule.num_steps} steps"
                )
                schedule = replace(schedule, num_pieces=len(pieces))
                break
    report.add(
        "Chains",
        f"{num_chains} "
        + ("adjusted" if schedule.adjusted else f"unadjusted (bias tolerance {BIAS_TOLERANCE})")
        + " microcanonical chains from "
        + ("optima of the race" if optima else "Adam's optimum")
        + (", with scales and noise held at their medians" if hold or optima else ""),
        f"{num_warmup} warmup steps{', first with constant noise,' if starts_constant else ''} "
        f"and {num_steps - num_warmup} after them; {schedule.num_kept} draws kept per chain",
        *lines,
    )
    return Run(posterior, mcmc, num_steps, schedule)


def warm_up(
    target: "FlatTarget", key: Array, vectors: Array, num_warmup: int, num_kept: int, adjusted: bool = False
) -> MCMC:
    """Start chains at vectors (chains, size); equal lengths make all such chains one program."""
    form: dict[str, Any] = {"adjusted": adjusted, "bias_tolerance": BIAS_TOLERANCE}
    kernel = MicrocanonicalLangevin(potential_fn=target.potential_energy, **form)
    form = {"num_chains": len(vectors), "postprocess_fn": target.values, "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_kept, chain_method=kernel.compiled_once, **form)
    mcmc.warmup(key, init_params=vectors if len(vectors) > 1 else vectors[0], **_FIELDS)
    jax.block_until_ready(mcmc.last_state)
    return mcmc


def run_pieces(mcmc: MCMC, num_steps: int, num_pieces: int, clock: Clock) -> list[dict]:
    """Run pieces of the steps, each keeping as many draws, until the budget is over; return their states."""
    num_kept = mcmc.num_samples // mcmc.thinning
    mcmc.thinning = max(num_steps // PIECES // num_kept, 1)
    mcmc.num_samples = mcmc.thinning * num_kept
    pieces = list[Any]()
    while len(pieces) < num_pieces and not (pieces and clock.is_over):
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.last_state.rng_key, **_FIELDS)
        jax.block_until_ready(mcmc.last_state)
        pieces.append(mcmc._states)
    return pieces


def join(mcmc: MCMC, pieces: Sequence[dict]) -> None:
    """Give chains the draws of several pieces."""
    mcmc._states = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *pieces)
    mcmc._states_flat = None


class FlatTarget(NamedTuple):
    """Posterior of a collapsed network, whose latent sites are N(0, 1), over one vector: a small program."""

    network: Network
    known: tuple  # medians, x and y
    shapes: dict[str, tuple[int, ...]]  # of the latent sites
    used: Array | float = 1.0  # factor of the position in the likelihood, (size,)

    def without(self, site: str | None = None) -> Array:
        """Return the factor that leaves out a site, or none."""
        factors = {name: jnp.full((1, *shape), float(name != site)) for name, shape in self.shapes.items()}
        return self.vectors(factors)[0]

    def vectors(self, values: dict[str, Array]) -> Array:
        """Return the positions of chains, (chains, size), from values by site with an axis of chains in front."""
        return jnp.concatenate([jnp.reshape(values[name], (len(values[name]), -1)) for name in self.shapes], axis=1)

    def values(self, z: Array) -> dict[str, Array]:
        """Return a position's values by site."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        parts = jnp.split(z, ends[:-1])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def potential_energy(self, z: Array) -> Array:
        """Return minus the log density, up to a constant."""
        medians, x, y = self.known
        features, noise = parts_of(self.network, self.values(self.used * z), medians, x)
        return 0.5 * jnp.sum(z**2) - log_evidence(features, y, noise)


def judge(
    network: Network,
    draws: Mapping[str, np.ndarray],
    known: tuple,
    scored: tuple[np.ndarray, np.ndarray],
    num_chains: int,
    is_strict: bool = False,  # whether function, scales and noise are to agree, each
) -> tuple[DrawnPosterior, bool, list[str]]:
    """Return the posterior of finite draws, weighted if chains disagree, whether they settled at x and y, and lines."""
    x, y = scored
    posterior = DrawnPosterior(network, draws, known)
    function = posterior.function(x)
    kept, num_left, lost = finite_draws(function, num_chains)
    if lost:
        posterior = DrawnPosterior(network, {name: values[kept] for name, values in draws.items()}, known)
    some = slice(None, None, -(-len(x) // MOST_CHECKED))
    mean, variance, noise_variance = (part[kept, some] for part in function)
    is_settled, lines, posterior.agrees, posterior.rhat = convergence(
        mean, variance + noise_variance, y[some], num_left
    )
    if is_strict:
        posterior.rhat, name = largest_rhat(posterior, mean, noise_variance, num_left)
        posterior.agrees = is_settled = posterior.rhat <= LARGEST_RHAT
        lines.append(f"largest R-hat of function, scales and noise: {posterior.rhat:.4f}, of {name}")
    elif not posterior.agrees:
        lines.append(weigh(posterior, num_left, (mean, variance, noise_variance), y[some]))
    return posterior, is_settled, [*lines, *lost]


def largest_rhat(
    posterior: DrawnPosterior, mean: np.ndarray, noise_variance: np.ndarray, num_chains: int
) -> tuple[float, str]:
    """Return the largest R-hat of function and noise, (chains · draws, rows, k), and of scales, and its name."""
    values = {"the function": mean, "the noise": noise_variance}
    values |= {name.removesuffix("_base"): draws for name, draws in posterior.draws.items() if "." not in name}
    rhats = {
        name: float(np.nanmax(_arviz.rhat(draws.reshape(num_chains, -1, *draws.shape[1:]))))
        for name, draws in values.items()
    }
    name = max(rhats, key=lambda name: rhats[name])
    return rhats[name], name


def weigh(posterior: DrawnPosterior, num_chains: int, moments: Moments, y: np.ndarray) -> str:
    """Repeat or leave out draws of chains by weights of leave-one-out at rows of y; return a report line."""
    by_chain = zip(*(np.split(part, num_chains) for part in moments), strict=True)
    weights = chain_weights(np.array([of_regression(one, y).by_row for one in by_chain]))
    ends = np.round(len(moments[0]) * np.cumsum(weights)).astype(int)
    numbers, length = np.diff(ends, prepend=0), len(moments[0]) // num_chains
    rows = [np.linspace(one * length, (one + 1) * length - 1, number) for one, number in enumerate(numbers)]
    posterior.choose(np.concatenate(rows).astype(int))
    return f"weights of the chains: {', '.join(f'{weight:.2f}' for weight in weights)}"


def latent_shapes(network: Network, known: tuple) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the latent sites of a collapsed network."""
    sites = latent_sites(abstract_sites(partial(run_network, network), known, {}))
    return {name: tuple(sites[name]["fn"].shape()) for name in sorted(sites) if name != "readout"}


def starts_near(
    optima: Sequence[dict[str, np.ndarray]], key: Array, shapes: dict[str, tuple[int, ...]], num_chains: int
) -> dict[str, Array]:
    """Return starts of chains in turn near optima of some sites; all others, normal, are at their medians."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    start = {}
    for name, shape in shapes.items():
        values = np.zeros((num_chains, *shape))
        if name in optima[0]:
            values = np.stack([optima[chain % len(optima)][name] for chain in range(num_chains)])
            values = values + _STARTS_APART * random.standard_normal(values.shape)
        start[name] = jnp.asarray(values, float)
    return start


def finite_draws(function: tuple[np.ndarray, ...], num_chains: int) -> tuple[np.ndarray, int, list[str]]:
    """Return indices of draws (chains · draws, rows, k) that are finite, the number of their chains, and lines."""
    is_finite = np.all([np.isfinite(part).all(axis=(1, 2)) for part in function], axis=0).reshape(num_chains, -1)
    counts = is_finite.sum(axis=1)
    if not counts.any():
        raise FloatingPointError("no draw of the chains has finite predictions")
    chains = np.flatnonzero(2 * counts >= counts.max())  # equally many of each chain that has half of the most
    length = counts[chains].min()
    rows = np.concatenate([chain * is_finite.shape[1] + np.flatnonzero(is_finite[chain])[-length:] for chain in chains])
    num_lost = is_finite.size - counts.sum()
    if not num_lost:
        return rows, num_chains, []
    line = f"{num_lost} of {is_finite.size} draws have predictions that are not finite and are left out: "
    return rows, len(chains), [f"{line}{len(rows)} draws of {len(chains)} chains are kept"]


def convergence(
    mean: np.ndarray, variance: np.ndarray, y: np.ndarray, num_chains: int
) -> tuple[bool, list[str], bool, float | None]:
    """Judge by moments (chains · draws, rows, k) for y (rows, k): whether chains settled, and agree, and R-hat."""
    by_chain = [part.reshape(num_chains, -1, *y.shape) for part in (mean, variance)]
    sizes = _arviz.effective_sample_size(by_chain[0])
    lines = [f"effective draws of predictions: median {np.nanmedian(sizes):.0f}, smallest {np.nanmin(sizes):.0f}"]
    if num_chains == 1:
        return True, [*lines, "R-hat is unknown for a single chain; run more of them"], True, None
    found = pooling(y, *by_chain)
    lines.append(f"R-hat of predictions between chains: {found.between:.3f}, largest {found.largest:.3f}")
    if not found.unsettled:
        return True, [*lines, found.advice], found.between <= found.limit, found.between
    # The excess of its square goes with one over the length.
    factor = (found.between**2 - 1) / (found.limit**2 - 1)
    many = f"about {factor:.1f} times" if factor < _MOST_TIMES else f"more than {_MOST_TIMES} times"
    longer = f"{many} as many steps, of as much of the time_budget, would bring R-hat to {found.limit:g}"
    return False, [*lines, found.advice, *([longer] if factor > 1 else [])], False, found.between
