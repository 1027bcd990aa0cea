"""Chains within a budget of seconds."""

import math
from collections.abc import Sequence
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
from numpyro_wide.estimators._posteriors import DrawnPosterior, Moments, Network, collapsed, parts_of, run_network
from numpyro_wide.estimators._scoring import chain_weights, of_regression
from numpyro_wide.linear_gaussian._problem import log_evidence
from numpyro_wide.mcmc.microcanonical import MicrocanonicalLangevin
from numpyro_wide.runs._optimum import init_to_optimum

BIAS_TOLERANCE = 0.15  # root mean square over directions
MOST_CHECKED = 200  # rows of the comparison of chains
_NUM_ADAM, _NUM_WARMUP = 500, 2000  # steps at most
_NUM_SAMPLES = 3000  # steps before the first look
_NUM_KEPT = (200, 100, 50)  # predictive draws by chain: few, where their predictions are dear
_KEPT_SHARE = 0.1  # of the seconds left, for predictions of the draws
_FEWEST_STEPS = 50  # of warmup
_FEWEST_OF_TWO = 1000  # of each of two warmups; with less, there is one
_STARTS_APART = 0.1  # of those near one optimum, in prior deviations
GRADIENTS_A_STEP = 2.6  # cost of a kernel step
_CONSTANT_SHARE, _MOST_CONSTANT = 0.3, 25_000  # of the seconds left, and steps, with constant noise
_ADAM_SHARE, _WARMUP_SHARE = 0.05, 0.4  # of the seconds left: a step of the chains gains more than Adam's of its cost
_SAMPLES_SHARE = 0.95  # of those after it: scores follow
_SECONDS_A_ROW = 4.5e-7  # of a gradient of fifty units: measured
_COMPILING_ADAM = 3.7  # seconds
_NUM_PROGRAMS, _JUDGING = 2, 0.5  # of that cost: in warmup and samples, and in predictions; measured
_GRADIENTS_A_PREDICTION = 3  # cost of a draw's predictions, in float64: measured
_BY_ROW = 1.3  # cost of a gradient with noise by row
_MOST_TIMES = 10  # as many steps, that are worth a number
_TOLERANCE = 0.1  # of the budget, by which it may be overrun


def run_chains(
    network: Network,
    known: tuple,  # as of a posterior
    scored: tuple[np.ndarray, np.ndarray],  # x and y of compared predictions
    num_chains: int,
    *,
    optima: Sequence[dict[str, np.ndarray]] = (),  # weights by site to start near; without, Adam finds starts
    are_asked_for: bool = True,  # so that a user is warned of their lack
    clock: Clock,
    key: Any,
    report: Report,
) -> tuple[DrawnPosterior, MCMC, int] | None:
    """Run microcanonical chains until settled, or to the budget's end, in the precision of the context.

    Return their posterior, chains and steps; None for too small a budget.
    """
    args = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), known)
    target = FlatTarget(network, args, latent_shapes(network, args))
    target = target._replace(used=target.without())  # an array, as where a site is left out: the same program
    _, x, _ = args
    gradients = num_chains * gradient_seconds(len(x), network.depth, network.width, network.by_row)
    gradients *= x.dtype.itemsize / 4  # double precision takes twice as long
    hold = "scales" if network.is_latent else None  # at their medians, by Adam
    most = _KEPT_SHARE * clock.left
    num_kept = next((number for number in _NUM_KEPT if _judging(number, gradients) < most), _NUM_KEPT[-1])
    affordable = _num_warmup(clock, gradients)
    if affordable >= _FEWEST_STEPS:
        start_key, run_key = jax.random.split(key)
        if optima:
            start = starts_near(optima, start_key, target.shapes, num_chains)
        else:
            clock.begin("Adam, for starts of the chains")
            num_adam, before = min(int(_ADAM_SHARE * clock.left / gradients), _NUM_ADAM), clock.seconds
            options: dict[str, Any] = {"num_chains": num_chains, "num_steps": num_adam, "hold": hold}
            start = init_to_optimum(start_key, collapsed(network), *args, progress_bar=False, **options)
            start = start if num_chains > 1 else {name: values[None] for name, values in start.items()}
            # A busy or a slow machine shows here, and programs that are there already.
            clock.pace = (clock.seconds - before) / (_COMPILING_ADAM + num_adam * gradients)
        compiling, measured = clock.pace * _COMPILING_ADAM, max(1.0, clock.pace) * gradients
        judging = _JUDGING * compiling + _judging(num_kept, measured)
        kept = _NUM_PROGRAMS * compiling + judging - _TOLERANCE * clock.budget
        affordable = _num_warmup(clock, measured, max(0.0, kept))
    if affordable < _FEWEST_STEPS:
        report.fall_back(clock.left, warns=are_asked_for, stacklevel=6)  # the caller of the estimator's fit
        return None
    starts_constant = network.by_row and affordable >= 2 * _FEWEST_OF_TWO
    num_warmup = _rounded(min(affordable // 2 if starts_constant else affordable, _NUM_WARMUP))
    lengths = num_warmup, num_kept
    vectors, num_steps = target.vectors(start), 0
    if starts_constant:
        # Noise that varies from the start takes for noise what is not learnt yet, and some of it never is.
        clock.begin("chains with constant noise")
        end = clock.seconds + _CONSTANT_SHARE * clock.left
        held = target.without("noise.readout")
        first = warm_up(target._replace(used=held), run_key, vectors, *lengths)
        step = go_on(first, num_kept, num_kept, clock)
        num_more = max(0, int(min((end - clock.seconds) / max(step, 1e-7), _MOST_CONSTANT)) // num_kept)
        if num_more:
            go_on(first, num_more * num_kept, num_kept, clock)
        vectors = held[None] * jnp.reshape(first.last_state.z, vectors.shape)
        num_steps = num_warmup + (1 + num_more) * num_kept
    clock.begin("warmup of the chains")
    mcmc = warm_up(target, run_key, vectors, *lengths)

    # A short run without compilation shows the cost of a step.
    step = go_on(mcmc, num_kept, num_kept, clock)
    num_steps += num_warmup + num_kept
    num_samples = _affordable(clock, step, judging)
    if num_samples >= 3 * _NUM_SAMPLES:  # with fewer, no run twice as long could follow a first look
        num_samples = _NUM_SAMPLES
    while True:
        num_samples = max(num_samples // num_kept, 1) * num_kept
        clock.begin(f"samples of the chains, {num_samples} steps")
        step = go_on(mcmc, num_samples, num_kept, clock)
        num_steps += num_samples
        before = clock.seconds
        posterior, is_settled, lines = judge(network, mcmc.get_samples(), known, scored, num_chains)
        affordable = _affordable(clock, step, clock.seconds - before)
        if is_settled or affordable <= num_samples:
            break
        num_samples = affordable if affordable < 6 * num_samples else 2 * num_samples
    report.add(
        "Chains",
        f"{num_chains} unadjusted microcanonical chains (bias tolerance {BIAS_TOLERANCE}) from "
        + ("optima of the race" if optima else "Adam's optimum")
        + (", with scales and noise held at their medians" if hold or optima else ""),
        f"{num_steps - num_samples} warmup steps{', first with constant noise,' if starts_constant else ''} "
        f"and {num_samples} after them, {1000 * step:.3g} ms each; "
        f"{num_kept} draws kept per chain",
        *lines,
    )
    return posterior, mcmc, num_steps


_FIELDS = {"extra_fields": ("accept_prob", "num_grad")}


def warm_up(target: "FlatTarget", key: Any, vectors: Array, num_warmup: int, num_kept: int) -> MCMC:
    """Start chains at vectors (chains, size); equal lengths make all such chains one program."""
    kernel = MicrocanonicalLangevin(potential_fn=target.potential_energy, adjusted=False, bias_tolerance=BIAS_TOLERANCE)
    form = {"num_chains": len(vectors), "postprocess_fn": target.values, "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_kept, chain_method=kernel.compiled_once, **form)
    mcmc.warmup(key, init_params=vectors if len(vectors) > 1 else vectors[0], **_FIELDS)
    jax.block_until_ready(mcmc.last_state)
    return mcmc


def go_on(mcmc: MCMC, num_samples: int, num_kept: int, clock: Clock) -> float:
    """Run further steps of chains, and return the seconds of one."""
    before = clock.seconds
    mcmc.num_samples, mcmc.thinning = num_samples, num_samples // num_kept
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, **_FIELDS)
    jax.block_until_ready(mcmc.last_state)
    return (clock.seconds - before) / num_samples


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
    network: Network, draws: dict[str, Any], known: tuple, scored: tuple[np.ndarray, np.ndarray], num_chains: int
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
    is_settled, lines, agree = convergence(mean, variance + noise_variance, y[some], num_left)
    if not agree:
        lines.append(weigh(posterior, num_left, (mean, variance, noise_variance), y[some]))
    return posterior, is_settled, [*lines, *lost]


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
    optima: Sequence[dict[str, np.ndarray]], key: Any, shapes: dict[str, tuple[int, ...]], num_chains: int
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


def convergence(mean: np.ndarray, variance: np.ndarray, y: np.ndarray, num_chains: int) -> tuple[bool, list[str], bool]:
    """Tell by predictive moments (chains · draws, rows, k) for y (rows, k) whether chains settled, and agree."""
    by_chain = [part.reshape(num_chains, -1, *y.shape) for part in (mean, variance)]
    sizes = _arviz.effective_sample_size(by_chain[0])
    lines = [f"effective draws of predictions: median {np.nanmedian(sizes):.0f}, smallest {np.nanmin(sizes):.0f}"]
    if num_chains == 1:
        return True, [*lines, "R-hat is unknown for a single chain; run more of them"], True
    found = pooling(y, *by_chain)
    lines.append(f"R-hat of predictions between chains: {found.between:.3f}, largest {found.largest:.3f}")
    if not found.unsettled:
        return True, [*lines, found.advice], found.between <= found.limit
    # The excess of its square goes with one over the length.
    factor = (found.between**2 - 1) / (found.limit**2 - 1)
    many = f"about {factor:.1f} times" if factor < _MOST_TIMES else f"more than {_MOST_TIMES} times"
    longer = f"{many} as many steps, of as much of the time_budget, would bring R-hat to {found.limit:g}"
    return False, [*lines, found.advice, *([longer] if factor > 1 else [])], False


def gradient_seconds(num_rows: int, depth: int, width: int, by_row: bool = False) -> float:
    """Estimate the seconds of a gradient, with constant noise or noise by row."""
    share = width / 50
    return (6e-5 + _SECONDS_A_ROW * num_rows * max(share, depth * share**2)) * (_BY_ROW if by_row else 1.0)


def _judging(num_kept: int, gradients: float) -> float:
    """Return the seconds of predictions by the draws of all chains, once compiled."""
    return _GRADIENTS_A_PREDICTION * num_kept * gradients


def _num_warmup(clock: Clock, gradients: float, kept: float = 0.0) -> int:
    """Return the affordable warmup steps, from the seconds of a gradient of all chains, and those kept for the rest."""
    return int(_WARMUP_SHARE * max(0.0, clock.left - kept) / (GRADIENTS_A_STEP * gradients))


def _affordable(clock: Clock, step: float, judging: float) -> int:
    """Return the affordable steps with a judgement after them."""
    return int(_SAMPLES_SHARE * (clock.left - judging) / max(step, 1e-7))


def _rounded(number: int) -> int:
    """Round down to few different numbers, to reuse programs."""
    step = 10 ** max(1, len(str(number)) - 2)
    return number // step * step
