"""Amortised guides on a public benchmark: eight simulators, posteriors known, published scores beside ours.

One call of `amortized.fit` for each task, budget of simulations and seed: held-out simulations choose everything. With
--emulate a network may learn the simulator first. A classifier then tells draws from reference draws (C2ST, 0.5 is
perfect). Without a folder of references only "gaussian_linear" runs, against its closed form. Prints a table, and draws
a figure.

    python studies/sbibm.py --data ../shared/data/sbibm
    python studies/sbibm.py --data ../shared/data/sbibm --tasks lotka_volterra --budgets 10000 --emulate 1
"""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import _common
import _sbibm_tasks
from numpyro_wide import amortized, calibration

ALGORITHMS = ("NPE", "SNPE", "NLE", "REJ-ABC")
FAMILIES = ("normal", "independent", "mixture", "flow")
JOINED = ("single", "mixture", "mean")


class Cell(NamedTuple):
    """One training."""

    task: str
    family: str
    budget: int
    seed: int
    emulate: int
    num_steps: int  # 0 for the default


class Row(NamedTuple):
    """What it gave: what was chosen, held-out loss in nats, processor seconds, and C2ST."""

    chosen: float  # place in FAMILIES
    is_covariance: float  # of factors
    decay: float
    width: float
    is_emulated: float
    joined: float  # place in JOINED
    held_out: float
    gain: float
    seconds: float
    corrected: float  # mean C2ST of draws weighted by importance, NaN where the task does not ask for it
    c2st_1: float
    c2st_2: float
    c2st_3: float
    c2st_4: float
    c2st_5: float

    @property
    def mean(self) -> float:
        """Mean C2ST over the observations that were scored."""
        return float(np.nanmean(self[-5:]))


def weighted_draws(model, fit: amortized.AmortizedFit, seed: int, num_draws: int, data: dict) -> np.ndarray:
    """Draw ten times as many, and of these in proportion to their importance."""
    key = jax.random.key(seed)
    weighted = amortized.importance_sample(key, 10 * num_draws, model, fit.guide, fit.params, data)
    weights = np.exp(np.float64(weighted.log_weights))
    rows = np.random.default_rng(seed).choice(10 * num_draws, num_draws, p=weights / weights.sum())
    return np.asarray(weighted.samples["theta"])[rows]


def score(cell: Cell, options) -> Row:
    """Train, and tell draws from the references'."""
    task = _sbibm_tasks.TASKS[cell.task]
    model, reference = _sbibm_tasks.load(cell.task, options.data)
    start = time.process_time()
    fit = amortized.fit(
        jax.random.key(cell.seed),
        model,
        observed="x",
        sites=["theta"],
        family=cell.family,
        emulate=bool(cell.emulate),
        num_simulations=cell.budget,
        num_steps=cell.num_steps or "auto",
        progress_bar=False,
    )
    seconds = time.process_time() - start
    print(f"\n{cell}: {seconds:.0f} processor seconds")
    _common.print_table(fit.report.trials)
    num_draws = min(options.num_draws, reference.draws.shape[1])
    scores, corrected = np.full(_sbibm_tasks.NUM_OBSERVATIONS, np.nan), []
    for number in range(options.num_observations):
        data = {"x": jnp.asarray(reference.observation[number], jnp.float32)}
        key, exact = jax.random.key(number), reference.draws[number, :num_draws]
        scores[number] = calibration.c2st(key, fit.sample(key, data, num_draws)["theta"], exact)
        if task.is_corrected:
            corrected.append(calibration.c2st(key, weighted_draws(model, fit, number, num_draws, data), exact))
    best, report = fit.report.trials[0], fit.report
    setting = FAMILIES.index(best["family"]), best["factor"] == "covariance", best["weight_decay"], best["width"]
    setting = *map(float, setting), float(best["is_emulated"]), JOINED.index(report.joined)
    mean = float(np.mean(corrected)) if corrected else np.nan
    return Row(*setting, report.held_out, report.gain, seconds, mean, *scores)


def table_of(rows: dict[Cell, Row], folder: Path | None) -> list[dict]:
    """Make one row for each task, family and budget, with published scores beside ours."""
    others = _sbibm_tasks.published(folder)
    groups: dict[tuple, list[Row]] = {}
    for cell, row in rows.items():
        groups.setdefault(cell._replace(seed=0), []).append(row)
    table = []
    for (task, family, budget, *_), found in sorted(groups.items()):
        line = {"task": task, "simulations": budget, "family": family, "seeds": len(found)}
        rivals = {name: f"{others[task, budget, name]:.3f}" for name in ALGORITHMS if (task, budget, name) in others}
        trained = {"held-out loss": np.mean([row.held_out for row in found]).round(3)}
        trained |= {"chosen": "/".join(FAMILIES[int(row.chosen)] for row in found)}
        trained |= {"factor": "/".join("covariance" if row.is_covariance else "precision" for row in found)}
        trained |= {"weight decay": "/".join(f"{row.decay:g}" for row in found)}
        trained |= {"width": "/".join(f"{row.width:g}" for row in found)}
        trained |= {"core seconds": f"{np.mean([row.seconds for row in found]):.0f}"}
        trained |= {"joined as": "/".join(JOINED[int(row.joined)] for row in found)}
        trained |= {"emulated": "/".join("yes" if row.is_emulated else "no" for row in found)}
        scored = {"observations": int(np.sum(np.isfinite(found[0][-5:])))}
        table.append(line | scored | {"C2ST": _common.with_error([row.mean for row in found])} | rivals | trained)
        if np.isfinite(found[0].corrected):
            corrected = _common.with_error([row.corrected for row in found])
            line["family"] += ", importance-corrected"
            table.append(line | scored | {"C2ST": corrected} | rivals)
    return table


def draw(rows: dict[Cell, Row], options) -> None:
    """Draw C2ST against the number of simulations, a panel for each task."""
    others = _sbibm_tasks.published(options.data)
    names = [name for name in _sbibm_tasks.TASKS if any(cell.task == name for cell in rows)]
    figure, axes = plt.subplots(2, 4, figsize=(10, 5), layout="constrained", sharey=True, squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        for algorithm in ALGORITHMS:
            line = {budget: c2st for (task, budget, kind), c2st in others.items() if (task, kind) == (name, algorithm)}
            ax.semilogx(list(line), list(line.values()), "-", linewidth=1, label=f"{algorithm}, published")
        cells = sorted((cell for cell in rows if cell.task == name), key=lambda cell: cell.budget)
        budgets = [cell.budget for cell in cells]
        ax.semilogx(budgets, [rows[cell].mean for cell in cells], "ko", label="amortized.fit")
        ax.semilogx(budgets, [rows[cell].corrected for cell in cells], "k+", label="importance-corrected")
        ax.axhline(0.5, color="0.5", linewidth=1, linestyle=":")
        ax.set(title=name, ylim=(0.45, 1.02), xlabel="simulations")
        ax.title.set_size("small")
    for ax in axes.flat[len(names) :]:
        ax.axis("off")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
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
        num_observations=(_sbibm_tasks.NUM_OBSERVATIONS, "observations to score"),
        num_draws=(10_000, "draws to tell from as many of the reference; fewer flatter"),
        family=("auto", "family of the guides, by default the best by held-out loss"),
        emulate=(0, "1 to try simulations by a network that learns the simulator"),
        num_steps=(0, "steps of all trainings of a cell, 0 for the default"),
    )
    everything = list(_sbibm_tasks.TASKS) if options.data else ["gaussian_linear"]
    tasks = everything if options.tasks == ["all"] else options.tasks
    cells = [
        Cell(
            task,
            options.family,
            budget,
            seed,
            options.emulate,
            options.num_steps,
        )
        for task in tasks
        for budget in options.budgets
        for seed in range(options.seeds)
    ]
    rows = _common.resumed(
        options.output / "sbibm.csv",
        cells,
        Row,
        lambda cell: score(cell, options),
        unit="training",
        name=lambda cell: f"{cell.task}, {cell.budget}",
    )
    _common.write_table(table_of(rows, options.data), options.output / "sbibm_summary.csv")
    draw(rows, options)


if __name__ == "__main__":
    main()
