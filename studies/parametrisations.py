"""Does an amortised normal train better in natural parameters? Three parametrisations, by width, over seeds.

The expected forward KL is convex in natural parameters (McNamara 2025, Lemma 1), which speaks for computing those by a
network: (Λμ, Λ). Beside it both forms of :class:`AutoAmortized`: regressions, convex in the coefficients for given
residual variances, and mean and Cholesky factor of the covariance. Same simulations of Lotka-Volterra's equations,
encoder, optimiser and steps; held-out losses in nats, at the best of two learning rates. Prints a table.

    python studies/parametrisations.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.contrib.module import flax_module
from numpyro.distributions import biject_to

import _common
import _sbibm_tasks
from numpyro_wide import AmortizedForwardKL, natural
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.nn import ResidualEncoder

DIM = 4
FACTORS = {"mean and factor": "covariance", "regressions": "precision"}  # of AutoAmortized
FORMS = ("natural", *FACTORS)
STANDARDISED = dist.MultivariateNormal(jnp.zeros(DIM), jnp.eye(DIM))


class Cell(NamedTuple):
    """One training."""

    form: str
    width: int
    learning_rate: float
    seed: int
    num_simulations: int
    num_epochs: int


class Row(NamedTuple):
    """What it gave: losses in nats, training's the mean over its last epoch."""

    held_out: float
    training: float


def natural_normal(outputs: jax.Array) -> dist.Distribution:
    """Make the normal distribution of standardised latents from a network's outputs; N(0, I) where these are zero."""
    into = biject_to(natural.domain(natural.MultivariateNormal))
    return natural.MultivariateNormal(into(outputs + into.inv(natural.parameters(STANDARDISED))))


def guide_of(form: str, width: int, simulations: dict[str, np.ndarray]):
    """Make the guide: the shipped one, or the same with another head."""
    if form in FACTORS:
        options = {"sites": ["theta"], "encoder": ResidualEncoder(width), "factor": FACTORS[form]}
        return AutoAmortized(_sbibm_tasks.lotka_volterra, observed="x", **options)
    loc, scale = (moment(np.log(simulations["theta"]), axis=0) for moment in (np.mean, np.std))
    log_data = np.log(simulations["x"])
    into = [dist.transforms.AffineTransform(loc, scale), dist.transforms.ExpTransform()]

    def guide(observed):
        data = (jnp.log(observed["x"]) - log_data.mean(axis=0)) / log_data.std(axis=0)
        features = flax_module("encoder", ResidualEncoder(width), input_shape=(1, 20))(data[None])[0]
        shape = (len(features), DIM * (DIM + 3) // 2)
        outputs = features @ numpyro.param("kernel", jnp.zeros(shape)) + numpyro.param("bias", jnp.zeros(shape[1]))
        numpyro.sample("theta", dist.TransformedDistribution(natural_normal(outputs), into))

    return guide


def train(cell: Cell, simulations: dict[str, np.ndarray]) -> Row:
    """Train one guide."""
    model = _sbibm_tasks.lotka_volterra
    held_out, batch_size, num_steps = _sbibm_tasks.lengths_of(cell.num_simulations, cell.num_epochs)
    adam = optax.adam(optax.cosine_decay_schedule(cell.learning_rate, num_steps))
    optimiser = optax.chain(optax.clip_by_global_norm(5.0), adam)
    guide = guide_of(cell.form, cell.width, simulations)
    trainer = AmortizedForwardKL(model, guide, optimiser, observed="x", batch_size=batch_size)
    options = {"simulations": simulations, "held_out": held_out, "progress_bar": False}
    result = trainer.run(jax.random.key(cell.seed), num_steps, **options)
    return Row(float(result.state.held_out.best_loss), float(np.mean(result.losses[-(num_steps // cell.num_epochs) :])))


def table_of(rows: dict[Cell, Row]) -> list[dict]:
    """Make one row for each form and width, at its best learning rate."""
    table = []
    for form, width in dict.fromkeys((cell.form, cell.width) for cell in rows):
        of_rate = {}
        for cell, row in rows.items():
            if (cell.form, cell.width) == (form, width):
                of_rate.setdefault(cell.learning_rate, []).append(row)
        rate, best = min(of_rate.items(), key=lambda pair: np.mean([row.held_out for row in pair[1]]))
        line = {"parametrisation": form, "width": width, "learning rate": rate, "seeds": len(best)}
        line["held-out loss"] = _common.with_error([row.held_out for row in best])
        table.append(line | {"training loss": _common.with_error([row.training for row in best])})
    return table


def main() -> None:
    """Train what is asked for, and show all that was trained."""
    options = _common.arguments(
        __doc__,
        num_simulations=(10_000, "simulations, a tenth of them held out"),
        num_epochs=(50, "epochs of each training"),
        widths=([32, 128, 512], "units of the encoder's layers"),
        learning_rates=([1e-3, 3e-3], "first learning rates"),
        seeds=(5, "number of seeds"),
    )
    cells = [
        Cell(form, width, rate, seed, options.num_simulations, options.num_epochs)
        for form in FORMS
        for width in options.widths
        for rate in options.learning_rates
        for seed in range(options.seeds)
    ]
    simulations = _sbibm_tasks.simulations_of(_sbibm_tasks.lotka_volterra, options.num_simulations, 0)
    rows = _common.resumed(
        options.output / "parametrisations.csv",
        cells,
        Row,
        lambda cell: train(cell, simulations),
        unit="training",
        name=lambda cell: f"{cell.form}, {cell.width}",
    )
    _common.write_table(table_of(rows), options.output / "parametrisations_summary.csv")


if __name__ == "__main__":
    main()
