"""Race of finite networks: optima under vague scales, ordered by errors at rows left out.

The readout is integrated out, and the noise held at a few levels: a free one goes to zero and orders nothing. One
program serves all networks, whose depth, activation and noise are data.
"""

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._compile import over_chains, run_program
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._posteriors import LimitPosterior
from numpyro_wide.linear_gaussian._problem import log_evidence, readout_map
from numpyro_wide.machine import precision
from numpyro_wide.nn._layers import ACTIVATIONS, scaled_features, unit_scale

HEADING = "Race of architectures"
RACED = ("tanh", "gelu", "relu", "erf")
DEPTHS = (2, 3, 1)  # in the order of the race
LEAST_BUDGET = 30.0  # seconds that pay for a race
LEVELS = (0.1, 0.3, 0.8)  # held, in targets' deviations
# Rows, and rows for a second of the budget: more of them want deeper networks, as chains on all rows will.
MOST_LEARNT, _LEARNT_A_SECOND, _MOST_HELD = 800, 8, 700
_MOST_PARTS = 5  # left out in turn
_LEARNT = 0.8  # share of the rows
WIDTH = 32
_NUM_STEPS, _STEP_SIZE = 300, 0.02  # of Adam
_SHARE = 0.15  # of the budget
_COMPILING_RACE, _SECONDS_A_RACED_ROW = 3.0, 0.004  # of the first depth: measured
_NOISE_SHARE, _LEAST_NOISE = 0.8, 1e-3
# Medians and spreads of the scales: units have variance one, inputs any relevance.
_B_STD, _READOUT, _READOUT_B_STD = 0.5, 1.6, 0.3
_SPREADS = {"input_scale": 1.0, "b_std": 0.5, "readout_w_std": 0.5}


class Optimum(NamedTuple):
    """Network of a race, at its best noise."""

    depth: int
    activation: str
    level: float  # of the held noise
    residuals: np.ndarray  # at rows left out, (m, k), averaged over two levels
    scales: dict[str, Any]  # as of a limit's fit
    size: float  # prior variance of its outputs
    weights: list[dict[str, np.ndarray]]  # by site of the hidden layers, the best first

    @property
    def error(self) -> float:
        """Root mean square at rows left out."""
        return float(np.sqrt(np.mean(self.residuals**2)))

    @property
    def noise_scale(self) -> float:
        """Noise for chains to start at, in targets' deviations: chains learn what one optimum leaves over."""
        return max(_NOISE_SHARE * self.error, _LEAST_NOISE)


class Entry(NamedTuple):
    """Network that takes part, as data."""

    depth: Any
    activation: Any  # index in ``RACED``
    unit: Any  # scale of units of variance one
    noise: Any


def parted(num_rows: int, budget: float, random: np.random.RandomState) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return indices of rows to learn from, and of others, by part of a cross-validation."""
    rows = random.permutation(num_rows)
    num_learnt = min(int(_LEARNT * num_rows), max(MOST_LEARNT, int(_LEARNT_A_SECOND * budget)))
    num_held = min(num_rows - num_learnt, _MOST_HELD)
    moved = (np.roll(rows, -part * num_held) for part in range(min(_MOST_PARTS, -(-num_rows // num_held))))
    return [(order[:num_learnt], order[num_learnt : num_learnt + num_held]) for order in moved]


def race(
    x: np.ndarray,
    y: np.ndarray,
    parts: list[tuple[np.ndarray, np.ndarray]],
    depth: int | None,
    clock: Clock,
    random: np.random.RandomState,
    num_steps: int = _NUM_STEPS,
) -> list[list[Optimum]]:
    """Return optima for x (n, d) and y (n,) or (n, k) by part, while the budget's share lasts."""
    depths: tuple[int, ...] = DEPTHS if depth is None else (depth,)
    most, raced_depths = clock.seconds + _SHARE * clock.budget, list[int]()

    def optima_of(entries: Entry, starts: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
        return over_chains(lambda entry, start: _descend(num_steps, entry, start, x, y))(entries, starts)

    def results_of(entries: Entry, optima: dict[str, Array], *rows: Array) -> dict[str, Any]:
        return over_chains(lambda entry, weights: _results(entry, weights, *rows))(entries, optima)

    def race_depth(one: int, part: tuple[np.ndarray, np.ndarray]) -> list[Optimum]:
        rows = [jnp.asarray(values[indices], float) for indices in part for values in (x, y)]
        starts = _starts(random, len(RACED) * len(LEVELS), max(depths), x.shape[1])
        weights = run_program(optima_of, _entries(one), starts, *rows[:2])
        found = jax.tree.map(np.asarray, run_program(results_of, _entries(one), weights, *rows, quick=True))
        optima = (_best(one, activation, found) for activation in range(len(RACED)))
        return [optimum for optimum in optima if optimum is not None]

    with precision(False):
        before, first = clock.seconds, list[Optimum]()
        for one in depths:
            if raced_depths and clock.seconds > most:
                break
            first += race_depth(one, parts[0])
            if not raced_depths:
                clock.pace = (clock.seconds - before) / (_COMPILING_RACE + _SECONDS_A_RACED_ROW * len(parts[0][0]))
            raced_depths.append(one)
        raced = [first]
        for part in parts[1:]:
            if 2 * clock.seconds - before > most:  # with one more
                break
            before = clock.seconds
            raced.append([optimum for one in raced_depths for optimum in race_depth(one, part)])
    return raced


def joined(raced: list[list[Optimum]]) -> list[Optimum]:
    """Return the optima of the first part, with all parts' residuals and weights."""
    by_part = [{(one.depth, one.activation): one for one in optima} for optima in raced]
    optima = []
    for kind, first in by_part[0].items():
        if all(kind in part for part in by_part):
            residuals = np.concatenate([part[kind].residuals for part in by_part])
            weights = chain.from_iterable(zip(*(part[kind].weights for part in by_part), strict=False))
            optima.append(first._replace(residuals=residuals, weights=list(weights)))
    return optima


def in_order(optima: list[Optimum], prefers_depth: bool) -> list[Optimum]:
    """Order by error, but put first, of those within a standard error of the least, one of most or of fewest layers."""
    by_error = sorted(optima, key=lambda one: one.error)
    if not by_error:
        return []

    def is_level(one: Optimum) -> bool:
        excess = np.mean(one.residuals**2 - by_error[0].residuals ** 2, axis=1)
        return bool(excess.mean() <= excess.std() / len(excess) ** 0.5)

    first = (max if prefers_depth else min)(filter(is_level, by_error), key=lambda one: one.depth)
    return [first, *(one for one in by_error if one is not first)]


def _entries(depth: int) -> Entry:
    """Return the entries of a depth: every activation with every noise."""
    activations, noises = (grid.ravel() for grid in np.meshgrid(np.arange(len(RACED)), LEVELS, indexing="ij"))
    units = np.array([unit_scale(activation, _B_STD) for activation in RACED])[activations]
    numbers = (jnp.asarray(part, float) for part in (units, noises))
    return Entry(jnp.asarray(np.full(len(activations), depth)), jnp.asarray(activations), *numbers)


def _descend(num_steps: int, entry: Entry, weights: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Descend to an optimum by Adam."""
    import optax  # optional

    adam = optax.flatten(optax.adam(optax.cosine_decay_schedule(_STEP_SIZE, num_steps)))

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, adam_state = state
        update, adam_state = adam.update(jax.grad(potential)(weights, entry, x, y), adam_state)
        return (optax.apply_updates(weights, update), adam_state), None

    return jax.lax.scan(step, (weights, adam.init(weights)), None, length=num_steps)[0][0]


def _results(entry: Entry, weights: dict[str, Array], x: Array, y: Array, x_new: Array, y_new: Array) -> dict[str, Any]:
    """Return an optimum's scales, hidden weights, residuals at rows left out, and size."""
    hidden = hidden_of(weights, entry, jnp.concatenate([x, x_new]))
    all_features = scaled_features(hidden, _scales(weights, entry)["readout_w_std"], _READOUT_B_STD)
    features, features_new = all_features[: len(x)], all_features[len(x) :]
    readout = readout_map(features, y, jnp.zeros((features.shape[1], *y.shape[1:])), entry.noise)[0]
    residuals = y_new - features_new @ readout
    # An optimum has small hidden weights and a large readout, draws have neither: only the prior's readout serves.
    prior = scaled_features(hidden[: len(x)], _READOUT * entry.unit, _READOUT_B_STD)
    return {
        "scales": _scales(weights, entry),
        "weights": {name: weights[name] for name in ("first", "deeper", "biases")},
        "residuals": residuals,
        "size": jnp.mean(jnp.sum(prior**2, axis=1)),
    }


def _starts(random: np.random.RandomState, number: int, largest: int, num_columns: int) -> dict[str, Array]:
    """Draw hidden weights of some networks; scales are at their medians."""
    shapes = {"first": (num_columns, WIDTH), "deeper": (largest - 1, WIDTH, WIDTH), "biases": (largest, WIDTH)}
    drawn = {name: random.standard_normal((number, *shape)) for name, shape in shapes.items()}
    medians = {"input_scale": (num_columns,), "b_std": (largest,), "readout_w_std": ()}
    weights = drawn | {name: np.zeros((number, *shape)) for name, shape in medians.items()}
    return {name: jnp.asarray(values, float) for name, values in weights.items()}


def _scales(weights: dict[str, Array], entry: Entry) -> dict[str, Array]:
    """Return the scales, log-normal a priori."""
    factor = {name: jnp.exp(spread * weights[name]) for name, spread in _SPREADS.items()}
    return {
        "input_scale": factor["input_scale"],
        "b_std": _B_STD * factor["b_std"],
        "readout_w_std": _READOUT * entry.unit * factor["readout_w_std"],
    }


def hidden_of(weights: dict[str, Array], entry: Entry, x: Array) -> Array:
    """Return the last hidden units, (n, width), of a network whose layers above its depth do nothing."""
    scales = _scales(weights, entry)
    activate = partial(jax.lax.switch, entry.activation, [ACTIVATIONS[name] for name in RACED])
    first = (1 - _B_STD**2) ** 0.5 / x.shape[1] ** 0.5 * (x * scales["input_scale"][None]) @ weights["first"]
    biases = scales["b_std"][:, None] * weights["biases"]

    # The first layer is a step of the loop as well, so that the activations are compiled once.
    def layer(hidden: Array, of_layer: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, kernel, bias = of_layer
        before = jnp.where(index == 0, first, entry.unit / WIDTH**0.5 * hidden @ kernel)
        return jnp.where(index < entry.depth, activate(before + bias[None]), hidden), None

    kernels = jnp.concatenate([jnp.zeros((1, WIDTH, WIDTH), first.dtype), weights["deeper"]])
    return jax.lax.scan(layer, jnp.zeros_like(first), (jnp.arange(len(biases)), kernels, biases))[0]


def potential(weights: dict[str, Array], entry: Entry, x: Array, y: Array) -> Array:
    """Return minus the log joint density, up to a constant."""
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))
    features = scaled_features(hidden_of(weights, entry, x), _scales(weights, entry)["readout_w_std"], _READOUT_B_STD)
    return 0.5 * squares - log_evidence(features, y, entry.noise)


def _best(depth: int, activation: int, found: dict[str, Any]) -> Optimum | None:
    """Return an activation's optimum at its best noise; None if all diverged."""
    levels = slice(activation * len(LEVELS), (activation + 1) * len(LEVELS))
    own = jax.tree.map(lambda leaf: leaf[levels].astype(float), found)
    residuals = own["residuals"].reshape(*own["residuals"].shape[:2], -1)
    errors = np.mean(residuals**2, axis=(1, 2))
    is_finite = np.isfinite(errors)
    if not is_finite.any():
        return None
    order = np.argsort(np.where(is_finite, errors, np.inf))[: is_finite.sum()]
    best, two = order[0], order[:2]  # two levels average out the chance of one optimum
    unit = unit_scale(RACED[activation], _B_STD)
    scales = {
        "input_scale": own["scales"]["input_scale"][best],
        "w_std": np.array([(1 - _B_STD**2) ** 0.5, *[unit] * (depth - 1)]),
        "b_std": own["scales"]["b_std"][best, :depth],
        "readout_w_std": _READOUT * unit,
        "readout_b_std": _READOUT_B_STD,
    }
    size = float(own["size"][best])
    weights = [_by_site(depth, {name: values[level] for name, values in own["weights"].items()}) for level in order]
    return Optimum(depth, RACED[activation], LEVELS[best], residuals[two].mean(axis=0), scales, size, weights)


def _by_site(depth: int, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights of the hidden layers by site of the chains' model."""
    kernels = [weights["first"], *weights["deeper"]]
    found = {f"hidden.hidden_{layer}.kernel": kernels[layer] for layer in range(depth)}
    return found | {f"hidden.hidden_{layer}.bias": weights["biases"][layer] for layer in range(depth)}


def with_limit(
    limit: LimitPosterior,
    gram: np.ndarray,
    depth: int | None,
    clock: Clock,
    random: np.random.RandomState,
    report: Report,
    long_run: float,  # seconds of chains, on the machine of our measurements, from which the most layers are preferred
) -> list[Optimum]:
    """Return optima in order; none where the limit, of kernel ``gram``, is better."""
    fit = limit.fit
    parts = parted(len(fit.inputs), clock.budget, random)
    raced = race(fit.inputs, fit.targets, parts, depth, clock, random)
    parts = parts[: len(raced)]
    prefers_depth = max(1.0, clock.pace) * long_run < clock.left
    optima = in_order(joined(raced), prefers_depth)
    of_limit = np.concatenate([fit.targets[new] - limit.predicted(gram, known, new) for known, new in parts])
    report.add(
        HEADING,
        f"optima of networks of {WIDTH} units with the noise held, learnt from {len(parts[0][0])} rows; errors of "
        f"{len(of_limit)} rows left out; the first has the {'most' if prefers_depth else 'fewest'} layers within a "
        "standard error of the least",
        table(optima, of_limit),
    )
    if not optima:
        report.add(HEADING, "no optimum is finite")
        return []
    best = optima[0]
    # Chains reach less than an optimum's error, but from the limit's scales about the limit's.
    if np.sqrt(np.mean(of_limit**2)) < best.noise_scale:
        report.add(HEADING, f"the limit's error is below {_NOISE_SHARE} of the least: its architecture and scales stay")
        return []
    return optima


def table(optima: list[Optimum], of_limit: np.ndarray) -> str:
    """Return the errors as text."""
    lines = [f"{'activation':>10} {'depth':>6} {'noise held':>11} {'error':>7}"]
    lines += [f"{one.activation:>10} {one.depth:>6} {one.level:>11} {one.error:>7.4f}" for one in optima]
    lines.append(f"{'the limit':>29} {np.sqrt(np.mean(of_limit**2)):>7.4f}")
    return "\n".join(lines)
