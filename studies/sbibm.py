"""Amortised guides on a public benchmark: eight simulators, posteriors known, published scores beside ours.

One guide for all observations of a task is trained on a budget of simulations, and told from reference draws by a
classifier (C2ST, 0.5 is perfect). Settings are chosen by the loss on held-out simulations alone. Without a folder of
references only "gaussian_linear" runs, against its closed form. Prints a table, and draws a figure.

    python studies/sbibm.py --data ../shared/data/sbibm
    python studies/sbibm.py --data ../shared/data/sbibm --tasks lotka_volterra --budgets 100000
"""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from numpyro.infer import Predictive

import _common
import _sbibm_tasks
from numpyro_wide import AmortizedForwardKL, calibration
from numpyro_wide.autoguide import AutoAmortized

ALGORITHMS = ("NPE", "SNPE", "NLE", "REJ-ABC")
BATCH_SIZE = 256


class Cell(NamedTuple):
    """One training."""

    task: str
    family: str
    budget: int
    seed: int
    num_epochs: int


class Row(NamedTuple):
    """What it gave: weight decay that was best, its held-out loss in nats, seconds of all trainings, and C2ST."""

    decay: float
    held_out: float
    seconds: float
    c2st_1: float
    c2st_2: float
    c2st_3: float
    c2st_4: float
    c2st_5: float

    @property
    def mean(self) -> float:
        """Mean C2ST."""
        return float(np.mean(self[3:]))


def simulations_of(model, budget: int, seed: int) -> dict[str, np.ndarray]:
    """Simulate a budget; NumPy arrays of "theta" and "x"."""
    single = lambda key: Predictive(model, num_samples=1, return_sites=["theta", "x"])(key)  # noqa: E731
    keys = jax.random.split(jax.random.key(1000 + seed), budget)
    draws = jax.jit(lambda keys: jax.lax.map(single, keys, batch_size=min(budget, 1000)))(keys)
    return {name: np.asarray(values)[:, 0] for name, values in draws.items()}


def train(model, cell: Cell, decays: list[float]):
    """Train guides on a budget, a tenth of it held out; return the best, its result, weight decay, and seconds."""
    simulations = simulations_of(model, cell.budget, cell.seed)
    held_out = cell.budget // 10
    batch_size = min(BATCH_SIZE, (cell.budget - held_out) // 4)
    num_steps = cell.num_epochs * ((cell.budget - held_out) // batch_size)
    schedule = optax.cosine_decay_schedule(2e-3, num_steps)
    guide = AutoAmortized(model, observed="x", family=cell.family, sites=["theta"])
    start, found = time.perf_counter(), []
    for decay in decays:
        optimiser = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(schedule, weight_decay=decay))
        trainer = AmortizedForwardKL(model, guide, optimiser, observed="x", batch_size=batch_size)
        key, options = jax.random.key(cell.seed), {"simulations": simulations, "held_out": held_out}
        result = trainer.run(key, num_steps, progress_bar=False, **options)
        found.append((float(result.state.held_out.best_loss), decay, result))
    _, decay, result = min(found, key=lambda entry: entry[0])
    return guide, result, decay, time.perf_counter() - start


def score(cell: Cell, folder: Path | None, most_draws: int, decays: list[float]) -> Row:
    """Train, and tell draws from the references'."""
    model, reference = _sbibm_tasks.load(cell.task, folder)
    guide, result, decay, seconds = train(model, cell, decays)
    num_draws = min(most_draws, reference.draws.shape[1])
    ask = Predictive(guide, params=result.params, num_samples=num_draws)
    found = []
    for number, (observation, exact) in enumerate(zip(reference.observation, reference.draws, strict=True)):
        data = {"x": jnp.asarray(observation, jnp.float32)}
        draws = ask(jax.random.key(number), data)["theta"]
        found.append(calibration.c2st(jax.random.key(number), draws, exact[:num_draws]))
    return Row(decay, float(result.state.held_out.best_loss), seconds, *found)


def table_of(rows: dict[Cell, Row], folder: Path | None) -> list[dict]:
    """Make one row for each task, family and budget, with published scores beside ours."""
    others = _sbibm_tasks.published(folder)
    groups: dict[tuple, list[Row]] = {}
    for cell, row in rows.items():
        groups.setdefault((cell.task, cell.budget, cell.family, cell.num_epochs), []).append(row)
    table = []
    for (task, budget, family, num_epochs), found in sorted(groups.items()):
        line = {"task": task, "simulations": budget, "family": family, "epochs": num_epochs, "seeds": len(found)}
        line |= {"C2ST": _common.with_error([row.mean for row in found])}
        line |= {name: f"{others[task, budget, name]:.3f}" for name in ALGORITHMS if (task, budget, name) in others}
        line |= {"held-out loss": np.mean([row.held_out for row in found]).round(3)}
        line |= {"weight decay": "/".join(f"{row.decay:g}" for row in found)}
        table.append(line | {"seconds": round(np.mean([row.seconds for row in found]))})
    return table


def draw(rows: dict[Cell, Row], options) -> None:
    """Draw C2ST against the number of simulations, a panel for each task."""
    others, names = _sbibm_tasks.published(options.data), sorted({cell.task for cell in rows})
    figure, axes = plt.subplots(2, 4, figsize=(11, 5), layout="constrained", sharey=True, squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        cells = sorted((cell for cell in rows if cell.task == name), key=lambda cell: cell.budget)
        ax.semilogx([cell.budget for cell in cells], [rows[cell].mean for cell in cells], "ko", label="here")
        for algorithm in ALGORITHMS:
            line = {budget: c2st for (task, budget, kind), c2st in others.items() if (task, kind) == (name, algorithm)}
            ax.semilogx(list(line), list(line.values()), "-", linewidth=1, label=algorithm)
        ax.set(title=name, ylim=(0.48, 1.02))
        ax.title.set_size("small")
    for ax in axes.flat[len(names) :]:
        ax.axis("off")
    axes.flat[0].legend(fontsize="x-small")
    figure.supxlabel("simulations")
    figure.supylabel("C2ST")
    _common.save(figure, options, "sbibm.png", dpi=120)


def main() -> None:
    """Run what is asked for, and show all that was run."""
    options = _common.arguments(
        __doc__,
        data={"type": Path, "default": None, "help": "folder of the references and published scores"},
        tasks=(["all"], "names of tasks"),
        budgets=([1000, 10_000], "numbers of simulations"),
        seeds=(1, "number of seeds"),
        num_epochs=(100, "epochs of each training"),
        num_draws=(10_000, "draws to tell from as many of the reference; fewer flatter"),
        decays=([0.1, 0.3, 1.0, 5.0], "weight decays, of which held-out simulations choose one"),
        family=("", "family of the guides, by default the task's own"),
    )
    everything = list(_sbibm_tasks.TASKS) if options.data else ["gaussian_linear"]
    tasks = everything if options.tasks == ["all"] else options.tasks
    cells = [
        Cell(task, options.family or _sbibm_tasks.TASKS[task].family, budget, seed, options.num_epochs)
        for task in tasks
        for budget in options.budgets
        for seed in range(options.seeds)
    ]
    rows = _common.resumed(
        options.output / "sbibm.csv",
        cells,
        Row,
        lambda cell: score(cell, options.data, options.num_draws, options.decays),
        unit="training",
        name=lambda cell: f"{cell.task}, {cell.budget}",
    )
    _common.write_table(table_of(rows, options.data), options.output / "sbibm_summary.csv")
    draw(rows, options)


if __name__ == "__main__":
    main()
