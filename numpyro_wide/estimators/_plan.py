"""Plan of a fit: rows, candidates and steps of its stages, from shapes, options and one measured speed."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np

# Seconds are those of the machine of the measurements, whose speed is 1: the budget's, divided by the speed. "UCI":
# boston, concrete, energy, wine, yacht, ten random splits each, by studies/estimator.py; kin8nm, bike, airfoil: one.
DEFAULT_SECONDS = 600.0
REFERENCE = 9e-4  # seconds of the linear algebra of `measured_speed`
SEVERAL = 20.0  # seconds that pay for several architectures of classes, and for the race: UCI

COMPARED, FITTED, KNOWN = 200, 1000, 3000  # rows to choose limits by, to fit scales to, to predict from: bike, memory
FEW = 50  # rows; with fewer, one layer, one scale and targets as they are: chance decides
LIMIT_DEPTHS = 1, 3
STRUCTURED_COLUMNS = 50  # at the most: Griewank and Rosenbrock of 20; of 10, with 100 rows, too
LIMIT_SECONDS, LIMIT_SHARE = 30.0, 0.3  # for a thousand rows, of three layers with scales by column; of the budget
CODES_SECONDS = 100.0  # of label regression on 3000 rows: digits

RACE_DEPTHS = 2, 3, 1  # in the order of the race
RACE_SHARE, RACE_ROW = 0.15, 0.004  # of the budget; seconds of a row in a run of all activations: concrete
RACE_ROWS = 800, 8, 700  # learnt from, at least, and for a second of the budget; left out, at most: kin8nm
RACE_PARTS, RACE_STEPS = 5, 300  # of a cross-validation: airfoil's rows left out, .174 to .157; of Adam

WEIGHTED_ROWS, NUM_WEIGHTED = 100, (500, 200, 50)  # more rows leave few draws the weight; draws, few sizes of programs
CONSTANT_ROWS = 10  # by column, at the most, with constant noise: diabetes
UNITS, RACE_UNITS = 50, 32  # of one layer, and of several: UCI, where wider ones gain less than longer chains
GRADIENT, GRADIENT_ROW = 6e-5, 4.5e-7  # seconds in float32; of each row and fifty units
# Costs in gradients: of a step of unadjusted chains, a draw's predictions, a weighted draw, a trajectory; noise by row.
GRADIENTS = {"step": 2.6, "prediction": 3.0, "weighted draw": 45.0, "trajectory": 20.0, "noise by row": 1.3}
COMPILING = {"chains": 4.0, "noise by row": 2.0, "Adam": 3.7, "weighted draws": 4.5, "race": 3.0}  # seconds: UCI
FEWEST_STEPS, MANY_STEPS = 500, 17_000  # of chains; with as many, layers gain that optima do not need: kin8nm
WARMUP_SHARE, CONSTANT_SHARE = 0.4, 0.3  # of the steps, at the most; with constant noise first: concrete
MOST_ADAM, MOST_WARMUP, MOST_CONSTANT, FIRST_LOOK = 500, 2000, 25_000, 3000  # steps; more gained nothing: UCI
NUM_KEPT = 200, 100, 50  # predictive draws by chain, a tenth of the steps at most
TRAJECTORIES = 500  # of the warmup of a posterior, before its first look, and of its draws: 392 cars
PIECES = 5  # of the steps before a look: after each the budget may end the fit


@dataclass(frozen=True)
class Schedule:
    """Chains of a finite network: steps and kept draws of each chain."""

    depth: int
    units: int
    by_row: bool  # whether the noise depends on inputs, if the targets are not discrete
    num_rows: int
    num_adam: int  # where no optimum of the race has these units
    num_constant: int  # with constant noise first, after a warmup of their own
    num_warmup: int
    looks: tuple[int, ...]  # steps before each look at the chains, which ends them if they have settled
    num_kept: int
    precision: str = "auto"  # or "float32", "float64", with half of the steps
    constant_pieces: int = PIECES
    num_pieces: int = 0  # in all looks; fewer of a fit that the budget has ended
    adjusted: bool = False  # whether a step is a trajectory that Metropolis corrects: exact, and dearer

    @property
    def num_steps(self) -> int:
        """Steps of a chain in all."""
        return self.num_constant + self.num_warmup * (1 + bool(self.num_constant)) + sum(self.looks)

    def in_float64(self) -> "Schedule":
        """Return half of the steps, which take as long."""
        halves = tuple(max(length // 2 // self.num_kept, 1) * self.num_kept for length in self.looks)
        steps = {name: getattr(self, name) // 2 for name in ("num_adam", "num_constant", "num_warmup")}
        return replace(self, **steps, looks=halves, precision="float64")

    def __str__(self) -> str:
        constant = f"{self.num_warmup} + {self.num_constant} steps with constant noise, then " * bool(self.num_constant)
        return (
            f"{self.depth} x {self.units} units, {'noise by row' if self.by_row else 'constant noise'}, "
            f"{self.num_rows} rows, {self.precision}: {constant}{self.num_warmup} of warmup, and "
            f"{' + '.join(map(str, self.looks))}{' adjusted' * self.adjusted} ({self.num_kept} draws kept)"
        )


@dataclass(frozen=True)
class Plan:
    """Rows, candidates and steps of a fit: equal plans and ``random_state`` are equal fits, to the last bit.

    Attributes:
        num_rows: rows of the table, copies left out, as of all that follows.
        schedules: chains by depth; of the depths, those that the budget pays for.
        left_out: what the budget does not pay for.
    """

    # What it is made from.
    task: str  # "regression" or "classification"
    num_rows: int
    num_columns: int
    num_outputs: int
    hidden: str | tuple[int, ...]
    method: str
    noise: str
    num_chains: int
    time_budget: float
    speed: float
    target_transform: str = "none"
    # What it says: rows of each stage, candidates, steps.
    transform_rows: int = 0  # 0: targets as they are, or as asked for
    compared_rows: int = 0
    fitted_rows: int = 0
    known_rows: int = 0
    depths: tuple[int, ...] = (1,)  # of the limits
    by_column: bool = False  # whether limits with scales by column are compared
    structures: tuple[str, ...] = ("dense",)  # of the limits
    race_rows: tuple[int, int] = (0, 0)  # learnt from, left out
    race_runs: tuple[tuple[int, int], ...] = ()  # depth and part of each
    prefers_depth: bool = False
    num_weighted: int = 0
    schedules: tuple[Schedule, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def depth(self) -> int | None:
        """Number of hidden layers, or None to be chosen."""
        return None if isinstance(self.hidden, str) else len(self.hidden)

    def schedule(self, depth: int) -> Schedule | None:
        """Return the chains of a depth; None where the budget pays for none."""
        return next((one for one in self.schedules if one.depth == depth), None)

    def having_run(self, schedule: Schedule) -> "Plan":
        """Return the plan with the chains of a depth as they were run."""
        return replace(
            self, schedules=tuple(schedule if one.depth == schedule.depth else one for one in self.schedules)
        )

    def to_json(self) -> str:
        """Return the plan as a text, from which :meth:`from_json` makes an equal one."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan of a text; ValueError if it is of none."""
        try:
            fields = json.loads(text, object_hook=lambda one: {name: _frozen(value) for name, value in one.items()})
            return cls(**fields | {"schedules": tuple(Schedule(**one) for one in fields["schedules"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"plan must be plan_ of an earlier fit, or its text by to_json(); {error}.") from error

    def __str__(self) -> str:
        lines = [
            f"{self.num_rows} rows, {self.num_columns} columns; method {self.method}, noise {self.noise}; "
            f"{self.time_budget:g} seconds at the speed {self.speed:g}",
            f"limit: {_listed(self.structures)}, layers {_listed(self.depths)}; "
            f"{self.compared_rows or self.known_rows} rows to choose by, {self.fitted_rows or self.known_rows} to fit "
            f"scales to, {self.known_rows} to predict from",
        ]
        if self.race_runs:
            depths, (learnt, held) = _listed(dict.fromkeys(depth for depth, _ in self.race_runs)), self.race_rows
            lines.append(
                f"race: layers {depths}; {learnt} rows to learn from, {held} left out; "
                f"{len(self.race_runs)} runs of {RACE_STEPS} steps of Adam"
            )
        if self.num_weighted:
            lines.append(f"weighted draws: {self.num_weighted}")
        lines += [f"{self.num_chains} chains, {schedule}" for schedule in self.schedules]
        return "\n".join(lines + [f"left out: {line}" for line in self.left_out])


def _listed(values: Iterable[int | str]) -> str:
    return ", ".join(map(str, values))


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def measured_speed() -> float:
    """Measure seconds here for one on the machine of the measurements, once in a process, to a factor of √2."""
    matrix, seconds = np.eye(300) + 1e-3, []
    for _ in range(20):
        start = time.perf_counter()
        np.linalg.cholesky(matrix @ matrix)
        seconds.append(time.perf_counter() - start)
    return round(float(2 ** (np.round(2 * np.log2(min(seconds) / REFERENCE)) / 2)), 3)


def gradient_seconds(num_rows: int, depth: int, width: int, by_row: bool = False) -> float:
    """Estimate the seconds of a gradient, with constant noise or noise by row."""
    share = width / 50
    seconds = GRADIENT + GRADIENT_ROW * num_rows * max(share, depth * share**2)
    return seconds * (GRADIENTS["noise by row"] if by_row else 1.0)


def network_rows(num_rows: int, depth: int, units: int, num_chains: int, seconds: float) -> int:
    """Return the rows of a finite network: all, if some seconds pay for a thousand steps on them."""
    step = GRADIENTS["step"] * num_chains * gradient_seconds(num_rows, depth, units)
    return num_rows if num_rows <= KNOWN or seconds > 2 * FEWEST_STEPS * step else KNOWN


def looks_of(num_steps: int, length: int = FIRST_LOOK) -> tuple[int, ...]:
    """Part steps into runs, each twice as long as the last, and the rest."""
    looks = list[int]()
    while num_steps >= 3 * length:  # with fewer, no run twice as long could follow
        looks.append(length)
        num_steps, length = num_steps - length, 2 * length
    return (*looks, num_steps)


def schedule_of(
    num_rows: int, depth: int, units: int, by_row: bool, num_chains: int, seconds: float, is_raced: bool
) -> Schedule | None:
    """Return the chains of a network in some seconds, compilation included; None where these are too few."""
    seconds -= COMPILING["chains"] + COMPILING["noise by row"] * by_row
    step = GRADIENTS["step"] * num_chains * gradient_seconds(num_rows, depth, units, by_row)
    starts_at_optima = is_raced and units == RACE_UNITS
    if not starts_at_optima:
        seconds -= COMPILING["Adam"]
    num_steps = int(seconds / step)
    if num_steps < FEWEST_STEPS // 4:
        return None
    num_kept = next((number for number in NUM_KEPT if 10 * number <= num_steps), NUM_KEPT[-1])
    num_adam = min(num_steps // 8, MOST_ADAM)
    num_steps -= int(GRADIENTS["prediction"] * num_kept / GRADIENTS["step"])
    num_steps -= 0 if starts_at_optima else int(num_adam / GRADIENTS["step"])
    num_warmup, num_constant = int(WARMUP_SHARE * num_steps), 0
    if by_row and num_warmup >= MOST_WARMUP:  # enough for two
        num_warmup = min(num_warmup // 2, MOST_WARMUP)
        num_constant = min(int(CONSTANT_SHARE * num_steps) - num_warmup, MOST_CONSTANT)
        num_constant -= num_constant % NUM_KEPT[0]
    num_warmup = min(num_warmup, MOST_WARMUP)
    num_samples = num_steps - num_warmup * (1 + bool(num_constant)) - num_constant
    looks = looks_of(max(num_samples - num_samples % num_kept, num_kept))
    kind = depth, units, by_row, num_rows
    return Schedule(*kind, num_adam, num_constant, num_warmup, looks, num_kept, num_pieces=PIECES * len(looks))


def _with_posterior(plan: Plan, seconds: float) -> Plan:
    """Add adjusted chains of one network, on all rows."""
    depth, by_row = plan.depths[0], plan.noise == "by_row"
    units = units_of(plan, depth)
    seconds -= COMPILING["chains"] + COMPILING["Adam"] + COMPILING["noise by row"] * by_row
    step = GRADIENTS["trajectory"] * plan.num_chains * gradient_seconds(plan.num_rows, depth, units, by_row)
    number = int(seconds / step) // TRAJECTORIES - 1
    if number < 1:
        return _without(plan, f"the posterior of {depth} x {units} units: fewer than {2 * TRAJECTORIES} trajectories")
    looks = looks_of(number * TRAJECTORIES, TRAJECTORIES)
    kind = depth, units, by_row, plan.num_rows, MOST_ADAM, 0, TRAJECTORIES, looks, TRAJECTORIES
    return replace(plan, schedules=(Schedule(*kind, num_pieces=PIECES * len(looks), adjusted=True),))


def plan_regression(
    num_rows: int,
    num_columns: int,
    num_outputs: int,
    *,
    hidden: str | Sequence[int] = "auto",
    method: str = "auto",
    noise: str = "auto",
    target_transform: str = "auto",
    num_chains: int = 4,
    time_budget: float = DEFAULT_SECONDS,
    speed: float = 1.0,
) -> Plan:
    """Plan a regression; what depends on the data, such as who wins the race, is left to the fit."""
    seconds = time_budget / speed
    affordable = int(FITTED * (LIMIT_SHARE * seconds / LIMIT_SECONDS) ** (1 / 3))
    compared = min(num_rows, COMPARED, max(affordable, FEW))
    is_told = num_rows > max(WEIGHTED_ROWS, CONSTANT_ROWS * num_columns) and method != "posterior"
    plan = Plan(
        "regression",
        *(num_rows, num_columns, num_outputs, _widths(hidden), method),
        noise="constant" if noise == "auto" and not is_told else noise,
        num_chains=num_chains,
        time_budget=float(time_budget),
        speed=speed,
        target_transform=target_transform,
        transform_rows=min(num_rows, COMPARED) if target_transform == "auto" and num_rows >= FEW else 0,
        compared_rows=compared,
        fitted_rows=min(num_rows, max(min(affordable, FITTED), compared)),
        known_rows=min(num_rows, KNOWN),
        depths=_depths(hidden, LIMIT_DEPTHS if compared >= FEW and method != "posterior" else LIMIT_DEPTHS[:1]),
        by_column=num_columns > 1 and compared >= FEW,
    )
    # A structured network is a limit alone: not for who asks for layers, for draws, or for a noise by row.
    is_free = isinstance(hidden, str) and noise != "by_row" and 1 < num_columns <= STRUCTURED_COLUMNS
    pays = method == "limit" or (method == "auto" and seconds >= 2 * SEVERAL)
    if is_free and pays and num_rows >= FEW:
        plan = replace(plan, structures=("dense", "additive", "both"))
    if method == "limit":
        return plan
    if plan.noise != noise and method != "posterior":
        plan = _without(plan, "noise by row: the rows, ten a column or fewer, do not tell one that varies")
    is_raced = num_rows > WEIGHTED_ROWS and seconds >= SEVERAL and method != "weighted"
    race_seconds = RACE_SHARE * seconds
    learnt = min(int(0.8 * plan.known_rows), max(RACE_ROWS[0], int(RACE_ROWS[1] * seconds)))
    held = min(plan.known_rows - learnt, RACE_ROWS[2])
    seconds -= min(LIMIT_SHARE * seconds, LIMIT_SECONDS * plan.fitted_rows / FITTED)
    if method == "posterior":
        return _with_posterior(plan, seconds)
    if method == "weighted" or (method == "auto" and num_rows <= WEIGHTED_ROWS):
        plan, seconds = _with_weighted(plan, seconds)
    if method == "weighted":
        return plan
    if not is_raced:
        return _with_chains(plan, num_rows, seconds, plan.depths)
    race_seconds = max(race_seconds, COMPILING["race"] + RACE_ROW * learnt)
    plan = _with_chains(plan, num_rows, seconds - race_seconds, _depths(hidden, RACE_DEPTHS), is_raced=True)
    depths = [depth for depth in _depths(hidden, RACE_DEPTHS) if plan.schedule(depth)]
    runs = [(depth, part) for part in range(min(RACE_PARTS, -(-plan.known_rows // held))) for depth in depths]
    number = int((race_seconds - COMPILING["race"]) / (RACE_ROW * learnt))
    if number > len(depths) > 0:
        number -= number % len(depths)  # every part has all
    return replace(plan, race_rows=(learnt, held), race_runs=tuple(runs[:number]))


def plan_classification(
    num_rows: int,
    num_columns: int,
    num_classes: int,
    *,
    hidden: str | Sequence[int] = "auto",
    method: str = "auto",
    num_chains: int = 4,
    time_budget: float = DEFAULT_SECONDS,
    speed: float = 1.0,
) -> Plan:
    """Plan a classification, whose chains are run twice, the first time on four fifths of the rows."""
    seconds = time_budget / speed
    known = min(num_rows, max(FEW, int(min(1.0, (seconds / CODES_SECONDS) ** (1 / 3)) * KNOWN)))
    plan = Plan(
        "classification",
        *(num_rows, num_columns, num_classes, _widths(hidden), method),
        noise="constant",
        num_chains=num_chains,
        time_budget=float(time_budget),
        speed=speed,
        known_rows=known,
        depths=_depths(hidden, LIMIT_DEPTHS if seconds >= SEVERAL else LIMIT_DEPTHS[:1]),
        by_column=seconds >= SEVERAL,
    )
    seconds -= CODES_SECONDS * (known / KNOWN) ** 3
    return plan if method == "limit" else _with_chains(plan, known, seconds / 2, plan.depths)


def _depths(hidden: str | Sequence[int], several: tuple[int, ...]) -> tuple[int, ...]:
    return several if isinstance(hidden, str) else (len(hidden),)


def _widths(hidden: str | Sequence[int]) -> str | tuple[int, ...]:
    return hidden if isinstance(hidden, str) else tuple(map(int, hidden))


def _without(plan: Plan, line: str) -> Plan:
    """Return the plan with a line on what is left out."""
    return replace(plan, left_out=(*plan.left_out, line))


def units_of(plan: Plan, depth: int) -> int:
    """Return the units of a layer."""
    if not isinstance(plan.hidden, str):
        return plan.hidden[0]
    return UNITS if depth == 1 or plan.num_rows <= WEIGHTED_ROWS else RACE_UNITS


def _with_weighted(plan: Plan, seconds: float) -> tuple[Plan, float]:
    """Add weighted draws of the prior, and return the seconds left."""
    units = units_of(plan, max(plan.depths))
    draw = GRADIENTS["weighted draw"] * gradient_seconds(
        plan.num_rows, max(plan.depths), units, plan.noise != "constant"
    )
    most = (seconds - COMPILING["weighted draws"]) / draw
    least = NUM_WEIGHTED[-1] if plan.method == "weighted" else 0
    number = next((number for number in NUM_WEIGHTED if number <= most), least)
    return replace(plan, num_weighted=number), seconds - COMPILING["weighted draws"] - number * draw


def _with_chains(plan: Plan, num_rows: int, seconds: float, depths: tuple[int, ...], is_raced: bool = False) -> Plan:
    """Add chains by depth: those of enough steps, by row if there are for that, or else the cheapest."""
    noises = {"auto": (True, False), "by_row": (True,), "constant": (False,)}[plan.noise]
    schedules, short = list[Schedule](), list[Schedule]()
    for depth in sorted({*depths, *plan.depths}):
        units = units_of(plan, depth)
        rows = network_rows(num_rows, depth, units, plan.num_chains, seconds)
        form = plan.num_chains, seconds, is_raced
        tried = [schedule_of(rows, depth, units, by_row, *form) for by_row in noises]
        long = [one for one in tried if one is not None and one.num_steps >= FEWEST_STEPS]
        short += [one for one in tried[-1:] if one is not None and not long]
        schedules += long[:1]
        if not long or long[0] is not tried[0]:
            what = "noise by row" if long else "chains"
            plan = _without(plan, f"{what} of {depth} x {units} units: fewer than {FEWEST_STEPS} steps")
        if rows < num_rows:
            plan = _without(plan, f"{num_rows - rows} rows, from the chains of {depth} x {units} units")
    schedules = schedules or short[:1]
    many = max((one.num_steps for one in schedules if one.depth == max(depths)), default=0)
    return replace(plan, schedules=tuple(schedules), prefers_depth=many >= MANY_STEPS)
