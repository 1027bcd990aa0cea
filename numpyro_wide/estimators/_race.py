"""Race of finite networks: optima under vague scales, ordered by errors at rows left out.

The readout is integrated out, and the noise held at a few levels: a free one goes to zero and orders nothing. One
program serves all networks, whose depth, activation and noise are data.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._activations import ACTIVATIONS
from numpyro_wide._compile import over_chains, run_program
from numpyro_wide.estimators._base import Clock, Report
from numpyro_wide.estimators._plan import RACE_DEPTHS, RACE_STEPS, RACE_UNITS, Plan
from numpyro_wide.estimators._posteriors import LimitPosterior
from numpyro_wide.linear_gaussian._problem import log_evidence, readout_map
from numpyro_wide.machine import precision
from numpyro_wide.nn._layers import scaled_features, unit_scale

HEADING = "Race of architectures"
RACED = ("tanh", "gelu", "relu", "erf")
LEVELS = (0.1, 0.3, 0.8)  # held, in targets' deviations
_STEP_SIZE = 0.02  # of Adam
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
    scales: dict[str, np.ndarray]  # as of a limit's fit
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

    depth: Array
    activation: Array  # index in ``RACED``
    unit: Array  # scale of units of variance one
    noise: Array


def parted(plan: Plan, random: np.random.RandomState) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return indices of rows to learn from, and of others, by part of a cross-validation."""
    rows, (num_learnt, num_held) = random.permutation(plan.known_rows), plan.race_rows
    num_parts = 1 + max(part for _, part in plan.race_runs)
    moved = (np.roll(rows, -part * num_held) for part in range(num_parts))
    return [(order[:num_learnt], order[num_learnt : num_learnt + num_held]) for order in moved]


def race(
    x: np.ndarray,
    y: np.ndarray,
    parts: list[tuple[np.ndarray, np.ndarray]],
    plan: Plan,
    clock: Clock,
    random: np.random.RandomState,
    num_steps: int = RACE_STEPS,
) -> list[list[Optimum]]:
    """Return optima for x (n, d) and y (n,) or (n, k) of each run of the plan, until the budget is over."""
    num_layers = plan.depth or max(RACE_DEPTHS)  # of all, so that they are one program

    def optima_of(entries: Entry, starts: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
        return over_chains(lambda entry, start: _descend(num_steps, entry, start, x, y))(entries, starts)

    def results_of(entries: Entry, optima: dict[str, Array], *rows: Array) -> dict[str, Any]:
        return over_chains(lambda entry, weights: _results(entry, weights, *rows))(entries, optima)

    raced = list[list[Optimum]]()
    with precision(False):
        for depth, part in plan.race_runs:
            if raced and clock.is_over:
                break
            rows = [jnp.asarray(values[indices], float) for indices in parts[part] for values in (x, y)]
            starts = _starts(random, len(RACED) * len(LEVELS), num_layers, x.shape[1])
            weights = run_program(optima_of, _entries(depth), starts, *rows[:2])
            found = jax.tree.map(np.asarray, run_program(results_of, _entries(depth), weights, *rows, quick=True))
            optima = (_best(depth, activation, found) for activation in range(len(RACED)))
            raced.append([optimum for optimum in optima if optimum is not None])
    return raced


def joined(raced: list[list[Optimum]]) -> list[Optimum]:
    """Return the optima of one depth's first part, with the residuals and weights of all parts."""
    by_part = [{one.activation: one for one in optima} for optima in raced]
    optima = []
    for activation, first in by_part[0].items():
        if all(activation in part for part in by_part):
            residuals = np.concatenate([part[activation].residuals for part in by_part])
            weights = chain.from_iterable(zip(*(part[activation].weights for part in by_part), strict=False))
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
    shapes = {
        "first": (num_columns, RACE_UNITS),
        "deeper": (largest - 1, RACE_UNITS, RACE_UNITS),
        "biases": (largest, RACE_UNITS),
    }
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
        before = jnp.where(index == 0, first, entry.unit / RACE_UNITS**0.5 * hidden @ kernel)
        return jnp.where(index < entry.depth, activate(before + bias[None]), hidden), None

    kernels = jnp.concatenate([jnp.zeros((1, RACE_UNITS, RACE_UNITS), first.dtype), weights["deeper"]])
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
    limit: LimitPosterior, gram: np.ndarray, plan: Plan, clock: Clock, random: np.random.RandomState, report: Report
) -> tuple[list[Optimum], Plan]:
    """Return optima in order, none where the limit, of kernel ``gram``, is better, and the plan as it was run."""
    fit = limit.fit
    parts = parted(plan, random)
    raced = race(fit.inputs, fit.targets, parts, plan, clock, random)
    if len(raced) < len(plan.race_runs):
        report.add("Plan", f"the race was ended by the budget, after {len(raced)} of {len(plan.race_runs)} runs")
        plan = replace(plan, race_runs=plan.race_runs[: len(raced)])
    depths = list(dict.fromkeys(depth for depth, _ in plan.race_runs))
    num_parts = max(1, len(raced) // len(depths))  # that all depths were run on
    parts, raced = parts[:num_parts], raced[: num_parts * len(depths)]
    by_depth = [joined(raced[place :: len(depths)]) for place in range(len(depths))]
    optima = in_order([optimum for joint in by_depth for optimum in joint], plan.prefers_depth)
    of_limit = np.concatenate([fit.targets[new] - limit.predicted(gram, known, new) for known, new in parts])
    report.add(
        HEADING,
        f"optima of networks of {RACE_UNITS} units with the noise held, learnt from {len(parts[0][0])} rows; errors of "
        f"{len(of_limit)} rows left out; the first has the {'most' if plan.prefers_depth else 'fewest'} layers within "
        "a standard error of the least",
        table(optima, of_limit),
    )
    if not optima:
        report.add(HEADING, "no optimum is finite")
    # Chains reach less than an optimum's error, but from the limit's scales about the limit's.
    elif np.sqrt(np.mean(of_limit**2)) < optima[0].noise_scale:
        report.add(HEADING, f"the limit's error is below {_NOISE_SHARE} of the least: its architecture and scales stay")
        optima = []
    return optima, plan


def table(optima: list[Optimum], of_limit: np.ndarray) -> str:
    """Return the errors as text."""
    lines = [f"{'activation':>10} {'depth':>6} {'noise held':>11} {'error':>7}"]
    lines += [f"{one.activation:>10} {one.depth:>6} {one.level:>11} {one.error:>7.4f}" for one in optima]
    lines.append(f"{'the limit':>29} {np.sqrt(np.mean(of_limit**2)):>7.4f}")
    return "\n".join(lines)
