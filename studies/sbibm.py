"""Amortised guides on a public benchmark: eight simulators, posteriors known, published scores beside ours.

Guides for all observations of a task are trained on a budget of simulations, a tenth of it held out. The held-out loss
alone chooses the weight decay of the hidden layers, the step to stop at, and how to join guides of several seeds: as a
mixture, or by the mean of what their networks compute. With --emulated a guide for the data given the parameters is
trained first, on the same simulations, and its draws are added to them. A classifier then tells draws from reference
draws (C2ST, 0.5 is perfect). Without a folder of references only "gaussian_linear" runs, against its closed form.
Prints a table, and draws a figure.

    python studies/sbibm.py --data ../shared/data/sbibm
    python studies/sbibm.py --data ../shared/data/sbibm --tasks lotka_volterra --budgets 100000
"""

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import Predictive

import _common
import _sbibm_tasks
from numpyro_wide import AmortizedForwardKL, calibration
from numpyro_wide.amortized import importance_sample
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.nn import ResidualEncoder

ALGORITHMS = ("NPE", "SNPE", "NLE", "REJ-ABC")
AVERAGED = ("normal", "independent")  # families whose components have no order to agree on


class Cell(NamedTuple):
    """One training."""

    task: str
    family: str
    budget: int
    seed: int
    num_epochs: int
    num_guides: int
    width: int  # of the encoder
    factor: str  # of joint normals
    emulated: int  # simulations by a network, beside those of the budget
    emulator_width: int  # of that network's encoder


class Row(NamedTuple):
    """What it gave: what was chosen, held-out loss in nats, seconds of all trainings, and C2ST."""

    decay: float
    is_averaged: float
    held_out: float
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
        return float(np.nanmean(self[5:]))


class Encoders(linen.Module):
    """Encoders of several guides side by side, for one guide that averages what their linear layers compute."""

    number: int
    width: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the features of all."""
        return jnp.concatenate([ResidualEncoder(self.width, name=f"guide_{i}")(x) for i in range(self.number)], axis=1)


def averaged(members: list[dict]) -> dict:
    """Return the parameters of the guide with all encoders. The loss is convex in the averages of c and A."""
    heads = [params["auto_head"] for params in members]
    encoder = {f"guide_{i}": params["auto_encoder"] for i, params in enumerate(members)}
    kernel = jnp.concatenate([head["kernel"] for head in heads]) / len(heads)
    bias = jnp.mean(jnp.stack([head["bias"] for head in heads]), axis=0)
    return members[0] | {"auto_encoder": encoder, "auto_head": {"kernel": kernel, "bias": bias}}


class Guides(NamedTuple):
    """Guides of one architecture, the best held-out one first, whose mixture is the posterior."""

    guide: AutoAmortized
    params: list[dict]
    decay: float
    is_averaged: bool
    held_out: float
    seconds: float

    def draw(self, seed: int, num_draws: int, data: dict) -> np.ndarray:
        """Draw as many from each guide."""
        share = -(-num_draws // len(self.params))
        draws = [
            Predictive(self.guide, params=params, num_samples=share)(jax.random.key(seed + number), data)["theta"]
            for number, params in enumerate(self.params)
        ]
        return np.concatenate(draws)[:num_draws]


def is_decayed(params: dict) -> dict:
    """Tell which weights decay: those of hidden layers. Biases, and what is linear in features or data, do not."""

    def told(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim > 1 and "head" not in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(told, params)


def trainer_of(model, guide: AutoAmortized, cell: Cell, decay: float, observed: str = "x") -> AmortizedForwardKL:
    """Return a trainer by Adam, with weight decay and a step that falls to zero."""
    _, batch_size, num_steps = _sbibm_tasks.lengths_of(cell.budget, cell.num_epochs)
    adamw = optax.adamw(optax.cosine_decay_schedule(2e-3, num_steps), weight_decay=decay, mask=is_decayed)
    optimiser = optax.chain(optax.clip_by_global_norm(5.0), adamw)
    return AmortizedForwardKL(model, guide, optimiser, observed=observed, batch_size=batch_size)


def trained(trainer: AmortizedForwardKL, cell: Cell, simulations: dict, number: int) -> tuple[float, dict]:
    """Return the least held-out loss of a training with its own number, and the parameters that have it."""
    held_out, _, num_steps = _sbibm_tasks.lengths_of(cell.budget, cell.num_epochs)
    options = {"simulations": simulations, "held_out": held_out, "progress_bar": False}
    result = trainer.run(jax.random.key(1000 * cell.seed + number), num_steps, **options)
    return float(result.state.held_out.best_loss), result.params


def emulator_of(family: str, simulations: dict, width: int, *, are_positive: bool) -> AutoAmortized:
    """Make a guide for the data given the parameters."""
    theta, x = simulations["theta"], simulations["x"]
    distribution = dist.LogNormal if are_positive else dist.Normal

    def model():  # gives names, shapes and supports
        numpyro.sample("theta", dist.Normal(0, 1).expand(theta.shape[1:]).to_event(1))
        numpyro.sample("x", distribution(0, 1).expand(x.shape[1:]).to_event(1))

    options = {"factor": "covariance"} if family == "normal" else {}
    encoder = ResidualEncoder(width)
    return AutoAmortized(model, observed="theta", sites=["x"], family=family, encoder=encoder, **options)


def with_emulated(model, cell: Cell, simulations: dict, decays: list[float]) -> dict:
    """Put simulations by a network in front: a guide for the data, given the parameters, that is trained on these."""
    sites = handlers.trace(handlers.seed(model, 0)).get_trace()
    unconstrain = biject_to(sites["theta"]["fn"].support).inv
    real = simulations["x"]
    least, most = real.min(0), real.max(0)
    are_counts = np.array_equal(real, np.round(real))
    # Square roots of counts, made continuous, have nearly the same noise everywhere.
    learnt = np.sqrt(real + np.random.default_rng(cell.seed).random(real.shape)) if are_counts else real
    known = {"theta": np.asarray(jax.jit(jax.vmap(unconstrain))(simulations["theta"])), "x": np.float32(learnt)}

    family, are_positive = _sbibm_tasks.TASKS[cell.task].emulator, not are_counts and bool(np.all(real > 0))
    guide = emulator_of(family, known, cell.emulator_width, are_positive=are_positive)
    trainers = [trainer_of(guide.model, guide, cell, decay, observed="theta") for decay in decays]
    _, params = min((trained(trainer, cell, known, 500) for trainer in trainers), key=lambda entry: entry[0])

    def single(key: jax.Array) -> dict[str, jax.Array]:
        prior_key, data_key = jax.random.split(key)
        theta = Predictive(model, num_samples=1, return_sites=["theta"])(prior_key)["theta"]
        given = {"theta": unconstrain(theta[0])}
        return {"theta": theta} | Predictive(guide, params=params, num_samples=1)(data_key, given)

    emulated = _sbibm_tasks.drawn(single, cell.emulated, 2000 + cell.seed)
    if are_counts:
        emulated["x"] = np.clip(np.floor(np.maximum(emulated["x"], 0) ** 2), least, most)
    # What lies beyond all simulations the network has not learnt.
    is_known = np.all((emulated["x"] >= least) & (emulated["x"] <= most), axis=1)
    return {name: np.concatenate([emulated[name][is_known], values]) for name, values in simulations.items()}


def train(model, cell: Cell, decays: list[float]) -> Guides:
    """Train guides on a budget, one for each weight decay and more with that of the best, and join them."""
    start = time.perf_counter()
    simulations = _sbibm_tasks.simulations_of(model, cell.budget, cell.seed)
    held_out, *_ = _sbibm_tasks.lengths_of(cell.budget, cell.num_epochs)
    apart = {name: values[-held_out:] for name, values in simulations.items()}
    if cell.emulated:
        simulations = with_emulated(model, cell, simulations, decays)
    make = partial(AutoAmortized, model, observed="x", family=cell.family, sites=["theta"], factor=cell.factor)
    guide = make(encoder=ResidualEncoder(cell.width))

    found = []
    for decay in decays:
        trainer = trainer_of(model, guide, cell, decay)
        found.append((*trained(trainer, cell, simulations, 0), decay, trainer))
    loss, params, decay, trainer = min(found, key=lambda entry: entry[0])
    others = [trained(trainer, cell, simulations, number) for number in range(1, cell.num_guides)]
    members = sorted([(loss, params), *others], key=lambda entry: entry[0])
    params = [params for _, params in members]
    log_probs = jnp.stack([trainer.guide_log_prob(member, apart) for member in params])
    loss = np.log(cell.num_guides) - float(jnp.mean(logsumexp(log_probs, axis=0)))
    is_averaged = False
    if cell.family in AVERAGED:
        joint = make(encoder=Encoders(len(params), cell.width))
        trainer = trainer_of(model, joint, cell, decay)
        mean = averaged(params)
        loss_of_mean = -float(jnp.mean(trainer.guide_log_prob(mean, apart)))
        if is_averaged := loss_of_mean < loss:
            guide, params, loss = joint, [mean], loss_of_mean
    return Guides(guide, params, decay, is_averaged, loss, time.perf_counter() - start)


def weighted_draws(model, guides: Guides, seed: int, num_draws: int, data: dict) -> np.ndarray:
    """Draw ten times as many from the first guide, and of these in proportion to their importance."""
    found = importance_sample(jax.random.key(seed), 10 * num_draws, model, guides.guide, guides.params[0], data)
    weights = np.exp(np.float64(found.log_weights))
    rows = np.random.default_rng(seed).choice(10 * num_draws, num_draws, p=weights / weights.sum())
    return np.asarray(found.samples["theta"])[rows]


def score(cell: Cell, options) -> Row:
    """Train, and tell draws from the references'."""
    task = _sbibm_tasks.TASKS[cell.task]
    model, reference = _sbibm_tasks.load(cell.task, options.data)
    guides = train(model, cell, options.decays)
    num_draws = min(options.num_draws, reference.draws.shape[1])
    found, corrected = np.full(_sbibm_tasks.NUM_OBSERVATIONS, np.nan), []
    for number in range(options.num_observations):
        data = {"x": jnp.asarray(reference.observation[number], jnp.float32)}
        key, exact = jax.random.key(number), reference.draws[number, :num_draws]
        found[number] = calibration.c2st(key, guides.draw(100 * number, num_draws, data), exact)
        if task.is_corrected:
            draws = weighted_draws(model, guides, number, num_draws, data)
            corrected.append(calibration.c2st(key, draws, exact))
    mean = float(np.mean(corrected)) if corrected else np.nan
    return Row(guides.decay, float(guides.is_averaged), guides.held_out, guides.seconds, mean, *found)


def table_of(rows: dict[Cell, Row], folder: Path | None) -> list[dict]:
    """Make one row for each task, family and budget, with published scores beside ours."""
    others = _sbibm_tasks.published(folder)
    groups: dict[tuple, list[Row]] = {}
    for cell, row in rows.items():
        groups.setdefault(cell._replace(seed=0), []).append(row)
    table = []
    for (task, family, budget, _, num_epochs, num_guides, width, factor, emulated, by), found in sorted(groups.items()):
        line = {"task": task, "simulations": budget, "family": family, "epochs": num_epochs, "guides": num_guides}
        line |= {"emulated": emulated or "", "emulator's width": by if emulated else ""}
        line |= {"width": width, "factor": factor if family in ("normal", "mixture") else "", "seeds": len(found)}
        rivals = {name: f"{others[task, budget, name]:.3f}" for name in ALGORITHMS if (task, budget, name) in others}
        trained = {"held-out loss": np.mean([row.held_out for row in found]).round(3)}
        trained |= {"weight decay": "/".join(f"{row.decay:g}" for row in found)}
        trained |= {"seconds": f"{np.mean([row.seconds for row in found]):.0f}"}
        trained |= {"joined as": "/".join("mean" if row.is_averaged else "mixture" for row in found)}
        scored = {"observations": int(np.sum(np.isfinite(found[0][5:])))}
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
        ax.semilogx(budgets, [rows[cell].mean for cell in cells], "ko", label="AutoAmortized")
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
        num_epochs=(50, "epochs of each training"),
        num_guides=(3, "guides that are joined"),
        width=(256, "units of the encoder's layers"),
        num_observations=(_sbibm_tasks.NUM_OBSERVATIONS, "observations to score"),
        num_draws=(10_000, "draws to tell from as many of the reference; fewer flatter"),
        decays=([0.3, 1.0, 5.0], "weight decays, of which held-out simulations choose one"),
        family=("", "family of the guides, by default the task's own"),
        factor=("precision", "of joint normals: precision or covariance"),
        emulated=(0, "simulations to add by a network that learns the simulator"),
        emulator_width=(512, "units of its encoder's layers"),
    )
    everything = list(_sbibm_tasks.TASKS) if options.data else ["gaussian_linear"]
    tasks = everything if options.tasks == ["all"] else options.tasks
    cells = [
        Cell(
            task,
            options.family or _sbibm_tasks.TASKS[task].family,
            budget,
            seed,
            options.num_epochs,
            options.num_guides,
            options.width,
            options.factor,
            options.emulated,
            options.emulator_width,
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
